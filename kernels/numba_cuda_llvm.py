"""How numbers of `numba_cuda` kernels lie in memory and in registers, as LLVM's instructions, one number at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

WIDTH = 16  # bytes of one access

HALF, FLOAT, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
MEMORY = {
    types.float64: (DOUBLE, 8),
    types.float32: (FLOAT, 4),
    types.int16: (HALF, 2),
    types.uint16: (I16, 2),
    types.int8: (I8, 1),
    types.uint8: (I8, 1),
}


def vector_type(tag: types.Type, other: types.Type) -> types.UniTuple:
    """As many numbers as the smaller of two types in memory puts in 16 bytes, of the pair's compute type."""
    pair = (tag, other)
    wide = types.float64 in pair and types.int8 not in pair
    return types.UniTuple(types.float64 if wide else types.float32, WIDTH // min(MEMORY[t][1] for t in pair))


def pointer(builder: ir.IRBuilder, address: ir.Value, offset: int, to: ir.Type) -> ir.Value:
    """A pointer into global memory, some bytes behind an address."""
    return builder.inttoptr(builder.add(address, I64(offset)), ir.PointerType(to, addrspace=1))


def words_of(tag: types.Type) -> ir.Type:
    """What 16 bytes are loaded as: 16 bits and less in words, since a vector of them would become shorter accesses."""
    scalar, size = MEMORY[tag]
    return ir.VectorType(I32 if size < 4 else scalar, WIDTH // max(size, 4))


def split(builder: ir.IRBuilder, words: ir.Value, tag: types.Type) -> list[ir.Value]:
    """Words → the numbers in them, by shifts."""
    scalar, size = MEMORY[tag]
    found = [builder.extract_element(words, I32(index)) for index in range(words.type.count)]
    if size >= 4:
        return found
    shifts = range(0, 32, size * 8)
    parts = [builder.trunc(builder.lshr(word, I32(shift)), ir.IntType(size * 8)) for word in found for shift in shifts]
    return [builder.bitcast(part, scalar) for part in parts]


def join(builder: ir.IRBuilder, numbers: Sequence[ir.Value], tag: types.Type) -> ir.Value:
    """The same back."""
    size, words = MEMORY[tag][1], ir.Constant(words_of(tag), ir.Undefined)
    for index in range(words.type.count):
        if size >= 4:
            word = numbers[index]
        else:
            word = I32(0)
            for lane in range(4 // size):
                number = builder.bitcast(numbers[index * (4 // size) + lane], ir.IntType(size * 8))
                word = builder.or_(word, builder.shl(builder.zext(number, I32), I32(lane * size * 8)))
        words = builder.insert_element(words, word, I32(index))
    return words


def widen(builder: ir.IRBuilder, value: ir.Value, tag: types.Type, to: types.Type) -> ir.Value:
    """What memory of type `tag` holds → FP32 or FP64."""
    if tag == types.uint16:
        value = builder.bitcast(builder.shl(builder.zext(value, I32), I32(16)), FLOAT)
    elif tag == types.int8:
        value = builder.sitofp(value, FLOAT)
    elif tag == types.int16:
        value = builder.fpext(value, FLOAT)
    elif tag == types.uint8:
        byte = builder.zext(value, I32)
        code = builder.and_(byte, I32(0x7F))
        whole = builder.bitcast(builder.sitofp(code, FLOAT), I32)  # of what is smaller than 2^-6: 2^9 times it
        tiny = builder.select(builder.icmp_signed("==", code, I32(0)), code, builder.sub(whole, I32(9 << 23)))
        size = builder.add(builder.shl(code, I32(20)), I32(120 << 23))
        size = builder.select(builder.icmp_signed("<", code, I32(8)), tiny, size)
        sign = builder.shl(builder.and_(byte, I32(0x80)), I32(24))
        value = builder.bitcast(builder.or_(size, sign), FLOAT)
    return cast(builder, value, to)


def cast(builder: ir.IRBuilder, value: ir.Value, to: types.Type) -> ir.Value:
    """FP32 ↔ FP64."""
    if value.type == DOUBLE and to == types.float32:
        return builder.fptrunc(value, FLOAT)
    return builder.fpext(value, DOUBLE) if value.type == FLOAT and to == types.float64 else value


def narrow(builder: ir.IRBuilder, value: ir.Value, tag: types.Type) -> ir.Value:
    """FP32 or FP64 → what memory of type `tag` holds."""
    if tag == types.float64:
        return cast(builder, value, tag)
    value = cast(builder, value, types.float32)
    if tag == types.int16:
        return builder.fptrunc(value, HALF)
    if tag == types.uint16:
        bits = builder.bitcast(value, I32)
        high = builder.lshr(bits, I32(16))
        half = builder.add(builder.and_(high, I32(1)), I32(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), I32(16))
        nan = builder.or_(high, I32(0x40))
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded), I16)
    if tag == types.uint8:
        bits = builder.bitcast(value, I32)
        size = builder.and_(bits, I32(0x7FFFFFFF))
        digits = builder.or_(builder.and_(size, I32(0x7FFFFF)), I32(1 << 23))
        shift = builder.sub(I32(141), builder.lshr(size, I32(23)))  # 2^-9 is 1
        shift = builder.select(builder.icmp_signed("<", shift, I32(31)), shift, I32(31))
        code = builder.sub(builder.lshr(size, I32(20)), I32(120 << 3))
        is_tiny = builder.icmp_signed("<", size, I32(121 << 23))
        shift = builder.select(is_tiny, shift, I32(31))
        code = builder.select(is_tiny, builder.lshr(digits, shift), code)
        return builder.trunc(builder.or_(code, builder.and_(builder.lshr(bits, I32(24)), I32(0x80))), I8)
    return builder.trunc(builder.fptosi(value, I32), I8) if tag == types.int8 else value


def is_whole(builder: ir.IRBuilder, address: ir.Value, count: ir.Value, lanes: int) -> ir.Value:
    """Whether a vector of so many lanes may be moved 16 bytes at a time."""
    aligned = builder.icmp_unsigned("==", builder.and_(address, I64(WIDTH - 1)), I64(0))
    return builder.and_(aligned, builder.icmp_signed(">=", count, I64(lanes)))


def numbers_of(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> Iterable[ir.Value]:
    """A vector's, or one number for all lanes; of words of random bits 16 for each lane, four lanes' in a word."""
    if not isinstance(value.type, ir.ArrayType):
        return [value] * lanes
    if value.type.element == I64:
        return (_drawn(builder, value, lane) for lane in range(lanes))
    return [builder.extract_value(value, lane) for lane in range(lanes)]


def _drawn(builder: ir.IRBuilder, words: ir.Value, lane: int) -> ir.Value:
    word = builder.trunc(builder.extract_value(words, lane // 4), I32)
    half = builder.lshr(word, I32(16)) if lane // 2 % 2 else builder.and_(word, I32(0xFFFF))
    if lane % 2 == 0:
        return half
    exchanged = builder.or_(builder.shl(builder.and_(half, I32(0xFF)), I32(8)), builder.lshr(half, I32(8)))
    return builder.xor(exchanged, I32(0xFF))


def pack(context: Any, builder: ir.IRBuilder, values: Sequence[ir.Value], result: types.Type) -> ir.Value:
    """Numbers → a vector."""
    packed: ir.Value = ir.Constant(context.get_value_type(result), ir.Undefined)
    for lane, value in enumerate(values):
        packed = builder.insert_value(packed, value, lane)
    return packed


def by_lane(of_one: Callable[..., ir.Value]) -> Callable[..., Any]:
    """What is done with a builder and a number of each argument → the same with vectors, or vectors and numbers.

    The result has the type of the first argument, which may be a number too.
    """

    @wraps(of_one)  # Numba asks for the names of arguments
    def define(_typing: Any, first: types.Type, *others: types.Type) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            if not isinstance(first, types.UniTuple):
                return of_one(builder, *args)
            lanes = zip(*(numbers_of(builder, arg, first.count) for arg in args), strict=True)
            return pack(context, builder, [of_one(builder, *lane) for lane in lanes], first)

        return first(first, *others), emit

    defined: Callable[..., Any] = intrinsic(define)
    return defined


def bits_without_sign(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Those of an FP32 number without its sign: as integers they compare as magnitudes do, every NaN above infinity."""
    return builder.and_(builder.bitcast(value, I32), I32(0x7FFFFFFF))


def is_finite(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Whether a number is neither infinite nor NaN."""
    integer, infinity = (I64, 0x7FF << 52) if value.type == DOUBLE else (I32, 0xFF << 23)
    magnitude = builder.and_(builder.bitcast(value, integer), integer((1 << integer.width - 1) - 1))
    return builder.icmp_signed("<", magnitude, integer(infinity))


def rounded_op(builder: ir.IRBuilder, operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """An operation (mul, add, div) on two numbers of one type, rounded to nearest even by itself."""
    declared, name = builder.module.globals, f"llvm.nvvm.{operation}.rn.{'d' if a.type == DOUBLE else 'f'}"
    operator = declared.get(name) or ir.Function(builder.module, ir.FunctionType(a.type, [a.type, a.type]), name)
    return builder.call(operator, [a, b])
