"""What a thread of a `numba_cuda` kernel computes with: vectors (loads and stores: `numba_cuda_memory.py`).

Kernels take raw addresses and *tags*, scalars whose types say what lies there, so that one kernel text serves every
pair of dtypes: FP16 is tagged int16, BF16 uint16 and E4M3 uint8. A vector is a tuple of FP32 or FP64 numbers. Every
operation says its rounding: of plain products and sums the compiler would make fma. `numba_cuda_simulated.py` has a
twin of each function for Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .numba_cache import keyed
from .numba_cuda_llvm import (
    DOUBLE,
    FLOAT,
    I32,
    I64,
    MEMORY,
    bits_without_sign,
    by_lane,
    cast,
    is_finite,
    narrow,
    numbers_of,
    pack,
    rounded_op,
    widen,
)
from .torch_residuals import FACTORS, GOLDEN

# Inlined: Numba compiles a function by itself for the GPU that is there only, and without one not at all.
function = cuda.jit(device=True, inline="always")
# Not linked through LTO, which would compile other PTX than the tests look at.
kernel = keyed(cuda.jit(cache=True, lto=False))


@by_lane
def multiply(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The product, rounded to nearest even."""
    return rounded_op(builder, "mul", a, b)


@by_lane
def add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum, likewise."""
    return rounded_op(builder, "add", a, b)


@by_lane
def divide(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient, likewise."""
    return rounded_op(builder, "div", a, b)


@by_lane
def magnitudes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The numbers without signs."""
    return builder.bitcast(bits_without_sign(builder, value), FLOAT)


@by_lane
def signed_as(builder: ir.IRBuilder, value: ir.Value, other: ir.Value) -> ir.Value:
    """Numbers from 0 on with the signs of others; a zero has none."""
    bits = builder.bitcast(value, I32)
    negative = builder.and_(
        builder.icmp_signed("<", builder.bitcast(other, I32), I32(0)), builder.icmp_signed(">", bits, I32(0))
    )
    return builder.bitcast(builder.select(negative, builder.or_(bits, I32(1 << 31)), bits), FLOAT)


@by_lane
def at_most(builder: ir.IRBuilder, value: ir.Value, limit: ir.Value) -> ir.Value:
    """The smaller of each number and a limit."""
    return builder.select(builder.fcmp_ordered("<", value, limit), value, limit)


@by_lane
def more_than_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """1 where a number is larger than 0.5, else 0."""
    return builder.select(builder.fcmp_ordered(">", value, FLOAT(0.5)), FLOAT(1), FLOAT(0))


@by_lane
def where_finite(builder: ir.IRBuilder, tested: ir.Value, then: ir.Value, otherwise: ir.Value) -> ir.Value:
    """Each number of the second vector where that of the first is finite, else of the third."""
    return builder.select(is_finite(builder, tested), then, otherwise)


@by_lane
def e4m3_rounders(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """1.5 times 2^20 of each number's power of two, 2^-6 at least: a sum with it has the digits that E4M3 has."""
    binade = builder.and_(builder.bitcast(value, I32), I32(0x7F800000))
    binade = builder.select(builder.icmp_signed(">", binade, I32(121 << 23)), binade, I32(121 << 23))
    return builder.bitcast(builder.add(binade, I32((20 << 23) + (1 << 22))), FLOAT)


