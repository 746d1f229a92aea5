"""Time that a thread loses without doing anything of its own: waiting for a processor core, and collecting garbage."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

from ...environment.once import once

SCHEDULER = "/proc/thread-self/schedstat"  # nanoseconds on a core, nanoseconds of waiting for one, turns


class _Statistics:
    """The kernel's file about the thread that opened it."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        try:
            self._file = os.open(SCHEDULER, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # a kernel without
            self._file = -1

    def queued(self) -> float:
        if self._file < 0:
            return 0.0
        try:
            return int(os.pread(self._file, 80, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


_own = threading.local()


def queued() -> tuple[int, float]:
    """This thread's id, and the seconds that it has waited for a core so far; 0 where the kernel does not tell."""
    statistics: _Statistics | None = getattr(_own, "statistics", None)
    if statistics is None:
        statistics = _own.statistics = _Statistics()
    return statistics.thread, statistics.queued()


def _after_fork() -> None:
    """A fork's thread is another one than that of which the file tells."""
    _own.__dict__.clear()


os.register_at_fork(after_in_child=_after_fork)


# Garbage


class _Collections:
    """Adds up what collections of garbage take on a core."""

    def __init__(self) -> None:
        self.seconds, self._start = 0.0, 0.0

    def __call__(self, phase: str, _: Any) -> None:
        if phase == "start":
            self._start = time.thread_time()
        else:
            self.seconds += max(0.0, time.thread_time() - self._start)


_collections = _Collections()


@once
def notice_collections() -> None:
    """Add them up from now on."""
    gc.callbacks.append(_collections)


def collected() -> float:
    """The seconds that collections of garbage have taken in this process since `notice_collections`."""
    return _collections.seconds
