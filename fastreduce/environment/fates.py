"""What has become of a process of this host that has told its id: it runs, is stopped, or has ended."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

STATES = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": "has ended", "X": "has ended"}


def introduction() -> list[Any]:
    """This process, for `fate`: its host, its id, and when it began. Where the system does not tell, nothing."""
    pid = os.getpid()
    try:
        return [_host(), pid, _born(pid)]
    except (OSError, IndexError):
        return ["", pid, ""]


def fate(host: str, pid: int, born: str) -> str:
    """As a clause, what has become of a process that introduced itself; "" where it runs, or nobody knows."""
    if not host or host != _host():
        return ""
    try:
        if _born(pid) != born:
            raise ProcessLookupError
        state = _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return f"its process {pid} has ended"
    except OSError:  # this process has too many files open, say
        return ""
    return f"its process {pid} {STATES[state]}" if state in STATES else ""


def has_ended(host: str, pid: int, born: str) -> bool:
    """Whether it is known that a process has ended."""
    return fate(host, pid, born).endswith("has ended")


def runs_here(host: str, pid: int, born: str) -> bool:
    """Whether it is known that a process goes on, on this host."""
    try:
        return bool(host) and host == _host() and _born(pid) == born and _stat(pid)[0] not in STATES
    except (OSError, IndexError):
        return False


def _stat(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat", errors="replace") as file:  # its name may be cut within a letter
        return file.read().rsplit(")", 1)[1].split()


def _born(pid: int) -> str:
    """When a process began, in ticks since the host did: ids are used again."""
    return _stat(pid)[19]


def _host() -> str:
    """The host, and which of its processes this one sees; "" where the system does not tell, as in some sandboxes."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
