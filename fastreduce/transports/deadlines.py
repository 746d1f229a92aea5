"""Calls that may never return, made so that nobody waits for them longer than a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

LOOK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # beyond a timeout that torch itself was given, whose own error says more


def in_background(function: Callable[[], Any], seconds: float, look: Callable[[], None] | None = None) -> Any:
    """The value of `function()` on a daemon thread of its own; `look`, called now and then meanwhile, may raise.

    Raises:
        TimeoutError: if it does not return in time; the thread is left behind.
        BaseException: what it raises.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend((function(), None))
        except BaseException as error:
            outcome.extend((None, error))

    thread = threading.Thread(target=run, name="fastreduce-background", daemon=True)
    thread.start()
    deadline = time.monotonic() + seconds
    while look is not None and thread.is_alive() and time.monotonic() < deadline:
        thread.join(LOOK_SECONDS)
        if thread.is_alive():
            look()
    thread.join(max(0.0, deadline - time.monotonic()))
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = outcome
    if error is not None:
        raise error
    return value
