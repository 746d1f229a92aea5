"""Calls that may never return, made so that nobody waits for them longer than a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..environment.exits import Exit, at_exit

LOOK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # beyond a timeout that torch itself was given, whose own error says more
EXIT_SECONDS = 1.0

_running: set[threading.Event] = set()
"""Of calls that have not returned, though nobody may wait for them any more: set when they have."""


def in_background(function: Callable[[], Any], seconds: float, look: Callable[[], None] | None = None) -> Any:
    """The value of `function()` on a daemon thread of its own; `look`, called now and then meanwhile, may raise.

    Raises:
        TimeoutError: if it does not return in time; the thread is left behind.
        BaseException: what it raises.
    """
    outcome: list[Any] = []
    # Not the thread's own end: Python takes it for ended once an interrupt has come between a wait for it.
    returned = threading.Event()

    def run() -> None:
        _running.add(returned)
        try:
            outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))
        _running.discard(returned)
        returned.set()

    threading.Thread(target=run, name="fastreduce-background", daemon=True).start()
    deadline = time.monotonic() + seconds
    while look is not None and time.monotonic() < deadline and not returned.wait(LOOK_SECONDS):
        look()
    if not returned.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = outcome
    if error is not None:
        raise error
    return value


def _wait_for_all() -> None:
    """At exit: one that came back from C++ while Python goes would abort the process."""
    deadline = time.monotonic() + EXIT_SECONDS
    for returned in list(_running):
        returned.wait(max(0.0, deadline - time.monotonic()))


at_exit(Exit.GLOO, _wait_for_all, _running)
