"""What each rank asks to move wires, its version and its host, told before a transport is made.

Where ranks ask for different ones, or are of different versions, all get one error.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from ..errors import MismatchError, TransportError, listed
from ..version import __version__
from .hosts import DIGITS, this_host
from .meeting import AbsentError, clear, look_for, meet, new_place, no_word_from, notes, until_cleared
from .messages import decode, encode, of_types
from .ranks import client_of, own_name, timeout_of, who_has_ended
from .store_client import SOON_SECONDS

_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()
_places: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


class Choice(NamedTuple):
    """What one rank asks for.

    Attributes:
        transport: a name, or nothing where hosts decide.
        asked: how a user finds that in the script or the environment.
        error: why this rank cannot go on, or nothing.
        host: `this_host()`.
        version: of fastreduce.
    """

    transport: str
    asked: str
    error: str
    host: str
    version: str = __version__

    @property
    def key(self) -> str:
        """What ranks that go on together have in common."""
        return f"{self.version} " + (f"error {self.error}" if self.error else f"transport {self.transport}")


def agree(group: dist.ProcessGroup, transport: str, asked: str, error: Exception | None = None) -> list[str]:
    """The host of each rank of `group`, once all have come, of one version, and ask for the same; every rank calls it.

    Ranks that ask for the same are counted. Notes are read where they are not all, and in a group's first call, which
    alone tells hosts.

    Args:
        group: the ranks.
        transport: a name, or nothing where hosts decide.
        asked: how a user finds that in the script or the environment.
        error: why this rank cannot go on; no other rank waits for it then.

    Raises:
        Exception: this rank's own `error`.
        MismatchError: on every rank alike, with all versions, or all that is asked for, and the ranks, or with another
            rank's error.
        TransportError: naming the ranks that do not come within the group's timeout, or that send something else.
    """
    mine = Choice(
        transport, asked, "" if error is None else f"{type(error).__name__}: {error}", this_host(), __version__
    )
    try:
        found = _told(group, mine)
    except TransportError as reason:
        if error is not None:
            raise error from reason
        why = no_word_from(reason.missing) if isinstance(reason, AbsentError) else str(reason)
        raise TransportError(f"{own_name(group)}: choosing a transport failed. {why}", reason.missing) from reason
    if error is not None:
        raise error
    if len({choice.version for choice in found}) > 1:
        versions = _listed(found, lambda choice: choice.version)
        raise MismatchError(
            f"ranks differ in the version of fastreduce: {versions}. Install the same one on every host"
        )
    for rank, choice in enumerate(found):
        if choice.error:
            raise MismatchError(f"rank {rank} could not be set up: {choice.error}")
    if len({choice.transport for choice in found}) > 1:
        raise MismatchError(f"ranks differ in their transport: {_listed(found)}. Ask for the same on every rank")
    if group not in _hosts:
        _hosts[group] = [choice.host for choice in found]
    return _hosts[group]


def known_hosts(group: dist.ProcessGroup) -> list[str] | None:
    """The host of each rank, if ranks have told."""
    return _hosts.get(group)


def _told(group: dist.ProcessGroup, mine: Choice) -> list[Choice]:
    """What each rank asks for; nothing where it is known that all ask for the same."""
    here, seconds = client_of(group).at("fastreduce/choices"), timeout_of(group).total_seconds()
    rank, ranks = dist.get_rank(group), range(dist.get_world_size(group))
    place = _places.get(group)
    if place is None:  # a process that was killed while it waited here has left a note
        place = new_place(here, rank, len(ranks), seconds)
    here = here.at(place)
    look = look_for(who_has_ended(group))
    until_cleared(here, seconds, look)
    here.add(mine.key, 1)
    try:
        meet(here, rank, ranks, seconds, encode(list(mine)).decode(), look)
    except BaseException:
        with suppress(TransportError):
            here.at("", SOON_SECONDS).add(mine.key, -1)
        raise
    _places[group] = place
    found = []
    if group not in _hosts or here.add(mine.key, 0) < len(ranks):
        found = [decode(note, other, _choice) for other, note in enumerate(notes(here, ranks))]
    clear(here, ranks, mine.key, *(choice.key for choice in found))
    return found


def _choice(value: Any) -> Choice:
    choice = Choice(*of_types(value, str, str, str, str, str))
    if not re.fullmatch(f"[0-9a-f]{{{DIGITS}}}", choice.host):
        raise ValueError(f"{choice.host!r:.40} is no host")
    return choice


def _listed(found: Sequence[Choice], told: Callable[[Choice], str] = lambda choice: choice.asked) -> str:
    """Each thing that is told, or asked for, with the ranks that do."""
    ranks: dict[str, list[int]] = {}
    for rank, choice in enumerate(found):
        ranks.setdefault(told(choice), []).append(rank)
    return "; ".join(f"{text} on rank {listed(of)}" for text, of in ranks.items())
