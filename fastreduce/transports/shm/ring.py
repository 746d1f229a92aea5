"""Collectives over rings in shared memory, piece by piece, as one compiled function that can be called again.

Each rank owns a segment: a header of words that it alone writes, and a ring of slots. A collective is cut into pieces
that fit a slot, numbered on from the collective before, and every rank goes through three stages with each piece:

    send   copy what others are to read into the own slot         needs: every rank has taken what the slot held before
    sum    (all-reduce) the own part of everybody's piece         needs: every rank has sent the piece
    take   copy what others hold for this rank                    needs: every rank has sent it, or summed it

Behind each stage a rank counts up the word of that name. The oldest piece goes first, so that a piece is taken while
it is still in the cache, and later ones are sent only where a rank would wait else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .flags import Emitted, compiled, fall_asleep, load_acquire, pause, sleep, stay_awake, store_release, wake
from .segments import ASLEEP, BEAT, DATA, FAILED, SENT, SUMMED, TAG_BYTES, TAGS, TAKEN

# Kinds of collectives.
ALL_REDUCE, ONE_SHOT, ALL_TO_ALL, ALL_GATHER = 1, 2, 3, 4
# What `advance` returns.
DONE, BLOCKED, FAILED_RANK, OTHER_CALL = 0, 1, 2, 3

LINE = 64
_BLOCK = 4096  # bytes that are summed while they lie in L1
_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
# Tags, whose types say what is summed: FP16 is tagged int16, BF16 uint16.
_FP32, _FP64, _FP16, _BF16 = np.float32(0), np.float64(0), np.int16(0), np.uint16(0)
_MEMORY = {types.float32: (_FLOAT, 4), types.float64: (_DOUBLE, 8), types.int16: (_HALF, 2), types.uint16: (_I16, 2)}


@intrinsic
def _copy(_typing: Any, to: types.Type, source: types.Type, count: types.Type) -> Emitted:
    """Copy bytes that do not overlap."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _splat(kind: ir.Type, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * kind.count)


def _widen(builder: ir.IRBuilder, value: ir.Value, tag: types.Type) -> ir.Value:
    lanes = value.type.count
    if tag == types.int16:
        return builder.fpext(value, ir.VectorType(_FLOAT, lanes))
    if tag == types.uint16:
        wide = ir.VectorType(_I32, lanes)
        return builder.bitcast(builder.shl(builder.zext(value, wide), _splat(wide, 16)), ir.VectorType(_FLOAT, lanes))
    return value


def _narrow(builder: ir.IRBuilder, value: ir.Value, tag: types.Type) -> ir.Value:
    """Round to nearest, ties to even."""
    lanes = value.type.count
    if tag == types.int16:
        return builder.fptrunc(value, ir.VectorType(_HALF, lanes))
    if tag == types.uint16:
        wide = ir.VectorType(_I32, lanes)
        bits = builder.bitcast(value, wide)
        high = builder.lshr(bits, _splat(wide, 16))
        half = builder.add(builder.and_(high, _splat(wide, 1)), _splat(wide, 0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), _splat(wide, 16))
        nan = builder.or_(high, _splat(wide, 0x40))
        return builder.trunc(
            builder.select(builder.fcmp_unordered("uno", value, value), nan, rounded), ir.VectorType(_I16, lanes)
        )
    return value


