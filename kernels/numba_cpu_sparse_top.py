"""Top-k's own kernels on CPUs: the largest elements without a sort, and the average of what ranks have taken."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .numba_cpu_elements import STREAM_BYTES, TAGS, convert, fence, inlined, kernel, size_of, store
from .slots import INFINITE_FROM, PlacesError, spare

MAGNITUDE = 0x7FFFFFFF  # of an FP32's bits; as whole numbers these have the order of the magnitudes, NaN above all
INFINITE = 0x7F800000
UPPER, LOWER = 11, 10  # bits of a magnitude that are counted at a time: 11, 10 and 10
NEAR = 4  # times as many elements as are taken: so many near the least of them are set apart
ZEROS = 16  # a power of two
CHUNK = 4096  # elements of a tile: it stays in L1
INF, ZERO, ONE = np.float32(np.inf), np.float32(0), np.float32(1)


@kernel
def _take_largest(bits, taken, places):
    """`bits` and `taken` are FP32 as INT32.

    1. Count elements by their upper bits: in one of these bins the least that is taken lies. Zeros, of which there may
       be long runs, are counted by turns in bins of their own, since counting in one takes four times as long.
    2. Set the places of elements in this bin and above apart, if they are few.
    3. Among them, count by the bits that follow, twice: then the least magnitude that is taken is known, and how many
       of those that are equal to it. It is 0 where fewer than are taken are not.
    4. Take what is larger, and of the equal ones the first.
    """
    numel, count = len(bits), len(taken)
    bins = 1 << UPPER
    counts = np.zeros(bins + ZEROS, np.int64)
    for index in range(numel):
        magnitude = bits[index] & MAGNITUDE
        counts[magnitude >> 2 * LOWER if magnitude else bins + index % ZEROS] += 1
    least, wanted = np.int64(bins - 1), np.int64(count)
    while least >= 0 and counts[least] < wanted:
        wanted -= counts[least]
        least -= 1
    few = least < 0  # are not 0
    least = max(least, 0)
    near = numel if few else count - wanted + counts[least]
    apart = not few and near <= NEAR * count + CHUNK
    found = np.empty(near if apart else 0, np.int32)
    if apart:
        filled, lowest = 0, max(least << 2 * LOWER, 1)
        for index in range(numel):
            if bits[index] & MAGNITUDE >= lowest:
                found[filled] = index
                filled += 1
    looked_at = near if apart else numel
    if not few:
        for shift in (LOWER, 0):
            counts = np.zeros(1 << LOWER, np.int64)
            for each in range(looked_at):
                magnitude = bits[found[each] if apart else each] & MAGNITUDE
                if magnitude > 0 and magnitude >> shift + LOWER == least:
                    counts[(magnitude >> shift) & ((1 << LOWER) - 1)] += 1
            digit = np.int64(len(counts) - 1)
            while counts[digit] < wanted:
                wanted -= counts[digit]
                digit -= 1
            least = least << LOWER | digit
    made = 0
    for each in range(looked_at):
        index = np.int64(found[each]) if apart else each
        magnitude = bits[index] & MAGNITUDE
        if magnitude > least or (magnitude == least and wanted > 0):
            if magnitude == least:
                wanted -= 1
            taken[made], places[made] = bits[index], index
            bits[index] = 0
            made += 1
            if made == count:
                break
    if least >= INFINITE:
        for index in range(numel):
            if bits[index] & MAGNITUDE >= INFINITE:
                bits[index] = 0


def take_largest(values: Tensor, taken: Tensor, places: Tensor) -> None:
    """The elements of `values`, FP32 `[numel]`, of the largest magnitude → `taken` `[count]`, which become 0 there.

    `places` `[count]`, INT32, ascending, says where they were. NaN is larger than infinity, and of equal magnitudes
    those in front are taken. What is not finite and is left becomes 0, too.
    """
    _take_largest(values.view(torch.int32).numpy(), taken.view(torch.int32).numpy(), places.numpy())


@inlined
def _add(total, values, places, value, place, head, count, start, stop, room):
    """Elements of one rank, from entry `head` on, that lie before `stop` → into a tile; the next entry, or -1."""
    last = np.int64(-1)
    while head < count and places[place + head] < stop:
        index = np.int64(places[place + head]) - start
        if index <= last:
            return np.int64(-1)
        last = index
        total[index] += values[value + head] / room
        head += 1
    return head


@kernel
def _average_taken(
    values, places, ranks, first, place, count, numel, scale, room, limit, into, tag, total, address, small, stream
):  # fmt: skip
    """Tile by tile; returns whether all are finite, and the rank whose places are wrong, or -1."""
    width = len(values) // ranks
    heads, ends = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    finite = True
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        size = stop - start
        total[:size] = ZERO
        for rank in range(ranks):
            row = rank * width
            ends[rank] = _add(total, values, places, row + first, row + place, heads[rank], count, start, stop, ONE)
            if ends[rank] < 0:
                return finite, rank
        over = 0
        for index in range(size):
            over += 0 if abs(total[index] * scale) < limit and abs(total[index]) < INF else 1
        if over == 0:
            convert(into + start * size_of(tag), tag, address, scale, size, scale, stream)
        else:
            small[:size] = ZERO
            for rank in range(ranks):
                row = rank * width
                _add(small, values, places, row + first, row + place, heads[rank], count, start, stop, room)
            for index in range(size):
                average = total[index] * scale if abs(total[index]) < INF else small[index] * (scale * room)
                finite = finite and abs(average) < limit
                store(into, start + index, tag, average)
        heads[:] = ends
    fence()
    for rank in range(ranks):
        if heads[rank] != count:
            return finite, rank
    return finite, -1


def average_taken(
    messages: Tensor, first: int, places: int, count: int, scale: float, into: Tensor, finite: Tensor | None = None
) -> None:
    """What ranks have taken of one gradient → their sum in rank order, scaled once, in all of `into`, 1-D.

    `messages` is FP32 `[ranks, numbers]`: of each, `count` numbers from `first` on are values, and from `places` on the
    bits of as many INT32. `finite` becomes 0 if an average is not, in the dtype of `into`.

    Raises:
        PlacesError: if places do not ascend within `into`.
    """
    ranks, flat = len(messages), messages.view(-1)
    total, small = torch.empty(2, CHUNK, dtype=torch.float32, device="cpu").unbind()
    limit = INFINITE_FROM.get(into.dtype, np.inf)
    found, wrong = _average_taken(
        flat.numpy(),
        flat.view(torch.int32).numpy(),
        ranks,
        first,
        places,
        count,
        into.numel(),
        np.float32(scale),
        np.float32(spare(ranks)),
        np.float32(limit),
        into.data_ptr(),
        TAGS[into.dtype],
        total.numpy(),
        total.data_ptr(),
        small.numpy(),
        into.nbytes >= STREAM_BYTES,
    )
    if wrong >= 0:
        raise PlacesError(wrong, into.numel())
    if finite is not None and not found:
        finite.fill_(0)
