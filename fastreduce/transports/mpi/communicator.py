"""MPI communicators whose collectives are polled, time out and name who did not come."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...environment.exits import Exit, each_at_exit
from ...environment.signals import is_of_signal
from ...errors import TransportError
from .. import messages
from ..base import Work
from ..connections import failed_here
from ..deadlines import in_background
from ..meeting import look_for, meet
from ..ranks import Ranks, client_of, names_of, own_name, place_in, timeout_of, who_has_ended, world_ranks_of
from ..store_client import SOON_SECONDS
from .library import GATE, load_mpi
from .polling import late, poll

BLOCK = 1 << 30  # bytes; MPI counts with an int

Begin = Callable[[], Any]


_alive: weakref.WeakSet[MpiConnection] = weakref.WeakSet()
_broken: set[MpiConnection] = set()  # MPI may still write where their collectives were to


class MpiConnection:
    """A communicator of ours, and beside it a place in the group's store where ranks tell why they do not come.

    Raises:
        TransportError: if ranks do not come within the group's timeout.
    """

    def __init__(self, group: Ranks, name: str) -> None:
        self.rank, self.size = place_in(group)
        self._me, self._names = own_name(group), names_of(group)
        self._name = self._names[self.rank]
        self.failed = False
        self._why = ""  # of the first failure, which those that follow from it tell too
        self._seconds = timeout_of(group).total_seconds()
        # Without an answer from the store soon, collectives go on.
        self._store = client_of(group).at(f"fastreduce/mpi/{name}", SOON_SECONDS)
        self._started = self._leases = 0
        self._told_to_wait = False
        self._under_way: dict[int, PolledWork] = {}
        self._spare: dict[int, Tensor] = {}  # bytes that all_reduce receives in, by address
        with self._errors("connecting"):
            # Wait for all ranks here, since making a communicator has no timeout.
            look = look_for(who_has_ended(group))
            meet(self._store.at("here", self._seconds), self._name, self._names, self._seconds, look=look)
            ranks = world_ranks_of(group)
            try:
                self._first, self._second = in_background(lambda: _make(ranks), self._seconds)
            except TimeoutError as error:
                GATE.stuck = True
                raise TransportError(f"a rank {late(self._seconds)}: MPI makes no communicator") from error
        _alive.add(self)

    @contextlib.contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        """What MPI and the store raise, and reasons raised here, come out as TransportError with rank and operation.

        What a signal's handler raises comes out as it is, and ends the connection: nobody knows how far it has come.
        """
        try:
            yield
        except BaseException as error:
            if is_of_signal(error):
                self.abort()
            if is_of_signal(error) or not isinstance(error, RuntimeError):
                raise
            self._why = self._why or str(error)
            self.failed = True  # last: another thread that sees it tells why
            failed_here.set()
            missing = getattr(error, "missing", ())
            raise TransportError(f"{self._me}: {operation} over MPI failed: {error}.", missing) from error

    def start(
        self,
        operation: str,
        begin: Begin,
        keep: list[Tensor],
        then: Begin | None = None,
        after: Callable[[], object] | None = None,
    ) -> Work:
        """Start a collective on the tensors `keep`, and a second one, `then`, when it has ended; then call `after`."""
        work = PolledWork(self, operation, keep, after)
        with self._errors(operation), GATE:
            if load_mpi().Is_finalized():  # a call behind it ends the process
                raise TransportError("MPI.Finalize() has been called; destroy_process_group() comes first")
            if self.failed:
                raise TransportError(self._why or "it was aborted")
            self._started += 1
            work.number = self._started
            work.request, work.then = begin(), then
            self._under_way[work.number] = work
        return work

    def wait(self, work: PolledWork) -> None:
        """Wait for one."""

        def done() -> bool:
            with GATE:
                self._advance()
                return work.then is None and bool(work.request.Test())

        with self._errors(work.operation):
            if not poll(done, self._seconds, lambda: self._look(work)):
                raise self._who()
        if self._told_to_wait:
            self._tell("")
        with GATE:
            self._under_way.pop(work.number, None)

    def _advance(self) -> None:
        """Start second collectives, on every rank in the order of the first ones."""
        for work in self._under_way.values():
            if work.then is not None:
                if not work.request.Test():
                    return
                work.request, work.then = work.then(), None

    def _look(self, work: PolledWork) -> None:
        """Tell that this rank waits; raises if another has left before it came to what is waited for."""
        if self.failed:
            raise TransportError(self._why or "it was aborted")
        left = ""
        self._tell("waits")
        with contextlib.suppress(TransportError):  # the store's rank may be on its way out
            left = self._store.read(f"left/{self._leases}") or ""
        for note in left.split():
            if not re.fullmatch(r"\d+:(-1|\d+)", note):
                raise TransportError(f"who has left is told by {note[:40]!r}, no note of a rank")
            rank, started = map(int, note.split(":"))
            if started < work.number and rank != self._name:
                raise TransportError(f"rank {rank} has ended, or takes no part any more", [rank])

    def _tell(self, what: str) -> None:
        """What this rank does; a rank that waits, in this collective or an earlier one, is not what others lack."""
        self._told_to_wait = bool(what)
        with contextlib.suppress(TransportError):
            self._store.set(f"doing/{self._name}", what)

    def _who(self) -> TransportError:
        why = late(self._seconds)
        others = [rank for rank in self._names if rank != self._name]
        try:
            missing = [rank for rank in others if self._store.read(f"doing/{rank}") != "waits"]
        except TransportError as error:
            return TransportError(f"a rank {why}, and nobody can be asked which: {error}")
        return TransportError(f"rank {', '.join(map(str, missing)) or 'unknown'} {why}", missing)

    def begin(self) -> None:
        """A transport uses it from now on; on every rank at once."""
        self._leases += 1

    def tell_end(self, at_once: bool = False) -> None:
        """Tell the others that this rank starts nothing more, or `at_once` that it ends what is under way."""
        with contextlib.suppress(TransportError):
            self._store.append(f"left/{self._leases}", f"{self._name}:{-1 if at_once else self._started} ")

    def leave(self) -> None:
        """The transport begins nothing more."""
        if self.failed:
            _broken.add(self)
        self.tell_end(at_once=self.failed)

    def abort(self) -> None:
        """End what is under way, on the peers when they next ask."""
        self.failed = True
        self.leave()

    def all_to_all(self, received: Tensor, wire: Tensor, after: Callable[[], object] | None = None) -> Work:
        """Row r of `received` from rank r's own shard of bytes."""

        def begin() -> Any:
            return self._first.Ialltoall(self._shards(wire), self._shards(received))

        return self.start("all_to_all", begin, [received, wire], after=after)

    def all_gather(
        self, wire: Tensor, operation: str = "all_gather", after: Callable[[], object] | None = None
    ) -> Work:
        """Shard r of `wire` from rank r, in place, as bytes."""

        def begin() -> Any:
            return self._first.Iallgather(load_mpi().IN_PLACE, self._shards(wire))

        return self.start(operation, begin, [wire], after=after)

    def all_reduce(self, tensor: Tensor, after: Callable[[], object] | None = None) -> Work:
        """The sum in rank order, in place and in the tensor's dtype: all-to-all, our sum of the own shard, all-gather.

        0.62 of the time of MPI's Iallreduce (100 MB of FP32 in 25 MB buckets, two ranks on one machine), and it
        sums FP16 and BF16, which MPI does not know.
        """
        flat = tensor.view(-1)
        if flat.numel() % self.size:
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))

            def copy_back() -> None:
                flat.copy_(padded[: flat.numel()])
                if after is not None:
                    after()

            return self.all_reduce(ready(padded), copy_back)
        room = self._take_room(flat)
        received = room[: flat.nbytes].view(flat.dtype)
        rows, own = received.view(self.size, -1), flat.view(self.size, -1)[self.rank]

        def sum_and_gather() -> Any:
            torch.add(rows[0], rows[1], out=own)
            for row in rows[2:]:
                own.add_(row)
            self._spare[room.data_ptr()] = room
            return self._second.Iallgather(load_mpi().IN_PLACE, self._shards(ready(flat)))

        def begin() -> Any:
            return self._first.Ialltoall(self._shards(flat), self._shards(received))

        return self.start("all_reduce", begin, [flat, received], sum_and_gather, after)

    def _take_room(self, flat: Tensor) -> Tensor:
        """Bytes to receive `flat` in: of those that are spare the smallest that do, or new ones for the largest."""
        spare = sorted(((room.numel(), at) for at, room in list(self._spare.items()) if room.device == flat.device))
        fits = [at for nbytes, at in spare if nbytes >= flat.nbytes]
        room = self._spare.pop(fits[0] if fits else spare[-1][1], None) if spare else None
        if room is None or room.numel() < flat.nbytes:
            return torch.empty(flat.nbytes, dtype=torch.uint8, device=flat.device)
        return room

    def _shards(self, wire: Tensor) -> list[Any]:
        """Called under GATE: it may have MPI make a datatype."""
        return [load_mpi().memory.fromaddress(wire.data_ptr(), wire.nbytes), *_unit(wire.nbytes // self.size)]

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return messages.exchange_in_rows(
            value, self.rank, self.size, lambda rows: self.all_gather(rows, operation).wait()
        )


class PolledWork:
    """Collectives under way on one communicator."""

    request: Any
    number: int
    then: Begin | None

    def __init__(
        self, communicator: MpiConnection, operation: str, keep: list[Tensor], after: Callable[[], object] | None
    ) -> None:
        self.operation = operation
        self._communicator, self._keep, self._after = communicator, keep, after

    def wait(self) -> None:
        """Poll until they have ended; errors come out as TransportError."""
        self._communicator.wait(self)
        after, self._after = self._after, None
        if after is not None:
            after()


def ready(tensor: Tensor) -> Tensor:
    """`tensor`, once its stream has written it: MPI knows no streams."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return tensor


def _make(ranks: list[int]) -> tuple[Any, Any]:
    """A communicator over ranks of COMM_WORLD, and a second one, begun whenever a first collective has ended."""
    world = load_mpi().COMM_WORLD
    with GATE:
        first = world.Create_group(world.group.Incl(ranks))
        return first, first.Dup()


each_at_exit(Exit.TELL, MpiConnection.tell_end, _alive)  # nobody waits for a rank that is gone


def _unit(nbytes: int) -> tuple[int, Any]:
    """Count and MPI datatype of `nbytes` bytes."""
    return (nbytes, load_mpi().BYTE) if nbytes <= BLOCK else (1, _large(nbytes))


@cache
def _large(nbytes: int) -> Any:
    byte = load_mpi().BYTE
    blocks, rest = divmod(nbytes, BLOCK)
    block = byte.Create_contiguous(BLOCK)
    return block.Create_struct([blocks, rest], [0, blocks * BLOCK], [block, byte]).Commit()
