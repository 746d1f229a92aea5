"""Elements in memory for the `numba_cpu` kernels: loads and stores that convert, and stores that bypass the cache.

Kernels take raw addresses and *tags*, scalars whose types say what lies there, so that one kernel text serves
every pair of dtypes. Numba has no 16-bit floats on the CPU: FP16 is tagged int16 and BF16 uint16, and E4M3 uint8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from .numba_cache import keyed

TAGS: dict[torch.dtype, Any] = {
    torch.float64: np.float64(0),
    torch.float32: np.float32(0),
    torch.float16: np.int16(0),
    torch.bfloat16: np.uint16(0),
}

# Output of this many bytes and more bypasses the cache: a line written whole is not read first, which saves a
# quarter to two fifths of the traffic. Less output may still lie in L2 when its reader comes.
STREAM_BYTES = 1 << 20
LINE = 64
# Bytes to prefetch: the hardware by itself fetched too few, and quantizing took 1.5 times as long; with half, 1.07.
AHEAD = 2048
BLOCK_LANES = 16  # the least block, but for INT4
ANYWHERE = 1  # what loads and stores take for granted of an address: it may be no multiple of an element

# No fastmath: every operation rounds by itself, and LLVM fuses none unless told to.
kernel = keyed(njit(nogil=True, cache=True, error_model="numpy"))
# Where a call for each block would show.
inlined = keyed(njit(nogil=True, cache=True, error_model="numpy", forceinline=True))

_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
MEMORY = {
    types.float64: (_DOUBLE, 8),
    types.float32: (_FLOAT, 4),
    types.int16: (_HALF, 2),
    types.uint16: (_I16, 2),
    types.int8: (_I8, 1),
    types.uint8: (_I8, 1),
}


def addresses(tensors: Sequence[Tensor]) -> NDArray[np.int64]:
    """Where each tensor's elements begin."""
    return np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))


def stage(doubles: int) -> Tensor:
    """Scratch that stays in L1. It starts at a line, as NumPy's does not: up to 1.7 times as fast."""
    return torch.empty(doubles, dtype=torch.float64, device="cpu")


