"""What the ranks of a group, or two of them, do together on its store, beside the group's own collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist

from ..errors import NotInitializedError, SettingError, TransportError
from ..transports.connections import timeout_of
from ..transports.meeting import AbsentError, clear, meet, notes, wait_until
from ..transports.store_client import SOON_SECONDS, StoreClient, client_of

_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
_exchanged: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, int, int]]] = weakref.WeakKeyDictionary()


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


def store_of(group: dist.ProcessGroup) -> StoreClient:
    """The group's part of the rendezvous store."""
    return client_of(group).at("fastreduce")


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
    rank, ranks, here = dist.get_rank(), ranks_of(group), store_of(group).at(f"{kind}/{number}")
    seconds = (timeout or timeout_of(group)).total_seconds()
    try:
        meet(here, rank, ranks, seconds, note or "")
        told = {} if note is None else dict(zip(ranks, notes(here, ranks), strict=True))
        clear(here, ranks)
    except TransportError as error:
        raise failed_meeting(call, len(ranks), error, seconds) from error
    count[kind] += 1
    return told


def failed_meeting(
    call: str, size: int, error: TransportError, seconds: float, rank: int | None = None
) -> TransportError:
    """The error of `call`, where ranks have not met."""
    who = f"{call} on rank {dist.get_rank() if rank is None else rank}"
    if isinstance(error, AbsentError):
        return TransportError(f"{who}: of {size} ranks, rank {error.names} did not arrive within {seconds:g} s")
    return TransportError(f"{who}: {error}")


def exchange_notes(group: dist.ProcessGroup, call: str, source: int, destination: int, tag: int, note: str) -> str:
    """Give `note` to the other one of two ranks, of which one sends and one receives, and return its own.

    Raises:
        TransportError: if the other one does not come within the group's timeout.
    """
    here = _between(group, source, destination, tag)
    receives = dist.get_rank() == destination
    mine, theirs = ("receiver", "sender") if receives else ("sender", "receiver")
    store, seconds = store_of(group), timeout_of(group).total_seconds()
    try:
        store.set(f"{here}/{mine}", note)
        if not wait_until(store, lambda store: store.has(f"{here}/{theirs}"), seconds):
            store.at("", SOON_SECONDS).delete(f"{here}/{mine}")
            other, does = (source, "send") if receives else (destination, "receive")
            raise AbsentError([other], seconds, f" to {does} with tag {tag}")
        (told,) = store.read_all([f"{here}/{theirs}"])
        store.delete(f"{here}/{theirs}")
    except TransportError as error:
        raise TransportError(f"{call} on rank {dist.get_rank()}: {error}") from error
    _exchanged.setdefault(group, Counter())[source, destination, tag] += 1
    return told


def find_sender(group: dist.ProcessGroup, call: str, tag: int) -> int:
    """The first rank that has come to send to this one, for `exchange_notes`.

    Raises:
        TransportError: if none comes within the group's timeout.
    """
    rank, store, seconds = dist.get_rank(), store_of(group), timeout_of(group).total_seconds()
    others = [r for r in ranks_of(group) if r != rank]
    keys, found = [f"{_between(group, r, rank, tag)}/sender" for r in others], list[int]()

    def anybody(store: StoreClient) -> bool:
        found[:] = sorted(set(range(len(keys))) - set(store.absent(keys)))
        return bool(found)

    try:
        if wait_until(store, anybody, seconds):
            return others[found[0]]
    except TransportError as error:
        raise TransportError(f"{call} on rank {rank}: {error}") from error
    raise TransportError(f"{call} on rank {rank}: no rank came to send with tag {tag} within {seconds:g} s")


def _between(group: dist.ProcessGroup, source: int, destination: int, tag: int) -> str:
    number = _exchanged.setdefault(group, Counter())[source, destination, tag]
    return f"message/{source}/{destination}/{tag}/{number}"
