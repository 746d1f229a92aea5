"""NCCL beside a group: its communicators, who watches them, and what happens when one fails."""

from __future__ import annotations

import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...environment.exits import Exit, at_exit, each_at_exit
from ...errors import TransportError
from ..deadlines import in_background
from ..meeting import AbsentError, clear, look_for, meet, no_word_from, notes
from ..messages import checked, decode, encode
from ..ranks import Ranks, client_of, names_of, own_name, place_in, timeout_of, who_is_gone
from ..store_client import SOON_SECONDS
from . import library
from .communicator import Communicator, Enqueue, Entry
from .library import GpuPlace, check_distinct
from .watchdog import (
    END_SECONDS,
    WAKE_SECONDS,
    Watchdog,
    join_all,
    raise_in_main_thread,
    running,
    withdraw_from_main_thread,
)

PATIENCE_SECONDS = 4 * WAKE_SECONDS  # for ranks to note how far they are, once one has failed

_alive: weakref.WeakSet[NcclConnection] = weakref.WeakSet()


class NcclConnection:
    """The communicators over one group that one transport at a time uses, one for each set of devices.

    A watchdog thread looks whether collectives end and NCCL is well. When one fails, all fail: the error is kept
    and raised by every later call; if no thread is inside a call, it is raised on the main thread, which waits for
    the GPU; then the communicators are aborted, which ends that wait.

    Args:
        group: the ranks.
        name: that no other connection beside them has.
        interrupts: whether an error may be raised on the main thread; else who waits for the GPU calls `check`.

    Raises:
        BackendUnavailableError: if NCCL cannot be used.
    """

    def __init__(self, group: Ranks, name: str, interrupts: bool) -> None:
        self._nccl, self._cuda = library.load_nccl(), library.Cuda()
        self.rank, self.size = place_in(group)
        self._me, self._names, self._interrupts = own_name(group), names_of(group), interrupts
        self._look_for_gone = look_for(who_is_gone(group))
        self._seconds = timeout_of(group).total_seconds()
        self._store = client_of(group).at(f"fastreduce/nccl/{name}/exchange")
        self._exchanges = 0
        self._progress_notes = client_of(group).at(f"fastreduce/nccl/{name}/progress", SOON_SECONDS)
        self._communicators: dict[tuple[str, ...], Communicator] = {}
        self._failure: str | None = None
        self._state = threading.Lock()  # never held while anything blocks
        self._calls_inside, self._leases = 0, 0
        self._open = self._raised = False
        self._told: dict[str, int] = {}
        self._session = ""  # no rank has left the same notes in this store before
        self._watchdog = Watchdog(self, self._communicators)
        weakref.finalize(self, self._watchdog.end).atexit = False
        _alive.add(self)

    # Use by transports

    @property
    def failed(self) -> bool:
        """Whether it cannot be used any more."""
        return self._failure is not None

    def begin(self) -> None:
        """A transport uses it from now on; on every rank at once."""
        if not self._leases:
            self._session = checked(self.exchange(uuid.uuid4().hex, "connecting"), _hex, "number of a session")[0].hex()
        self._leases += 1
        self._open = True

    def leave(self) -> None:
        """The transport begins nothing more; nothing is raised on the main thread from now on."""
        with self._state:
            self._open = False
            self._withdraw()
        for communicator in list(self._communicators.values()):
            self._tell(communicator)
        self._note(f"{self.rank} ")

    def abort(self) -> None:
        """End what is under way, here and on the peers."""
        with self._state:
            self._open = False
            self._withdraw()
            self._failure = self._failure or f"{self._me}: this NCCL transport was aborted."
        self._abort()
        self._watchdog.join(min(END_SECONDS, self._seconds / 4))  # who waits here may have to say that it is alive

    def end(self) -> None:
        """At exit: begin to give everything back."""
        if not self.failed:
            if self._open and self._communicators:
                self.leave()
            self._watchdog.end()

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        """Every rank's value, over the store. A rank that raises has left; all ranks may then try again.

        Raises:
            TransportError: naming the ranks that do not come.
        """
        with self._inside():
            try:
                return self._meet(value)
            except TransportError as error:
                why = no_word_from(error.missing) if isinstance(error, AbsentError) else str(error)
                raise TransportError(
                    f"{self._me}: {operation} over NCCL's store failed. {why}", error.missing
                ) from error

    def _meet(self, value: Any) -> list[Any]:
        ranks, here = self._names, self._store.at(f"round {self._exchanges}")
        meet(here, ranks[self.rank], ranks, self._seconds, encode(value).decode(), self._look)
        told = notes(here, ranks)
        clear(here, ranks)  # a later group may have the same name in the same store
        self._exchanges += 1
        return [decode(text, rank, lambda found: found) for rank, text in enumerate(told)]

    def communicator(self, device: torch.device) -> Communicator:
        """The one on this rank's `device` and the devices that the other ranks name; all ranks call it at once.

        Raises:
            BackendUnavailableError: if two ranks are on one GPU.
            TransportError: if ranks do not come, or NCCL cannot connect.
        """
        if self._cuda.capturing():
            raise TransportError(
                f"{self._me}: NCCL connects in the first collective, which a CUDA graph cannot "
                "capture: run a step before the capture"
            )
        place = GpuPlace.of(device, self._cuda, self._nccl)
        places = checked(self.exchange(asdict(place), "connecting"), GpuPlace.told, "place of a GPU")
        check_distinct(self.rank, places, self._nccl.get_version())
        gpus = tuple(place.gpu for place in places)
        if gpus not in self._communicators:
            communicator = self._connect(device, str(len(self._communicators)))
            self._communicators[gpus] = communicator
            cuda = self._cuda  # the thread must not hold the connection
            self._watchdog.start(lambda: cuda.enter_watchdog(device))
        return self._communicators[gpus]

    def _connect(self, device: torch.device, key: str) -> Communicator:
        with self._inside(lambda error: ("connecting", str(error))):
            mine = self._nccl.get_unique_id() if self.rank == 0 else b""
            told = self._meet(mine.hex() if isinstance(mine, bytes) else list(mine))
            identifier = checked(told, _identifier, "identifier of a communicator")[0]

            def make() -> Any:
                with self._cuda.using(device):
                    return self._nccl.NcclCommunicator(self.size, identifier, self.rank)

            made = in_background(make, self._seconds, self._look)  # NCCL itself has no timeout here
        return Communicator(made, device, self._cuda, key)

    def run(self, communicator: Communicator, operation: str, tensor: Tensor, about: str, enqueue: Enqueue) -> None:
        """Enqueue a collective.

        Raises:
            TransportError: if NCCL refuses it, or anything failed before.
        """

        def told(error: Exception) -> tuple[str, str]:
            entry = Entry(communicator.begun, operation, tensor.nbytes, tensor.dtype, about)
            return str(entry), f"{error}. {self._who(communicator, entry)} {about}".rstrip()

        with self._inside(told):
            communicator.run(operation, tensor, about, enqueue)

    # Failing

    def _look(self) -> None:
        """Raise where it is in vain to wait for the others."""
        self.check()
        self._look_for_gone()

    def check(self) -> None:
        """Raise what made the connection fail."""
        with self._state:
            self._raise_failure()

    @contextmanager
    def _inside(self, told: Callable[[Exception], tuple[str, str]] | None = None) -> Iterator[None]:
        """A call of the transport: what fails meanwhile is raised by it, not on the main thread from outside.

        With `told`, whatever CuPy, NCCL or CUDA raises in the call makes the connection fail: it comes out as
        TransportError, with the operation and reason that `told` gives.
        """
        with self._state:
            self._raise_failure()
            self._calls_inside += 1
        try:
            yield
        except Exception as error:  # CuPy meets codes that it does not know with KeyError
            if told is not None and not self.failed:
                self.fail(*told(error))
            raise
        finally:
            with self._state:
                self._calls_inside -= 1
                self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._withdraw()
            raise TransportError(self._failure)

    def _withdraw(self) -> None:
        if self._raised:
            self._raised = False
            withdraw_from_main_thread()

    def fail(self, operation: str, reason: str) -> None:
        """Keep the error, raise it on the main thread if nobody else will, abort: in this order."""
        with self._state:
            if self._failure is not None:
                return
            self._failure = f"{self._me}: {operation} over NCCL failed: {reason}"
            if self._interrupts and self._open and not self._calls_inside:
                self._raised = True
                raise_in_main_thread(self._failure)
        self._abort()

    def _abort(self) -> None:
        self._note(f"{self.rank}! ")
        self._watchdog.end(abort=True)

    # The watchdog's part

    def look(self) -> bool:
        """Look at what is under way, and tell the others how far this rank is; true when all is over."""
        for communicator in list(self._communicators.values()):
            oldest = None
            try:
                oldest = communicator.oldest()
                communicator.check()
                reason = self._why_given_up(communicator, oldest)
            except Exception as error:  # whatever it is, this thread must not die of it
                reason = f"{type(error).__name__}: {error}."
                if oldest is not None:
                    reason += f" {self._who(communicator, oldest)}"
            if reason is not None:
                self.fail(str(oldest or "watching"), f"{reason} {oldest.about if oldest else ''}".rstrip())
                return True
            if self._told.get(communicator.key) != communicator.begun:
                self._tell(communicator)
        return self.failed

    def _why_given_up(self, communicator: Communicator, oldest: Entry | None) -> str | None:
        waited = time.monotonic() - oldest.begun if oldest else 0.0
        if oldest is None or waited < WAKE_SECONDS:
            return None
        if waited > self._seconds:
            return f"it did not end within {self._seconds:g} s. {self._who(communicator, oldest)}"
        left = ""
        with suppress(TransportError):
            left = self._progress_notes.read(self._left) or ""
        for note in left.split():
            if not re.fullmatch(r"\d{1,9}!?", note) or (rank := int(note.rstrip("!"))) >= self.size:
                return f"who has left is told by {note[:40]!r}, no note of a rank."
            if note.endswith("!"):
                return f"rank {self._names[rank]} gave up. {self._who(communicator, oldest)}"
            with suppress(TransportError):
                if rank != self.rank and self._progress(communicator, rank) < oldest.number:
                    return f"rank {self._names[rank]} has ended, or takes no part any more."
        return None

    @property
    def _left(self) -> str:
        return f"{self._session}/left/{self._leases}"

    def _note(self, text: str) -> None:
        with suppress(TransportError):
            self._progress_notes.append(self._left, text)

    def _tell(self, communicator: Communicator) -> None:
        self._told[communicator.key] = communicator.begun
        with suppress(TransportError):
            self._progress_notes.set(f"{self._session}/{communicator.key}/{self.rank}", str(communicator.begun))

    def _progress(self, communicator: Communicator, rank: int) -> int:
        text = self._progress_notes.read(f"{self._session}/{communicator.key}/{rank}") or "0"
        return int(text[:20]) if text.isdecimal() else 0

    def _who(self, communicator: Communicator, entry: Entry) -> str:
        """Ranks that have not come to `entry`; those that have may still have to say so, as this one does."""
        self._tell(communicator)
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + PATIENCE_SECONDS
        try:
            while missing := [r for r in missing if self._progress(communicator, r) < entry.number]:
                if time.monotonic() > deadline:
                    return no_word_from([self._names[rank] for rank in missing])
                time.sleep(0.05)
        except TransportError as error:
            return f"Nobody can be asked who is missing: {error}."
        return "All ranks had come to it."


def _identifier(value: Any) -> bytes | tuple[int, ...]:
    """What CuPy makes: bytes, or their numbers."""
    if isinstance(value, list) and all(type(n) is int and -128 <= n < 256 for n in value):
        return tuple(value)
    return _hex(value)


def _hex(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"hexadecimal digits were expected, not {value!r:.80}")
    return bytes.fromhex(value)


each_at_exit(Exit.NCCL, NcclConnection.end, _alive)
at_exit(Exit.NCCL, join_all, running)