def rows(received: Tensor) -> NDArray[np.int64]:
    """Where each row of a matrix begins."""
    count, nbytes = received.shape[0], received.nbytes
    return received.data_ptr() + np.arange(count) * (nbytes // max(1, count))


@intrinsic
def bits_of(_typing: Any, code: types.Type) -> tuple[Any, Any]:
    """Bits of an element of a quantized wire."""
    bits = 4 if code == types.uint32 else 8
    return types.int64(code), lambda _target, _builder, _signature, _args: _I64(bits)


@intrinsic
def is_fp8(_typing: Any, code: types.Type) -> tuple[Any, Any]:
    """Whether elements of a quantized wire are E4M3."""
    found = ir.Constant(ir.IntType(1), code == types.uint8)
    return types.boolean(code), lambda _target, _builder, _signature, _args: found


@intrinsic
def byte_of(_typing: Any, code: types.Type) -> tuple[Any, Any]:
    """The tag of a byte of a quantized wire: that of its elements, or of INT8 where two of them share one."""
    byte = types.int8 if code == types.uint32 else code
    return byte(code), lambda target, _builder, _signature, _args: target.get_constant(byte, 0)


def element(builder: ir.IRBuilder, address: ir.Value, index: ir.Value, tag: types.Type) -> ir.Value:
    """A pointer to element `index`."""
    base = builder.inttoptr(address, ir.PointerType())
    return builder.gep(base, [index], source_etype=MEMORY[tag][0])


def named(name: str, define: Callable[..., Any]) -> Callable[..., Any]:
    """The intrinsic that `define` defines, by a name that no other one made in the same place has."""
    define.__name__ = name
    defined: Callable[..., Any] = intrinsic(define)
    return defined


def _like(value: ir.Value, scalar: ir.Type) -> ir.Type:
    return ir.VectorType(scalar, value.type.count) if isinstance(value.type, ir.VectorType) else scalar


def _constant(value: ir.Value, number: float) -> ir.Constant:
    is_vector = isinstance(value.type, ir.VectorType)
    return ir.Constant(value.type, [number] * value.type.count if is_vector else number)


def widen(builder: ir.IRBuilder, value: ir.Value, tag: types.Type) -> ir.Value:
    """What memory holds → FP64 where that is FP64, else FP32."""
    if tag == types.int16:
        return builder.fpext(value, _like(value, _FLOAT))
    if tag == types.uint16:
        bits = builder.zext(value, _like(value, _I32))
        return builder.bitcast(builder.shl(bits, _constant(bits, 16)), _like(value, _FLOAT))
    if tag == types.int8:
        return builder.sitofp(value, _like(value, _FLOAT))
    if tag == types.uint8:
        # Its bits in FP16's places are the number times 2^-8, those below the smallest normal one too.
        byte = builder.zext(value, _like(value, _I16))
        sign = builder.shl(builder.and_(byte, _constant(byte, 0x80)), _constant(byte, 8))
        bits = builder.or_(builder.shl(builder.and_(byte, _constant(byte, 0x7F)), _constant(byte, 7)), sign)
        number = builder.fpext(builder.bitcast(bits, _like(value, _HALF)), _like(value, _FLOAT))
        return builder.fmul(number, _constant(number, 2.0**8))
    return value


def narrow(builder: ir.IRBuilder, value: ir.Value, computed: types.Type, tag: types.Type) -> ir.Value:
    """FP64 or FP32 → what memory holds."""
    if tag == types.int8:
        return builder.trunc(value, _like(value, _I8))
    if tag == types.uint8:
        half = builder.fptrunc(builder.fmul(value, _constant(value, 2.0**-8)), _like(value, _HALF))
        bits = builder.bitcast(half, _like(value, _I16))
        code = builder.and_(builder.lshr(bits, _constant(bits, 7)), _constant(bits, 0x7F))
        sign = builder.and_(builder.lshr(bits, _constant(bits, 8)), _constant(bits, 0x80))
        return builder.trunc(builder.or_(code, sign), _like(value, _I8))
    if computed == types.float32 and tag == types.float64:
        return builder.fpext(value, _like(value, _DOUBLE))
    if computed == types.float64 and tag != types.float64:
        value = builder.fptrunc(value, _like(value, _FLOAT))
    if tag == types.int16:
        return builder.fptrunc(value, _like(value, _HALF))
    if tag == types.uint16:
        bits = builder.bitcast(value, _like(value, _I32))
        high = builder.lshr(bits, _constant(bits, 16))
        half = builder.add(builder.and_(high, _constant(bits, 1)), _constant(bits, 0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), _constant(bits, 16))
        nan = builder.or_(high, _constant(bits, 0x40))
        bits = builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded)
        return builder.trunc(bits, _like(value, _I16))
    return value


@intrinsic
def held(_typing: Any, tag: types.Type, value: types.Type) -> tuple[Any, Any]:
    """A number as memory of type `tag` will hold it."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return widen(builder, narrow(builder, args[1], value, tag), tag)

    return (types.float64 if tag == types.float64 else types.float32)(tag, value), emit


@intrinsic
def size_of(_typing: Any, tag: types.Type) -> tuple[Any, Any]:
    """Bytes of an element."""
    return types.int64(tag), lambda _target, _builder, _signature, _args: _I64(MEMORY[tag][1])


@intrinsic
def at_most_fp32(_typing: Any, tag: types.Type) -> tuple[Any, Any]:
    """The tag itself, or FP32's for FP64."""
    narrow = types.float32 if tag == types.float64 else tag
    return narrow(tag), lambda target, builder, _signature, _args: target.get_constant(narrow, 0)


