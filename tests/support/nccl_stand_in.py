"""In the place of CuPy's NCCL and of CUDA's streams: host memory moves between real processes, through files.

This module has the names of `cupy.cuda.nccl` that the transport uses, with the same signatures (a test compares
them). Like NCCL it takes raw addresses, moves sends and receives of a group together, lets a send outside of one
wait for its receiver, and works in the order of a stream. Unlike NCCL it notices ranks that disagree.

Stream 0 works at once, on the caller's thread. A `Stream` has a thread of its own, as a GPU would.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fastreduce import transports
from fastreduce.ddp import elastic_reducer
from fastreduce.transports.nccl import connection, library, watchdog

NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64 = 0, 1, 2, 4
NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 6, 7, 8, 9
NCCL_SUM = 0

DTYPES = {
    NCCL_INT8: torch.int8,
    NCCL_UINT8: torch.uint8,
    NCCL_INT32: torch.int32,
    NCCL_INT64: torch.int64,
    NCCL_FLOAT16: torch.float16,
    NCCL_FLOAT32: torch.float32,
    NCCL_FLOAT64: torch.float64,
    NCCL_BFLOAT16: torch.bfloat16,
}

available = True
version = 23203
directory = ""


class NcclError(RuntimeError):
    pass


@contextlib.contextmanager
def installed(where: str) -> Iterator[None]:
    """NcclTransport works with this, on CPU tensors, in files below `where`."""
    global directory
    directory = where
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_nccl", lambda: sys.modules[__name__])
        patch.setattr(library, "Cuda", HostCuda)
        # Ten times a second in place of twice.
        patch.setattr(watchdog, "WAKE_SECONDS", 0.1)
        patch.setattr(connection, "WAKE_SECONDS", 0.1)
        patch.setattr(connection, "PATIENCE_SECONDS", 1.0)
        yield


@contextlib.contextmanager
def asked_for_on_cpus() -> Iterator[None]:
    """`transport="nccl"` is allowed for modules on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(transports.TRANSPORTS, "nccl", ("cpu",))
        patch.setitem(elastic_reducer.TRANSPORTS, "cpu", ("nccl",))
        yield


# CuPy's module


def get_version() -> int:
    return version


def get_unique_id() -> bytes:
    return Path(tempfile.mkdtemp(dir=directory)).name.encode().ljust(128, b"\0")


class _Group(threading.local):
    depth = 0
    calls: list[_Call] | None = None


_group = _Group()


def groupStart() -> None:
    if _group.depth == 0:
        _group.calls = []
    _group.depth += 1


def groupEnd() -> None:
    if _group.depth == 0:
        raise NcclError("NCCL_ERROR_INVALID_USAGE: groupEnd without groupStart")
    _group.depth -= 1
    if _group.depth == 0:
        calls, _group.calls = _group.calls or [], None
        _launch(calls)


def _launch(calls: list[_Call]) -> None:
    if not calls:
        return
    streams = {call.stream for call in calls}
    assert len(streams) == 1, "a group on several streams"
    stream = Stream.known.get(streams.pop())

    def run() -> None:
        for call in calls:
            call.start()
        for call in sorted(calls, key=lambda call: call.last):
            call.finish()

    if stream is None:
        run()
    else:
        stream.put(lambda: calls[0].communicator._guard(run))


