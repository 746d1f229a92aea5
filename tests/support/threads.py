"""Threads of ours, counted."""

from __future__ import annotations

import threading
import time


def communication_threads() -> int:
    """Those that this process has now."""
    return sum(thread.name.startswith("fastreduce") for thread in threading.enumerate())


def threads_left_over(before: int) -> int:
    """Communication threads beyond those of `before`, after what they need to end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and communication_threads() > before:
        time.sleep(0.01)
    return communication_threads() - before
