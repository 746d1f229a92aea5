"""What all ranks of a group do together on its store, beside the group's own collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import NotInitializedError, SettingError
from ..transports.connections import timeout_of
from .rendezvous import forget_meeting, meet, notes

_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


def group_of(call: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default group for None; this rank is in it.

    Raises:
        NotInitializedError: if there is none.
        SettingError: if this rank is not in it.
    """
    default = dist.group.WORLD
    if default is None:
        raise NotInitializedError(call)
    if dist.get_rank(group) < 0:
        raise SettingError(f"{call} on rank {dist.get_rank()}: this rank is not in the group")
    return group or default


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """Global ranks, in the group's order."""
    return dist.get_process_group_ranks(group)


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The group's part of the rendezvous store."""
    return dist.PrefixStore("fastreduce", _get_process_group_store(group))


def meet_in(
    group: dist.ProcessGroup, call: str, *, note: str | None = None, timeout: timedelta | None = None
) -> dict[int, str]:
    """Return when all ranks of `group` have come; with a `note`, everybody's note by global rank.

    Raises:
        TransportError: naming the ranks that have not come within the timeout (None means the group's).
    """
    count = _met.setdefault(group, Counter())
    kind = "barrier" if note is None else "notes"
    number = count[kind]
    rank, ranks, store = dist.get_rank(), ranks_of(group), store_of(group)
    here = dist.PrefixStore(f"{kind}/{number}", store)
    meet(here, rank, ranks, timeout or timeout_of(group), call, note or "")
    if number:  # all have left the one before
        forget_meeting(dist.PrefixStore(f"{kind}/{number - 1}", store), rank, ranks)
    count[kind] += 1
    return {} if note is None else notes(here, ranks)
