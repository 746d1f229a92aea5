"""What the ranks of a group, or two of them, do together on its store, beside the group's own collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..errors import SettingError, TransportError, brief, no_group
from ..transports.meeting import AbsentError, clear, look_for, meet, notes, until_cleared, wait_until, who_waits
from ..transports.ranks import check_process, client_of, timeout_of, who_has_ended
from ..transports.store_client import StoreClient

LEAVING_SECONDS = 5.0  # that the store is kept for ranks that have come to a meeting, and may have died in it

_met: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()
_exchanged: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, int, int]]] = weakref.WeakKeyDictionary()


def group_or_default(call: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the default group for None; this rank is in it, and this process is that rank.

    Raises:
        NotInitializedError: if there is none.
        SettingError: if this rank is not in it.
        TransportError: in a fork of the process that is the rank.
    """
    found = known_group(call, group)
    check_process(f"{call} on rank {dist.get_rank()} was called")
    return found


def known_group(call: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The same for calls that move nothing, which a fork may make too. Raises as above, but for forks."""
    default = dist.group.WORLD
    if default is None:
        raise no_group(call)
    check_group(call, group)
    if dist.get_rank(group) < 0:
        raise SettingError(f"{call} on rank {dist.get_rank()}: this rank is not in the group")
    return group or default


def check_group(call: str, group: Any) -> None:
    """Raise SettingError unless `group` is one, or None, or what `new_group` gives to ranks that are not in it."""
    if not (group is None or isinstance(group, dist.ProcessGroup) or group is dist.GroupMember.NON_GROUP_MEMBER):
        raise SettingError(
            f"{call} on rank {dist.get_rank()}: group={brief(group)}; allowed: a ProcessGroup, as new_group makes, or "
            "None"
        )


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
        meet(here, rank, ranks, seconds, note or "", _look_for_any(group, ranks))
        count[kind] += 1
        told = {} if note is None else dict(zip(ranks, notes(here, ranks), strict=True))
    except TransportError as error:
        raise failed_meeting(call, len(ranks), error, seconds) from error
    _leave(here, ranks, seconds)
    return told


def _look_for_any(group: dist.ProcessGroup, ranks: Sequence[int]) -> Callable[[], None]:
    """What raises once the process of one of these ranks has ended."""
    ended, names = who_has_ended(group), ranks_of(group)
    return look_for(ended and (lambda: [names[place] for place in ended() if names[place] in ranks]))


def _leave(store: StoreClient, ranks: list[int], seconds: float) -> None:
    """Be done with a meeting; rank 0, with whose process the store may end at once, waits until all are.

    To those who have met it makes no difference if the store is gone.
    """
    with suppress(TransportError):
        clear(store, ranks)
        if dist.get_rank() == 0:
            wait_until(store, lambda store: not store.has("complete"), min(LEAVING_SECONDS, seconds))


def failed_meeting(
    call: str, size: int, error: TransportError, seconds: float, rank: int | None = None
) -> TransportError:
    """The error of `call`, where ranks have not met."""
    who = f"{call} on rank {dist.get_rank() if rank is None else rank}"
    if isinstance(error, AbsentError) and error.seconds is not None:
        how = f"of {size} ranks, rank {error.names} did not arrive within {seconds:g} s"
        return TransportError(f"{who}: {how}", error.missing)
    return TransportError(f"{who}: {error}", error.missing)


def exchange_notes(group: dist.ProcessGroup, call: str, source: int, destination: int, tag: int, note: str) -> str:
    """Give `note` to the other one of two ranks, of which one sends and one receives, and return its own.

    Raises:
        TransportError: if the other one does not come within the group's timeout.
    """
    rank, ranks, seconds = dist.get_rank(), [source, destination], timeout_of(group).total_seconds()
    other, does = (source, "send") if rank == destination else (destination, "receive")
    here = store_of(group).at(_between(group, source, destination, tag))
    try:
        look = _look_for_any(group, ranks)
        until_cleared(here, seconds, look)  # with the same tag
        meet(here, rank, ranks, seconds, note, look)
        _exchanged.setdefault(group, Counter())[source, destination, tag] += 1
        told = dict(zip(ranks, notes(here, ranks), strict=True))
    except AbsentError as error:
        if error.seconds is None:
            raise TransportError(f"{call} on rank {rank}: {error}", error.missing) from error
        how = f"rank {other} did not come to {does} with tag {tag} within {seconds:g} s"
        raise TransportError(f"{call} on rank {rank}: {how}", [other]) from error
    except TransportError as error:
        raise TransportError(f"{call} on rank {rank}: {error}", error.missing) from error
    _leave(here, ranks, seconds)
    return told[other]


def find_sender(group: dist.ProcessGroup, tag: int) -> int:
    """The first rank that has come to send to this one, for `exchange_notes`.

    Raises:
        TransportError: if none comes within the group's timeout, or the processes of all have ended.
    """
    rank, seconds = dist.get_rank(), timeout_of(group).total_seconds()
    others = [(r, _between(group, r, rank, tag)) for r in ranks_of(group) if r != rank]
    found: list[int] = []
    ended = who_has_ended(group)

    def all_ended() -> list[int]:
        names = [ranks_of(group)[place] for place in ended()] if ended else []
        return names if len(names) == len(others) else []

    def anybody(store: StoreClient) -> bool:
        found[:] = who_waits(store, others)
        return bool(found)

    try:
        if wait_until(store_of(group), anybody, seconds, look_for(all_ended)):
            return found[0]
    except TransportError as error:
        raise TransportError(f"recv on rank {rank}: {error}", error.missing) from error
    raise TransportError(f"recv on rank {rank}: no rank came to send with tag {tag} within {seconds:g} s")


def _between(group: dist.ProcessGroup, source: int, destination: int, tag: int) -> str:
    number = _exchanged.setdefault(group, Counter())[source, destination, tag]
    return f"message/{source}/{destination}/{tag}/{number}"
