"""What a thread of a `numba_cuda` kernel computes with: vectors, loaded and stored 16 bytes at a time.

Kernels take raw addresses and *tags*, scalars whose types say what lies there, so that one kernel text serves every
pair of dtypes: FP16 is tagged int16, BF16 uint16 and E4M3 uint8. A vector is a tuple of FP32 or FP64 numbers. Every
operation says its rounding: of plain products and sums the compiler would make fma. `numba_cuda_simulated.py` has a
twin of each function for Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Any

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .numba_cache import keyed
from .torch_residuals import FACTORS, GOLDEN

WIDTH = 16  # bytes of one access

_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_MEMORY = {
    types.float64: (_DOUBLE, 8),
    types.float32: (_FLOAT, 4),
    types.int16: (_HALF, 2),
    types.uint16: (_I16, 2),
    types.int8: (_I8, 1),
    types.uint8: (_I8, 1),
}

# Inlined: Numba compiles a function by itself for the GPU that is there only, and without one not at all.
function = cuda.jit(device=True, inline="always")
# Not linked through LTO, which would compile other PTX than the tests look at.
kernel = keyed(cuda.jit(cache=True, lto=False))


def _vector(tag: types.Type, other: types.Type) -> types.UniTuple:
    """As many numbers as the smaller of two types in memory puts in 16 bytes, of the pair's compute type."""
    pair = (tag, other)
    wide = types.float64 in pair and types.int8 not in pair
    return types.UniTuple(types.float64 if wide else types.float32, WIDTH // min(_MEMORY[t][1] for t in pair))


def _pointer(builder: ir.IRBuilder, address: ir.Value, offset: int, to: ir.Type) -> ir.Value:
    return builder.inttoptr(builder.add(address, _I64(offset)), ir.PointerType(to, addrspace=1))


# 16 bits and less travel in words, split and joined by shifts: a vector of them would become shorter accesses.
def _words(tag: types.Type) -> ir.Type:
    scalar, size = _MEMORY[tag]
    return ir.VectorType(_I32 if size < 4 else scalar, WIDTH // max(size, 4))


def _split(builder: ir.IRBuilder, words: ir.Value, tag: types.Type) -> list[ir.Value]:
    scalar, size = _MEMORY[tag]
    found = [builder.extract_element(words, _I32(index)) for index in range(words.type.count)]
    if size >= 4:
        return found
    shifts = range(0, 32, size * 8)
    parts = [builder.trunc(builder.lshr(word, _I32(shift)), ir.IntType(size * 8)) for word in found for shift in shifts]
    return [builder.bitcast(part, scalar) for part in parts]


def _join(builder: ir.IRBuilder, numbers: Sequence[ir.Value], tag: types.Type) -> ir.Value:
    size, words = _MEMORY[tag][1], ir.Constant(_words(tag), ir.Undefined)
    for index in range(words.type.count):
        if size >= 4:
            word = numbers[index]
        else:
            word = _I32(0)
            for lane in range(4 // size):
                number = builder.bitcast(numbers[index * (4 // size) + lane], ir.IntType(size * 8))
                word = builder.or_(word, builder.shl(builder.zext(number, _I32), _I32(lane * size * 8)))
        words = builder.insert_element(words, word, _I32(index))
    return words


def _widen(builder: ir.IRBuilder, value: ir.Value, tag: types.Type, to: types.Type) -> ir.Value:
    """What memory of type `tag` holds → FP32 or FP64."""
    if tag == types.uint16:
        value = builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _FLOAT)
    elif tag == types.int8:
        value = builder.sitofp(value, _FLOAT)
    elif tag == types.int16:
        value = builder.fpext(value, _FLOAT)
    elif tag == types.uint8:
        byte = builder.zext(value, _I32)
        code = builder.and_(byte, _I32(0x7F))
        whole = builder.bitcast(builder.sitofp(code, _FLOAT), _I32)  # of what is smaller than 2^-6: 2^9 times it
        tiny = builder.select(builder.icmp_signed("==", code, _I32(0)), code, builder.sub(whole, _I32(9 << 23)))
        size = builder.add(builder.shl(code, _I32(20)), _I32(120 << 23))
        size = builder.select(builder.icmp_signed("<", code, _I32(8)), tiny, size)
        sign = builder.shl(builder.and_(byte, _I32(0x80)), _I32(24))
        value = builder.bitcast(builder.or_(size, sign), _FLOAT)
    return _cast(builder, value, to)


def _cast(builder: ir.IRBuilder, value: ir.Value, to: types.Type) -> ir.Value:
    if value.type == _DOUBLE and to == types.float32:
        return builder.fptrunc(value, _FLOAT)
    return builder.fpext(value, _DOUBLE) if value.type == _FLOAT and to == types.float64 else value


def _narrow(builder: ir.IRBuilder, value: ir.Value, tag: types.Type) -> ir.Value:
    """FP32 or FP64 → what memory of type `tag` holds."""
    if tag == types.float64:
        return _cast(builder, value, tag)
    value = _cast(builder, value, types.float32)
    if tag == types.int16:
        return builder.fptrunc(value, _HALF)
    if tag == types.uint16:
        bits = builder.bitcast(value, _I32)
        high = builder.lshr(bits, _I32(16))
        half = builder.add(builder.and_(high, _I32(1)), _I32(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), _I32(16))
        nan = builder.or_(high, _I32(0x40))
        return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded), _I16)
    if tag == types.uint8:
        bits = builder.bitcast(value, _I32)
        size = builder.and_(bits, _I32(0x7FFFFFFF))
        digits = builder.or_(builder.and_(size, _I32(0x7FFFFF)), _I32(1 << 23))
        shift = builder.sub(_I32(141), builder.lshr(size, _I32(23)))  # 2^-9 is 1
        shift = builder.select(builder.icmp_signed("<", shift, _I32(31)), shift, _I32(31))
        code = builder.sub(builder.lshr(size, _I32(20)), _I32(120 << 3))
        is_tiny = builder.icmp_signed("<", size, _I32(121 << 23))
        shift = builder.select(is_tiny, shift, _I32(31))
        code = builder.select(is_tiny, builder.lshr(digits, shift), code)
        return builder.trunc(builder.or_(code, builder.and_(builder.lshr(bits, _I32(24)), _I32(0x80))), _I8)
    return builder.trunc(builder.fptosi(value, _I32), _I8) if tag == types.int8 else value


def _whole(builder: ir.IRBuilder, address: ir.Value, count: ir.Value, lanes: int) -> ir.Value:
    aligned = builder.icmp_unsigned("==", builder.and_(address, _I64(WIDTH - 1)), _I64(0))
    return builder.and_(aligned, builder.icmp_signed(">=", count, _I64(lanes)))


@intrinsic
def size_of(_typing: Any, tag: types.Type) -> Any:
    """Bytes of an element."""
    return types.int64(tag), lambda _context, _builder, _signature, _args: _I64(_MEMORY[tag][1])


@intrinsic
def lanes_of(_typing: Any, tag: types.Type, other: types.Type) -> Any:
    """Numbers of a vector between memory of two types."""
    return types.int64(tag, other), lambda _context, _builder, _signature, _args: _I64(_vector(tag, other).count)


@intrinsic
def quotient(_typing: Any, a: types.Type, b: types.Type) -> Any:
    """The whole part of a / b, for 0 <= a, b < 2^32: Numba itself divides by the slow 64-bit way."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.zext(builder.udiv(*(builder.trunc(arg, _I32) for arg in args)), _I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def fetch(_typing: Any, address: types.Type, index: types.Type) -> Any:
    """Entry `index` of a table of int64."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        at = builder.add(args[0], builder.mul(args[1], _I64(8)))
        return builder.load(_pointer(builder, at, 0, _I64), align=8)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def fetch_int32(_typing: Any, address: types.Type) -> Any:
    """An int32, as an int64."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.sext(builder.load(_pointer(builder, args[0], 0, _I32), align=4), _I64)

    return types.int64(types.int64), emit


@intrinsic
def fetch_byte(_typing: Any, address: types.Type) -> Any:
    """A byte as a number from 0 to 255."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.zext(builder.load(_pointer(builder, args[0], 0, _I8), align=1), _I64)

    return types.int64(types.int64), emit


@intrinsic
def store_byte(_typing: Any, address: types.Type, number: types.Type) -> Any:
    """A number from 0 to 255 as a byte."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.store(builder.trunc(args[1], _I8), _pointer(builder, args[0], 0, _I8), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load(_typing: Any, address: types.Type, tag: types.Type, other: types.Type, count: types.Type) -> Any:
    """A vector from memory of type `tag`, on its way to memory of type `other`; numbers from `count` on are zero."""
    result, (scalar, size) = _vector(tag, other), _MEMORY[tag]
    lanes, part = result.count, WIDTH // size

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, _, _, count = args
        array = context.get_value_type(result)
        with builder.goto_entry_block():
            place = builder.alloca(array)

        def put(lane: int, value: ir.Value) -> None:
            value = _widen(builder, value, tag, result.dtype)
            builder.store(value, builder.gep(place, [_I32(0), _I32(lane)]))

        with builder.if_else(_whole(builder, address, count, lanes)) as (whole, scattered):
            with whole:
                for start in range(0, lanes, part):
                    words = builder.load(_pointer(builder, address, start * size, _words(tag)), align=WIDTH)
                    for lane, value in enumerate(_split(builder, words, tag)):
                        put(start + lane, value)
            with scattered:
                builder.store(ir.Constant(array, None), place)
                for lane in range(lanes):
                    with builder.if_then(builder.icmp_signed(">", count, _I64(lane))):
                        put(lane, builder.load(_pointer(builder, address, lane * size, scalar), align=size))
        return builder.load(place)

    return result(types.int64, tag, other, types.int64), emit


@intrinsic
def store(
    _typing: Any, address: types.Type, tag: types.Type, vector: types.Type, count: types.Type, extent: types.Type
) -> Any:
    """The first `count` numbers of a vector to memory of type `tag`, each rounded once more, then zeros to `extent`.

    FP64 reaches 16 bits through FP32; int8 takes whole numbers, E4M3 its own.
    """
    (scalar, size), lanes = _MEMORY[tag], vector.count
    part = WIDTH // size

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, _, numbers, count, extent = args
        values = [_narrow(builder, builder.extract_value(numbers, lane), tag) for lane in range(lanes)]
        with builder.if_else(_whole(builder, address, count, lanes)) as (whole, scattered):
            with whole:
                for start in range(0, lanes, part):
                    words = _join(builder, values[start : start + part], tag)
                    builder.store(words, _pointer(builder, address, start * size, _words(tag)), align=WIDTH)
            with scattered:
                for lane, value in enumerate(values):
                    with builder.if_then(builder.icmp_signed(">", extent, _I64(lane))):
                        inside = builder.icmp_signed(">", count, _I64(lane))
                        chosen = builder.select(inside, value, ir.Constant(scalar, 0))
                        builder.store(chosen, _pointer(builder, address, lane * size, scalar), align=size)
        return context.get_dummy_value()

    return types.void(types.int64, tag, vector, types.int64, types.int64), emit


@intrinsic
def bits_of(_typing: Any, code: types.Type) -> Any:
    """Bits of an element of a quantized wire."""
    bits = 4 if code == types.uint32 else 8
    return types.int64(code), lambda _context, _builder, _signature, _args: _I64(bits)


@intrinsic
def byte_of(_typing: Any, code: types.Type) -> Any:
    """The tag of a byte of a quantized wire: that of its elements, or of INT8 where two of them share one."""
    byte = types.int8 if code == types.uint32 else code
    return byte(code), lambda _context, _builder, _signature, _args: _I8(0)


@intrinsic
def is_fp8(_typing: Any, code: types.Type) -> Any:
    """Whether elements of a quantized wire are E4M3."""
    found = ir.Constant(ir.IntType(1), code == types.uint8)
    return types.boolean(code), lambda _context, _builder, _signature, _args: found


def _numbers(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> Iterable[ir.Value]:
    """A vector's, or one number for all lanes; of words of random bits 16 for each lane, two lanes' in a word."""
    if not isinstance(value.type, ir.ArrayType):
        return [value] * lanes
    if value.type.element == _I64:
        return (_drawn(builder, value, lane) for lane in range(lanes))
    return [builder.extract_value(value, lane) for lane in range(lanes)]


def _drawn(builder: ir.IRBuilder, words: ir.Value, lane: int) -> ir.Value:
    word = builder.trunc(builder.extract_value(words, lane // 2), _I32)
    return builder.lshr(word, _I32(16)) if lane % 2 else builder.and_(word, _I32(0xFFFF))


def _pack(context: Any, builder: ir.IRBuilder, values: Sequence[ir.Value], result: types.Type) -> ir.Value:
    packed: ir.Value = ir.Constant(context.get_value_type(result), ir.Undefined)
    for lane, value in enumerate(values):
        packed = builder.insert_value(packed, value, lane)
    return packed


def _by_lane(of_one: Callable[..., ir.Value]) -> Callable[..., Any]:
    """What is done with a builder and a number of each argument → the same with vectors, or vectors and numbers.

    The result has the type of the first argument, which may be a number too.
    """

    @wraps(of_one)  # Numba asks for the names of arguments
    def define(_typing: Any, first: types.Type, *others: types.Type) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            if not isinstance(first, types.UniTuple):
                return of_one(builder, *args)
            lanes = zip(*(_numbers(builder, arg, first.count) for arg in args), strict=True)
            return _pack(context, builder, [of_one(builder, *lane) for lane in lanes], first)

        return first(first, *others), emit

    defined: Callable[..., Any] = intrinsic(define)
    return defined


def _bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Those of an FP32 number without its sign: as integers they compare as magnitudes do, every NaN above infinity."""
    return builder.and_(builder.bitcast(value, _I32), _I32(0x7FFFFFFF))


def _is_finite(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    integer, infinity = (_I64, 0x7FF << 52) if value.type == _DOUBLE else (_I32, 0xFF << 23)
    magnitude = builder.and_(builder.bitcast(value, integer), integer((1 << integer.width - 1) - 1))
    return builder.icmp_signed("<", magnitude, integer(infinity))


def _rounded(builder: ir.IRBuilder, operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """An operation (mul, add, div) on two numbers of one type, rounded to nearest even by itself."""
    declared, name = builder.module.globals, f"llvm.nvvm.{operation}.rn.{'d' if a.type == _DOUBLE else 'f'}"
    operator = declared.get(name) or ir.Function(builder.module, ir.FunctionType(a.type, [a.type, a.type]), name)
    return builder.call(operator, [a, b])


@_by_lane
def multiply(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The product, rounded to nearest even."""
    return _rounded(builder, "mul", a, b)


@_by_lane
def add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum, likewise."""
    return _rounded(builder, "add", a, b)


@_by_lane
def divide(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The quotient, likewise."""
    return _rounded(builder, "div", a, b)


@_by_lane
def magnitudes(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The numbers without signs."""
    return builder.bitcast(_bits(builder, value), _FLOAT)


@_by_lane
def signed_as(builder: ir.IRBuilder, value: ir.Value, other: ir.Value) -> ir.Value:
    """Numbers from 0 on with the signs of others; a zero has none."""
    bits = builder.bitcast(value, _I32)
    negative = builder.and_(
        builder.icmp_signed("<", builder.bitcast(other, _I32), _I32(0)), builder.icmp_signed(">", bits, _I32(0))
    )
    return builder.bitcast(builder.select(negative, builder.or_(bits, _I32(1 << 31)), bits), _FLOAT)


@_by_lane
def at_most(builder: ir.IRBuilder, value: ir.Value, limit: ir.Value) -> ir.Value:
    """The smaller of each number and a limit."""
    return builder.select(builder.fcmp_ordered("<", value, limit), value, limit)


@_by_lane
def more_than_half(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """1 where a number is larger than 0.5, else 0."""
    return builder.select(builder.fcmp_ordered(">", value, _FLOAT(0.5)), _FLOAT(1), _FLOAT(0))


@_by_lane
def where_finite(builder: ir.IRBuilder, tested: ir.Value, then: ir.Value, otherwise: ir.Value) -> ir.Value:
    """Each number of the second vector where that of the first is finite, else of the third."""
    return builder.select(_is_finite(builder, tested), then, otherwise)


@_by_lane
def e4m3_rounders(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """1.5 times 2^20 of each number's power of two, 2^-6 at least: a sum with it has the digits that E4M3 has."""
    binade = builder.and_(builder.bitcast(value, _I32), _I32(0x7F800000))
    binade = builder.select(builder.icmp_signed(">", binade, _I32(121 << 23)), binade, _I32(121 << 23))
    return builder.bitcast(builder.add(binade, _I32((20 << 23) + (1 << 22))), _FLOAT)


@_by_lane
def e4m3_bases(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """2^-6 for each number below it, and 0 for others: added to its magnitude, the sum has E4M3's steps."""
    tiny = builder.icmp_signed("<", _bits(builder, value), _I32(121 << 23))
    return builder.select(tiny, _FLOAT(2.0**-6), _FLOAT(0.0))


@_by_lane
def bf16_by_chance(builder: ir.IRBuilder, value: ir.Value, drawn: ir.Value) -> ir.Value:
    """The BF16 numbers that random bits choose."""
    number = _cast(builder, value, types.float32)
    summed = builder.add(builder.bitcast(number, _I32), drawn)
    rounded = builder.bitcast(builder.and_(summed, _I32(-65536)), _FLOAT)
    chosen = builder.select(builder.fcmp_unordered("uno", number, number), number, rounded)
    return _cast(builder, chosen, types.float64) if value.type == _DOUBLE else chosen


def _whole_number(builder: ir.IRBuilder, fixed: ir.Value, word: ir.Value, shift: int) -> ir.Value:
    """The one that 15 random bits, a word's from bit `shift` on, choose of a number times 2^15, plus 1.5 * 2^23."""
    number = builder.sub(builder.bitcast(fixed, _I32), _I32(0x4B400000))
    return builder.sitofp(builder.ashr(builder.add(number, builder.lshr(word, _I32(shift))), _I32(15)), _FLOAT)


@_by_lane
def whole_by_chance(builder: ir.IRBuilder, fixed: ir.Value, drawn: ir.Value) -> ir.Value:
    """The whole numbers that random bits choose of numbers times 2^15, to which 1.5 * 2^23 has been added."""
    return _whole_number(builder, fixed, drawn, 1)


@intrinsic
def whole_by_own_bits(
    _typing: Any, fixed: types.Type, values: types.Type, largest: types.Type, first: types.Type
) -> Any:
    """The whole numbers that values choose by their bits, of themselves times 2^15 and with 1.5 * 2^23 added."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        found, place = [], builder.trunc(args[3], _I32)
        pairs = zip(*(_numbers(builder, arg, fixed.count) for arg in args[:2]), strict=True)
        for lane, (value, bits) in enumerate(pairs):
            salt = builder.xor(args[2], builder.add(place, _I32(lane)))
            word = builder.add(builder.bitcast(bits, _I32), builder.mul(salt, _I32(GOLDEN)))
            for shift, factor in ((16, FACTORS[0]), (13, FACTORS[1])):
                word = builder.mul(builder.xor(word, builder.lshr(word, _I32(shift))), _I32(factor))
            word = builder.xor(word, builder.lshr(word, _I32(16)))
            found.append(_whole_number(builder, value, word, 17))
        return _pack(context, builder, found, fixed)

    return fixed(fixed, values, types.int32, types.int64), emit


@_by_lane
def e4m3_by_chance(builder: ir.IRBuilder, sums: ir.Value, drawn: ir.Value) -> ir.Value:
    """Numbers cut off to the 4 digits of E4M3, up or down as random bits choose."""
    room = builder.add(builder.shl(drawn, _I32(4)), _I32(8))
    return builder.bitcast(builder.and_(builder.add(builder.bitcast(sums, _I32), room), _I32(-(1 << 20))), _FLOAT)


@intrinsic
def load_int4(_typing: Any, address: types.Type, count: types.Type) -> Any:
    """16 numbers of 4 bits, the first of each byte in its low ones; zeros where `count` is 0."""
    result = types.UniTuple(types.float32, WIDTH)

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        with builder.goto_entry_block():
            places = [builder.alloca(_I32) for _ in range(2)]
        for place in places:
            builder.store(_I32(0), place)
        with builder.if_then(builder.icmp_signed(">", args[1], _I64(0))):
            for word, place in enumerate(places):
                builder.store(builder.load(_pointer(builder, args[0], 4 * word, _I32), align=4), place)
        words = [builder.load(place) for place in places for _ in range(8)]
        shifted = [builder.shl(word, _I32(28 - 4 * (lane % 8))) for lane, word in enumerate(words)]
        values = [builder.sitofp(builder.ashr(word, _I32(28)), _FLOAT) for word in shifted]
        return _pack(context, builder, values, result)

    return result(types.int64, types.int64), emit


@intrinsic
def store_int4(_typing: Any, address: types.Type, vector: types.Type) -> Any:
    """16 whole numbers from -8 to 7 as 8 bytes."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        for start in (0, 8):
            word = _I32(0)
            for lane in range(8):
                number = builder.fptosi(builder.extract_value(args[1], start + lane), _I32)
                word = builder.or_(word, builder.shl(builder.and_(number, _I32(15)), _I32(4 * lane)))
            builder.store(word, _pointer(builder, args[0], start // 2, _I32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), emit


@intrinsic
def largest_bits(_typing: Any, vector: types.Type) -> Any:
    """The largest magnitude's bits: as integers they compare as the numbers do, infinity and every NaN above them."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        largest = _I32(0)
        for value in _numbers(builder, args[0], vector.count):
            bits = _bits(builder, value)
            largest = builder.select(builder.icmp_signed(">", bits, largest), bits, largest)
        return largest

    return types.int32(vector), emit


@intrinsic
def largest_and_sign(_typing: Any, vector: types.Type) -> Any:
    """The largest magnitude's bits, the last of which is 1 if a number with a plus has them, but for that bit."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        largest = _I32(0)
        for value in _numbers(builder, args[0], vector.count):
            bits = builder.bitcast(value, _I32)
            plus = builder.lshr(builder.not_(bits), _I32(31))
            key = builder.or_(builder.and_(bits, _I32(0x7FFFFFFE)), plus)
            largest = builder.select(builder.icmp_signed(">", key, largest), key, largest)
        return largest

    return types.int32(vector), emit


@intrinsic
def from_bits(_typing: Any, bits: types.Type) -> Any:
    """The FP32 number of 32 bits."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), emit


@intrinsic
def to_bits(_typing: Any, number: types.Type) -> Any:
    """The 32 bits of an FP32 number."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.bitcast(args[0], _I32)

    return types.int32(types.float32), emit


@intrinsic
def power(_typing: Any, exponent: types.Type, like: types.Type) -> Any:
    """2^(exponent - 127) for an exponent from 1 to 254, in the type of another number."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        bits = builder.shl(builder.trunc(args[0], _I32), _I32(23))
        return _cast(builder, builder.bitcast(bits, _FLOAT), like)

    return like(types.int64, like), emit


def _stored(
    builder: ir.IRBuilder, vector: ir.Value, tag: types.Type, to: types.Type, count: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each number as memory of type `tag` will hold it, in type `to`, and whether it is one of the first `count`."""
    for lane in range(vector.type.count):
        value = _narrow(builder, builder.extract_value(vector, lane), tag)
        yield _widen(builder, value, tag, to), builder.icmp_signed(">", count, _I64(lane))


@intrinsic
def sum_of_squares(_typing: Any, vector: types.Type, tag: types.Type, sum_tag: types.Type, count: types.Type) -> Any:
    """The sum of the first `count` numbers' squares, in their order, each as memory of type `tag` will hold it."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = ir.Constant(_MEMORY[sum_tag][0], 0.0)
        for value, inside in _stored(builder, args[0], tag, sum_tag, args[3]):
            more = _rounded(builder, "add", total, _rounded(builder, "mul", value, value))
            total = builder.select(inside, more, total)
        return total

    return sum_tag(vector, tag, sum_tag, types.int64), emit


@intrinsic
def not_finite(_typing: Any, vector: types.Type, tag: types.Type, count: types.Type) -> Any:
    """How many of the first `count` numbers memory of type `tag` will hold as infinity or NaN."""
    to = types.float64 if tag == types.float64 else types.float32

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        total = _I64(0)
        for value, inside in _stored(builder, args[0], tag, to, args[2]):
            odd = builder.and_(inside, builder.not_(_is_finite(builder, value)))
            total = builder.add(total, builder.zext(odd, _I64))
        return total

    return types.int64(vector, tag, types.int64), emit
