"""Words that ranks share: loads that acquire, stores that release, and sleep until another rank has stored one.

A word has one writer, but for the word by which a rank sleeps. Who stores a word wakes whoever sleeps (`wake`); who
waits says that it is about to sleep, looks once more, and sleeps only while nobody has taken that back. Nobody sleeps
longer than a slice, so that a rank that dies between a store and a wake costs a slice, and aborts are seen.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from ...kernels.numba_cache import keyed
from ...kernels.numba_cpu_elements import fence

compiled = keyed(njit(nogil=True, cache=True, error_model="numpy"), Path(__file__).parent)

_VOID, _I32, _I64 = ir.VoidType(), ir.IntType(32), ir.IntType(64)
WAIT, WAKE = 0, 1  # futex operations, between processes
EVERYBODY = 0x7FFFFFFF

# What a processor does that waits.
_PAUSES: dict[str, tuple[str, list[int]]] = {
    "x86_64": ("llvm.x86.sse2.pause", []),
    "aarch64": ("llvm.aarch64.hint", [1]),  # yield
}

Emitted = tuple[Any, Any]


def _word(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, ir.PointerType(kind))


@intrinsic
def load_acquire(_typing: Any, address: types.Type) -> Emitted:
    """The 64 bits at an address; what their writer wrote before is there too."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.load_atomic(_word(builder, args[0], _I64), "acquire", 8, typ=_I64)

    return types.int64(types.int64), emit


@intrinsic
def store_release(_typing: Any, address: types.Type, value: types.Type) -> Emitted:
    """Write 64 bits, behind all that was written before."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.store_atomic(args[1], _word(builder, args[0], _I64), "release", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _load_sleep(_typing: Any, address: types.Type) -> Emitted:
    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        return builder.load_atomic(_word(builder, args[0], _I32), "seq_cst", 4, typ=_I32)

    return types.int32(types.int64), emit


@intrinsic
def _store_sleep(_typing: Any, address: types.Type, value: types.Type) -> Emitted:
    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        builder.store_atomic(args[1], _word(builder, args[0], _I32), "seq_cst", 4)
        return target.get_dummy_value()

    return types.void(types.int64, types.int32), emit


@intrinsic
def pause(_typing: Any) -> Emitted:
    """Let the other thread of the core have its units for a moment."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, _args: Sequence[ir.Value]) -> ir.Value:
        found = _PAUSES.get(platform.machine())
        if found:
            name, numbers = found
            kind = ir.FunctionType(_VOID, [_I32] * len(numbers))
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), list(map(_I32, numbers)))
        return target.get_dummy_value()

    return types.void(), emit


@intrinsic
def _futex(
    _typing: Any, number: types.Type, word: types.Type, what: types.Type, value: types.Type, limit: types.Type
) -> Emitted:
    """futex(2) by libc's `syscall`: 0 or the number woken, or -1."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        call = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        return builder.call(call, [*args, _I64(0), _I64(0)])

    return types.int64(*[types.int64] * 5), emit


@compiled
def wake(futex, word):
    """Wake the rank that sleeps, or is about to, by its word; call it behind a store that it may wait for."""
    fence()
    if _load_sleep(word) != 0:
        _store_sleep(word, 0)
        _futex(futex, word, WAKE, EVERYBODY, 0)


@compiled
def fall_asleep(word):
    """Say that this rank is about to sleep. It looks once more for what it waits for, then calls `sleep`."""
    _store_sleep(word, 1)
    fence()


@compiled
def stay_awake(word):
    """Take `fall_asleep` back."""
    _store_sleep(word, 0)


@compiled
def sleep(futex, word, limit):
    """Sleep until woken since `fall_asleep`, or for as long as the timespec at `limit` says; returns whether woken."""
    woken = _futex(futex, word, WAIT, 1, limit) == 0 or _load_sleep(word) == 0
    _store_sleep(word, 0)
    return woken
