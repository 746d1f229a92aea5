"""Ranks inside one process: world size 1, and several threads that act as ranks in tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import TransportError
from .base import Done, Transport, Work
from .messages import decode, encode


class _Meeting:
    """Where the ranks of one process lay out what they bring to a collective.

    `threading.Barrier` would do but for one thing: aborted, it also breaks ranks that are still on their
    way out of a complete meeting.
    """

    def __init__(self, world_size: int, timeout: float) -> None:
        self.brought: list[Any] = [None] * world_size
        self._world_size, self._timeout = world_size, timeout
        self._changed = threading.Condition()
        self._waiting = self._generation = 0
        self._left = False

    def wait(self, rank: int) -> None:
        """Wait, as `rank`, for all ranks.

        Raises:
            TransportError: if one has left, or has not come within the timeout.
        """
        with self._changed:
            generation = self._generation
            self._waiting += 1
            if self._waiting == self._world_size:
                self._waiting, self._generation = 0, generation + 1
                self._changed.notify_all()
                return
            self._changed.wait_for(lambda: self._generation != generation or self._left, self._timeout)
            if self._generation == generation:
                self._left = True
                self._changed.notify_all()
                raise TransportError(f"rank {rank}: another local rank did not come or left")

    def leave(self) -> None:
        """Let nobody wait for a rank that is gone."""
        with self._changed:
            self._left = True
            self._changed.notify_all()


class LocalTransport(Transport):
    """One rank of a process; alone (world size 1) by default, with others from `local_ranks`."""

    name = "local"

    def __init__(self, rank: int = 0, world_size: int = 1, meeting: _Meeting | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.enqueues = world_size == 1
        self._meeting = meeting or _Meeting(world_size, timeout=60.0)

    def _meet(self, value: Any, use: Callable[[list[Any]], None]) -> Work:
        """Lay `value` out, use what everybody brought, and leave when all have."""
        meeting = self._meeting
        meeting.brought[self.rank] = value
        meeting.wait(self.rank)
        use(meeting.brought)
        meeting.wait(self.rank)
        return Done()

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum in rank order, in the tensor's dtype."""

        def use(brought: list[Any]) -> None:
            total = brought[0].clone()
            for other in brought[1:]:
                total += other
            self._meeting.wait(self.rank)
            tensor.copy_(total)

        return Done() if self.world_size == 1 else self._meet(tensor, use)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Copy row `rank` of everybody's wire."""

        def use(brought: list[Any]) -> None:
            for row, other in zip(received.view(self.world_size, -1), brought, strict=True):
                row.copy_(other.view(self.world_size, -1)[self.rank])

        if self.world_size > 1:
            return self._meet(wire, use)
        received.view(-1).copy_(wire)
        return Done()

    def all_gather(self, wire: Tensor) -> Work:
        """Copy everybody's own shard."""

        def use(brought: list[Any]) -> None:
            for r, other in enumerate(brought):
                if r != self.rank:
                    wire.view(self.world_size, -1)[r].copy_(other.view(self.world_size, -1)[r])

        return Done() if self.world_size == 1 else self._meet(wire, use)

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value."""
        texts: list[bytes] = []
        self._meet(encode(value), texts.extend)
        return [decode(text, rank, lambda told: told) for rank, text in enumerate(texts)]

    def abort(self) -> None:
        """Leave."""
        self._meeting.leave()

    def close(self) -> None:
        """Leave; others that wait for this rank are told."""
        self._meeting.leave()


def local_ranks(world_size: int, timeout: float = 60.0) -> list[LocalTransport]:
    """`world_size` transports that meet in this process; use each from a thread of its own."""
    meeting = _Meeting(world_size, timeout)
    return [LocalTransport(rank, world_size, meeting) for rank in range(world_size)]
