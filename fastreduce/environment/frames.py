"""Walks through the frames of threads, which may go on meanwhile."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_walk = threading.RLock()  # a signal's handler may walk where its thread does


@contextmanager
def walking_frames() -> Iterator[None]:
    """For `sys._current_frames()` and the frames around those: meanwhile no garbage is collected.

    Python 3.11 makes the object of a frame when it is asked for, and may collect garbage before. What that finalizes
    can let the thread go on, and leave the frame: its memory then has something else, or is gone (SIGSEGV).
    """
    with _walk:
        collects = gc.isenabled()
        try:
            gc.disable()
            yield
        finally:
            if collects:
                gc.enable()


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those around it, the innermost one first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


# Else a fork amid another thread's walk would collect nothing, and never walk.
os.register_at_fork(before=_walk.acquire, after_in_parent=_walk.release, after_in_child=_walk.release)
