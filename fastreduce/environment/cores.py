"""How many processor cores this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores that this process may run on; in a container whose quota is fewer, so many, rounded down, but at least one.

    More threads than that would take turns with pauses, in which those that wait for each other all stand still.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas()])))


def _quotas() -> Iterator[float]:
    """Those of this process's control groups, and of those around them, in cores: of Linux's version 2, and 1."""
    lines = list[list[str]]()
    with suppress(OSError):  # a sandbox without
        lines = [line.split(":", 2) for line in OWN.read_text(errors="surrogateescape").splitlines()]
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = GROUPS / controllers
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):  # in a container the first ones may not be there
            with suppress(OSError, ValueError, ZeroDivisionError):
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
                quota, period = map(float, " ".join(folder.joinpath(file).read_text() for file in files).split())
                if quota > 0:  # without one it is -1, or "max"
                    yield quota / period
            if folder == top:
                break
