"""Connections of our own beside a group of the user: made once, and taken again by later transports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .messages import checked, numbers, of_types

MOST = 1 << 20  # connections


class Connections:
    """What stands beside one group of the user: a control connection, and one for each transport in use.

    They live as long as the group: connecting costs time and threads, taking a connection down while a
    peer still connects fails there, and a new wrapper over the same ranks can take one that is free.
    """

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.free: set[int] = set()
        self._control: Any = None

    def take(self, connect: Callable[[str], Any], exchange: Callable[[Any, Any], list[Any]]) -> int:
        """The number of a connection that is free on every rank, or of a new one; every rank calls it at once.

        Args:
            connect: makes a connection of this name.
            exchange: every rank's value over a connection, in rank order.
        """
        if self._control is None:
            self._control = connect("control")
        told = checked(exchange(self._control, [sorted(self.free), len(self.made)]), _free_and_made, "free connections")
        free = set[int].intersection(*(theirs for theirs, _ in told))
        number = min(free, default=max(count for _, count in told))
        if not free:
            self.made += [None] * (number - len(self.made))  # connections that this rank did not come to
            self.made.append(connect(str(number)))
        self.free.discard(number)
        return number

    def leave(self, number: int, failed: bool) -> None:
        """Leave a connection to the next that takes one, unless it has failed."""
        if failed:
            self.made[number] = None
        else:
            self.free.add(number)

    def end(self) -> None:
        """Give back those that nobody uses."""
        for number in self.free:
            self.made[number] = None
        self.free.clear()
        self._control = None


def _free_and_made(value: Any) -> tuple[set[int], int]:
    free, made = of_types(value, list, int)
    if not 0 <= made < MOST:
        raise ValueError(f"{made} connections")
    return set(numbers(free, 0, made)), made


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the user gave to `group`."""
    for device in group._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            return group._get_backend(device).options._timeout
    return dist.default_pg_timeout
