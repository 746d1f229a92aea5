"""INT4 blocks for CPU tensors: vector code by hand, 32 elements at a time, whose loops are too short for LLVM's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_cpu_elements import (
    AHEAD,
    ANYWHERE,
    LINE,
    MEMORY,
    convert,
    element,
    folded,
    inlined,
    kernel,
    larger,
    load,
    load_byte,
    narrow,
    prefetch,
    splat,
    store,
    store_line,
    widen,
)

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
# x + ROUNDER holds rint(x) in its low byte, and minus ROUNDER again it is rint(x), never -0: |x| < 2^22.
_ROUNDER = ir.Constant(_FLOATS, [1.5 * 2**23] * LANES)
_MOST = ir.Constant(_FLOATS, [7.0] * LANES)


def _each(builder: ir.IRBuilder, block: ir.Value, body: Callable[[ir.Value], None]) -> None:
    """Run `body` for the first element of every 32."""
    with cgutils.for_range(builder, builder.sdiv(block, _I64(LANES))) as loop:
        body(builder.mul(loop.index, _I64(LANES)))


def _load(builder: ir.IRBuilder, address: ir.Value, tag: types.Type, index: ir.Value) -> ir.Value:
    """32 elements as FP32."""
    kind = ir.VectorType(MEMORY[tag][0], LANES)
    value = widen(builder, builder.load(element(builder, address, index, tag), typ=kind, align=ANYWHERE), tag)
    return builder.fptrunc(value, _FLOATS) if tag == types.float64 else value


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, index: ir.Value) -> None:
    builder.store(value, element(builder, address, index, types.float32), align=ANYWHERE)


def _decoded(builder: ir.IRBuilder, payload: ir.Value, index: ir.Value, unit: ir.Value) -> ir.Value:
    """32 elements times the scale."""
    at = element(builder, payload, builder.sdiv(index, _I64(2)), types.int8)
    pairs = builder.load(at, typ=_PACKED, align=ANYWHERE)
    four = ir.Constant(_PACKED, [4] * (LANES // 2))
    low, high = builder.ashr(builder.shl(pairs, four), four), builder.ashr(pairs, four)
    places = [half * (LANES // 2) + pair for pair in range(LANES // 2) for half in (0, 1)]
    codes = builder.shuffle_vector(low, high, ir.Constant(_INTEGERS, places))
    return builder.fmul(builder.sitofp(codes, _FLOATS), splat(builder, unit, LANES))


@intrinsic
def _gather(
    _typing: Any, values: types.Type, source: types.Type, tag: types.Type,
    scale: types.Type, old: types.Type, block: types.Type,
) -> tuple[Any, Any]:  # fmt: skip
    """Write a block times `scale`, plus the residuals if there are any, as FP32; its largest magnitude's bits.

    The last of them is 1 if an element with a plus has that magnitude, but for the last bit, else 0.
    """

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        values, source, _, scale, old, block = args
        largest = cgutils.alloca_once_value(builder, ir.Constant(_INTEGERS, None))

        def gather(index: ir.Value, with_old: bool) -> None:
            for line in range(0, LANES * MEMORY[tag][1], LINE):
                prefetch(builder, element(builder, builder.add(source, _I64(AHEAD + line)), index, tag))
            value = builder.fmul(_load(builder, source, tag, index), splat(builder, scale, LANES))
            if with_old:
                value = builder.fadd(value, _load(builder, old, types.float32, index))
            _store(builder, value, values, index)
            bits = builder.bitcast(value, _INTEGERS)
            plus = builder.lshr(builder.not_(bits), ir.Constant(_INTEGERS, [31] * LANES))
            key = builder.or_(builder.and_(bits, ir.Constant(_INTEGERS, [0x7FFFFFFE] * LANES)), plus)
            builder.store(larger(builder, key, builder.load(largest)), largest)

        with builder.if_else(builder.icmp_signed("==", old, _I64(0))) as (without, also):
            with without:
                _each(builder, block, lambda index: gather(index, False))
            with also:
                _each(builder, block, lambda index: gather(index, True))
        return folded(builder, builder.load(largest), partial(larger, builder))

    return types.int32(types.int64, types.int64, tag, types.float32, types.int64, types.int64), emit


def _packer(name: str, keeps: bool, stream: bool) -> Callable[..., Any]:
    """An intrinsic that writes a block of FP32 values times `inverse`, rounded; and, if it `keeps`, what was lost."""

    def define(
        _typing: Any, payload: types.Type, values: types.Type, block: types.Type,
        inverse: types.Type, unit: types.Type, new: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            payload, values, block, inverse, unit, new = args

            def pack(index: ir.Value) -> None:
                value = _load(builder, values, types.float32, index)
                steps = builder.fmul(value, splat(builder, inverse, LANES))
                steps = builder.select(builder.fcmp_ordered("<", steps, _MOST), steps, _MOST)
                rounded = builder.fadd(steps, _ROUNDER)
                pairs = builder.bitcast(builder.trunc(builder.bitcast(rounded, _INTEGERS), _BYTES), _PAIRS)
                low = builder.and_(pairs, ir.Constant(_PAIRS, [0x0F] * (LANES // 2)))
                high = builder.lshr(pairs, ir.Constant(_PAIRS, [4] * (LANES // 2)))
                high = builder.and_(high, ir.Constant(_PAIRS, [0xF0] * (LANES // 2)))
                at = element(builder, payload, builder.sdiv(index, _I64(2)), types.int8)
                builder.store(builder.trunc(builder.or_(low, high), _PACKED), at, align=ANYWHERE)
                if keeps:
                    sent = builder.fmul(builder.fsub(rounded, _ROUNDER), splat(builder, unit, LANES))
                    lost = builder.fsub(value, sent)
                    store_line(builder, lost, element(builder, new, index, types.float32), stream)

            _each(builder, block, pack)
            return target.get_dummy_value()

        signature = types.void(*[types.int64] * 3, *[types.float32] * 2, types.int64)
        return signature, emit

    define.__name__ = name
    defined: Callable[..., Any] = intrinsic(define)
    return defined


_pack = _packer("pack", keeps=False, stream=False)
_pack_and_keep = _packer("pack_and_keep", keeps=True, stream=False)
_pack_and_stream = _packer("pack_and_stream", keeps=True, stream=True)


def _spreader(name: str, stream: bool) -> Callable[..., Any]:
    """An intrinsic that decodes a block to where gradients are."""

    def define(
        _typing: Any, to: types.Type, tag: types.Type, payload: types.Type, block: types.Type, unit: types.Type
    ) -> tuple[Any, Any]:
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, _, payload, block, unit = args

            def spread(index: ir.Value) -> None:
                value = narrow(builder, _decoded(builder, payload, index, unit), types.float32, tag)
                store_line(builder, value, element(builder, to, index, tag), stream)

            _each(builder, block, spread)
            return target.get_dummy_value()

        return types.void(types.int64, tag, types.int64, types.int64, types.float32), emit

    define.__name__ = name
    defined: Callable[..., Any] = intrinsic(define)
    return defined


_spread = _spreader("spread", stream=False)
_spread_and_stream = _spreader("spread_and_stream", stream=True)


@intrinsic
def add_int4(
    _typing: Any, total: types.Type, payload: types.Type, block: types.Type, unit: types.Type
) -> tuple[Any, Any]:
    """Add a decoded block to FP32 sums."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total, payload, block, unit = args

        def add(index: ir.Value) -> None:
            summed = builder.fadd(_load(builder, total, types.float32, index), _decoded(builder, payload, index, unit))
            _store(builder, summed, total, index)

        _each(builder, block, add)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.float32), emit


