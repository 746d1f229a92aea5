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

from .library import Cuda

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
        self.captured = False  # a CUDA graph holds it: NCCL waits for the graph's end before it ends
        self._made, self._cuda = made, cuda
        self._entries: deque[Entry] = deque()
        self._spare_events: list[Any] = []
        self._order = threading.Lock()  # collectives are enqueued in the order of their numbers
        self._forgetting = threading.Lock()

    def run(self, operation: str, tensor: Tensor, about: str, enqueue: Enqueue) -> None:
        """Enqueue a collective on the current stream, and watch it, unless a CUDA graph is being captured.

        Raises:
            RuntimeError: CuPy's.
        """
        with self._order, self._cuda.using(self.device):
            self.begun += 1
            stream, watched = self._cuda.stream(self.device), not self._cuda.capturing()
            self.captured |= not watched
            if watched:
                entry = Entry(self.begun, operation, tensor.nbytes, tensor.dtype, about)
                self._entries.append(entry)
            enqueue(self._made, stream.cuda_stream)
            if watched:
                spare = self._spare_events  # once: another thread may `forget` them
                event = spare.pop() if spare else self._cuda.event()
                event.record(stream)
                entry.event = event

    def oldest(self) -> Entry | None:
        """The first collective that is not done; forgets those that are.

        Raises:
            RuntimeError: torch's, for an error of CUDA.
        """
        with self._forgetting:
            count = len(self._entries)  # others may come meanwhile
            last = self._entries[-1].event if count else None
            all_done = last is not None and last.query()  # a query lets other threads run: one is enough, as a rule
            for _ in range(count):
                entry = self._entries[0]
                if not all_done and (entry.event is None or not entry.event.query()):
                    return entry
                self._entries.popleft()
                self._spare_events.append(entry.event)
        return None

    def forget(self) -> None:
        """Let go of all collectives, and of their events."""
        with self._forgetting:
            self._entries.clear()
            self._spare_events = []

    @property
    def busy(self) -> bool:
        """Whether something is under way."""
        with contextlib.suppress(RuntimeError):
            return self.oldest() is not None
        return True

    def check(self) -> None:
        """Raise CuPy's error if NCCL noticed one by itself."""
        self._made.check_async_error()

    def end(self, abort: bool) -> None:
        """Give it back. `abort` ends what is under way; without it, peers still receive what was sent to them.

        Called once, by the thread that calls `check`. May wait for the peers' own end.
        """
        # Not while another thread is inside NCCL, unless it waits there for a peer.
        locked = self._order.acquire(timeout=1)
        try:
            with contextlib.suppress(RuntimeError), self._cuda.using(self.device):
                (self._made.abort if abort else self._made.destroy)()
        finally:
            if locked:
                self._order.release()
