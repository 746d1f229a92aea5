"""Vector code of stochastic rounding on the CPU, by hand: what random bits make of a block, and of a line of BF16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .numba_cpu_elements import ANYWHERE, LINE, element, folded, inlined, larger, load_lanes, named, splat, store_line
from .numba_cpu_elements import BLOCK_LANES as LANES

_I8, _I16, _I32, _I64, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
LINE_LANES = 32  # of BF16 in a line


def _all(kind: ir.Type, number: float, lanes: int = LANES) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, lanes), [number] * lanes)


def _load(
    builder: ir.IRBuilder, source: ir.Value, tag: types.Type, index: ir.Value, scale: ir.Value, lanes: int = LANES
) -> ir.Value:
    """Elements as FP32 times `scale`, an FP32 or FP64 number."""
    value = load_lanes(builder, source, tag, index, lanes)
    single = ir.VectorType(_FLOAT, lanes)
    if tag == types.float64 and scale.type == _FLOAT:
        value = builder.fptrunc(value, single)
    value = builder.fmul(value, splat(builder, scale, lanes))
    return value if scale.type == _FLOAT else builder.fptrunc(value, single)


def drawn_bits(builder: ir.IRBuilder, bits: ir.Value, index: ir.Value, lanes: int = LANES) -> ir.Value:
    """The random bits of elements, 16 of each: of every second one those of the one before, bytes exchanged."""
    at = element(builder, bits, index, types.uint8)
    halves = builder.load(at, typ=ir.VectorType(_I8, lanes), align=ANYWHERE)
    places = [place for low in range(0, lanes, 2) for place in (low, low + 1, low + 1, low)]
    both = builder.shuffle_vector(halves, halves, ir.Constant(ir.VectorType(_I32, 2 * lanes), places))
    turned = ir.Constant(ir.VectorType(_I16, lanes), [0, 0xFF] * (lanes // 2))
    return builder.xor(builder.bitcast(both, turned.type), turned)


@intrinsic
def largest_of_block(
    _typing: Any, source: types.Type, tag: types.Type, scale: types.Type, block: types.Type
) -> tuple[Any, Any]:
    """The bits of the largest magnitude among elements times `scale`, as FP32; `block` is as in `round_block`."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        source, _, scale, block = args
        integers = ir.VectorType(_I32, LANES)
        found = cgutils.alloca_once_value(builder, ir.Constant(integers, None))

        with cgutils.for_range(builder, builder.sdiv(block, _I64(LANES))) as loop:
            value = _load(builder, source, tag, builder.mul(loop.index, _I64(LANES)), scale)
            size = builder.and_(builder.bitcast(value, integers), _all(_I32, 0x7FFFFFFF))
            builder.store(larger(builder, size, builder.load(found)), found)
        return folded(builder, builder.load(found), partial(larger, builder))

    return types.int32(types.int64, tag, types.float32, types.int64), emit


def whole(builder: ir.IRBuilder, fixed: ir.Value, drawn: ir.Value) -> ir.Value:
    """Numbers times 2^15 → the low bytes of the whole numbers that bits choose."""
    lanes = fixed.type.count
    integers = ir.VectorType(_I32, lanes)
    rounded = builder.bitcast(builder.fadd(fixed, _all(_FLOAT, 1.5 * 2**23, lanes)), integers)
    half = builder.zext(builder.lshr(drawn, _all(_I16, 1, lanes)), integers)
    # 1.5 * 2^23 is 0x9680 there, whose low byte is 0x80.
    bytes_ = builder.lshr(builder.add(rounded, half), _all(_I32, 15, lanes))
    return builder.xor(builder.trunc(bytes_, ir.VectorType(_I8, lanes)), _all(_I8, 0x80, lanes))