class NcclCommunicator:
    async_error: Exception | None = None

    def __init__(self, ndev: int, commId: bytes, rank: int, config: Any = None) -> None:
        assert isinstance(commId, bytes) and len(commId) == 128 and 0 <= rank < ndev and config is None
        self.ndev, self.rank, self.path = ndev, rank, Path(directory, commId.rstrip(b"\0").decode())
        self.aborted = self.destroyed = False
        self._calls = 0
        self._sent: Counter[int] = Counter()  # by peer
        self._received: Counter[int] = Counter()
        everybody = [self.path / f"init.{r}" for r in range(ndev)]
        everybody[rank].touch()
        self.until(lambda: all(path.exists() for path in everybody))

    def destroy(self) -> None:
        self.destroyed = True

    def abort(self) -> None:
        self.aborted = True

    def check_async_error(self) -> None:
        assert not self.aborted and not self.destroyed
        if self.async_error:
            raise self.async_error

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert op == NCCL_SUM
        self._collective(("allReduce", count, datatype), sendbuf, count, recvbuf, datatype, _sum, stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._collective(("allGather", count, datatype), sendbuf, count, recvbuf, datatype, torch.cat, stream)

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._sent[peer] += 1
        path = self.path / f"{self.rank} to {peer}.{self._sent[peer]}"
        wire = _memory(sendbuf, count, datatype)

        def start() -> None:
            _publish(path, (count, datatype), wire)

        self._submit(_Call(self, stream, start, lambda: self.until(lambda: not path.exists()), last=True))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._received[peer] += 1
        path = self.path / f"{peer} to {self.rank}.{self._received[peer]}"
        into = _memory(recvbuf, count, datatype)

        def finish() -> None:
            self.until(path.exists)
            into.copy_(_read(path, (count, datatype)))
            path.unlink()

        self._submit(_Call(self, stream, lambda: None, finish))

    def _collective(
        self,
        what: tuple[Any, ...],
        sendbuf: int,
        send_count: int,
        recvbuf: int,
        datatype: int,
        combine: Callable[[list[Tensor]], Tensor],
        stream: int,
    ) -> None:
        self._calls += 1
        number, wire = self._calls, _memory(sendbuf, send_count, datatype)
        paths = [self.path / f"{number}.{rank}" for rank in range(self.ndev)]

        def finish() -> None:
            try:
                self.until(lambda: all(path.exists() for path in paths))
            except NcclError:
                paths[self.rank].unlink()  # a rank that gives up does not count as having come
                raise
            result = combine([_read(path, what) for path in paths])
            _memory(recvbuf, result.numel(), datatype).copy_(result)
            (self.path / f"{number - 1}.{self.rank}").unlink(missing_ok=True)  # everybody has left that one

        self._submit(_Call(self, stream, lambda: _publish(paths[self.rank], what, wire), finish))

    def _submit(self, call: _Call) -> None:
        if self.aborted or self.destroyed:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: the communicator has ended")
        if _group.calls is None:
            _launch([call])
        else:
            _group.calls.append(call)

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self.aborted:
                raise NcclError("NCCL_ERROR_INTERNAL_ERROR: aborted")
            time.sleep(0.0005)

    def _guard(self, run: Callable[[], None]) -> None:
        """On a stream: an aborted kernel ends, other errors show in `check_async_error`."""
        try:
            run()
        except Exception as error:
            if not self.aborted:
                self.async_error = error


class _Call:
    """A call in two parts: `start` waits for nobody; those that are `last` finish last."""

    def __init__(
        self,
        communicator: NcclCommunicator,
        stream: int,
        start: Callable[[], None],
        finish: Callable[[], None],
        last: bool = False,
    ) -> None:
        self.communicator, self.stream, self.start, self.finish, self.last = communicator, stream, start, finish, last


def _memory(address: int, count: int, datatype: int) -> Tensor:
    dtype = DTYPES[datatype]
    if not count:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _sum(sent: list[Tensor]) -> Tensor:
    total = sent[0].clone()
    for other in sent[1:]:
        total += other
    return total


def _publish(path: Path, what: tuple[Any, ...], wire: Tensor) -> None:
    """Write a file at one go."""
    partial = path.with_name(f"{path.name} of {os.getpid()}")
    partial.write_bytes(pickle.dumps((what, wire.dtype, wire.view(torch.uint8).numpy().tobytes())))
    partial.rename(path)


def _read(path: Path, expected: tuple[Any, ...]) -> Tensor:
    what, dtype, data = pickle.loads(path.read_bytes())
    if what != expected:
        raise NcclError(f"ranks disagree: {what} there, {expected} here")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


# CUDA


class Stream:
    """Works in order, on a thread of its own."""

    known: ClassVar[dict[int, Stream]] = {}
    current: ClassVar[Stream | None] = None

    def __init__(self) -> None:
        self.cuda_stream = id(self)
        self.known[self.cuda_stream] = self
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._jobs.get()()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def synchronize(self) -> None:
        """Wait in C for all that is enqueued, as CUDA does: no exception from outside ends it."""
        event = Event()
        event.record(self)
        event.lock.acquire()

    @contextlib.contextmanager
    def as_current(self) -> Iterator[Stream]:
        Stream.current = self
        try:
            yield self
        finally:
            Stream.current = None


class _AtOnce:
    cuda_stream = 0

    def put(self, job: Callable[[], None]) -> None:
        job()


class Event:
    """Not done from `record` until its stream comes to it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def record(self, stream: Any) -> None:
        self.lock.acquire(blocking=False)
        stream.put(self.lock.release)

    def query(self) -> bool:
        return not self.lock.locked()


class HostCuda(library.Cuda):
    """CPU tensors, and the streams above."""

    device_type = "cpu"
    is_capturing = False
    gpu: str | None = None
    watchdogs = 0

    def stream(self, device: torch.device) -> Any:
        return Stream.current or _AtOnce()

    def capturing(self) -> bool:
        return self.is_capturing

    def event(self) -> Any:
        return Event()

    def using(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def identity(self, device: torch.device) -> str:
        return self.gpu or f"process {os.getpid()}"

    def enter_watchdog(self, device: torch.device) -> None:
        HostCuda.watchdogs += 1
