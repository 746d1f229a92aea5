"""Two levels: ranks of one host sum among themselves, and only what leaves the host goes between hosts."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..errors import BackendUnavailableError, TransportError
from ..kernels.slots import Pieces
from .base import PieceTransport, Transport, Work
from .local import LocalTransport
from .meeting import no_word_from, wait_until
from .messages import checked
from .ranks import Subgroup, client_of, timeout_of
from .shm import ShmTransport
from .store_client import SOON_SECONDS

logger = logging.getLogger(__name__)

KERNELS = "FASTREDUCE_KERNELS"  # which a rank has been told to take
PATIENCE_SECONDS = 2.0  # until something has failed for the other ranks, too
NOBODY = "nobody"  # is gone


class Nodes(NamedTuple):
    """The ranks of each node, and the place of one rank among them.

    A flat is cut into as many columns as the smallest node has ranks. The rank at place c of each node owns column c; a
    node's further ranks own none.
    """

    ranks: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rank: int) -> Nodes:
        """As `rank` sees them."""
        node = next(i for i, ranks in enumerate(nodes) if rank in ranks)
        return cls(tuple(map(tuple, nodes)), node, nodes[node].index(rank))

    @property
    def here(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.ranks[self.node]

    @property
    def columns(self) -> int:
        """Their number."""
        return min(map(len, self.ranks))

    @property
    def column(self) -> tuple[int, ...]:
        """The ranks, one of each node, that own the same column as this one; none if it owns none."""
        return tuple(ranks[self.local_rank] for ranks in self.ranks) if self.local_rank < self.columns else ()

    @property
    def parts(self) -> int:
        """Into how many equal parts a flat must divide, for columns, shards of a column and ranks of each node."""
        return math.lcm(self.columns * len(self.ranks), *map(len, self.ranks))

    def __str__(self) -> str:
        return " | ".join(",".join(map(str, ranks)) for ranks in self.ranks)


class Level(NamedTuple):
    """Who meets in one stage of a reduction: the ranks of a node, and those of a column."""

    within: Transport
    between: Transport


class Connected(NamedTuple):
    """The transports of both levels.

    A reduction sums over `sums` and gathers averages over `gathers`, so that one bucket may be in the first while
    another is in the second; `moves`, within the node, is for what happens between steps.
    """

    sums: Level
    gathers: Level
    moves: Transport


class TwoLevelTransport(Transport):
    """All ranks, and beside them the levels in which a bucket is reduced.

    Its own collectives go over all ranks as if there were one level. The levels are connected with their first use, by
    every rank at once.

    Args:
        nodes: the ranks of each node.
        whole: all ranks.
        connect: makes the transports of the levels.

    Attributes:
        nodes: the ranks of each node.
        whole: all ranks.
    """

    name = "two_level"

    def __init__(self, nodes: Nodes, whole: Transport, connect: Callable[[], Connected]) -> None:
        self.nodes, self.whole = nodes, whole
        self.rank, self.world_size, self.enqueues = whole.rank, whole.world_size, whole.enqueues
        self._connect, self._connecting = connect, threading.Lock()
        self._levels: Connected | None = None

    @property
    def levels(self) -> Connected:
        """What a reduction in two levels goes over.

        Raises:
            TransportError: if ranks do not come within the timeout.
        """
        if self._levels is None:
            with self._connecting:
                self._levels = self._levels or self._connect()
        return self._levels

    def all_reduce(self, tensor: Tensor) -> Work:
        """Over all ranks."""
        return self.whole.all_reduce(tensor)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Over all ranks."""
        return self.whole.all_to_all(received, wire)

    def all_gather(self, wire: Tensor) -> Work:
        """Over all ranks."""
        return self.whole.all_gather(wire)

    def exchange(self, value: Any) -> list[Any]:
        """Over all ranks."""
        return self.whole.exchange(value)

    def tell_watchdog(self, about: str) -> None:
        """Tell those of all levels."""
        for transport in self._all():
            transport.tell_watchdog(about)

    def abort(self) -> None:
        """End what is under way on all levels."""
        for transport in self._all():
            transport.abort()

    def close(self) -> None:
        """Give back the connections of all levels."""
        for transport in self._all():
            transport.close()

    def _all(self) -> list[Transport]:
        levels = self._levels
        return [self.whole] if levels is None else [*levels.sums, *levels.gathers, levels.moves, self.whole]