def _e4m3(builder: ir.IRBuilder, steps: ir.Value, drawn: ir.Value) -> ir.Value:
    """Numbers → the bytes of the E4M3 numbers that bits choose."""
    integers = ir.VectorType(_I32, LANES)
    bits = builder.bitcast(steps, integers)
    size = builder.bitcast(builder.and_(bits, _all(_I32, 0x7FFFFFFF)), steps.type)
    tiny = builder.fcmp_ordered("<", size, _all(_FLOAT, 2.0**-6))
    base = builder.select(tiny, _all(_FLOAT, 2.0**-6), _all(_FLOAT, 0.0))
    room = builder.add(builder.shl(builder.zext(drawn, integers), _all(_I32, 4)), _all(_I32, 8))
    summed = builder.add(builder.bitcast(builder.fadd(size, base), integers), room)
    least = builder.select(tiny, _all(_I32, 121 << 3), _all(_I32, 120 << 3))
    code = builder.sub(builder.lshr(summed, _all(_I32, 20)), least)
    sign = builder.and_(builder.lshr(bits, _all(_I32, 24)), _all(_I32, 0x80))
    signed = builder.select(builder.icmp_signed(">", code, _all(_I32, 0)), builder.or_(code, sign), code)
    return builder.trunc(signed, ir.VectorType(_I8, LANES))


@intrinsic
def round_block(
    _typing: Any, payload: types.Type, source: types.Type, tag: types.Type, scale: types.Type, inverse: types.Type,
    bits: types.Type, block: types.Type, code: types.Type,
) -> tuple[Any, Any]:  # fmt: skip
    """Write the codes that random bits choose for a block times `scale`; `inverse` is 2^15 times as large but for E4M3.

    `block` is a multiple of 16.
    """

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        payload, source, _, scale, inverse, bits, block, _ = args
        with cgutils.for_range(builder, builder.sdiv(block, _I64(LANES))) as loop:
            index = builder.mul(loop.index, _I64(LANES))
            values = _load(builder, source, tag, index, scale)
            steps, drawn = builder.fmul(values, splat(builder, inverse, LANES)), drawn_bits(builder, bits, index)
            codes = _e4m3(builder, steps, drawn) if code == types.uint8 else whole(builder, steps, drawn)
            builder.store(codes, element(builder, payload, index, types.int8), align=ANYWHERE)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, tag, types.float32, types.float32, types.int64, types.int64, code), emit


def _upper(builder: ir.IRBuilder, numbers: ir.Value, drawn: ir.Value, where: ir.Value) -> ir.Value:
    """The upper halves of 32-bit numbers plus random bits, `where` these are to be added; without a sum of 32 bits."""
    count = drawn.type.count
    both = builder.bitcast(numbers, ir.VectorType(_I16, 2 * count))
    lower, upper = (
        builder.shuffle_vector(both, both, ir.Constant(ir.VectorType(_I32, count), list(range(half, 2 * count, 2))))
        for half in (0, 1)
    )
    carry = builder.and_(builder.icmp_unsigned(">", lower, builder.not_(drawn)), where)
    return builder.add(upper, builder.zext(carry, upper.type))


def _liner(name: str, stream: bool) -> Callable[..., Any]:
    """An intrinsic that writes lines of BF16 numbers that random bits choose for elements times `scale`."""

    def define(
        _typing: Any, to: types.Type, source: types.Type, tag: types.Type, count: types.Type, scale: types.Type,
        bits: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, source, _, count, scale, bits = args
            with cgutils.for_range(builder, builder.sdiv(count, _I64(LINE_LANES))) as loop:
                index = builder.mul(loop.index, _I64(LINE_LANES))
                value = _load(builder, source, tag, index, scale, LINE_LANES)
                number = builder.bitcast(value, ir.VectorType(_I32, LINE_LANES))
                # A NaN is a quiet one behind a multiplication.
                is_number = builder.fcmp_ordered("ord", value, value)
                upper = _upper(builder, number, drawn_bits(builder, bits, index, LINE_LANES), is_number)
                store_line(builder, upper, element(builder, to, index, types.uint16), stream)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, tag, types.int64, scale, types.int64), emit

    return named(name, define)


_store_lines, _stream_lines = _liner("store_lines", stream=False), _liner("stream_lines", stream=True)


@inlined
def round_lines(to, source, tag, count, scale, bits, stream):
    """`count` elements times `scale` → the BF16 numbers that random bits choose, a multiple of 32."""
    if stream and to % LINE == 0:
        _stream_lines(to, source, tag, count, scale, bits)
    else:
        _store_lines(to, source, tag, count, scale, bits)
