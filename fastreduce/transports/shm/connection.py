"""The segments of a group's ranks, mapped, and the collectives over them in the order in which they come."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...environment.cores import usable_cores
from ...environment.exits import Exit, each_at_exit
from ...environment.forks import Owner
from ...environment.signals import is_of_signal
from ...errors import BackendUnavailableError, DeviceError, TransportError, listed
from ...kernels.numba_cpu_elements import addresses, stage
from ...kernels.slots import Pieces, SlotTable
from .. import messages
from ..base import Work
from ..connections import failed_here
from ..hosts import boot
from ..meeting import AbsentError, clear, look_for, meet, no_word_from, notes, until_cleared
from ..ranks import Ranks, client_of, names_of, own_name, place_in, timeout_of, who_has_ended, who_is_gone
from ..store_client import StoreClient
from . import ring
from .segments import BEAT, FAILED, GEOMETRY, NUMBERS, CannotShareError, Geometry, Segment, file_of, why_no_shm

CONTROL = Geometry(cells=2, cell_bytes=16 << 10)  # for the few words that ranks exchange to lease connections
ONE_SHOT_BYTES = 32 << 10  # up to which every rank sums all of a tensor: ranks wait once, not twice
SLICE_NANOSECONDS = 20_000_000  # of sleep, after which a rank looks up
LOOK_SECONDS = 0.1  # of waiting, after which a rank looks whether others have ended
SPINS = 60  # some microseconds; backward, or another rank, may want the core
DTYPES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
GAVE_UP, ENDED = 1, 2  # what the word FAILED says: this rank waited in vain, or ended what was under way

_NOWHERE = np.zeros(1, np.int64)
Places = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], float]
Arguments = tuple[int, Places, int, int]  # kind, tensors without scratch, total, dtype: those of `ring.advance`


class Collective:
    """One under way, with the arguments of `ring.advance` that are its own."""

    def __init__(
        self,
        connection: ShmConnection,
        operation: str,
        arguments: Arguments,
        pieces: int,
        keep: Sequence[object],
        after: Callable[[], object] | None,
    ) -> None:
        self.operation, self.arguments, self.pieces = operation, arguments, pieces
        self.at = np.zeros(4, np.int64)
        self.first = 0
        self.done = False
        self._connection, self._keep, self._after = connection, keep, after

    def wait(self) -> None:
        """Bring it, and those before it, to their end; errors come out as TransportError."""
        self._connection.wait(self)
        after, self._after = self._after, None
        if after is not None:
            after()


class ShmConnection:
    """Shared memory of the ranks of `group`.

    Args:
        group: the ranks.
        name: which no other connection of the group has.
        times: as much as its segments take must be free.

    Raises:
        BackendUnavailableError: on every rank, if one of them cannot share memory with the others; it says why.
        TransportError: if ranks do not come within the timeout.
    """

    def __init__(self, group: Ranks, name: str, times: int) -> None:
        self.rank, self.size = place_in(group)
        self._me, self._names = own_name(group), names_of(group)
        self.failed = False
        self._gone, self._look = who_is_gone(group), look_for(who_has_ended(group))
        self._why = ""
        self._missing: tuple[int, ...] = ()
        self._seconds = timeout_of(group).total_seconds()
        self._geometry = CONTROL if name == "control" else GEOMETRY
        self._lock = threading.Lock()
        self._under_way: deque[Collective] = deque()
        self._pieces = 0  # of all collectives so far
        self._owner = Owner()
        self._futex = NUMBERS.get(os.uname().machine, 0)
        self._segments: list[Segment] = []
        self._scratch = stage(max(ring.BLOCK, self._part) // 8)  # compiled before others wait for this rank
        try:
            self._segments = self._connect(client_of(group).at(f"fastreduce/shm/{name}"), times)
        except AbsentError as error:
            raise self._fail("connecting", error.missing) from error
        except TransportError as error:  # the store's
            raise self._fail("connecting", (), f"{error}. {no_word_from([])}") from error
        self._bases = np.array([segment.address for segment in self._segments], np.int64)
        self._limit = np.array([0, SLICE_NANOSECONDS], np.int64)  # a timespec
        # Ranks that share cores do not spin: who is waited for may need this one's.
        self._spins = SPINS if usable_cores() >= self.size else 0
        _alive.add(self)

    def _connect(self, store: StoreClient, times: int) -> list[Segment]:
        """Meet, see what is free, meet, make segments, meet, map the others', meet; then no name is needed any more."""
        ranks = range(self.size)
        told = self._meet(store.at("here"), json.dumps([boot(), socket.gethostname(), uuid.uuid4().hex]))
        hosts, machines, places = zip(*map(messages.decode, told, self._names, [_here] * self.size), strict=True)
        away = [rank for rank in ranks if hosts[rank] != hosts[0]]
        if away:
            raise BackendUnavailableError(
                f"{self._me}: ranks share no memory over hosts: rank {self._names[0]} runs on "
                f"{machines[0]}, rank {listed(self._named(away))} on {machines[away[0]]}; use transport='gloo'"
            )
        place, path = places[0], None
        segments: list[Segment | None] = [None] * self.size
        try:
            self._agree(store.at("can"), why_no_shm(times * self.size * self._geometry.nbytes) or "")
            path, reason = file_of(place, self.rank), ""
            try:
                segments[self.rank] = Segment.make(path, self.rank, self.size, self._geometry)
            except CannotShareError as error:
                reason = str(error)
            self._agree(store.at("made"), reason)
            for rank in ranks:
                if rank != self.rank and not reason:
                    try:
                        segments[rank] = Segment.open(file_of(place, rank), rank, self.size, self._geometry)
                    except CannotShareError as error:
                        reason = str(error)
            self._agree(store.at("mapped"), reason)
        except TransportError:
            for rank in ranks:  # another may be gone, and have left its own
                file_of(place, rank).unlink(missing_ok=True)
            raise
        finally:
            if path is not None:
                path.unlink(missing_ok=True)
        return [segment for segment in segments if segment is not None]

    def _meet(self, store: StoreClient, note: str) -> list[str]:
        until_cleared(store, self._seconds, self._look)  # of an attempt before this one
        meet(store, self._names[self.rank], self._names, self._seconds, note, self._look)
        found = notes(store, self._names)
        clear(store, self._names)
        return found

    def _agree(self, store: StoreClient, reason: str) -> None:
        """Raise on every rank if one of them has a reason why not."""
        for rank, why in enumerate(self._meet(store, reason)):
            if why:
                raise BackendUnavailableError(
                    f"{self._me}: ranks cannot share memory here. Rank {self._names[rank]} says: {why:.400}"
                )

    # Collectives

    def all_reduce(self, tensor: Tensor) -> Work:
        """The sum in rank order, in place and in the tensor's dtype."""
        if tensor.dtype not in DTYPES:
            rows = tensor.new_empty(self.size, tensor.numel())
            rows[self.rank] = tensor.view(-1)
            return self.all_gather(rows, "all_reduce", lambda: tensor.copy_(_sum(rows).view_as(tensor)))
        whole = SlotTable(_NOWHERE, np.array([tensor.numel()]), tensor.numel())
        return self.all_reduce_slots([tensor], whole, 1.0, [tensor])

    def all_reduce_slots(
        self, tensors: Sequence[Tensor], slots: SlotTable, scale: float, into: Sequence[Tensor]
    ) -> Work:
        """The sum in rank order of the flats that tensors of one dtype make, each scaled, to where it belongs."""
        dtype = tensors[0].dtype
        nbytes, kind, piece = slots.total * dtype.itemsize, ring.ONE_SHOT, self._geometry.cell_bytes
        if nbytes * (self.size - 1) > ONE_SHOT_BYTES:
            kind, piece = ring.ALL_REDUCE, self._part * self.size
        found, kept = self._places("all_reduce", tensors), self._places("all_reduce", into)
        places = (found, kept, slots.offsets * dtype.itemsize, slots.numels * dtype.itemsize, scale)
        return self._start("all_reduce", (kind, places, nbytes, DTYPES[dtype]), piece, [*tensors, *into])

    def two_shot(self, pieces: Pieces) -> Work:
        """Averages that `pieces` makes, block by block: a piece is as many of each shard as fit a part of a cell."""
        return self._in_pieces("all_reduce", ring.TWO_SHOT, pieces)

    def reduce_scatter(self, pieces: Pieces) -> Work:
        """The same for the own shard alone."""
        return self._in_pieces("reduce_scatter", ring.REDUCE_SCATTER, pieces)

    def _in_pieces(self, operation: str, kind: int, pieces: Pieces) -> Work:
        told, terms = np.array(pieces[:4], np.int64), np.zeros(self.size, np.int64)
        places = (told, terms, _NOWHERE, _NOWHERE, 1.0)
        arguments = (kind, places, pieces.blocks, pieces.block_bytes)
        return self._start(operation, arguments, self._part // pieces.block_bytes, [pieces.keep])

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Row r of `received` from rank r's own shard of bytes."""
        places = (self._places("all_to_all", [wire]), self._places("all_to_all", [received]), _NOWHERE, _NOWHERE, 1.0)
        arguments = (ring.ALL_TO_ALL, places, wire.nbytes // self.size, 0)
        return self._start("all_to_all", arguments, self._part, [received, wire])

    def all_gather(
        self, wire: Tensor, operation: str = "all_gather", after: Callable[[], object] | None = None
    ) -> Work:
        """Shard r of `wire` from rank r, in place, as bytes; then call `after`."""
        place = self._places(operation, [wire])
        places = (place, place, _NOWHERE, _NOWHERE, 1.0)
        arguments = (ring.ALL_GATHER, places, wire.nbytes // self.size, 0)
        return self._start(operation, arguments, self._geometry.cell_bytes, [wire], after)

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return messages.exchange_in_rows(
            value, self.rank, self.size, lambda rows: self.all_gather(rows, operation).wait()
        )

    def _places(self, operation: str, tensors: Sequence[Tensor]) -> NDArray[np.int64]:
        """Where tensors of one device begin.

        Raises:
            DeviceError: if that is not the CPU: the process would end where it reads there.
        """
        if not tensors[0].is_cpu:
            raise DeviceError(
                f"{self._me}: {operation} over shm: ShmTransport moves tensors on the CPU, and this one is on "
                f"{tensors[0].device}: use NcclTransport, or move the tensor with .cpu()"
            )
        return addresses(tensors)

    @property
    def _part(self) -> int:
        return int(ring.part_bytes(self._geometry.cell_bytes, self.size))

    def _start(
        self,
        operation: str,
        arguments: Arguments,
        piece: int,
        keep: Sequence[object],
        after: Callable[[], object] | None = None,
    ) -> Collective:
        work = Collective(self, operation, arguments, -(-arguments[2] // piece), keep, after)
        if self.failed:
            return work  # `wait` tells it
        with self._lock:
            work.first = self._pieces
            self._pieces += work.pieces
            self._under_way.append(work)
            if len(self._under_way) == 1:
                with contextlib.suppress(TransportError):  # `wait` tells it
                    self._advance(work, patient=False)
        return work

    def wait(self, work: Collective) -> None:
        """Bring all up to this one to their end."""
        with self._lock:
            while not work.done:
                if self.failed:
                    raise self._error(work.operation)
                head = self._under_way[0]
                try:
                    self._finish(head)
                except TransportError:
                    raise self._error(work.operation) from None  # of the one that was asked for
                except BaseException as error:
                    if is_of_signal(error):  # else the next collective would meet another one of the peers
                        self.abort()
                    raise

    def _finish(self, work: Collective) -> None:
        """Bring the first one to its end."""
        since = looked = time.monotonic()
        before = work.at.copy()
        while not self._advance(work, patient=True):
            now = time.monotonic()
            if (work.at != before).any():
                since, before = now, work.at.copy()
            if now - looked > LOOK_SECONDS:
                looked = now
                gone = [rank for rank in self._others if self._segments[rank].owner_is_gone()]
                if gone and not self._advance(work, patient=False):  # what it did last may have come
                    raise self._fail(work.operation, self._who(1.0) if self._gone is None else self._named(gone))
                if work.done:
                    return
            if now - since > self._seconds:
                raise self._fail(work.operation, self._who(min(3.0, max(1.0, self._seconds / 10))))

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _advance(self, work: Collective, patient: bool) -> bool:
        """Whether it is done."""
        if self.failed:
            raise self._error(work.operation)
        kind, places, *sizes = work.arguments
        status = ring.advance(
            self._bases,
            self.rank,
            *self._geometry,
            self._futex,
            self._spins,
            self._limit.ctypes.data if patient else 0,
            kind,
            work.first,
            work.pieces,
            (*places, self._scratch.data_ptr()),
            *sizes,
            work.at,
        )
        if status == ring.DONE:
            work.done = True
            self._under_way.popleft()
            return True
        if status == ring.FAILED_RANK:
            if self.failed:  # the rank is this one, and whoever ended it has said why
                raise self._error(work.operation)
            raise self._fail(work.operation, self._who(1.0))
        if status == ring.OTHER_CALL:
            raise self._fail(
                work.operation,
                (),
                f"Rank {self._names[work.at[3]]} is in another call, or came with another size or dtype.",
            )
        return False

    # Failures

    def _error(self, operation: str) -> TransportError:
        return TransportError(f"{self._me}: {operation} over shm failed. {self._why}", self._missing)

    def _fail(self, operation: str, missing: Sequence[int], why: str = "", how: int = GAVE_UP) -> TransportError:
        """Nothing goes on, here and on the peers; returns the error, by default that ranks are missing."""
        if not self.failed:
            self._why, self._missing = why or no_word_from(missing), tuple(missing)
            self.failed = True  # last: another thread that sees it tells why
            if how != ENDED:
                failed_here.set()
            if self._segments and self._owner.is_here:
                self._segments[self.rank].set_word(FAILED, how)  # who sleeps looks up by itself, after a slice
        return self._error(operation)

    def _who(self, patience: float) -> list[int]:
        """Whom this rank waits for: those that neither wait themselves nor have failed, or else those that have ended.

        A rank that waits counts its looks, in this collective or an earlier one, and here too: others may ask at the
        same time.
        """
        if self._gone is not None:
            return list(self._gone())
        before = {rank: self._segments[rank].word(BEAT) for rank in self._others}
        silent, start, over = self._others, time.monotonic(), list[int]()
        own = self._segments[self.rank]
        while silent and time.monotonic() - start < patience:
            own.set_word(BEAT, own.word(BEAT) + 1)
            time.sleep(SLICE_NANOSECONDS / 1e9)
            failures = {rank: self._segments[rank].word(FAILED) for rank in self._others}
            ended = [rank for rank, how in failures.items() if how == ENDED]
            over = [rank for rank in self._others if self._segments[rank].owner_is_gone()]
            gone = [rank for rank in over if failures[rank] != GAVE_UP]  # else it has waited itself, and ended then
            if gone or ended:
                return self._named(sorted({*gone, *ended}))
            silent = [rank for rank in silent if not failures[rank] and self._segments[rank].word(BEAT) == before[rank]]
        return self._named(silent or over)

    def _named(self, ranks: Iterable[int]) -> list[int]:
        return [self._names[rank] for rank in ranks]

    # A lease

    def begin(self) -> None:
        """A transport uses it from now on."""

    def leave(self) -> None:
        """The transport begins nothing more; with something under way it cannot be used again."""
        if self._under_way:
            self.abort()

    def abort(self) -> None:
        """End what is under way, here and on the peers."""
        self._fail("abort", (), "It was ended here.", ENDED)

    def tell_end(self) -> None:
        """This process starts nothing more, though it may wait for others before it ends, as MPI does."""
        self._segments[self.rank].let_go()


_alive: weakref.WeakSet[ShmConnection] = weakref.WeakSet()
each_at_exit(Exit.TELL, ShmConnection.tell_end, _alive)


def _sum(rows: Tensor) -> Tensor:
    total = rows[0]
    for row in rows[1:]:
        total += row
    return total


def _here(value: Any) -> tuple[str, str, str]:
    """Host, its name, and a name for segments: a part of a path."""
    host, machine, place = messages.of_types(value, str, str, str)
    if not re.fullmatch("[0-9a-f]{32}", place):
        raise ValueError(f"{place!r:.40} is no name of a segment")
    return host, machine, place