@inlined
def load_int4(payload, index):
    """The code of element `index`, as FP32."""
    code = load_byte(payload, index >> 1) >> 4 * (index & 1) & 15
    return np.float32(code - 16 if code > 7 else code)


@inlined
def decode_int4(to, tag, payload, count, block, unit, stream):
    """The first `count` elements of a block to where they belong."""
    if count < block:
        for index in range(count):
            store(to, index, tag, load_int4(payload, index) * unit)
    elif stream and to % LINE == 0:
        _spread_and_stream(to, tag, payload, block, unit)
    else:
        _spread(to, tag, payload, block, unit)


@kernel
def encode_int4(source, tag, count, scale, old, new, values, block, payload, scale_at, stream):
    """Encode the `count` elements at `source` times `scale`, plus the residuals at `old`; whether all are finite.

    `values` is scratch for a block, `new` where what was lost belongs; it and `old` may be 0.
    """
    if count < block:
        for index in range(block):
            value = ZERO
            if index < count:
                value = np.float32(load(source, index, tag)) * scale
                if old:
                    value += load(old, index, FP32)
            store(values, index, FP32, value)
        largest = _gather(values, values, FP32, ONE, 0, block)
    else:
        largest = _gather(values, source, tag, scale, old, block)

    if largest >= INFINITY_BITS:
        store(scale_at, 0, BF16, NAN)
        for index in range(block >> 1):
            store(payload, index, INT8, np.int32(0))
        if new:
            convert(new, FP32, old, FP32, block, ONE, stream)
        return False
    unit = inverse = ZERO
    if largest >= TINY_BITS:
        eighth = np.int32((largest - THREE) & UPPER_HALF).view(np.float32)
        unit = -eighth if largest & 1 else eighth
        inverse = ONE / unit
    store(scale_at, 0, BF16, unit)
    if not new:
        _pack(payload, values, block, inverse, unit, new)
    elif stream and new % LINE == 0:
        _pack_and_stream(payload, values, block, inverse, unit, new)
    else:
        _pack_and_keep(payload, values, block, inverse, unit, new)
    return True
