"""Collectives over rings in shared memory, piece by piece, as one compiled function that can be called again.

Each rank owns a segment: a header of words that it alone writes, and a ring of cells. A collective is cut into pieces
that fit a cell, numbered on from the collective before, and every rank goes through three stages with each piece:

    send   copy what others are to read into the own cell         needs: every rank has taken what the cell held before
    sum    (if it reduces) the own part of everybody's piece      needs: every rank has sent the piece
    take   copy what others hold for this rank                    needs: every rank has sent it, or summed it

In a two-shot functions of others (`kernels.slots.Pieces`) encode what is sent, average, and decode what is taken. A
reduce-scatter is its first half: what is taken is summed, and nobody else reads the sum.

Behind each stage a rank counts up the word of that name. The oldest piece goes first, so that a piece is taken while
it is still in the cache, and later ones are sent only where a rank would wait else.
"""

from __future__ import annotations

from ...kernels.numba_cpu_elements import LINE, copy, slot_at
from .elements import add, average, decode, encode, multiply
from .flags import compiled, fall_asleep, load_acquire, pause, sleep, stay_awake, store_release, wake
from .segments import ASLEEP, BEAT, DATA, FAILED, SENT, SUMMED, TAG_BYTES, TAGS, TAKEN

# Kinds of collectives.
ALL_REDUCE, ONE_SHOT, ALL_TO_ALL, ALL_GATHER, TWO_SHOT, REDUCE_SCATTER = 1, 2, 3, 4, 5, 6
# What `advance` returns.
DONE, BLOCKED, FAILED_RANK, OTHER_CALL = 0, 1, 2, 3

BLOCK = 4096  # bytes that are summed while they lie in L1


