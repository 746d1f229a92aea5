"""One NCCL communicator: what is under way on it, and how it ends."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .nccl_library import Cuda

END_SECONDS = 5.0  # for what is under way, and again for NCCL's own end: nobody waits for ever at exit

Enqueue = Callable[[Any, int], None]  # (CuPy's communicator, address of a stream)


@dataclass
class Entry:
    """A collective under way."""

    number: int
    operation: str
    nbytes: int
    dtype: torch.dtype
    about: str
    begun: float = field(default_factory=time.monotonic)
    event: Any = None  # None until it is enqueued

    def __str__(self) -> str:
        return f"{self.operation} (collective {self.number}, {self.nbytes} bytes of {self.dtype})"


class Communicator:
    """CuPy's communicator on one device; `key` names it among the notes of the ranks."""

    def __init__(self, made: Any, device: torch.device, cuda: Cuda, key: str) -> None:
        self.device, self.key = device, key
        self.begun = 0  # the number of the last collective
        self._made, self._cuda = made, cuda
        self._entries: deque[Entry] = deque()
        self._spare_events: list[Any] = []
        self._order = threading.Lock()  # collectives are enqueued in the order of their numbers
        self._forgetting = threading.Lock()
        self._ended = False

    def run(self, operation: str, tensor: Tensor, about: str, enqueue: Enqueue) -> None:
        """Enqueue a collective on the current stream, and watch it, unless a CUDA graph is being captured.

        Raises:
            RuntimeError: CuPy's.
        """
        with self._order, self._cuda.using(self.device):
            self.begun += 1
            stream, watched = self._cuda.stream(self.device), not self._cuda.capturing()
            if watched:
                entry = Entry(self.begun, operation, tensor.nbytes, tensor.dtype, about)
                self._entries.append(entry)
            enqueue(self._made, stream.cuda_stream)
            if watched:
                event = self._spare_events.pop() if self._spare_events else self._cuda.event()
                event.record(stream)
                entry.event = event

    def oldest(self) -> Entry | None:
        """The first collective that is not done; forgets those that are.

        Raises:
            RuntimeError: torch's, for an error of CUDA.
        """
        with self._forgetting:
            while self._entries:
                entry = self._entries[0]
                if entry.event is None or not entry.event.query():
                    return entry
                self._entries.popleft()
                self._spare_events.append(entry.event)
        return None

    def check(self) -> None:
        """Raise CuPy's error if NCCL noticed one by itself."""
        if not self._ended:
            self._made.check_async_error()

    def abort(self) -> None:
        """End what is under way, here and on the peers."""
        if not self._ended:
            self._ended = True
            # Not while another thread is inside NCCL, unless it waits there for a peer.
            locked = self._order.acquire(timeout=1)
            try:
                self._in_background(self._made.abort)
            finally:
                if locked:
                    self._order.release()

    def end(self) -> None:
        """Give it back; what is under way is waited for, but not for long."""
        if self._ended:
            return
        deadline = time.monotonic() + END_SECONDS
        with contextlib.suppress(RuntimeError):
            while self.oldest() is not None:
                if time.monotonic() > deadline:
                    self.abort()
                    return
                time.sleep(0.01)
        self._ended = True
        self._in_background(self._made.destroy)  # unlike abort, delivers what peers have still to receive

    def _in_background(self, end: Callable[[], None]) -> None:
        """NCCL may wait for the peers' own end."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            in_background(end, END_SECONDS, self._cuda, self.device)


def in_background(function: Callable[[], Any], seconds: float, cuda: Cuda, device: torch.device) -> Any:
    """The value of `function()` on a thread of its own.

    Raises:
        TimeoutError: if it does not return in time; the thread is left behind.
        BaseException: what it raises.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            with cuda.using(device):
                outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="fastreduce-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = outcome
    if error is not None:
        raise error
    return value
