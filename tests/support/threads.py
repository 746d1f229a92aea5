"""Threads of ours, counted."""

from __future__ import annotations

import threading
import time

STAY = ("fastreduce-store", "fastreduce-signal")


def communication_threads() -> int:
    """Those that this process has now, but for those that stay: one asks a store, one prints at a signal."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith("fastreduce") and name not in STAY for name in names)


def threads_left_over(before: int) -> int:
    """Communication threads beyond those of `before`, after what they need to end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and communication_threads() > before:
        time.sleep(0.01)
    return communication_threads() - before