@intrinsic
def load(_typing: Any, address: types.Type, index: types.Type, tag: types.Type) -> tuple[Any, Any]:
    """Element `index` as FP64 where memory holds FP64, else as FP32."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        value = builder.load(element(builder, args[0], args[1], tag), typ=MEMORY[tag][0], align=ANYWHERE)
        return widen(builder, value, tag)

    result = types.float64 if tag == types.float64 else types.float32
    return result(types.int64, types.int64, tag), emit


def prefetch(builder: ir.IRBuilder, pointer: ir.Value) -> None:
    """Ask for the line at an address, which may be anywhere."""
    kinds = [ir.PointerType(), _I32, _I32, _I32]
    ask = builder.module.declare_intrinsic("llvm.prefetch", kinds[:1], ir.FunctionType(ir.VoidType(), kinds))
    builder.call(ask, [pointer, _I32(0), _I32(3), _I32(1)])


@intrinsic
def prefetch_block(_typing: Any, address: types.Type, size: types.Type) -> tuple[Any, Any]:
    """Ask for the lines of as many bytes, `AHEAD` behind an address."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        with cgutils.for_range(builder, builder.udiv(args[1], _I64(LINE))) as loop:
            at = builder.add(builder.add(args[0], _I64(AHEAD)), builder.mul(loop.index, _I64(LINE)))
            prefetch(builder, builder.inttoptr(at, ir.PointerType()))
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def copy(_typing: Any, to: types.Type, source: types.Type, count: types.Type) -> tuple[Any, Any]:
    """Copy bytes that do not overlap."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        to, source = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def load_byte(_typing: Any, address: types.Type, index: types.Type) -> tuple[Any, Any]:
    """Byte `index` as a number from 0 to 255."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.zext(builder.load(element(builder, args[0], args[1], types.int8), typ=_I8), _I32)

    return types.int32(types.int64, types.int64), emit


@intrinsic
def store(_typing: Any, address: types.Type, index: types.Type, tag: types.Type, value: types.Type) -> tuple[Any, Any]:
    """Round FP64 or FP32 to what memory holds, 16 bits by way of FP32; int8 takes an int32's low byte, E4M3 its own."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        value_in_memory = narrow(builder, args[3], value, tag)
        builder.store(value_in_memory, element(builder, args[0], args[1], tag), align=ANYWHERE)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, tag, value), emit


def load_lanes(builder: ir.IRBuilder, source: ir.Value, tag: types.Type, index: ir.Value, lanes: int) -> ir.Value:
    """`lanes` elements from `index` on, as FP64 where memory holds FP64, else as FP32."""
    kind = ir.VectorType(MEMORY[tag][0], lanes)
    return widen(builder, builder.load(element(builder, source, index, tag), typ=kind, align=ANYWHERE), tag)


def line_of(
    builder: ir.IRBuilder,
    source: ir.Value,
    source_tag: types.Type,
    index: ir.Value,
    factor: ir.Value,
    to_tag: types.Type,
    lanes: int,
) -> ir.Value:
    """`lanes` elements from `index` on, multiplied by `factor`, as memory of `to_tag` holds them."""
    value = load_lanes(builder, source, source_tag, index, lanes)
    scale = types.float64 if factor.type == _DOUBLE else types.float32
    if scale == types.float64 and source_tag != types.float64:
        value = builder.fpext(value, _like(value, _DOUBLE))
    return narrow(builder, builder.fmul(value, splat(builder, factor, lanes)), scale, to_tag)


def splat(builder: ir.IRBuilder, number: ir.Value, lanes: int) -> ir.Value:
    """A vector of one number."""
    first = builder.insert_element(ir.Constant(ir.VectorType(number.type, lanes), ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_I32, lanes), None))


def folded(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """The lanes of a vector combined to one, the first half with the second until one is left."""
    while (half := vector.type.count // 2) > 0:
        vector = combine(part(builder, vector, 0, half), part(builder, vector, half, half))
    return builder.extract_element(vector, _I32(0))


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger one of two integers, lane by lane."""
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def part(builder: ir.IRBuilder, vector: ir.Value, start: int, count: int) -> ir.Value:
    """Some lanes of a vector."""
    places = ir.Constant(ir.VectorType(_I32, count), list(range(start, start + count)))
    return builder.shuffle_vector(vector, vector, places)


