"""Calls that may never return, made so that nobody waits for them longer than a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

GRACE_SECONDS = 3.0  # beyond a timeout that torch itself was given, whose own error says more


def in_background(function: Callable[[], Any], seconds: float) -> Any:
    """The value of `function()` on a daemon thread of its own.

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
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    value, error = outcome
    if error is not None:
        raise error
    return value
