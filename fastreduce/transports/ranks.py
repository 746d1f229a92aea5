"""Whom a transport belongs to, a process group or some of its ranks: their names in errors, their timeout and store."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..environment.forks import Owner
from .meeting import PART
from .store_client import StoreClient, root_of

NEVER_SENT = (1 << 31) - 1  # a tag


@dataclass(frozen=True, eq=False)
class Subgroup:
    """Ranks of a process group, of which this process is one.

    Args:
        rank: the place of this one among them.
        names: their ranks in the whole group, ascending.
        of: how many ranks the whole group has.
        world_ranks: their ranks in the default group.
        store: where they meet, and nobody else.
        timeout: the whole group's.
        absent: tells at once which of `names` are gone; without it those that wait ask each other, which takes time.
    """

    rank: int
    names: tuple[int, ...]
    of: int
    world_ranks: tuple[int, ...]
    store: StoreClient
    timeout: timedelta
    absent: Callable[[], Sequence[int]] | None = None


Ranks = dist.ProcessGroup | Subgroup


def place_in(ranks: Ranks) -> tuple[int, int]:
    """The place of this process, and the number of ranks."""
    if isinstance(ranks, Subgroup):
        return ranks.rank, len(ranks.names)
    return dist.get_rank(ranks), dist.get_world_size(ranks)


def names_of(ranks: Ranks) -> Sequence[int]:
    """What users know each as: its rank in the whole group."""
    return ranks.names if isinstance(ranks, Subgroup) else range(dist.get_world_size(ranks))


def world_ranks_of(ranks: Ranks) -> list[int]:
    """The rank of each in the default group."""
    return list(ranks.world_ranks) if isinstance(ranks, Subgroup) else dist.get_process_group_ranks(ranks)


def own_name(ranks: Ranks) -> str:
    """This rank, as errors begin."""
    rank, size = place_in(ranks)
    return f"rank {names_of(ranks)[rank]} of {ranks.of if isinstance(ranks, Subgroup) else size}"


def who_is_gone(ranks: Ranks) -> Callable[[], Sequence[int]] | None:
    """What tells at once which of the ranks are gone, where somebody knows."""
    return ranks.absent if isinstance(ranks, Subgroup) else None


def who_has_ended(ranks: Ranks) -> Callable[[], Sequence[int]] | None:
    """What tells at once which of the ranks have ended, for one wait, where somebody knows.

    The system closes the connections of gloo, which says so to who begins to receive, even what is never sent. It is
    asked less often the longer it takes; in between the answer is that none has. So it is where a collective has
    failed (`count_as_failed`): gloo closes all connections of a rank that has waited in vain.
    """
    if isinstance(ranks, Subgroup):
        return ranks.absent
    if not _is_told_by_gloo(ranks):
        return None
    begun = asked = time.monotonic()
    others = [rank for rank in range(dist.get_world_size(ranks)) if rank != dist.get_rank(ranks)]
    group = weakref.ref(ranks)  # whose connections, which live as long as it does, may keep this

    def ended() -> list[int]:
        nonlocal asked
        now = time.monotonic()
        if now - asked < (now - begun) / PART:
            return []
        asked, alive = now, group()
        if alive is None or _failed.is_set():
            return []
        reasons = {rank: _why_cut_off(alive, rank) for rank in others}
        if any("Application timeout" in why for why in reasons.values()):  # in a collective of torch's
            return []
        return [rank for rank, why in reasons.items() if "by peer" in why or "Broken pipe" in why]

    return ended


_failed = threading.Event()


def count_as_failed() -> None:
    """Remember that a collective on a group of the user's has failed in this process."""
    _failed.set()


def _is_told_by_gloo(group: dist.ProcessGroup) -> bool:
    if not dist.is_gloo_available() or os.environ.get("TORCH_GLOO_LAZY_INIT"):
        return False
    with contextlib.suppress(RuntimeError):  # no backend for the CPU
        return isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    return False


def _why_cut_off(group: dist.ProcessGroup, rank: int) -> str:
    """Why gloo can receive nothing from a rank; nothing if it can."""
    try:
        gloo: Any = group._get_backend(torch.device("cpu"))
        gloo.recv([torch.empty(1, device="cpu")], rank, NEVER_SENT)
    except RuntimeError as error:
        return str(error)
    return ""


def timeout_of(ranks: Ranks) -> timedelta:
    """The timeout that the user gave to the process group."""
    if isinstance(ranks, Subgroup):
        return ranks.timeout
    for device in ranks._device_types:
        with contextlib.suppress(RuntimeError, AttributeError):
            return ranks._get_backend(device).options._timeout
    return dist.default_pg_timeout


def group_device_types(group: dist.ProcessGroup) -> list[str]:
    """Types of the devices whose tensors `group` moves."""
    return sorted({device.type for device in group._device_types})


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Where tensors that `group` moves can be made: the CPU if it moves those, else the current GPU."""
    if "cpu" in group_device_types(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


_owners: weakref.WeakKeyDictionary[dist.ProcessGroup, Owner] = weakref.WeakKeyDictionary()  # of default groups


def _before_fork() -> None:
    if dist.group.WORLD is not None:
        _owners.setdefault(dist.group.WORLD, Owner())


os.register_at_fork(before=_before_fork)


def check_process(what: str) -> None:
    """Raise in a fork of the process that made the default group: torch would wait there for threads that it lacks.

    Raises:
        TransportError: saying what was called there.
    """
    group = dist.group.WORLD
    if group is not None and group in _owners:
        _owners[group].check(what)


_clients: weakref.WeakKeyDictionary[dist.ProcessGroup, StoreClient] = weakref.WeakKeyDictionary()


def client_of(group: Ranks) -> StoreClient:
    """The client of the store of `group`; a call's deadline is the group's timeout.

    Groups behind one store share a connection: torch's store looks up the name of whoever connects, on the one thread
    that answers everybody, and without a name server that answers this takes 5 s and more.
    """
    if isinstance(group, Subgroup):
        return group.store
    if group not in _clients:
        store, seconds, world = _get_process_group_store(group), timeout_of(group).total_seconds(), dist.group.WORLD
        if world is None or world is group or root_of(store) is not root_of(_get_process_group_store(world)):
            _clients[group] = StoreClient(store, seconds)
        else:
            _clients[group] = client_of(world).at(f"fastreduce/group/{group.group_name}", seconds)
    return _clients[group]
