"""Vector code of the `numba_cpu` kernels, by hand: the last step of a sum over ranks, an FP16 block, the largest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_cpu_elements import (
    ANYWHERE,
    LINE,
    MEMORY,
    element,
    folded,
    held,
    inlined,
    larger,
    load_lanes,
    named,
    narrow,
    splat,
    store,
    store_line,
    widen,
)
from .slots import FP16_BLOCK

_I32, _I64 = ir.IntType(32), ir.IntType(64)
INT8, ZERO_BITS, INFINITY = np.int8(0), np.int32(0), np.float32(np.inf)
LOOK = 8192  # elements to look at before they are converted, which then lie in L1
LANES = 32  # in several registers, so that operations need not wait for one another


def _magnitudes(builder: ir.IRBuilder, values: ir.Value) -> ir.Value:
    """As integers they compare as the numbers do, with infinity and every NaN above them."""
    integers = ir.VectorType(_I32, LANES)
    return builder.and_(builder.bitcast(values, integers), ir.Constant(integers, [0x7FFFFFFF] * LANES))


def _largest(builder: ir.IRBuilder, magnitudes: Sequence[ir.Value]) -> ir.Value:
    combine = partial(larger, builder)
    return folded(builder, reduce(combine, magnitudes), combine)


def _block_writer(stream: bool, summing: bool) -> Callable[..., Any]:
    """An intrinsic that writes an FP16 block times `power`, and returns the largest magnitude's bits before that.

    The block is that at `source`; or, `summing`, FP32 sums at `total`, to which the last terms are added, FP16 at
    `source` times `unit`, and which are scaled and left there.
    """

    def write(builder: ir.IRBuilder, to: ir.Value, values: ir.Value, start: int, power: ir.Value) -> None:
        line = narrow(builder, builder.fmul(values, splat(builder, power, LANES)), types.float32, types.int16)
        store_line(builder, line, element(builder, to, _I64(start), types.int16), stream)

    def copy(_typing: Any, to: types.Type, source: types.Type, tag: types.Type, power: types.Type) -> tuple[Any, Any]:
        def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, source, _, power = args
            found = []
            for start in range(0, FP16_BLOCK, LANES):
                values = load_lanes(builder, source, tag, _I64(start), LANES)
                write(builder, to, values, start, power)
                found.append(_magnitudes(builder, values))
            return _largest(builder, found)

        return types.int32(types.int64, types.int64, tag, types.float32), emit

    def add(
        _typing: Any, to: types.Type, total: types.Type, source: types.Type,
        unit: types.Type, scale: types.Type, power: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, total, source, unit, scale, power = args
            found = []
            for start in range(0, FP16_BLOCK, LANES):
                term = load_lanes(builder, source, types.int16, _I64(start), LANES)
                term = builder.fmul(term, splat(builder, unit, LANES))
                at = element(builder, total, _I64(start), types.float32)
                summed = builder.fadd(builder.load(at, typ=term.type, align=LINE), term)
                values = builder.fmul(summed, splat(builder, scale, LANES))
                builder.store(values, at, align=LINE)
                write(builder, to, values, start, power)
                found.append(_magnitudes(builder, values))
            return _largest(builder, found)

        return types.int32(*[types.int64] * 3, *[types.float32] * 3), emit

    name = ("stream_" if stream else "store_") + ("sum" if summing else "block")
    return named(name, add if summing else copy)


_stream_block, _store_block = _block_writer(True, False), _block_writer(False, False)
_stream_sum, _store_sum = _block_writer(True, True), _block_writer(False, True)


@inlined
def narrow_block(to, source, tag, power, stream):
    """Write an FP16 block times `power`; the largest magnitude's bits before that. `tag` is none of FP64."""
    if stream and to % LINE == 0:
        return _stream_block(to, source, tag, power)
    return _store_block(to, source, tag, power)


@inlined
def narrow_sum(to, total, source, unit, scale, power, stream):
    """Add a block's last terms to FP32 sums at a line, scale them, and write them as `narrow_block` does."""
    if stream and to % LINE == 0:
        return _stream_sum(to, total, source, unit, scale, power)
    return _store_sum(to, total, source, unit, scale, power)


@intrinsic
def largest_magnitude(_typing: Any, source: types.Type, tag: types.Type, count: types.Type) -> tuple[Any, Any]:
    """The largest magnitude of `count` elements, of which a NaN is larger than infinity; zero of none."""
    scalar, size = MEMORY[tag]
    integer, lanes = ir.IntType(8 * size), 4 * LINE // size

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, _, count = args
        vector = ir.VectorType(integer, lanes)
        whole = builder.sdiv(count, count.type(lanes))
        found = cgutils.alloca_once_value(builder, ir.Constant(vector, None))
        with cgutils.for_range(builder, whole) as loop:
            at = element(builder, source, builder.mul(loop.index, count.type(lanes)), tag)
            loaded = builder.load(at, typ=vector, align=ANYWHERE)
            sizes = builder.and_(loaded, ir.Constant(vector, [(1 << 8 * size - 1) - 1] * lanes))
            builder.store(larger(builder, builder.load(found), sizes), found)
        largest = folded(builder, builder.load(found), partial(larger, builder))
        kept = cgutils.alloca_once_value(builder, largest)
        done = builder.mul(whole, count.type(lanes))
        with cgutils.for_range(builder, builder.sub(count, done)) as loop:
            loaded = builder.load(
                element(builder, source, builder.add(done, loop.index), tag), typ=integer, align=ANYWHERE
            )
            sizes = builder.and_(loaded, integer((1 << 8 * size - 1) - 1))
            builder.store(larger(builder, builder.load(kept), sizes), kept)
        return widen(builder, builder.bitcast(builder.load(kept), scalar), tag)

    result = types.float64 if tag == types.float64 else types.float32
    return result(types.int64, tag, types.int64), emit


@inlined
def note_finite(finite, source, tag, count, factor, to_tag):
    """Make the byte at `finite` 0 unless elements times `factor` are finite in `to_tag`; without an address nothing."""
    if finite and not abs(held(to_tag, largest_magnitude(source, tag, count) * factor)) < INFINITY:
        store(finite, 0, INT8, ZERO_BITS)


@intrinsic
def add_last(
    _typing: Any, total: types.Type, total_tag: types.Type, source: types.Type, tag: types.Type, count: types.Type
) -> tuple[Any, Any]:
    """Add the last terms to sums that begin at a line, `count` of them, a multiple of 32; whether all are finite now.

    Where the sum of some sums overflows the answer is no as well.
    """

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total, _, source, _, count = args
        kind = ir.VectorType(MEMORY[total_tag][0], LANES)
        check = cgutils.alloca_once_value(builder, ir.Constant(kind, None))
        with cgutils.for_range(builder, builder.sdiv(count, count.type(LANES))) as loop:
            index = builder.mul(loop.index, count.type(LANES))
            at = element(builder, total, index, total_tag)
            last = load_lanes(builder, source, tag, index, LANES)
            summed = builder.fadd(builder.load(at, typ=kind, align=LINE), last)
            builder.store(summed, at, align=LINE)
            builder.store(builder.fadd(builder.load(check), summed), check)
        found = folded(builder, builder.load(check), builder.fadd)
        nothing = builder.fsub(found, found)  # unless it is not finite
        return builder.fcmp_ordered("==", nothing, ir.Constant(nothing.type, 0.0))

    return types.boolean(types.int64, total_tag, types.int64, tag, types.int64), emit
