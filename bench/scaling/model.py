"""How long averaging takes on many hosts, by what a link, kernels and a message take: pure functions.

A step's buckets are all ready at once. The ranks of a host share its link, which sends first what comes first. A rank's
threads do what ours do, in the same order (`reduction/streams.py`), and other ranks do the same at the same time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

# What an element takes on the wire: payload, and its share of a block's scale or exponent.
WIRE_BYTES = {"none": 4.0, "fp16": 2 + 1 / 128, "int8": 1 + 4 / 128, "int4": 0.5 + 2 / 32}
SETTINGS = tuple(WIRE_BYTES)
FP32_BYTES = 4


@dataclass(frozen=True)
class Kernels:
    """Seconds an element: of gradients, of what is received, of averages."""

    compress: float
    reduce: float
    decompress: float


@dataclass(frozen=True)
class Inputs:
    """What is measured, with as many ranks at once as share the cores of a host.

    Args:
        kernels: by setting; of `none` the sum that ranks of a host make of their flats.
        shared: seconds a byte from one rank to another through shared memory.
        socket: seconds a byte that a rank sends and another receives, without a slow link.
        latency: seconds of a collective of a few bytes with one other rank.
        message: seconds more for each further rank.
    """

    kernels: Mapping[str, Kernels]
    shared: float
    socket: float
    latency: float
    message: float


@dataclass(frozen=True)
class Cluster:
    """Where ranks run.

    Args:
        hosts: their number.
        ranks: of each host.
        link: bytes a second that a host can send, and as many that it can receive.
    """

    hosts: int
    ranks: int
    link: float

    @property
    def all_ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks


@dataclass(frozen=True)
class Do:
    """A thread computes."""

    seconds: float


@dataclass(frozen=True)
class Send:
    """A thread gives something to the link, and goes on."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Wait:
    """A thread waits until something has been sent."""

    name: str


Step = Do | Send | Wait


def makespan(threads: Sequence[Sequence[Step]]) -> float:
    """Seconds until all threads have ended that begin together, and share one core and one link.

    Raises:
        ValueError: if a thread waits for what nobody sends.
    """
    order = count()
    ready = [(0.0, next(order), iter(steps)) for steps in threads]
    waiting: dict[str, list[Iterator[Step]]] = {}
    sent: dict[str, float] = {}
    core = link = end = 0.0
    heapq.heapify(ready)
    while ready:
        now, _, steps = heapq.heappop(ready)  # the earliest one: what comes first is served first
        end = max(end, now)
        step = next(steps, None)
        if isinstance(step, Do):
            core = max(core, now) + step.seconds
            heapq.heappush(ready, (core, next(order), steps))
        elif isinstance(step, Send):
            link = sent[step.name] = max(link, now) + step.seconds
            heapq.heappush(ready, (now, next(order), steps))
            for other in waiting.pop(step.name, []):
                heapq.heappush(ready, (link, next(order), other))
        elif isinstance(step, Wait) and step.name in sent:
            heapq.heappush(ready, (max(now, sent[step.name]), next(order), steps))
        elif isinstance(step, Wait):
            waiting.setdefault(step.name, []).append(steps)
    if waiting:
        raise ValueError(f"nobody sends {', '.join(waiting)}")
    return end


def transfer(inputs: Inputs, cluster: Cluster, of_rank: float, of_host: float, others: int) -> float:
    """Seconds of a collective in which each rank sends `of_rank` bytes to `others` ranks, and each host `of_host`."""
    if not others:
        return 0.0
    return max(of_host / cluster.link, of_rank * inputs.socket) + inputs.latency + (others - 1) * inputs.message


def ring(inputs: Inputs, cluster: Cluster, nbytes: float, ranks: int, rings: int = 1) -> float:
    """Seconds of gloo's all-reduce: 2 (N-1) rounds, in each of which a rank sends 1/N of it to the next one.

    The ranks of a host follow each other, so each of `rings` crosses its link once.
    """
    if ranks == 1:
        return 0.0
    once = transfer(inputs, cluster, nbytes / ranks, rings * nbytes / ranks, 1)
    return 2 * (ranks - 1) * once


def flat(inputs: Inputs, cluster: Cluster, setting: str, buckets: Sequence[int]) -> float:
    """Seconds until all averages are there where all ranks reduce as equals; buckets by their elements."""
    n, here = cluster.all_ranks, cluster.ranks
    kernels, begins, sums, ends = inputs.kernels[setting], list[Step](), list[Step](), list[Step]()
    for i, elements in enumerate(buckets):
        wire = WIRE_BYTES[setting] * elements
        begins.append(Do(kernels.compress * elements))
        if setting == "none":
            begins.append(Send(f"sum {i}", ring(inputs, cluster, wire, n)))
            ends.append(Wait(f"sum {i}"))
        else:
            shot = transfer(inputs, cluster, wire * (n - 1) / n, here * wire * (n - here) / n, n - 1)
            begins.append(Send(f"shards {i}", shot))
            sums += [Wait(f"shards {i}"), Do(kernels.reduce * elements), Send(f"sums {i}", shot)]
            ends.append(Wait(f"sums {i}"))
        ends.append(Do(kernels.decompress * elements))
    return makespan([begins, sums, ends])


def two_levels(inputs: Inputs, cluster: Cluster, setting: str, buckets: Sequence[int]) -> float:
    """Seconds until all averages are there where hosts sum in shared memory first."""
    hosts, here = cluster.hosts, cluster.ranks
    kernels, plain = inputs.kernels[setting], inputs.kernels["none"]
    begins, column_sums, ends = list[Step](), list[Step](), list[Step]()
    others = (here - 1) / here  # of what is moved within a host, the part that goes to other ranks
    for i, elements in enumerate(buckets):
        wire = WIRE_BYTES[setting] * elements
        sums = plain.compress + plain.reduce + inputs.shared * FP32_BYTES * others
        column = 0.0 if setting == "none" else kernels.compress / here  # `none` sums in its wire
        begins.append(Do((sums + column) * elements))
        if setting == "none":
            begins.append(Send(f"sum {i}", ring(inputs, cluster, wire / here, hosts, rings=here)))
            ends.append(Wait(f"sum {i}"))
        else:
            share = wire / here * (hosts - 1) / hosts
            shot = transfer(inputs, cluster, share, here * share, hosts - 1)
            begins.append(Send(f"shards {i}", shot))
            column_sums += [Wait(f"shards {i}"), Do(kernels.reduce * elements / here), Send(f"sums {i}", shot)]
            ends.append(Wait(f"sums {i}"))
        ends.append(Do(inputs.shared * wire * others + kernels.decompress * elements))
    return makespan([begins, column_sums, ends])