def _adder(nbytes: int) -> Any:
    """The sum of `nbytes` bytes of elements, or of one element where that is 0; written by hand, as it is in place."""

    @intrinsic
    def add(_typing: Any, to: types.Type, first: types.Type, second: types.Type, tag: types.Type) -> Emitted:
        scalar, size = _MEMORY[tag]

        def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            vector = ir.VectorType(scalar, max(1, nbytes // size))
            pointers = [builder.inttoptr(address, ir.PointerType(vector)) for address in args[:3]]
            terms = [_widen(builder, builder.load(p, align=1, typ=vector), tag) for p in pointers[1:]]
            builder.store(_narrow(builder, builder.fadd(*terms), tag), pointers[0], align=1)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, tag), emit

    return add


_add_line, _add_element = _adder(LINE), _adder(0)


@intrinsic
def _size_of(_typing: Any, tag: types.Type) -> Emitted:
    return types.int64(tag), lambda _target, _builder, _signature, _args: _I64(_MEMORY[tag][1])


@compiled
def _add_as(to, first, second, count, tag):
    done = np.int64(0)
    while done + LINE <= count:
        _add_line(to + done, first + done, second + done, tag)
        done += LINE
    while done < count:
        _add_element(to + done, first + done, second + done, tag)
        done += _size_of(tag)


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
def _part(number, total, part, ranks, index):
    """Where the part of rank `index` of a piece begins in the tensor, and its bytes; the last piece is cut evenly too."""
    start = number * part * ranks
    length = min(part * ranks, total - start)
    share = -(-length // (ranks * LINE)) * LINE
    low = min(index * share, length)
    return start + low, min(low + share, length) - low


@compiled
def part_bytes(slot_bytes, ranks):
    """The largest part of a piece that each of `ranks` ranks can have."""
    return slot_bytes // ranks // LINE * LINE


@compiled
def _sum_parts(bases, rank, slot, offset, own, length, to, dtype):
    """Everybody's part in the order of ranks into `to`; the own one is at `own`, others' at `offset` of their slots."""
    for start in range(0, length, _BLOCK):
        count = min(_BLOCK, length - start)
        total = to + start
        first = (own if rank == 0 else bases[0] + slot + offset) + start
        for other in range(1, len(bases)):
            term = (own if rank == other else bases[other] + slot + offset) + start
            add(total, first, term, count, dtype)
            first = total


@compiled
def _send(bases, rank, slot, kind, number, source, target, total, slot_bytes, part):
    ranks = len(bases)
    to = bases[rank] + slot
    if kind == ALL_TO_ALL:
        start = number * part
        count = min(part, total - start)
        for other in range(ranks):
            shard = source + other * total + start
            _copy(target + other * total + start if other == rank else to + other * part, shard, count)
    elif kind == ALL_REDUCE:
        for other in range(ranks):
            if other != rank:
                start, count = _part(number, total, part, ranks, other)
                _copy(to + other * part, source + start, count)
    else:  # everything, to everybody
        shard = source + rank * total if kind == ALL_GATHER else source
        start = number * slot_bytes
        _copy(to, shard + start, min(slot_bytes, total - start))


@compiled
def _sum(bases, rank, slot, number, source, total, part, dtype):
    ranks = len(bases)
    start, count = _part(number, total, part, ranks, rank)
    to = bases[rank] + slot + rank * part
    _sum_parts(bases, rank, slot, rank * part, source + start, count, to, dtype)
    _copy(source + start, to, count)


@compiled
def _take(bases, rank, slot, kind, number, source, target, total, slot_bytes, part, dtype):
    ranks = len(bases)
    if kind == ONE_SHOT:
        start = number * slot_bytes
        count = min(slot_bytes, total - start)
        own = bases[rank] + slot
        _sum_parts(bases, rank, slot, 0, own, count, source + start, dtype)
        return
    for other in range(ranks):
        if other == rank:
            continue
        slot_of = bases[other] + slot
        if kind == ALL_TO_ALL:
            start = number * part
            _copy(target + other * total + start, slot_of + rank * part, min(part, total - start))
        elif kind == ALL_GATHER:
            start = number * slot_bytes
            _copy(source + other * total + start, slot_of, min(slot_bytes, total - start))
        else:
            start, count = _part(number, total, part, ranks, other)
            _copy(source + start, slot_of + other * part, count)


@compiled
def _have(bases, word, count):
    """Whether every rank's word has come to `count`."""
    for base in bases:
        if load_acquire(base + word) < count:
            return False
    return True


@compiled
def _tell(futex, bases, rank, word, count):
    """Count a word up, and wake who sleeps."""
    store_release(bases[rank] + word, count)
    for other in range(len(bases)):
        if other != rank:
            wake(futex, bases[other] + ASLEEP)


@compiled
def _another_call(bases, tag, kind, total, dtype):
    """The first rank whose piece belongs to another call, or -1."""
    for other in range(len(bases)):
        at = bases[other] + tag
        if load_acquire(at) != kind or load_acquire(at + 8) != total or load_acquire(at + 16) != dtype:
            return other
    return -1


@compiled
def advance(bases, rank, slots, slot_bytes, futex, spins, limit, kind, first, pieces, source, target, total, dtype, at):
    """Bring a collective forward until it is done, or as far as it goes.

    Args:
        bases: address of each rank's segment.
        rank: this one.
        slots: of each ring.
        slot_bytes: of each slot.
        futex: the number of futex(2).
        spins: how often to look before it sleeps.
        limit: address of a timespec, for which it sleeps at most; 0 means that it does not wait.
        kind: of the collective.
        first: the number of its first piece.
        pieces: their number.
        source: address of the tensor, or of the wire.
        target: address of what an all-to-all receives.
        total: bytes of the tensor, or of a shard of the wire.
        dtype: its number, for `add`.
        at: how many pieces have been sent, summed and taken, and the rank that came with another call.
    """
    part = part_bytes(slot_bytes, len(bases))
    summed = kind == ALL_REDUCE
    idle, asleep, slept = 0, False, 0
    word = bases[rank] + ASLEEP
    while True:
        moved = False
        number = at[2]
        slot = (first + number) % slots
        if number == pieces:
            return DONE
        if number < at[1 if summed else 0] and _have(bases, SUMMED if summed else SENT, first + number + 1):
            if not summed:
                at[3] = _another_call(bases, TAGS + slot * TAG_BYTES, kind, total, dtype)
                if at[3] >= 0:
                    return OTHER_CALL
            place = DATA + slot * slot_bytes
            _take(bases, rank, place, kind, number, source, target, total, slot_bytes, part, dtype)
            at[2] = number + 1
            _tell(futex, bases, rank, TAKEN, first + number + 1)
            moved = True
        number = at[1]
        slot = (first + number) % slots
        if summed and number < at[0] and _have(bases, SENT, first + number + 1):
            at[3] = _another_call(bases, TAGS + slot * TAG_BYTES, kind, total, dtype)
            if at[3] >= 0:
                return OTHER_CALL
            _sum(bases, rank, DATA + slot * slot_bytes, number, source, total, part, dtype)
            at[1] = number + 1
            _tell(futex, bases, rank, SUMMED, first + number + 1)
            moved = True
        number = at[0]
        slot = (first + number) % slots
        if not moved and number < pieces and _have(bases, TAKEN, first + number + 1 - slots):
            tag = bases[rank] + TAGS + slot * TAG_BYTES
            store_release(tag, kind)
            store_release(tag + 8, total)
            store_release(tag + 16, dtype)
            place = DATA + slot * slot_bytes
            _send(bases, rank, place, kind, number, source, target, total, slot_bytes, part)
            at[0] = number + 1
            _tell(futex, bases, rank, SENT, first + number + 1)
            moved = True
        if moved:
            idle, slept = 0, 0
            if asleep:
                asleep = False
                stay_awake(word)
            continue
        for base in bases:
            if load_acquire(base + FAILED) != 0:
                return FAILED_RANK
        if limit == 0 or slept > 3:
            return BLOCKED
        if idle < spins:
            idle += 1
            pause()
        elif not asleep:
            asleep = True
            fall_asleep(word)
        else:
            if not sleep(futex, word, limit):
                slept += 1
                store_release(bases[rank] + BEAT, load_acquire(bases[rank] + BEAT) + 1)
            asleep, idle = False, 0
