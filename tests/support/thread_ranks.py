"""Many ranks in one process: threads, a transport between them, and a reducer by itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fastreduce import Compression, GradientReducer
from fastreduce.transports import LocalTransport, Transport, local_ranks


def in_threads(world_size: int, fn: Callable[[int, LocalTransport], Any], timeout: float = 30.0) -> list[Any]:
    """`fn(rank, transport)` on threads that act as ranks; values in rank order, or the first exception."""
    values: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(rank: int, transport: LocalTransport) -> None:
        try:
            values[rank] = fn(rank, transport)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=(rank, transport), daemon=True)
        for rank, transport in enumerate(local_ranks(world_size, timeout=timeout))
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


_seeding = threading.Lock()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model from seed 0, also beside other threads that draw."""
    with _seeding:
        torch.manual_seed(0)
        return make()
