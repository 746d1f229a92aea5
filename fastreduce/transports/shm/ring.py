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

from .elements import LINE, add, copy
from .flags import compiled, fall_asleep, load_acquire, pause, sleep, stay_awake, store_release, wake
from .segments import ASLEEP, BEAT, DATA, FAILED, SENT, SUMMED, TAG_BYTES, TAGS, TAKEN

# Kinds of collectives.
ALL_REDUCE, ONE_SHOT, ALL_TO_ALL, ALL_GATHER = 1, 2, 3, 4
# What `advance` returns.
DONE, BLOCKED, FAILED_RANK, OTHER_CALL = 0, 1, 2, 3

_BLOCK = 4096  # bytes that are summed while they lie in L1


@compiled
def _part(number, total, part, ranks, index):
    """Where the part of rank `index` of a piece begins in the tensor, and its bytes; the last piece is cut evenly."""
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
            copy(target + other * total + start if other == rank else to + other * part, shard, count)
    elif kind == ALL_REDUCE:
        for other in range(ranks):
            if other != rank:
                start, count = _part(number, total, part, ranks, other)
                copy(to + other * part, source + start, count)
    else:  # everything, to everybody
        shard = source + rank * total if kind == ALL_GATHER else source
        start = number * slot_bytes
        copy(to, shard + start, min(slot_bytes, total - start))


@compiled
def _sum(bases, rank, slot, number, source, total, part, dtype):
    ranks = len(bases)
    start, count = _part(number, total, part, ranks, rank)
    to = bases[rank] + slot + rank * part
    _sum_parts(bases, rank, slot, rank * part, source + start, count, to, dtype)
    copy(source + start, to, count)


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
            copy(target + other * total + start, slot_of + rank * part, min(part, total - start))
        elif kind == ALL_GATHER:
            start = number * slot_bytes
            copy(source + other * total + start, slot_of, min(slot_bytes, total - start))
        else:
            start, count = _part(number, total, part, ranks, other)
            copy(source + start, slot_of + other * part, count)


@compiled
def _have(bases, word, count):
    """Whether every rank's word has come to `count`."""
    for base in bases:  # noqa: SIM110 (Numba knows no all())
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
