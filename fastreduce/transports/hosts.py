"""Which ranks run on one host, and what a host is known by."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENT_VARIABLE = "FASTREDUCE_HOST"
SHARED_MEMORY, NETWORK = Path("/dev/shm"), Path("/proc/self/ns/net")
DIGITS = 16  # hexadecimal, of a host's name


def this_host() -> str:
    """What the ranks of one host have in common, and no other: 16 hexadecimal digits.

    FASTREDUCE_HOST where it is set. Else the number that the kernel was given when it started, what is mounted at
    /dev/shm, and the network namespace: containers that share no memory, or no addresses, are hosts of their own.
    """
    told = os.environ.get(ENVIRONMENT_VARIABLE)
    parts = ["told", told] if told else ["found", boot(), _identity(SHARED_MEMORY), _identity(NETWORK)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]


def boot() -> str:
    """The number that this host's kernel was given when it started, or the host's name, as in some sandboxes."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _identity(path: Path) -> str:
    """Device and number of a file, of a folder that is mounted the device alone; nothing where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return str(found.st_dev) if path.is_dir() else f"{found.st_dev}:{found.st_ino}"


def nodes_of(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())
