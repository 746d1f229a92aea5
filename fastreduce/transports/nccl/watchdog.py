"""The thread that watches NCCL's communicators and ends them, and errors that it raises on the main thread."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import TransportError
from .communicator import Communicator

WAKE_SECONDS = 0.5
END_SECONDS = 5.0  # for what is under way when communicators end: nobody waits for ever at exit

running: set[Watchdog] = set()
"""Those whose threads have not ended, though what they watched may be gone."""


class Watched(Protocol):
    """What a watchdog looks after."""

    def look(self) -> bool:
        """Look at what is under way; true if it is to be aborted."""

    def fail(self, operation: str, reason: str) -> None:
        """Let everybody who uses it know that it has failed, and end the watchdog."""


class Watchdog:
    """A daemon thread that calls `watched.look()` twice a second, and in the end ends `communicators`.

    It starts with `start`. NCCL may wait for the peers when a communicator ends, and a thread cannot be started at
    exit: so this one does it.
    """

    def __init__(self, watched: Watched, communicators: dict[Any, Communicator]) -> None:
        self._watched, self._communicators = weakref.ref(watched), communicators
        self._over, self._aborts = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self, prepare: Callable[[], None]) -> None:
        """Begin, unless it has; `prepare` is called first, on the thread."""
        if self._thread is None:
            running.add(self)
            name = "fastreduce-nccl-watchdog"
            self._thread = threading.Thread(target=self._work, args=(prepare,), name=name, daemon=True)
            self._thread.start()

    def end(self, abort: bool = False) -> None:
        """Stop looking; the communicators end, or are aborted."""
        self._aborts |= abort
        self._over.set()

    def join(self, seconds: float) -> None:
        """Wait until the communicators have ended, but not for long: NCCL may wait for a peer that is gone."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self, prepare: Callable[[], None]) -> None:
        try:
            try:
                prepare()
            except Exception as error:  # of the driver, say: nobody would end waiting for a rank that is gone
                if (watched := self._watched()) is not None:
                    watched.fail("watching", f"{type(error).__name__}: {error}")
                watched = None
            while not self._over.wait(WAKE_SECONDS):
                watched = self._watched()
                if watched is None or watched.look():
                    self.end(abort=watched is not None)
                del watched  # nobody waits for this thread to let go
            self._end_communicators()
        finally:
            # This thread may be the last that has them, and torch gives up Python's lock while a CUDA event ends:
            # a thread that came back from there while Python goes would abort the process.
            for communicator in list(self._communicators.values()):
                communicator.forget()
            running.discard(self)

    def _end_communicators(self) -> None:
        deadline = time.monotonic() + END_SECONDS
        # Those that a CUDA graph holds come last: NCCL does not return before the graph is gone.
        for communicator in sorted(self._communicators.values(), key=lambda communicator: communicator.captured):
            if communicator.captured and not self._aborts:
                continue
            while not self._aborts and communicator.busy and time.monotonic() < deadline:
                time.sleep(0.01)
            communicator.end(abort=self._aborts or communicator.busy)


def join_all() -> None:
    """At exit, once all have been told to end: a thread that came back from C++ then would abort the process."""
    deadline = time.monotonic() + 2 * END_SECONDS
    while running and time.monotonic() < deadline:  # by `join`, one that was interrupted before counts as ended
        time.sleep(0.01)


def raise_in_main_thread(text: str) -> None:
    """Make the main thread raise TransportError(text) when it next runs Python code."""

    class Raised(TransportError):
        def __init__(self) -> None:
            super().__init__(text)

        def __reduce__(self) -> Any:
            return TransportError, (text,)

    Raised.__name__ = Raised.__qualname__ = TransportError.__name__
    Raised.__module__ = TransportError.__module__
    _set_async_exception(ctypes.py_object(Raised))  # a class: CPython makes the instance


def withdraw_from_main_thread() -> None:
    """Take back what `raise_in_main_thread` has not raised yet."""
    _set_async_exception(None)


def _set_async_exception(kind: Any) -> None:
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, kind)