@by_lane
def e4m3_bases(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """2^-6 for each number below it, and 0 for others: added to its magnitude, the sum has E4M3's steps."""
    tiny = builder.icmp_signed("<", bits_without_sign(builder, value), I32(121 << 23))
    return builder.select(tiny, FLOAT(2.0**-6), FLOAT(0.0))


@by_lane
def bf16_by_chance(builder: ir.IRBuilder, value: ir.Value, drawn: ir.Value) -> ir.Value:
    """The BF16 numbers that random bits choose."""
    number = cast(builder, value, types.float32)
    summed = builder.add(builder.bitcast(number, I32), drawn)
    rounded = builder.bitcast(builder.and_(summed, I32(-65536)), FLOAT)
    chosen = builder.select(builder.fcmp_unordered("uno", number, number), number, rounded)
    return cast(builder, chosen, types.float64) if value.type == DOUBLE else chosen


def _whole_number(builder: ir.IRBuilder, fixed: ir.Value, word: ir.Value, shift: int) -> ir.Value:
    """The one that 15 random bits, a word's from bit `shift` on, choose of a number times 2^15, plus 1.5 * 2^23."""
    number = builder.sub(builder.bitcast(fixed, I32), I32(0x4B400000))
    return builder.sitofp(builder.ashr(builder.add(number, builder.lshr(word, I32(shift))), I32(15)), FLOAT)


@by_lane
def whole_by_chance(builder: ir.IRBuilder, fixed: ir.Value, drawn: ir.Value) -> ir.Value:
    """The whole numbers that random bits choose of numbers times 2^15, to which 1.5 * 2^23 has been added."""
    return _whole_number(builder, fixed, drawn, 1)


@intrinsic
def whole_by_own_bits(
    _typing: Any, fixed: types.Type, values: types.Type, largest: types.Type, first: types.Type
) -> Any:
    """The whole numbers that values choose by their bits, of themselves times 2^15 and with 1.5 * 2^23 added."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        found, place = [], builder.trunc(args[3], I32)
        pairs = zip(*(numbers_of(builder, arg, fixed.count) for arg in args[:2]), strict=True)
        for lane, (value, bits) in enumerate(pairs):
            salt = builder.xor(args[2], builder.add(place, I32(lane)))
            word = builder.add(builder.bitcast(bits, I32), builder.mul(salt, I32(GOLDEN)))
            for shift, factor in ((16, FACTORS[0]), (13, FACTORS[1])):
                word = builder.mul(builder.xor(word, builder.lshr(word, I32(shift))), I32(factor))
            word = builder.xor(word, builder.lshr(word, I32(16)))
            found.append(_whole_number(builder, value, word, 17))
        return pack(context, builder, found, fixed)

    return fixed(fixed, values, types.int32, types.int64), emit


@by_lane
def e4m3_by_chance(builder: ir.IRBuilder, sums: ir.Value, drawn: ir.Value) -> ir.Value:
    """Numbers cut off to the 4 digits of E4M3, up or down as random bits choose."""
    room = builder.add(builder.shl(drawn, I32(4)), I32(8))
    return builder.bitcast(builder.and_(builder.add(builder.bitcast(sums, I32), room), I32(-(1 << 20))), FLOAT)


@intrinsic
def largest_bits(_typing: Any, vector: types.Type) -> Any:
    """The largest magnitude's bits: as integers they compare as the numbers do, infinity and every NaN above them."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        largest = I32(0)
        for value in numbers_of(builder, args[0], vector.count):
            bits = bits_without_sign(builder, value)
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        return largest

    return types.int32(vector), emit


@intrinsic
def largest_and_sign(_typing: Any, vector: types.Type) -> Any:
    """The largest magnitude's bits, the last of which is 1 if a number with a plus has them, but for that bit."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        largest = I32(0)
        for value in numbers_of(builder, args[0], vector.count):
            bits = builder.bitcast(value, I32)
            plus = builder.lshr(builder.not_(bits), I32(31))
            key = builder.or_(builder.and_(bits, I32(0x7FFFFFFE)), plus)
            largest = builder.select(builder.icmp_signed(">", key, largest), key, largest)
        return largest

    return types.int32(vector), emit


@intrinsic
def from_bits(_typing: Any, bits: types.Type) -> Any:
    """The FP32 number of 32 bits."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(args[0], FLOAT)

    return types.float32(types.int32), emit


@intrinsic
def to_bits(_typing: Any, number: types.Type) -> Any:
    """The 32 bits of an FP32 number."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(args[0], I32)

    return types.int32(types.float32), emit


@intrinsic
def power(_typing: Any, exponent: types.Type, like: types.Type) -> Any:
    """2^(exponent - 127) for an exponent from 1 to 254, in the type of another number."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        bits = builder.shl(builder.trunc(args[0], I32), I32(23))
        return cast(builder, builder.bitcast(bits, FLOAT), like)

    return like(types.int64, like), emit


def _stored(
    builder: ir.IRBuilder, vector: ir.Value, tag: types.Type, to: types.Type, count: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each number as memory of type `tag` will hold it, in type `to`, and whether it is one of the first `count`."""
    for lane in range(vector.type.count):
        value = narrow(builder, builder.extract_value(vector, lane), tag)
        yield widen(builder, value, tag, to), builder.icmp_signed(">", count, I64(lane))


@intrinsic
def sum_of_squares(_typing: Any, vector: types.Type, tag: types.Type, sum_tag: types.Type, count: types.Type) -> Any:
    """The sum of the first `count` numbers' squares, in their order, each as memory of type `tag` will hold it."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = ir.Constant(MEMORY[sum_tag][0], 0.0)
        for value, inside in _stored(builder, args[0], tag, sum_tag, args[3]):
            more = rounded_op(builder, "add", total, rounded_op(builder, "mul", value, value))
            total = builder.select(inside, more, total)
        return total

    return sum_tag(vector, tag, sum_tag, types.int64), emit


@intrinsic
def not_finite(_typing: Any, vector: types.Type, tag: types.Type, count: types.Type) -> Any:
    """How many of the first `count` numbers memory of type `tag` will hold as infinity or NaN."""
    to = types.float64 if tag == types.float64 else types.float32

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = I64(0)
        for value, inside in _stored(builder, args[0], tag, to, args[2]):
            odd = builder.and_(inside, builder.not_(is_finite(builder, value)))
            total = builder.add(total, builder.zext(odd, I64))
        return total

    return types.int64(vector, tag, types.int64), emit