def why_no_two_levels(nodes: Sequence[Sequence[int]]) -> str | None:
    """The reason why the ranks of these nodes have no two levels, or None."""
    if len(nodes) == 1:
        return "all ranks run on one host, which nothing leaves: use transport='shm', or FASTREDUCE_HOST=NAME for hosts"
    if len(nodes) == sum(map(len, nodes)):
        return "each rank runs on a host of its own, where nothing can be summed: use transport='gloo'"
    return None


def two_levels(
    group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], make: Callable[[Any], Transport], spare: int
) -> TwoLevelTransport:
    """The two levels of `group`; no rank is waited for.

    Args:
        group: the ranks.
        nodes: those of each host.
        make: a transport between some of them; within a host where they cannot share memory, too.
        spare: as many times what shared memory takes must be free for it.
    """
    places, whole = Nodes.of(nodes, dist.get_rank(group)), make(group)
    return TwoLevelTransport(places, whole, _Connecting(group, places, whole, make, spare))


class _Connecting:
    """Makes the transports of the levels over parts of a process group."""

    def __init__(
        self, group: dist.ProcessGroup, nodes: Nodes, whole: Transport, make: Callable[[Any], Transport], spare: int
    ) -> None:
        self._nodes, self._whole, self._make, self._spare = nodes, whole, make, spare
        self._within, self._between = _subgroups(group, nodes)
        self._store, self._share = client_of(group), True
        self._made: list[Transport] = []
        self._failing, self._failed = threading.Lock(), False
        self._gone: tuple[int, ...] = ()
        self._unasked = ""

    def __call__(self) -> Connected:
        place = checked(self._whole.exchange(uuid.uuid4().hex), _place, "place for notes")[0]
        # No rank has left notes in this place before.
        self._notes = self._store.at(f"fastreduce/two levels/{place}", SOON_SECONDS)
        sums, gathers = (Level(self._node(), self._column()) for _ in range(2))
        if self._whole.rank == 0:
            ways = f"{sums.within.name} within a node, {self._whole.name} between nodes {self._nodes}"
            logger.info("gradients go in two levels: %s", ways)
        return Connected(sums, gathers, self._node())

    def _node(self) -> Transport:
        if self._within is None:
            return LocalTransport()
        if self._share:
            try:
                return self._connected(ShmTransport(self._within, self._spare))
            except BackendUnavailableError as error:  # on every rank of the node
                self._share = False
                logger.info("within this host gradients go over %s: %s", self._whole.name, error)
        return self._connected(self._make(self._within))

    def _column(self) -> Transport:
        return LocalTransport() if self._between is None else self._connected(self._make(self._between))

    def _connected(self, transport: Transport) -> Transport:
        self._made.append(transport)
        telling = _Telling(transport, self._explained)
        kernels = telling.exchange(os.environ.get(KERNELS, ""))  # all connect now, in one order
        if isinstance(transport, PieceTransport) and all(each == kernels[0] for each in kernels):
            return _TellingPieces(transport, self._explained)
        return telling  # others' kernels may know no pieces

    def _explained(self, error: TransportError) -> TransportError:
        """The error of one level, with the ranks that all levels wait for.

        Whom one level misses may itself wait for another, in the other level. So everything under way is ended here,
        and each rank notes whom it misses; who is missed, and does not come with a note soon, is named.
        """
        with self._failing:
            if not self._failed:
                self._failed = True
                for transport in self._made:
                    transport.abort()
                try:
                    self._gone = self._missing(error)
                except TransportError as reason:
                    self._unasked = f"Nobody can be asked for whom other ranks wait: {reason}."
        if self._unasked:
            return TransportError(f"{error} {self._unasked}", error.missing)
        if not self._gone or error.missing == self._gone:
            return error
        return TransportError(
            f"rank {self._whole.rank} of {self._whole.world_size}: a reduction in two levels failed. "
            f"{no_word_from(self._gone)}",
            self._gone,
        )

    def _missing(self, error: TransportError) -> tuple[int, ...]:
        """Who is gone, by the notes of all who ask: the first of them to know tells the others."""
        mine, ranks = self._whole.rank, [str(rank) for rank in range(self._whole.world_size)]
        self._notes.set(str(mine), ", ".join(map(str, error.missing)))
        wait_until(self._notes, lambda store: store.has("named") or not store.absent(ranks), PATIENCE_SECONDS)
        notes = self._notes.read_each(ranks)
        missed = {name for note in notes if note for name in note.split(", ")}
        gone = [rank for rank, note in zip(ranks, notes, strict=True) if rank in missed and note is None]
        named = self._notes.set_first("named", ", ".join(gone) or NOBODY)
        asking = len(ranks) - notes.count(None)
        with suppress(TransportError):  # the store may end with this process: not before all who ask have the names
            self._notes.add("told", 1)
            wait_until(self._notes, lambda store: store.add("told", 0) >= asking, SOON_SECONDS)
        return tuple(int(rank) for rank in named.split(", ") if rank not in (NOBODY, str(mine)))


