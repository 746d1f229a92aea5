"""Many ranks in one process: threads, a transport between them, and a reducer by itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastreduce import Compression, GradientReducer
from fastreduce.transports import Connected, Level, LocalTransport, Nodes, Transport, TwoLevelTransport, local_ranks


def on_nodes(counts: Sequence[int], timeout: float = 30.0) -> list[Transport]:
    """Transports of two levels, between threads: for so many ranks a node, numbered node by node."""
    starts = [sum(counts[:i]) for i in range(len(counts))]
    nodes = [list(range(start, start + count)) for start, count in zip(starts, counts, strict=True)]
    made: list[list[Transport]] = [[] for _ in range(sum(counts))]
    for _ in range(3):  # sums, gathers, moves
        for ranks in nodes:
            for rank, transport in zip(ranks, local_ranks(len(ranks), timeout), strict=True):
                made[rank].append(transport)
        for place in range(max(counts)):
            column = [ranks[place] for ranks in nodes if place < min(counts)]
            alone = [ranks[place] for ranks in nodes if min(counts) <= place < len(ranks)]
            for rank, transport in zip(column, local_ranks(len(column), timeout), strict=True):
                made[rank].append(transport)
            for rank in alone:
                made[rank].append(LocalTransport())

    def connected(sums: Transport, column: Transport, gathers: Transport, other: Transport, moves: Transport, _: Any):
        return Connected(Level(sums, column), Level(gathers, other), moves)

    return [
        TwoLevelTransport(Nodes.of(nodes, rank), whole, functools.partial(connected, *made[rank]))
        for rank, whole in enumerate(local_ranks(sum(counts), timeout))
    ]


def in_threads(ranks: int | Sequence[Transport], fn: Callable[[int, Any], Any], timeout: float = 30.0) -> list[Any]:
    """`fn(rank, transport)` on threads that act as ranks; values in rank order, or the first exception."""
    transports: Sequence[Transport] = local_ranks(ranks, timeout=timeout) if isinstance(ranks, int) else ranks
    values: list[Any] = [None] * len(transports)
    failures: list[BaseException] = []

    def run(rank: int, transport: Transport) -> None:
        try:
            values[rank] = fn(rank, transport)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(rank, transport), daemon=True) for rank, transport in enumerate(transports)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * timeout)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    return values


def make_reducer(model: nn.Module, transport: Transport, setting: str = "none", **options: Any) -> GradientReducer:
    return GradientReducer(
        list(model.parameters()),
        [name for name, _ in model.named_parameters()],
        transport,
        Compression.parse(setting),
        **{"bucket_caps": [2000], **options},
    )


def backward_of_step(model: nn.Module, reducer: GradientReducer, inputs: Tensor) -> None:
    """A step up to averages in `.grad`."""
    reducer.rebuild_buckets()
    model.zero_grad()
    output = model(inputs)
    reducer.arm()
    reducer.watch([output])
    output.square().mean().backward()


_seeding = threading.Lock()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model from seed 0, also beside other threads that draw."""
    with _seeding:
        torch.manual_seed(0)
        return make()
