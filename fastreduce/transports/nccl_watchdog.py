"""The thread that watches NCCL collectives, and errors that it raises on the main thread."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any, Protocol

from ..errors import TransportError

WAKE_SECONDS = 0.5


class Watched(Protocol):
    """What `watch` looks after."""

    def prepare_watchdog(self) -> None:
        """Called once, on the thread."""

    def look(self) -> bool:
        """Look at what is under way; false ends the thread."""


def watch(watched: Watched, stop: threading.Event) -> None:
    """Start a daemon thread that calls `watched.look()` twice a second, until `stop` or the end of `watched`."""
    arguments = (weakref.ref(watched), stop)
    threading.Thread(target=_work, args=arguments, name="fastreduce-nccl-watchdog", daemon=True).start()


def _work(reference: weakref.ref[Watched], stop: threading.Event) -> None:
    watched = reference()
    if watched is not None:
        watched.prepare_watchdog()
    del watched
    while not stop.wait(WAKE_SECONDS):
        watched = reference()
        if watched is None or not watched.look():
            return
        del watched  # nobody waits for this thread to let go


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
