"""Waiting for MPI by looking, again and again, with a limit."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..meeting import LOOK_SECONDS

POLL_SECONDS = 20e-6  # between two looks at what is under way; MPI moves data only while somebody looks


def poll(done: Callable[[], bool], seconds: float, look: Callable[[], None] = lambda: None) -> bool:
    """Call `done` until it is true, or for `seconds`; `look` now and then. Returns whether it is true.

    Sleeps in between: a thread in MPI's own Wait takes a core that backward needs. 50 MB to and from one peer took
    27 ms so, 48 with Wait (a busy machine, a core for each rank). Pauses of 1 ms cost 600 ms where MPI copies
    through small buffers, because each look moves some.
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


def late(seconds: float) -> str:
    """What is said of one for whom nobody waits any longer."""
    return f"did not come within {seconds:g} s"
