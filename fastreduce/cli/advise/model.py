"""The model of a step: buckets that are ready one after the other go through three servers, first come, first served.

1. The communication thread compresses a bucket. In a two-shot it also waits for the exchange and sums its shard. (Over
   gloo another thread does: what overlaps more there makes the share smaller. With a server for each thread predictions
   were no nearer to measured steps.)
2. The link carries transfers one after the other. One that takes `t` alone holds it for `share × t`: several at once
   fill it better than one does (share < 1), or come into each other's way (share > 1).
3. Averages are decompressed.

So a step never gets shorter where anything in it gets slower. What runs beside backward slows it down by `drag` seconds
a second. Pure functions; all times are in seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

KINDS = ("wire", "decompress", "sum", "compress")  # the first of those that go on at a time is what it counts as


@dataclass(frozen=True)
class Stages:
    """What one bucket takes alone; exchange and sum are 0 where there is but one collective."""

    compress: float
    exchange: float
    sum: float
    reduce: float
    decompress: float


class Rank(NamedTuple):
    """One rank in a step: when its backward begins, and when it has ended."""

    backward: float
    computed: float

    def moved(self, time: float, factor: float) -> float:
        """When what has come by `time` comes with a backward that takes `factor` times as long."""
        time = min(time, self.computed)
        return time if time < self.backward else self.backward + factor * (time - self.backward)


@dataclass(frozen=True)
class Step:
    """A step of all ranks as far as they compute, from its beginning.

    Attributes:
        ready: by bucket, when it is full on the last rank.
        ranks: all of them.
    """

    ready: tuple[float, ...]
    ranks: tuple[Rank, ...]

    @cached_property
    def last(self) -> Rank:
        """The one whose backward ends last."""
        return max(self.ranks, key=lambda rank: rank.computed)

    @property
    def backward(self) -> float:
        """When backward begins on the last rank."""
        return self.last.backward

    @property
    def computed(self) -> float:
        """When backward has ended on the last rank."""
        return self.last.computed

    @cached_property
    def compute(self) -> float:
        """When backward has ended, in the mean of the ranks."""
        return min(self.computed, fmean(rank.computed for rank in self.ranks))  # no more for rounding

    def stretched(self, factor: float) -> Step:
        """With a backward that takes `factor` times as long on each rank; another one may be the last then."""
        ready = tuple(max(rank.moved(time, factor) for rank in self.ranks) for time in self.ready)
        return Step(ready, tuple(rank._replace(computed=rank.moved(rank.computed, factor)) for rank in self.ranks))


@dataclass(frozen=True)
class Parts:
    """A step. All but `hidden` add up to it.

    Attributes:
        compute: forward, backward, optimizer and data, in the mean of the ranks.
        waiting: until the slowest rank has computed.
        compress: behind backward, while neither the wire nor another kernel is at work; so the next ones.
        wire: behind backward, while a transfer is under way.
        sum: of shards.
        decompress: of averages.
        other: what of the measured step the model does not explain; where that is less than nothing, communication is
            taken to be so much faster under each setting, else it is the same under each.
        hidden: all of communication that goes on before the slowest rank has computed.
    """

    compute: float
    waiting: float
    compress: float
    wire: float
    sum: float
    decompress: float
    hidden: float
    other: float = 0.0

    @property
    def exposed(self) -> float:
        """Communication that the step waits for."""
        return self.compress + self.wire + self.sum + self.decompress

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.waiting + self.exposed + self.other


Span = tuple[str, float, float]


def spans(ready: Sequence[float], buckets: Sequence[Stages], share: float) -> list[Span]:
    """What is done with the buckets: kind, from when, to when. A transfer that waits for the link is on the wire."""
    found: list[Span] = []
    thread = link = out = 0.0
    for time, bucket in zip(ready, buckets, strict=True):
        start = max(time, thread)
        compressed = summed = start + bucket.compress
        found.append(("compress", start, compressed))
        if bucket.exchange or bucket.sum:
            entered = max(compressed, link)
            exchanged, link = entered + bucket.exchange, entered + share * bucket.exchange
            summed = exchanged + bucket.sum
            found += [("wire", compressed, exchanged), ("sum", exchanged, summed)]
        thread = summed
        entered = max(summed, link)
        reduced, link = entered + bucket.reduce, entered + share * bucket.reduce
        begun = max(reduced, out)
        out = begun + bucket.decompress
        found += [("wire", summed, reduced), ("decompress", begun, out)]
    return found


def end_of(found: Sequence[Span]) -> float:
    """When all is done."""
    return max((end for _, _, end in found), default=0.0)


def times(step: Step, buckets: Sequence[Stages], share: float, drag: float = 0.0) -> tuple[float, float]:
    """When all ranks have computed, and when the step ends."""
    step = dragged(step, buckets, share, drag)
    return step.computed, max(step.computed, end_of(spans(step.ready, buckets, share)))


def parts(step: Step, buckets: Sequence[Stages], share: float, drag: float = 0.0) -> Parts:
    """What a step consists of."""
    step = dragged(step, buckets, share, drag)
    found = spans(step.ready, buckets, share)
    counted = dict.fromkeys(KINDS, 0.0)
    cuts = sorted({step.computed, *(time for _, start, end in found for time in (start, end) if time > step.computed)})
    for start, end in itertools.pairwise(cuts):
        at_work = {kind for kind, begun, ended in found if begun < end and ended > start}
        counted[next((kind for kind in KINDS if kind in at_work), "wire")] += end - start
    return Parts(
        compute=step.compute,
        waiting=step.computed - step.compute,
        compress=counted["compress"],
        wire=counted["wire"],
        sum=counted["sum"],
        decompress=counted["decompress"],
        hidden=hidden(step, found),
    )


def hidden(step: Step, found: Sequence[Span]) -> float:
    """How long something of it goes on before all ranks have computed."""
    total = reached = 0.0
    for _, start, end in sorted(found, key=lambda span: span[1]):
        start, end = max(start, reached), min(end, step.computed)
        if end > start:
            total, reached = total + end - start, end
    return total


def dragged(step: Step, buckets: Sequence[Stages], share: float, drag: float) -> Step:
    """The step with a backward that what goes on beside it slows down."""
    length = step.computed - step.backward
    if not drag or length <= 0:
        return step
    beside = hidden(step, spans(step.ready, buckets, share))
    return step.stretched(1 + drag * beside / length)


def fit_share(buckets: Sequence[Stages], burst: float) -> float:
    """The share with which buckets that are all ready at once take `burst` seconds, from 0.2 to 10."""
    at_once = [0.0] * len(buckets)
    low, high = 0.2, 10.0
    if len(buckets) < 2:
        return 1.0
    for _ in range(24):
        share = (low + high) / 2
        if end_of(spans(at_once, buckets, share)) > burst:
            high = share
        else:
            low = share
    return (low + high) / 2


class Wire(NamedTuple):
    """One bucket's wire between hosts.

    Args:
        nbytes: its bytes.
        collectives: 1, or 2 in a two-shot.
        one_level: whether all ranks reduce as equals, and so each compresses and sums for itself.
        times: how often it leaves a host: once, or in an all-to-all of equals once for each of its ranks.
    """

    nbytes: float
    collectives: int
    one_level: bool = False
    times: int = 1


def projected(
    buckets: Sequence[Stages],
    within: Sequence[float],
    wires: Sequence[Wire],
    ranks: int,
    nodes: int,
    gbits: float,
    latency: tuple[float, float],
) -> list[Stages]:
    """Stages on `nodes` hosts of `ranks` ranks each, whose adapters move `gbits` Gbit/s each way.

    Several ranks of a host sum their gradients first, as under `none` here, then each compresses and sums a column;
    but for settings under which all reduce as equals.

    Args:
        buckets: as measured.
        within: of each bucket, the seconds that its sum takes among the ranks of one host.
        wires: of each bucket.
        ranks: ranks of a host.
        nodes: hosts.
        gbits: of one host's adapter.
        latency: of a small all-reduce, and of a small all-to-all or all-gather, among the hosts.
    """
    found = []
    for bucket, local, wire in zip(buckets, within, wires, strict=True):
        each_way = wire.times * wire.nbytes * (nodes - 1) / nodes * 8 / (gbits * 1e9)
        columns = 1 if wire.one_level else ranks
        hops = (nodes * ranks - 1) / (nodes - 1) if wire.one_level else 1.0
        reduce, swap = (hops * seconds for seconds in latency)
        found.append(
            Stages(
                compress=bucket.compress / columns + (0.0 if wire.one_level else local),
                exchange=each_way + swap if wire.collectives == 2 else 0.0,
                sum=bucket.sum / columns,
                reduce=each_way + swap if wire.collectives == 2 else 2 * each_way + reduce,
                decompress=bucket.decompress,
            )
        )
    return found
