"""Connections of our own beside a group of the user: leased by one transport at a time, and left to the next."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from ..environment.forks import Owner
from ..errors import TransportError
from .messages import checked, numbers, of_types
from .ranks import Ranks, own_name

MOST = 1 << 20  # connections

failed_here = threading.Event()  # a collective has, in this process: from then on a rank may be gone


class Connection(Protocol):
    """What a transport leases."""

    @property
    def failed(self) -> bool:
        """Whether it cannot be used any more."""

    def begin(self) -> None:
        """A transport uses it from now on; on every rank at once."""

    def leave(self) -> None:
        """The transport begins nothing more."""

    def abort(self) -> None:
        """End what is under way, here and on the peers; it has failed then."""

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        """Every rank's value in rank order; on every rank at once. Errors name the operation."""


C = TypeVar("C", bound=Connection)


class Lease(Generic[C]):
    """One transport's use of a connection beside `group`, from its first collective until it closes.

    Connections live as long as the group: connecting costs time and threads, taking a connection down while a
    peer still connects fails there, and a new wrapper over the same ranks can take one that is free.

    Args:
        kind: "gloo", "shm", "NCCL" or "MPI"; leases of one kind share connections.
        group: the user's group, or some of its ranks.
        connect: makes a connection beside the group, by a name that no other has; all ranks call it at once.
    """

    def __init__(self, kind: str, group: Ranks, connect: Callable[[Any, str], C]) -> None:
        self._who = own_name(group)
        self._kind, self._group, self._connect = kind, group, connect
        self._taken: C | None = None
        self._ended, self._owner = False, Owner()
        self.number = -1

    @property
    def connection(self) -> C:
        """What is leased. Taken by the first call, so that a copied or loaded wrapper needs nobody until it trains.

        Raises:
            TransportError: if ranks do not come for it, or the lease has ended, or in a fork.
        """
        self._owner.check(f"{self._who}: a collective over {self._kind}")
        if self._ended:
            raise TransportError(f"{self._who}: this {self._kind} transport is closed")
        if self._taken is None:
            beside = _beside(self._group, self._kind)
            self.number = beside.take(lambda name: self._connect(self._group, name))
            connection = beside.made[self.number]
            connection.begin()
            self._taken = connection
        return self._taken

    def close(self) -> None:
        """Leave the connection to the next lease, unless it has failed."""
        self._end(lambda connection: connection.leave())

    def abort(self) -> None:
        """Abort the connection; the next lease makes another."""
        self._end(lambda connection: connection.abort())

    def _end(self, how: Callable[[C], None]) -> None:
        connection, self._taken, self._ended = self._taken, None, True
        if connection is not None:
            how(connection)
            _beside(self._group, self._kind).give_back(self.number, connection.failed)


class _Beside:
    """The connections of one kind beside one group: a control connection, and one for each lease at a time."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.free: set[int] = set()
        self.control: Any = None

    def take(self, connect: Callable[[str], Any]) -> int:
        """The number of a connection that is free on every rank, or of a new one; every rank calls it at once."""
        if self.control is None or self.control.failed:  # by an interrupt, say, and so on all ranks
            self.control = connect("control")
        self.free -= {n for n in list(self.free) if self.made[n].failed}  # since; and a lease may end at any moment
        told = self.control.exchange([sorted(self.free), len(self.made)], "connecting")
        theirs = checked(told, _free_and_made, "free connections")
        free = set[int].intersection(*(free for free, _ in theirs))
        number = min(free, default=max(made for _, made in theirs))
        if not free:
            self.made += [None] * (number - len(self.made))  # connections that this rank did not come to
            self.made.append(connect(str(number)))
        self.free.discard(number)
        return number

    def give_back(self, number: int, failed: bool) -> None:
        if number >= len(self.made):  # made before this process was forked: here there are none
            return
        if failed:
            self.made[number] = None
        else:
            self.free.add(number)

    def abort(self) -> None:
        for connection in [self.control, *self.made]:
            if connection is not None and not connection.failed:
                connection.abort()

    def drop(self) -> None:
        for number, connection in enumerate(self.made):
            if connection is not None and number not in self.free:
                connection.abort()
        self.made[:] = [None] * len(self.made)
        self.free.clear()
        self.control = None


ALL: weakref.WeakKeyDictionary[Ranks, dict[str, _Beside]] = weakref.WeakKeyDictionary()  # by group and kind


def _beside(group: Ranks, kind: str) -> _Beside:
    return ALL.setdefault(group, {}).setdefault(kind, _Beside())


def drop_all(kind: str) -> None:
    """Let go of the connections of one kind, beside all groups; of those that are leased, abort them."""
    for kinds in list(ALL.values()):
        if kind in kinds:
            kinds[kind].drop()


def abort_beside(group: Ranks) -> None:
    """Abort all connections beside a group of which ranks are lost; who is making one looks for the lost itself."""
    for beside in list(ALL.get(group, {}).values()):
        beside.abort()


def _free_and_made(value: Any) -> tuple[set[int], int]:
    free, made = of_types(value, list, int)
    if not 0 <= made < MOST:
        raise ValueError(f"{made} connections")
    return set(numbers(free, made)), made