def store_line(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, stream: bool) -> None:
    """Store a vector: past the cache, to the beginning of a line, or as any other."""
    stored = builder.store(value, pointer, align=LINE if stream else ANYWHERE)
    if stream:
        stored.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


# Vectors by hand: LLVM vectorises no loop into non-temporal stores unless its scalars were so aligned.
@intrinsic
def _stream_line(
    _typing: Any, to: types.Type, to_tag: types.Type, source: types.Type, source_tag: types.Type, index: types.Type,
    scale: types.Type,
) -> tuple[Any, Any]:  # fmt: skip
    size = MEMORY[to_tag][1]

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        to, _, source, _, index, factor = args
        value = line_of(builder, source, source_tag, index, factor, to_tag, LINE // size)
        store_line(builder, value, element(builder, to, index, to_tag), True)
        return target.get_dummy_value()

    return types.void(types.int64, to_tag, types.int64, source_tag, types.int64, scale), emit


@intrinsic
def fence(_typing: Any) -> tuple[Any, Any]:
    """What was stored, streamed lines included, is seen by all before what is stored or loaded next."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, _args: Sequence[ir.Value]) -> ir.Value:
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), emit


@kernel
def slot_at(offsets, place):
    """The last slot that begins at a place of the flat, or before it; the first one if none does."""
    low, high = 0, len(offsets)
    while high - low > 1:
        middle = (low + high) // 2
        if offsets[middle] <= place:
            low = middle
        else:
            high = middle
    return low


@kernel
def can_stream(to, to_tag, source):
    """Whether some element begins at a line, and the lines are not in the cache already, as they are in place."""
    return to != source and to % size_of(to_tag) == 0


@kernel
def convert(to, to_tag, source, source_tag, count, scale, stream):
    """Multiply `count` elements by `scale`, in the compute type, on their way elsewhere or in place."""
    done = np.int64(0)
    if stream and can_stream(to, to_tag, source):
        lanes = LINE // size_of(to_tag)
        done = min(-to % LINE // size_of(to_tag), count)
        for index in range(done):
            store(to, index, to_tag, load(source, index, source_tag) * scale)
        while done + lanes <= count:
            _stream_line(to, to_tag, source, source_tag, done, scale)
            done += lanes
    for index in range(done, count):
        store(to, index, to_tag, load(source, index, source_tag) * scale)


def _block_way(name: str, adding: bool) -> Callable[..., Any]:
    """An intrinsic that multiplies a block by `factor`, an FP32 number, and stores it elsewhere, or adds it there."""

    def define(
        _typing: Any, to: types.Type, to_tag: types.Type, source: types.Type, source_tag: types.Type,
        count: types.Type, factor: types.Type,
    ) -> tuple[Any, Any]:  # fmt: skip
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            to, _, source, _, count, factor = args
            if source_tag == types.float64:
                factor = builder.fpext(factor, _DOUBLE)
            with cgutils.for_range(builder, builder.sdiv(count, _I64(BLOCK_LANES))) as loop:
                index = builder.mul(loop.index, _I64(BLOCK_LANES))
                value = line_of(builder, source, source_tag, index, factor, to_tag, BLOCK_LANES)
                at = element(builder, to, index, to_tag)
                if adding:
                    value = builder.fadd(builder.load(at, typ=value.type, align=ANYWHERE), value)
                store_line(builder, value, at, False)
            return target.get_dummy_value()

        return types.void(types.int64, to_tag, types.int64, source_tag, types.int64, types.float32), emit

    return named(name, define)


# Blocks, or other multiples of 16 elements, by hand: LLVM's own loops store 32 bytes at a time, and what reads 64 of
# them at once waits until both stores have reached the cache: a sum of two ranks' BF16 shards took 1.5 times as long.
convert_block = _block_way("convert_block", adding=False)
add_to_block = _block_way("add_to_block", adding=True)