@compiled
def _part(number, total, part, ranks, index):
    """Where the part of rank `index` of a piece begins in the tensor, and its bytes; the last piece is cut evenly."""
    start = number * part * ranks
    length = min(part * ranks, total - start)
    share = -(-length // (ranks * LINE)) * LINE
    low = min(index * share, length)
    return start + low, min(low + share, length) - low


@compiled
def _blocks(number, total, part, block_bytes):
    """The first block of a piece in each rank's shard, and how many there are."""
    most = part // block_bytes
    return number * most, min(most, total - number * most)


@compiled
def part_bytes(cell_bytes, ranks):
    """The largest part of a piece that each of `ranks` ranks can have."""
    return cell_bytes // ranks // LINE * LINE


@compiled
def _flatten(to, tensors, offsets, lengths, start, count, scale, dtype):
    """Some bytes of the flat that tensors make, scaled; what lies between slots is left as it is."""
    end, slot = start + count, slot_at(offsets, start)
    while slot < len(offsets) and offsets[slot] < end:
        low, high = max(start, offsets[slot]), min(end, offsets[slot] + lengths[slot])
        if low < high and scale == 1:
            copy(to + low - start, tensors[slot] + low - offsets[slot], high - low)
        elif low < high:
            multiply(to + low - start, tensors[slot] + low - offsets[slot], high - low, scale, dtype)
        slot += 1


@compiled
def _unflatten(source, tensors, offsets, lengths, start, count):
    """Some bytes of a flat, to where they belong."""
    end, slot = start + count, slot_at(offsets, start)
    while slot < len(offsets) and offsets[slot] < end:
        low, high = max(start, offsets[slot]), min(end, offsets[slot] + lengths[slot])
        if low < high:
            copy(tensors[slot] + low - offsets[slot], source + low - start, high - low)
        slot += 1


@compiled
def _add_up(bases, rank, at, own, count, to, dtype):
    """Everybody's bytes in the order of ranks; the own ones are at `own`, others' at `at` of their segments."""
    first = own if rank == 0 else bases[0] + at
    for other in range(1, len(bases)):
        add(to, first, own if rank == other else bases[other] + at, count, dtype)
        first = to


@compiled
def _send(bases, rank, cell, kind, number, tensors, total, cell_bytes, part, dtype):
    sources, targets, offsets, lengths, scale, _ = tensors
    ranks = len(bases)
    to = bases[rank] + cell
    if kind == ALL_TO_ALL:
        start = number * part
        count = min(part, total - start)
        for other in range(ranks):
            shard = sources[0] + other * total + start
            copy(targets[0] + other * total + start if other == rank else to + other * part, shard, count)
    elif kind == ALL_REDUCE:
        for other in range(ranks):
            if other != rank:
                start, count = _part(number, total, part, ranks, other)
                _flatten(to + other * part, sources, offsets, lengths, start, count, scale, dtype)
    elif kind in (TWO_SHOT, REDUCE_SCATTER):
        start, count = _blocks(number, total, part, dtype)
        for other in range(ranks):
            if other != rank:
                encode(sources, other, start, count, to + other * part)
    else:  # everything, to everybody
        start = number * cell_bytes
        count = min(cell_bytes, total - start)
        if kind == ALL_GATHER:
            copy(to, sources[0] + rank * total + start, count)
        else:
            _flatten(to, sources, offsets, lengths, start, count, scale, dtype)


@compiled
def _sum(bases, rank, cell, kind, number, tensors, total, part, dtype):
    sources, targets, offsets, lengths, scale, scratch = tensors
    at = cell + rank * part
    if kind in (TWO_SHOT, REDUCE_SCATTER):
        first, count = _blocks(number, total, part, dtype)
        encode(sources, rank, first, count, scratch)
        average(sources, first, count, targets, bases, rank, at, scratch, bases[rank] + at)
        decode(sources, rank, first, count, bases[rank] + at)
        return
    first, length = _part(number, total, part, len(bases), rank)
    for start in range(0, length, BLOCK):
        count = min(BLOCK, length - start)
        _flatten(scratch, sources, offsets, lengths, first + start, count, scale, dtype)
        _add_up(bases, rank, at + start, scratch, count, bases[rank] + at + start, dtype)
        _unflatten(bases[rank] + at + start, targets, offsets, lengths, first + start, count)


@compiled
def _take(bases, rank, cell, kind, number, tensors, total, cell_bytes, part, dtype):
    sources, targets, offsets, lengths, _, scratch = tensors
    ranks = len(bases)
    if kind == REDUCE_SCATTER:
        _sum(bases, rank, cell, kind, number, tensors, total, part, dtype)
        return
    if kind == ONE_SHOT:
        first = number * cell_bytes
        length = min(cell_bytes, total - first)
        for start in range(0, length, BLOCK):
            count = min(BLOCK, length - start)
            _add_up(bases, rank, cell + start, bases[rank] + cell + start, count, scratch, dtype)
            _unflatten(scratch, targets, offsets, lengths, first + start, count)
        return
    for other in range(ranks):
        if other == rank:
            continue
        source = bases[other] + cell
        if kind == ALL_TO_ALL:
            start = number * part
            copy(targets[0] + other * total + start, source + rank * part, min(part, total - start))
        elif kind == ALL_GATHER:
            start = number * cell_bytes
            copy(targets[0] + other * total + start, source, min(cell_bytes, total - start))
        elif kind == TWO_SHOT:
            start, count = _blocks(number, total, part, dtype)
            decode(sources, other, start, count, source + other * part)
        else:
            start, count = _part(number, total, part, ranks, other)
            _unflatten(source + other * part, targets, offsets, lengths, start, count)


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
def advance(bases, rank, cells, cell_bytes, futex, spins, limit, kind, first, pieces, tensors, total, dtype, at):
    """Bring a collective forward until it is done, or as far as it goes.

    Args:
        bases: address of each rank's segment.
        rank: this one.
        cells: of each ring.
        cell_bytes: of each cell.
        futex: the number of futex(2).
        spins: how often to look before it sleeps.
        limit: address of a timespec, for which it sleeps at most; 0 means that it does not wait.
        kind: of the collective.
        first: the number of its first piece.
        pieces: their number.
        tensors: addresses of what is read and of what is written, where each begins in the flat that is summed and how
            long it is there, in bytes, by what they are multiplied first, and the address of scratch for a part; of
            what goes by a `Pieces` in the place of addresses its first words, and room for a word of each rank.
        total: bytes of the flat, or of a shard of the wire; of what goes by a `Pieces`, blocks of a shard.
        dtype: its number, for `add`; of what goes by a `Pieces`, bytes of a block.
        at: how many pieces have been sent, summed and taken, and the rank that came with another call.
    """
    part = part_bytes(cell_bytes, len(bases))
    summed = kind in (ALL_REDUCE, TWO_SHOT)
    idle, asleep, slept = 0, False, 0
    word = bases[rank] + ASLEEP
    while True:
        moved = False
        number = at[2]
        cell = (first + number) % cells
        if number == pieces:
            return DONE
        if number < at[1 if summed else 0] and _have(bases, SUMMED if summed else SENT, first + number + 1):
            if not summed:
                at[3] = _another_call(bases, TAGS + cell * TAG_BYTES, kind, total, dtype)
                if at[3] >= 0:
                    return OTHER_CALL
            place = DATA + cell * cell_bytes
            _take(bases, rank, place, kind, number, tensors, total, cell_bytes, part, dtype)
            at[2] = number + 1
            _tell(futex, bases, rank, TAKEN, first + number + 1)
            moved = True
        number = at[1]
        cell = (first + number) % cells
        if summed and number < at[0] and _have(bases, SENT, first + number + 1):
            at[3] = _another_call(bases, TAGS + cell * TAG_BYTES, kind, total, dtype)
            if at[3] >= 0:
                return OTHER_CALL
            _sum(bases, rank, DATA + cell * cell_bytes, kind, number, tensors, total, part, dtype)
            at[1] = number + 1
            _tell(futex, bases, rank, SUMMED, first + number + 1)
            moved = True
        number = at[0]
        cell = (first + number) % cells
        if not moved and number < pieces and _have(bases, TAKEN, first + number + 1 - cells):
            tag = bases[rank] + TAGS + cell * TAG_BYTES
            store_release(tag, kind)
            store_release(tag + 8, total)
            store_release(tag + 16, dtype)
            place = DATA + cell * cell_bytes
            _send(bases, rank, place, kind, number, tensors, total, cell_bytes, part, dtype)
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