class _Telling(Transport):
    """A transport among some of the ranks; `explained` makes its errors those of all levels."""

    def __init__(self, transport: Transport, explained: Callable[[TransportError], TransportError]) -> None:
        self.name, self.rank, self.world_size = transport.name, transport.rank, transport.world_size
        self.enqueues = transport.enqueues
        self._transport, self._explained = transport, explained

    def all_reduce(self, tensor: Tensor) -> Work:
        return self._begun(lambda: self._transport.all_reduce(tensor))

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        return self._begun(lambda: self._transport.all_to_all(received, wire))

    def all_gather(self, wire: Tensor) -> Work:
        return self._begun(lambda: self._transport.all_gather(wire))

    def exchange(self, value: Any) -> list[Any]:
        told: list[Any] = self.told(lambda: self._transport.exchange(value))
        return told

    def tell_watchdog(self, about: str) -> None:
        self._transport.tell_watchdog(about)

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

    def _begun(self, begin: Callable[[], Work]) -> Work:
        return _TellingWork(self, self.told(begin))

    def told(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except TransportError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error


class _TellingPieces(_Telling, PieceTransport):
    def reduce_scatter(self, pieces: Pieces) -> Work:
        assert isinstance(self._transport, PieceTransport)
        return self._begun(partial(self._transport.reduce_scatter, pieces))


class _TellingWork:
    def __init__(self, transport: _Telling, work: Work) -> None:
        self._transport, self._work = transport, work

    def wait(self) -> None:
        self._transport.told(self._work.wait)


_Parts = tuple[Subgroup | None, Subgroup | None]
_known: weakref.WeakKeyDictionary[dist.ProcessGroup, _Parts] = weakref.WeakKeyDictionary()


def _subgroups(group: dist.ProcessGroup, nodes: Nodes) -> _Parts:
    """The ranks of this node, and those of this rank's column; None where there is no other.

    The same objects for all transports over a group, beside whom connections are shared.
    """
    if group not in _known:
        world_ranks, store, timeout = dist.get_process_group_ranks(group), client_of(group), timeout_of(group)

        def make(kind: str, place: int, names: tuple[int, ...]) -> Subgroup | None:
            if len(names) < 2:
                return None
            of_world = tuple(world_ranks[name] for name in names)
            here = store.at(f"fastreduce/{kind} of {names[0]}")
            return Subgroup(place, names, len(world_ranks), of_world, here, timeout)

        _known[group] = make("node", nodes.local_rank, nodes.here), make("column", nodes.node, nodes.column)
    return _known[group]


def _place(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{32}", value):
        raise ValueError(f"32 hexadecimal digits were expected, not {value!r:.80}")
    return value
