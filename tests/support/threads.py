"""Threads of ours, counted."""

from __future__ import annotations

import threading
import time

import psutil

STAY = ("fastreduce-store", "fastreduce-signal")


def threads_of_all() -> int:
    """The least number of this process's threads in 50 looks: one that has ended is still seen for a moment."""
    process, least = psutil.Process(), 1 << 30
    for _ in range(50):
        least = min(least, process.num_threads())
        time.sleep(0.005)
    return least


def communication_threads() -> int:
    """Those that this process has now, but for those that stay: one asks a store, one prints at a signal."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(name.startswith("fastreduce") and name not in STAY for name in names)


def threads_left_over(before: int) -> int:
    """Communication threads beyond those of `before`, after what they need to end."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and communication_threads() > before:
        time.sleep(0.01)
    return max(0, communication_threads() - before)  # what an earlier test has left may have ended meanwhile
