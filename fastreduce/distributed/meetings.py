"""What the ranks of a group, or two of them, do together on its store, beside the group's own collectives."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import NotInitializedError, SettingError, TransportError
from ..transports.connections import timeout_of
from .rendezvous import forget_meeting, meet, notes

POLL_SECONDS = 0.01

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


def exchange_notes(group: dist.ProcessGroup, call: str, source: int, destination: int, tag: int, note: str) -> str:
    """Give `note` to the other one of two ranks, of which one sends and one receives, and return its own.

    Raises:
        TransportError: if the other one does not come within the group's timeout.
    """
    here = _between(group, source, destination, tag)
    receives = dist.get_rank() == destination
    mine, theirs = ("receiver", "sender") if receives else ("sender", "receiver")
    store, timeout = store_of(group), timeout_of(group)
    try:
        store.set(f"{here}/{mine}", note)
        try:
            store.wait([f"{here}/{theirs}"], timeout)
        except RuntimeError as error:
            store.delete_key(f"{here}/{mine}")
            other, does = (source, "send") if receives else (destination, "receive")
            raise TransportError(
                f"{call} on rank {dist.get_rank()}: rank {other} did not come to {does} with tag {tag} "
                f"within {timeout.total_seconds():g} s"
            ) from error
        told = store.get(f"{here}/{theirs}").decode()
        store.delete_key(f"{here}/{theirs}")
    except RuntimeError as error:
        raise error if isinstance(error, TransportError) else _gone(call, error) from error
    _exchanged.setdefault(group, Counter())[source, destination, tag] += 1
    return told


def find_sender(group: dist.ProcessGroup, call: str, tag: int) -> int:
    """The first rank that has come to send to this one, for `exchange_notes`.

    Raises:
        TransportError: if none comes within the group's timeout.
    """
    rank, store, timeout = dist.get_rank(), store_of(group), timeout_of(group)
    others = {r: f"{_between(group, r, rank, tag)}/sender" for r in ranks_of(group) if r != rank}
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        for other, key in others.items():
            try:
                if store.check([key]):
                    return other
            except RuntimeError as error:
                raise _gone(call, error) from error
        time.sleep(POLL_SECONDS)  # a store waits for all of its keys only
    raise TransportError(
        f"{call} on rank {rank}: no rank came to send with tag {tag} within {timeout.total_seconds():g} s"
    )


def _between(group: dist.ProcessGroup, source: int, destination: int, tag: int) -> str:
    number = _exchanged.setdefault(group, Counter())[source, destination, tag]
    return f"message/{source}/{destination}/{tag}/{number}"


def _gone(call: str, error: RuntimeError) -> TransportError:
    return TransportError(f"{call} on rank {dist.get_rank()}: the store of the rendezvous is gone: {error}")
