"""INT4 blocks for CPU tensors: vector code by hand, 32 elements at a time, whose loops are too short for LLVM's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .numba_cpu_elements import (
    AHEAD,
    ANYWHERE,
    LINE,
    MEMORY,
    bits_of,
    convert,
    element,
    inlined,
    kernel,
    larger,
    load,
    load_byte,
    load_lanes,
    named,
    narrow,
    part,
    prefetch,
    size_of,
    splat,
    store,
    store_line,
    widen,
)
from .numba_cpu_statistics import convert_and_sum
from .numba_cpu_stochastic_vectors import drawn_bits, whole
from .reference_stochastic import LARGEST_INT4_SCALE, RECIPROCAL_7

INT4 = np.uint32(0)  # the tag of two elements a byte

INT8, FP32, BF16 = np.int8(0), np.float32(0), np.uint16(0)
ZERO, ONE, NAN = np.float32(0), np.float32(1), np.float32(np.nan)
INFINITY_BITS = np.int32(0x7F800000)
TINY_BITS = np.int32(27 << 23)  # 2^-100
THREE, UPPER_HALF = np.int32(3 << 23), np.int32(-65536)  # a subtraction from the exponent; BF16's bits

_I8, _I16, _I32, _I64, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LANES = 32
_FLOATS, _INTEGERS, _BYTES = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _I32, _I8))
_PAIRS = ir.VectorType(_I16, LANES // 2)
_PACKED = ir.VectorType(_I8, LANES // 2)
# Addresses and counts as variables: numba compiles a kernel once more for each literal that it is called with.
NOTHING, SINGLE = np.int64(0), np.int64(1)
USUAL = 32  # elements of a block, known when LLVM compiles: what is written for any size takes a fifth longer
BLOCKS = 16  # whose scales are computed at once
_OF_BLOCKS = ir.VectorType(_I32, BLOCKS)
# x + ROUNDER holds rint(x) in its low byte, and minus ROUNDER again it is rint(x), never -0: |x| < 2^22.
_ROUNDER = ir.Constant(_FLOATS, [1.5 * 2**23] * LANES)
_MOST = ir.Constant(_FLOATS, [7.0] * LANES)


def _each(builder: ir.IRBuilder, block: ir.Value, body: Callable[[ir.Value], None]) -> None:
    """Run `body` for the first element of every 32."""
    with cgutils.for_range(builder, builder.sdiv(block, _I64(LANES))) as loop:
        body(builder.mul(loop.index, _I64(LANES)))


def _load(builder: ir.IRBuilder, address: ir.Value, tag: types.Type, index: ir.Value) -> ir.Value:
    """32 elements as FP32."""
    value = load_lanes(builder, address, tag, index, LANES)
    return builder.fptrunc(value, _FLOATS) if tag == types.float64 else value


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, index: ir.Value) -> None:
    builder.store(value, element(builder, address, index, types.float32), align=ANYWHERE)


def _decoded(builder: ir.IRBuilder, payload: ir.Value, index: ir.Value, unit: ir.Value) -> ir.Value:
    """32 elements times the scale."""
    at = element(builder, payload, builder.sdiv(index, _I64(2)), types.int8)
    pairs = builder.load(at, typ=_PACKED, align=ANYWHERE)
    both = builder.shuffle_vector(pairs, pairs, ir.Constant(_INTEGERS, [lane // 2 for lane in range(LANES)]))
    upmost = builder.shl(builder.zext(both, _INTEGERS), ir.Constant(_INTEGERS, [28, 24] * (LANES // 2)))
    codes = builder.ashr(upmost, ir.Constant(_INTEGERS, [28] * LANES))
    return builder.fmul(builder.sitofp(codes, _FLOATS), splat(builder, unit, LANES))


def _unit(builder: ir.IRBuilder, scale_at: ir.Value, number: ir.Value) -> ir.Value:
    """The scale of a block."""
    at = element(builder, scale_at, number, types.uint16)
    return widen(builder, builder.load(at, typ=_I16, align=ANYWHERE), types.uint16)


def _largest(
    builder: ir.IRBuilder, source: ir.Value, tag: types.Type, scale: ir.Value, old: ir.Value, values: ir.Value | None,
    block: ir.Value, signed: bool,
) -> ir.Value:  # fmt: skip
    """The largest magnitude's bits in each of 16 parts of a block times `scale`, plus residuals, which go to `values`.

    `signed`, they are less by one, without which their last bit is 1 if an element with a plus has that magnitude, but
    for the last bit, else 0.
    """
    largest = cgutils.alloca_once_value(builder, ir.Constant(_OF_BLOCKS, [-(2**31)] * BLOCKS))

    def gather(index: ir.Value, with_old: bool) -> None:
        for line in range(0, LANES * MEMORY[tag][1], LINE):
            prefetch(builder, element(builder, builder.add(source, _I64(AHEAD + line)), index, tag))
        value = builder.fmul(_load(builder, source, tag, index), splat(builder, scale, LANES))
        if with_old:
            value = builder.fadd(value, _load(builder, old, types.float32, index))
        if values is not None:
            _store(builder, value, values, index)
        bits = builder.bitcast(value, _INTEGERS)
        key = builder.and_(bits, ir.Constant(_INTEGERS, [0x7FFFFFFE if signed else 0x7FFFFFFF] * LANES))
        if signed:
            key = builder.add(key, builder.ashr(bits, ir.Constant(_INTEGERS, [31] * LANES)))
        for half in (0, BLOCKS):
            builder.store(larger(builder, part(builder, key, half, BLOCKS), builder.load(largest)), largest)

    if values is None:
        _each(builder, block, lambda index: gather(index, False))
    else:
        with builder.if_else(builder.icmp_signed("==", old, _I64(0))) as (without, also):
            with without:
                _each(builder, block, lambda index: gather(index, False))
            with also:
                _each(builder, block, lambda index: gather(index, True))
    return builder.load(largest)


def _largest_of_each(builder: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The largest number of each of 16 vectors, in the order of these."""
    width = BLOCKS
    while len(vectors) > 1:
        starts = range(0, BLOCKS * 2, width)
        halves = [
            ir.Constant(_OF_BLOCKS, [start + half + lane for start in starts for lane in range(width // 2)])
            for half in (0, width // 2)
        ]
        vectors = [
            larger(builder, *(builder.shuffle_vector(*pair, places) for places in halves))
            for pair in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    return vectors[0]


def _pack(builder: ir.IRBuilder, payload: ir.Value, index: ir.Value, codes: ir.Value) -> None:
    """Write the lower halves of 32 bytes."""
    pairs = builder.bitcast(codes, _PAIRS)
    low = builder.and_(pairs, ir.Constant(_PAIRS, [0x0F] * (LANES // 2)))
    high = builder.lshr(pairs, ir.Constant(_PAIRS, [4] * (LANES // 2)))
    high = builder.and_(high, ir.Constant(_PAIRS, [0xF0] * (LANES // 2)))
    at = element(builder, payload, builder.sdiv(index, _I64(2)), types.int8)
    builder.store(builder.trunc(builder.or_(low, high), _PACKED), at, align=ANYWHERE)


def _rounded(builder: ir.IRBuilder, value: ir.Value, inverse: ir.Value) -> ir.Value:
    """32 values times `inverse`, rounded, on top of `_ROUNDER`."""
    steps = builder.fmul(value, splat(builder, inverse, LANES))
    steps = builder.select(builder.fcmp_ordered("<", steps, _MOST), steps, _MOST)
    return builder.fadd(steps, _ROUNDER)


def _units(builder: ir.IRBuilder, largest: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value, ir.Value]:
    """The scales of 16 blocks by what `_largest` finds, 1 over each, and which are not finite: these get NaN and 0."""

    def all_of(number: Any, kind: ir.Type = _I32) -> ir.Constant:
        return ir.Constant(ir.VectorType(kind, BLOCKS), [number] * BLOCKS)

    floats = ir.VectorType(_FLOAT, BLOCKS)
    if signed:
        largest = builder.add(largest, all_of(1))
    odd = builder.icmp_signed(">=", largest, all_of(INFINITY_BITS))
    tiny = builder.icmp_signed("<", largest, all_of(TINY_BITS))
    one = all_of(1.0, _FLOAT)
    if signed:
        eighth = builder.and_(builder.sub(largest, all_of(THREE)), all_of(UPPER_HALF))
        unit = builder.bitcast(builder.or_(eighth, builder.shl(largest, all_of(31))), floats)
        inverse = builder.fdiv(one, unit)
    else:
        absmax = builder.bitcast(largest, floats)
        seventh = builder.bitcast(builder.fmul(absmax, all_of(RECIPROCAL_7, _FLOAT)), _OF_BLOCKS)
        unit = builder.bitcast(builder.and_(builder.add(seventh, all_of(0xFFFF)), all_of(UPPER_HALF)), floats)
        most = all_of(LARGEST_INT4_SCALE, _FLOAT)
        large = builder.fcmp_ordered(">", unit, most)
        dividend = builder.select(large, all_of(7.0, _FLOAT), one)
        inverse = builder.fdiv(dividend, builder.select(large, absmax, unit))
        unit = builder.select(large, most, unit)
    nothing = all_of(0.0, _FLOAT)
    unit = builder.select(odd, all_of(float("nan"), _FLOAT), builder.select(tiny, nothing, unit))
    return unit, builder.select(builder.or_(odd, tiny), nothing, inverse), odd


def _encoder(name: str, *, keeps: bool = False, stream: bool = False, by_chance: bool = False) -> Callable[..., Any]:
    """An intrinsic that encodes up to 16 blocks, and stores what was lost if it `keeps` it; which are not finite."""

    def define(
        _typing: Any, source: types.Type, tag: types.Type, blocks: types.Type, scale: types.Type, old: types.Type,
        new: types.Type, values: types.Type, block: types.Type, payload: types.Type, scale_at: types.Type,
        bits: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            source, _, blocks, scale, old, new, values, block, payload, scale_at, bits = args
            found, units, inverses = (
                builder.inttoptr(builder.ptrtoint(cgutils.alloca_once(builder, kind), _I64), ir.PointerType())
                for kind in (ir.ArrayType(_OF_BLOCKS, BLOCKS), *[ir.VectorType(_FLOAT, BLOCKS)] * 2)
            )

            def nth(array: ir.Value, number: ir.Value, kind: ir.Type) -> ir.Value:
                return builder.gep(array, [number], source_etype=kind)

            with cgutils.for_range(builder, blocks) as loop:
                start = builder.mul(loop.index, block)
                from_ = builder.add(source, builder.mul(start, _I64(MEMORY[tag][1])))
                of_old, to = (builder.add(at, builder.mul(start, _I64(4))) for at in (old, values))
                of_old = builder.select(builder.icmp_signed("==", old, _I64(0)), old, of_old)
                largest = _largest(builder, from_, tag, scale, of_old, to if keeps else None, block, not by_chance)
                builder.store(largest, nth(found, loop.index, _OF_BLOCKS))
            with cgutils.for_range(builder, _I64(BLOCKS), start=blocks) as loop:
                builder.store(ir.Constant(_OF_BLOCKS, None), nth(found, loop.index, _OF_BLOCKS))
            each = [builder.load(nth(found, _I64(number), _OF_BLOCKS), typ=_OF_BLOCKS) for number in range(BLOCKS)]
            unit_of, inverse_of, odd = _units(builder, _largest_of_each(builder, each), not by_chance)
            builder.store(unit_of, units)
            builder.store(inverse_of, inverses)
            odd = builder.bitcast(odd, _I16)

            with cgutils.for_range(builder, blocks) as loop:
                start = builder.mul(loop.index, block)
                unit = builder.load(nth(units, loop.index, _FLOAT), typ=_FLOAT)
                inverse = builder.load(nth(inverses, loop.index, _FLOAT), typ=_FLOAT)
                upper = builder.trunc(builder.lshr(builder.bitcast(unit, _I32), _I32(16)), _I16)
                builder.store(upper, element(builder, scale_at, loop.index, types.uint16), align=ANYWHERE)
                from_ = builder.add(source, builder.mul(start, _I64(MEMORY[tag][1])))
                held, lost_to = (builder.add(at, builder.mul(start, _I64(4))) for at in (values, new))
                to = builder.add(payload, builder.sdiv(start, _I64(2)))

                def write(index: ir.Value) -> None:
                    if keeps:
                        value = _load(builder, held, types.float32, index)
                    else:
                        value = builder.fmul(_load(builder, from_, tag, index), splat(builder, scale, LANES))
                    if by_chance:
                        fixed = builder.fmul(value, splat(builder, builder.fmul(inverse, _FLOAT(2.0**15)), LANES))
                        drawn = drawn_bits(builder, bits, builder.add(start, index), LANES)
                        _pack(builder, to, index, whole(builder, fixed, drawn))
                        return
                    rounded = _rounded(builder, value, inverse)
                    _pack(builder, to, index, builder.trunc(builder.bitcast(rounded, _INTEGERS), _BYTES))
                    if keeps:
                        sent = builder.fmul(builder.fsub(rounded, _ROUNDER), splat(builder, unit, LANES))
                        lost = element(builder, lost_to, index, types.float32)
                        store_line(builder, builder.fsub(value, sent), lost, stream)

                _each(builder, block, write)
            return builder.zext(odd, _I32)

        signature = types.int32(types.int64, tag, types.int64, types.float32, *[types.int64] * 7)
        return signature, emit

    return named(name, define)


_encode = _encoder("encode")
_encode_and_keep = _encoder("encode_and_keep", keeps=True)
_encode_and_stream = _encoder("encode_and_stream", keeps=True, stream=True)
_encode_by_chance = _encoder("encode_by_chance", by_chance=True)


def _spreader(name: str, *, stream: bool, squares: bool = False) -> Callable[..., Any]:
    """An intrinsic that decodes blocks to where gradients are, and adds their `squares` to the lanes at `sums`."""

    def define(
        _typing: Any, to: types.Type, tag: types.Type, payload: types.Type, scale_at: types.Type, blocks: types.Type,
        block: types.Type, sums: types.Type, sum_tag: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        lanes = LINE // MEMORY[sum_tag][1]
        total_type = ir.VectorType(MEMORY[sum_tag][0], lanes)

        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, _, payload, scale_at, blocks, block, sums, _ = args
            total_at = element(builder, sums, _I64(0), sum_tag)
            # In registers from block to block: by way of memory a bucket of blocks of 32 took half as long again.
            kept = cgutils.alloca_once(builder, total_type)
            if squares:
                builder.store(builder.load(total_at, typ=total_type, align=LINE), kept)
            with cgutils.for_range(builder, blocks) as loop:
                begin = builder.mul(loop.index, block)
                unit = _unit(builder, scale_at, loop.index)

                def spread(index: ir.Value) -> None:
                    place = builder.add(begin, index)
                    value = narrow(builder, _decoded(builder, payload, place, unit), types.float32, tag)
                    store_line(builder, value, element(builder, to, place, tag), stream)
                    if not squares:
                        return
                    stored, total = widen(builder, value, tag), builder.load(kept, typ=total_type)
                    for start in range(0, LANES, lanes):
                        some = part(builder, stored, start, lanes)
                        total = builder.fadd(total, builder.fmul(some, some))
                    builder.store(total, kept)

                _each(builder, block, spread)
            if squares:
                builder.store(builder.load(kept, typ=total_type), total_at, align=LINE)
            return target.get_dummy_value()

        return types.void(types.int64, tag, *[types.int64] * 5, sum_tag), emit

    return named(name, define)


_spread = _spreader("spread", stream=False)
_stream = _spreader("stream", stream=True)
_spread_and_square = _spreader("spread_and_square", stream=False, squares=True)
_stream_and_square = _spreader("stream_and_square", stream=True, squares=True)


def _total_way(name: str, adding: bool) -> Callable[..., Any]:
    """An intrinsic that decodes blocks to FP32 sums, or adds them to these."""

    def define(
        _typing: Any, total: types.Type, payload: types.Type, scale_at: types.Type, blocks: types.Type,
        block: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            total, payload, scale_at, blocks, block = args
            with cgutils.for_range(builder, blocks) as loop:
                begin, unit = builder.mul(loop.index, block), _unit(builder, scale_at, loop.index)

                def decode(index: ir.Value) -> None:
                    place = builder.add(begin, index)
                    value = _decoded(builder, payload, place, unit)
                    if adding:
                        value = builder.fadd(_load(builder, total, types.float32, place), value)
                    _store(builder, value, total, place)

                _each(builder, block, decode)
            return target.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return named(name, define)


put_int4 = _total_way("put_int4", adding=False)
add_int4 = _total_way("add_int4", adding=True)


@inlined
def load_int4(payload, index):
    """The code of element `index`, as FP32."""
    code = load_byte(payload, index >> 1) >> 4 * (index & 1) & 15
    return np.float32(code - 16 if code > 7 else code)


@inlined
def decode_int4(to, tag, payload, scale_at, count, block, stream):
    """The first `count` elements of blocks to where they belong."""
    whole_ones = count // block
    if stream and to % LINE == 0:
        _stream(to, tag, payload, scale_at, whole_ones, block, 0, FP32)
    else:
        _spread(to, tag, payload, scale_at, whole_ones, block, 0, FP32)
    for index in range(whole_ones * block, count):
        store(to, index, tag, load_int4(payload, index) * load(scale_at, whole_ones, BF16))


@inlined
def decode_int4_and_sum(to, tag, payload, scale_at, blocks, count, block, stream, values, sums, sum_tag):
    """The same, and their squares to the lanes at `sums`, as `convert_and_sum` adds them.

    `values` is scratch for a block.
    """
    whole_ones = count // block
    if not stream:
        _spread_and_square(to, tag, payload, scale_at, whole_ones, block, sums, sum_tag)
    elif to % LINE == 0:
        _stream_and_square(to, tag, payload, scale_at, whole_ones, block, sums, sum_tag)
    else:
        whole_ones = 0
    for number in range(whole_ones, blocks):
        at = number * block
        put_int4(values, payload + (at >> 1), scale_at + number * size_of(BF16), 1, block)
        convert_and_sum(to + at * size_of(tag), tag, values, FP32, min(block, count - at), ONE, stream, sums, sum_tag)


@inlined
def run_of(elements, blocks, block, code):
    """How many blocks are encoded at once: one, or whole ones of `elements` that follow each other in memory."""
    return max(1, min(elements // block, blocks, BLOCKS)) if bits_of(code) == 4 else 1


@inlined
def _encode_of_size(source, tag, blocks, scale, old, new, values, block, payload, scale_at, stream, bits):
    if bits:
        return _encode_by_chance(source, tag, blocks, scale, 0, 0, 0, block, payload, scale_at, bits)
    if not new:
        return _encode(source, tag, blocks, scale, 0, 0, 0, block, payload, scale_at, 0)
    if stream and new % LINE == 0:
        return _encode_and_stream(source, tag, blocks, scale, old, new, values, block, payload, scale_at, 0)
    return _encode_and_keep(source, tag, blocks, scale, old, new, values, block, payload, scale_at, 0)


@kernel
def _encode_whole(source, tag, blocks, scale, old, new, values, block, payload, scale_at, stream, bits):
    if block == USUAL:
        return _encode_of_size(source, tag, blocks, scale, old, new, values, USUAL, payload, scale_at, stream, bits)
    return _encode_of_size(source, tag, blocks, scale, old, new, values, block, payload, scale_at, stream, bits)


@kernel
def encode_int4(source, tag, blocks, count, scale, old, new, values, block, payload, scale_at, stream, bits):
    """Encode up to 16 blocks of `count` elements at `source` times `scale`, plus the residuals at `old`.

    Fewer elements than `blocks` have are of one block. `values` is scratch for the blocks, `new` where what was lost
    belongs; it and `old` may be 0. With random `bits` these round, and there are no residuals.

    Returns: bits, of which the first block's is the lowest: 1 where a block is not finite.
    """
    if count < block:
        for index in range(block):
            value = ZERO
            if index < count:
                value = np.float32(load(source, index, tag)) * scale
                if old:
                    value += load(old, index, FP32)
            store(values, index, FP32, value)
        odd = _encode_whole(values, FP32, SINGLE, ONE, NOTHING, new, values, block, payload, scale_at, stream, bits)
    else:
        odd = _encode_whole(source, tag, blocks, scale, old, new, values, block, payload, scale_at, stream, bits)
    if odd:
        for number in range(blocks):
            if odd >> number & 1:
                for index in range(block >> 1):
                    store(payload, number * (block >> 1) + index, INT8, np.int32(0))
                if new:
                    convert(new + number * block * 4, FP32, old + number * block * 4, FP32, block, ONE, stream)
    return odd
