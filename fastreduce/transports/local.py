"""Ranks inside one process: world size 1, and several threads that act as ranks in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import TransportError
from .base import Transport, Work


class _Done:
    def wait(self) -> None:
        return


class _Meeting:
    """Where the ranks of one process lay out what they bring to a collective."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.brought: list[Any] = [None] * world_size


class LocalTransport(Transport):
    """One rank of a process; alone (world size 1) by default, with others from `local_ranks`."""

    name = "local"

    def __init__(self, rank: int = 0, world_size: int = 1, meeting: _Meeting | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self._meeting = meeting or _Meeting(world_size, timeout=60.0)

    def _meet(self, value: Any, use: Callable[[list[Any]], None]) -> Work:
        """Lay `value` out, use what everybody brought, and leave when all have."""
        meeting = self._meeting
        meeting.brought[self.rank] = value
        try:
            meeting.barrier.wait()
            use(meeting.brought)
            meeting.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise TransportError(f"rank {self.rank}: another local rank did not come or left") from error
        return _Done()

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in rank order, in the tensor's dtype."""

        def use(brought: list[Any]) -> None:
            total = brought[0].clone()
            for other in brought[1:]:
                total += other
            self._meeting.barrier.wait()
            tensor.copy_(total)

        return _Done() if self.world_size == 1 else self._meet(tensor, use)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Copy row `rank` of everybody's wire."""

        def use(brought: list[Any]) -> None:
            for row, other in zip(received.view(self.world_size, -1), brought, strict=True):
                row.copy_(other.view(self.world_size, -1)[self.rank])

        return self._meet(wire, use)

    def all_gather(self, wire: Tensor) -> Work:
        """Copy everybody's own shard."""

        def use(brought: list[Any]) -> None:
            for r, other in enumerate(brought):
                if r != self.rank:
                    wire.view(self.world_size, -1)[r].copy_(other.view(self.world_size, -1)[r])

        return _Done() if self.world_size == 1 else self._meet(wire, use)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value."""
        values: list[Any] = []
        self._meet(value, lambda brought: values.extend(brought))
        return values

    def close(self) -> None:
        """Give nothing back: ranks that are still leaving their last collective need the meeting."""


def local_ranks(world_size: int, timeout: float = 60.0) -> list[LocalTransport]:
    """`world_size` transports that meet in this process; use each from a thread of its own."""
    meeting = _Meeting(world_size, timeout)
    return [LocalTransport(rank, world_size, meeting) for rank in range(world_size)]
