"""Elements in shared memory, by address: summed, each sum rounded once to their dtype, or made by others' functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...kernels.numba_cpu_elements import LINE, MEMORY, narrow, size_of, splat, widen
from .flags import Emitted, compiled

# Tags, whose types say what is summed: FP16 is tagged int16, BF16 uint16.
_FP32, _FP64, _FP16, _BF16 = np.float32(0), np.float64(0), np.int16(0), np.uint16(0)


def _adder(nbytes: int) -> Any:
    """The sum of `nbytes` bytes of elements, or of one element where that is 0; written by hand, as it is in place."""

    @intrinsic
    def add(_typing: Any, to: types.Type, first: types.Type, second: types.Type, tag: types.Type) -> Emitted:
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            first, second = (_load(builder, address, tag, nbytes) for address in args[1:3])
            _store(builder, builder.fadd(first, second), args[0], tag)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, tag), emit

    return add


def _multiplier(nbytes: int) -> Any:
    """The same of products with one number."""

    @intrinsic
    def multiply(_typing: Any, to: types.Type, source: types.Type, factor: types.Type, tag: types.Type) -> Emitted:
        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            value = _load(builder, args[1], tag, nbytes)
            factors = splat(builder, args[2], value.type.count)
            _store(builder, builder.fmul(value, factors), args[0], tag)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, factor, tag), emit

    return multiply


def _load(builder: ir.IRBuilder, address: ir.Value, tag: types.Type, nbytes: int) -> ir.Value:
    scalar, size = MEMORY[tag]
    vector = ir.VectorType(scalar, max(1, nbytes // size))
    return widen(builder, builder.load(builder.inttoptr(address, ir.PointerType(vector)), align=1, typ=vector), tag)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, tag: types.Type) -> None:
    value = narrow(builder, value, types.float64 if tag == types.float64 else types.float32, tag)
    builder.store(value, builder.inttoptr(address, ir.PointerType(value.type)), align=1)


_add_line, _add_element = _adder(LINE), _adder(0)
_multiply_line, _multiply_element = _multiplier(LINE), _multiplier(0)


@compiled
def _add_as(to, first, second, count, tag):
    done = np.int64(0)
    while done + LINE <= count:
        _add_line(to + done, first + done, second + done, tag)
        done += LINE
    while done < count:
        _add_element(to + done, first + done, second + done, tag)
        done += size_of(tag)


@compiled
def add(to, first, second, count, dtype):
    """The sum of two runs of `count` bytes, rounded once to their dtype: FP32, FP64, FP16 or BF16 by its number."""
    if dtype == 0:
        _add_as(to, first, second, count, _FP32)
    elif dtype == 1:
        _add_as(to, first, second, count, _FP64)
    elif dtype == 2:
        _add_as(to, first, second, count, _FP16)
    else:
        _add_as(to, first, second, count, _BF16)


@compiled
def _multiply_as(to, source, count, factor, tag):
    done = np.int64(0)
    while done + LINE <= count:
        _multiply_line(to + done, source + done, factor, tag)
        done += LINE
    while done < count:
        _multiply_element(to + done, source + done, factor, tag)
        done += size_of(tag)


@compiled
def multiply(to, source, count, factor, dtype):
    """A run of `count` bytes times an FP64 number: in FP64 for FP64, else in FP32, rounded once to their dtype."""
    if dtype == 0:
        _multiply_as(to, source, count, np.float32(factor), _FP32)
    elif dtype == 1:
        _multiply_as(to, source, count, factor, _FP64)
    elif dtype == 2:
        _multiply_as(to, source, count, np.float32(factor), _FP16)
    else:
        _multiply_as(to, source, count, np.float32(factor), _BF16)


@intrinsic
def _call(
    _typing: Any, function: types.Type, told: types.Type, a: types.Type, b: types.Type, c: types.Type, d: types.Type
) -> Emitted:
    """Call a C function of five integers by its address."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 5)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), emit


# `pieces` are the first words of a `Pieces`.


@compiled
def encode(pieces, shard, first, count, to):
    """Blocks of a shard, encoded to an address."""
    _call(pieces[0], pieces[3], shard, first, count, to)


@compiled
def average(pieces, first, count, terms, bases, rank, at, own, to):
    """The average of blocks of the own shard, as encoded at `own` and at `at` of the others' segments."""
    for other in range(len(bases)):
        terms[other] = own if other == rank else bases[other] + at
    _call(pieces[1], pieces[3], first, count, np.int64(terms.ctypes.data), to)


@compiled
def decode(pieces, shard, first, count, source):
    """Averages of blocks of a shard, from an address to where they belong."""
    _call(pieces[2], pieces[3], shard, first, count, source)
