"""once: what a process does a single time, whoever asks for it first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps


def once(function: Callable[[], None]) -> Callable[[], None]:
    """A function whose first call does it, and whose others wait for that one and do nothing.

    One that raises has not been done. `functools.cache` does it twice where two threads come at once.
    """
    lock, done = threading.RLock(), False

    @wraps(function)
    def call() -> None:
        nonlocal done
        if not done:
            with lock:
                if not done:
                    function()
                    done = True

    return call
