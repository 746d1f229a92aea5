"""Which ranks of a group run on one host: what a host is known by, told once by each rank."""

from __future__ import annotations

import hashlib
import os
import re
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from ..errors import TransportError
from .connections import timeout_of
from .meeting import AbsentError, clear, meet, notes
from .store_client import client_of

ENVIRONMENT_VARIABLE = "FASTREDUCE_HOST"
SHARED_MEMORY, NETWORK = Path("/dev/shm"), Path("/proc/self/ns/net")
DIGITS = 16  # hexadecimal, of a host's name

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()


def this_host() -> str:
    """What the ranks of one host have in common, and no other: 16 hexadecimal digits.

    FASTREDUCE_HOST where it is set. Else the number that the kernel was given when it started, what is mounted at
    /dev/shm, and the network namespace: containers that share no memory, or no addresses, are hosts of their own.
    """
    told = os.environ.get(ENVIRONMENT_VARIABLE)
    if told:
        parts = ["told", told]
    else:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        parts = ["found", boot, _identity(SHARED_MEMORY), _identity(NETWORK)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:DIGITS]


def _identity(path: Path) -> str:
    """Device and number of a file, of a folder that is mounted the device alone; nothing where there is none."""
    try:
        found = path.stat()
    except OSError:
        return ""
    return str(found.st_dev) if path.is_dir() else f"{found.st_dev}:{found.st_ino}"


def hosts_of(group: dist.ProcessGroup) -> list[str]:
    """The host of each rank of `group`. Every rank calls it; the first call waits for all, later ones for nobody.

    Raises:
        TransportError: naming the ranks that do not come within the group's timeout, or that send no host.
    """
    if group not in _known:
        rank, ranks, seconds = (
            dist.get_rank(group),
            range(dist.get_world_size(group)),
            timeout_of(group).total_seconds(),
        )
        where, store = f"rank {rank} of {len(ranks)}: finding out who shares a host", client_of(group)
        here = store.at("fastreduce/hosts")
        try:
            meet(here, rank, ranks, seconds, this_host())
            told = notes(here, ranks)
            clear(here, ranks)
        except AbsentError as error:
            raise TransportError(
                f"{where} failed. No word from rank {error.names}: it has exited, takes no part, or did not come "
                "within the timeout."
            ) from error
        except TransportError as error:  # the store's
            raise TransportError(f"{where} failed: {error}") from error
        for other, host in enumerate(told):
            if not re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", host):
                raise TransportError(f"{where} failed. Rank {other} sent {host!r:.40}, which is no host.")
        _known[group] = told
    return _known[group]


def nodes_of(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, hosts in the order of their first rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())
