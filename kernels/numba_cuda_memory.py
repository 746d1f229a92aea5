"""Loads and stores of `numba_cuda` kernels, 16 bytes at a time, and what the tag of an element says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from .numba_cuda_llvm import (
    FLOAT,
    I8,
    I32,
    I64,
    MEMORY,
    WIDTH,
    is_whole,
    join,
    narrow,
    pack,
    pointer,
    split,
    vector_type,
    widen,
    words_of,
)


@intrinsic
def size_of(_typing: Any, tag: types.Type) -> Any:
    """Bytes of an element."""
    return types.int64(tag), lambda _context, _builder, _signature, _args: I64(MEMORY[tag][1])


@intrinsic
def lanes_of(_typing: Any, tag: types.Type, other: types.Type) -> Any:
    """Numbers of a vector between memory of two types."""
    return types.int64(tag, other), lambda _context, _builder, _signature, _args: I64(vector_type(tag, other).count)


@intrinsic
def quotient(_typing: Any, a: types.Type, b: types.Type) -> Any:
    """The whole part of a / b, for 0 <= a, b < 2^32: Numba itself divides by the slow 64-bit way."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.zext(builder.udiv(*(builder.trunc(arg, I32) for arg in args)), I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def fetch(_typing: Any, address: types.Type, index: types.Type) -> Any:
    """Entry `index` of a table of int64."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        at = builder.add(args[0], builder.mul(args[1], I64(8)))
        return builder.load(pointer(builder, at, 0, I64), align=8)

    return types.int64(types.int64, types.int64), emit


@intrinsic
def fetch_int32(_typing: Any, address: types.Type) -> Any:
    """An int32, as an int64."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.sext(builder.load(pointer(builder, args[0], 0, I32), align=4), I64)

    return types.int64(types.int64), emit


@intrinsic
def fetch_byte(_typing: Any, address: types.Type) -> Any:
    """A byte as a number from 0 to 255."""

    def emit(_context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.zext(builder.load(pointer(builder, args[0], 0, I8), align=1), I64)

    return types.int64(types.int64), emit


@intrinsic
def store_byte(_typing: Any, address: types.Type, number: types.Type) -> Any:
    """A number from 0 to 255 as a byte."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.store(builder.trunc(args[1], I8), pointer(builder, args[0], 0, I8), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def load(_typing: Any, address: types.Type, tag: types.Type, other: types.Type, count: types.Type) -> Any:
    """A vector from memory of type `tag`, on its way to memory of type `other`; numbers from `count` on are zero."""
    result, (scalar, size) = vector_type(tag, other), MEMORY[tag]
    lanes, part = result.count, WIDTH // size

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, _, _, count = args
        array = context.get_value_type(result)
        with builder.goto_entry_block():
            place = builder.alloca(array)

        def put(lane: int, value: ir.Value) -> None:
            value = widen(builder, value, tag, result.dtype)
            builder.store(value, builder.gep(place, [I32(0), I32(lane)]))

        with builder.if_else(is_whole(builder, address, count, lanes)) as (whole, scattered):
            with whole:
                for start in range(0, lanes, part):
                    words = builder.load(pointer(builder, address, start * size, words_of(tag)), align=WIDTH)
                    for lane, value in enumerate(split(builder, words, tag)):
                        put(start + lane, value)
            with scattered:
                builder.store(ir.Constant(array, None), place)
                for lane in range(lanes):
                    with builder.if_then(builder.icmp_signed(">", count, I64(lane))):
                        put(lane, builder.load(pointer(builder, address, lane * size, scalar), align=size))
        return builder.load(place)

    return result(types.int64, tag, other, types.int64), emit


@intrinsic
def store(
    _typing: Any, address: types.Type, tag: types.Type, vector: types.Type, count: types.Type, extent: types.Type
) -> Any:
    """The first `count` numbers of a vector to memory of type `tag`, each rounded once more, then zeros to `extent`.

    FP64 reaches 16 bits through FP32; int8 takes whole numbers, E4M3 its own.
    """
    (scalar, size), lanes = MEMORY[tag], vector.count
    part = WIDTH // size

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        address, _, numbers, count, extent = args
        values = [narrow(builder, builder.extract_value(numbers, lane), tag) for lane in range(lanes)]
        with builder.if_else(is_whole(builder, address, count, lanes)) as (whole, scattered):
            with whole:
                for start in range(0, lanes, part):
                    words = join(builder, values[start : start + part], tag)
                    builder.store(words, pointer(builder, address, start * size, words_of(tag)), align=WIDTH)
            with scattered:
                for lane, value in enumerate(values):
                    with builder.if_then(builder.icmp_signed(">", extent, I64(lane))):
                        inside = builder.icmp_signed(">", count, I64(lane))
                        chosen = builder.select(inside, value, ir.Constant(scalar, 0))
                        builder.store(chosen, pointer(builder, address, lane * size, scalar), align=size)
        return context.get_dummy_value()

    return types.void(types.int64, tag, vector, types.int64, types.int64), emit


@intrinsic
def bits_of(_typing: Any, code: types.Type) -> Any:
    """Bits of an element of a quantized wire."""
    bits = 4 if code == types.uint32 else 8
    return types.int64(code), lambda _context, _builder, _signature, _args: I64(bits)


@intrinsic
def byte_of(_typing: Any, code: types.Type) -> Any:
    """The tag of a byte of a quantized wire: that of its elements, or of INT8 where two of them share one."""
    byte = types.int8 if code == types.uint32 else code
    return byte(code), lambda _context, _builder, _signature, _args: I8(0)


@intrinsic
def is_fp8(_typing: Any, code: types.Type) -> Any:
    """Whether elements of a quantized wire are E4M3."""
    found = ir.Constant(ir.IntType(1), code == types.uint8)
    return types.boolean(code), lambda _context, _builder, _signature, _args: found


@intrinsic
def load_int4(_typing: Any, address: types.Type, count: types.Type) -> Any:
    """16 numbers of 4 bits, the first of each byte in its low ones; zeros where `count` is 0."""
    result = types.UniTuple(types.float32, WIDTH)

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        with builder.goto_entry_block():
            places = [builder.alloca(I32) for _ in range(2)]
        for place in places:
            builder.store(I32(0), place)
        with builder.if_then(builder.icmp_signed(">", args[1], I64(0))):
            for word, place in enumerate(places):
                builder.store(builder.load(pointer(builder, args[0], 4 * word, I32), align=4), place)
        words = [builder.load(place) for place in places for _ in range(8)]
        shifted = [builder.shl(word, I32(28 - 4 * (lane % 8))) for lane, word in enumerate(words)]
        values = [builder.sitofp(builder.ashr(word, I32(28)), FLOAT) for word in shifted]
        return pack(context, builder, values, result)

    return result(types.int64, types.int64), emit


@intrinsic
def store_int4(_typing: Any, address: types.Type, vector: types.Type) -> Any:
    """16 whole numbers from -8 to 7 as 8 bytes."""

    def emit(context: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        for start in (0, 8):
            word = I32(0)
            for lane in range(8):
                number = builder.fptosi(builder.extract_value(args[1], start + lane), I32)
                word = builder.or_(word, builder.shl(builder.and_(number, I32(15)), I32(4 * lane)))
            builder.store(word, pointer(builder, args[0], start // 2, I32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, vector), emit
