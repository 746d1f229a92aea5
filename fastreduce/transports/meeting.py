"""Meetings of ranks on a store: each leaves a note, counts itself, and waits for the last one to come."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress

from ..environment.stacks import users_line
from ..errors import TransportError, listed
from .store_client import SOON_SECONDS, StoreClient, held_by_agent

logger = logging.getLogger(__name__)

SAY_SECONDS = 30.0  # of waiting, after which the log says for whom; from then on each time that it is twice as long
LOOK_SECONDS = 0.5  # of waiting, after which a rank looks whether it waits in vain
SHORTEST, LONGEST = 0.0005, 0.25  # pauses between two looks at the store
PART = 20  # of the time waited so far, as a pause: what a meeting loses by it


class AbsentError(TransportError):
    """Ranks that did not come within so many seconds, or, without these, that have ended."""

    def __init__(self, ranks: Sequence[int], seconds: float | None = None) -> None:
        self.names, self.seconds = ", ".join(map(str, ranks)), seconds
        gone = "is gone: its process has ended, or has closed its connections"
        how = gone if seconds is None else f"did not come within {seconds:g} s"
        super().__init__(f"rank {self.names} {how}", ranks)


def no_word_from(ranks: Sequence[int]) -> str:
    """As a sentence, that ranks are missing; without any, that one of the others is."""
    who = f"No word from rank {', '.join(map(str, ranks))}: it" if ranks else "A peer"
    return f"{who} has exited, takes no part, or did not come within the timeout."


def look_for(gone: Callable[[], Sequence[int]] | None) -> Callable[[], None]:
    """What to call while ranks are waited for, where somebody knows at once which of them are gone: it raises then."""

    def look() -> None:
        if gone is not None and (ranks := gone()):
            raise AbsentError(ranks)

    return look


def saying(rank: int, ranks: Sequence[int], seconds: float, missing: Callable[[], Sequence[int]]) -> Callable[[], None]:
    """What to call while ranks are waited for: it says in the log, now and then, on one rank, whom they wait for.

    Args:
        rank: this one, which has come.
        ranks: all.
        seconds: for which they are waited for.
        missing: asks who has not come.
    """
    start, due = time.monotonic(), SAY_SECONDS

    def say() -> None:
        nonlocal due
        if (waited := time.monotonic() - start) < due:
            return
        due *= 2
        late: Sequence[int] = ()
        with suppress(TransportError):  # who waits learns soon enough that the store is gone
            late = missing()
        if late and rank == next((each for each in ranks if each not in late), None):
            line = users_line(threading.get_native_id())
            where = f" ({line})" if line else ""
            says = "rank %d has waited %.0f s for rank %s%s, and waits up to %g s"
            logger.warning(says, rank, waited, listed(late), where, seconds)

    return say


def wait_until(
    store: StoreClient, done: Callable[[StoreClient], bool], seconds: float, look: Callable[[], None] = lambda: None
) -> bool:
    """Call `done(store)` until it is true, or for `seconds`; `look` now and then. Returns whether it is true.

    Raises:
        AbsentError: by `look`, and it is not true then either.
        TransportError: if the store is gone, or its holder does not answer for as long.
    """
    start = last_look = now = time.monotonic()

    def is_done() -> bool:
        return done(store.at("", min(store.seconds, max(SOON_SECONDS, seconds - (now - start)))))

    while not is_done():
        now = time.monotonic()
        if now - start > seconds:
            return False
        if now - last_look > LOOK_SECONDS:
            last_look = now
            try:
                look()
            except AbsentError:  # who has done its part may have ended since
                with suppress(TransportError):
                    if is_done():
                        return True
                raise
        time.sleep(min(max((now - start) / PART, SHORTEST), LONGEST))
    return True


def meet(
    store: StoreClient,
    rank: int,
    ranks: Sequence[int],
    seconds: float,
    note: str = "",
    look: Callable[[], None] = lambda: None,
) -> None:
    """Return when all of `ranks` have come; one meeting a prefix. `look`, called now and then, may raise.

    Raises:
        AbsentError: naming the ranks that have not come within `seconds`, or that `look` finds gone; this rank has
            left then, and all may try again.
        TransportError: if the store is gone, or its holder does not answer.
    """
    say = saying(rank, ranks, seconds, lambda: _missing(store.at("", SOON_SECONDS), ranks))

    def look_again() -> None:
        say()
        try:
            look()
        except AbsentError as error:  # who has come is not waited for, and who has left has found another gone
            missing = _missing(store.at("", SOON_SECONDS), ranks)
            if gone := [r for r in error.missing if r in missing]:
                raise AbsentError(gone) from error

    store.delete(f"gone {rank}")  # it may have left before
    store.set(f"note of {rank}", note)
    if store.add("count", 1) == len(ranks):
        store.set("complete", "")
    try:
        if wait_until(store, lambda store: store.has("complete"), seconds, look_again):
            return
        if missing := _missing(store.at("", SOON_SECONDS), ranks):
            raise AbsentError(missing, seconds)
    except BaseException:  # an interrupt, too: who comes again is to be counted once
        with suppress(TransportError):
            soon = store.at("", SOON_SECONDS)
            soon.set(f"gone {rank}", "")
            soon.add("count", -1)
        raise


def _missing(store: StoreClient, ranks: Sequence[int]) -> list[int]:
    """Who has not come to a meeting; if all have, who left before the others had come."""
    if absent := store.absent([f"note of {rank}" for rank in ranks]):
        return [ranks[i] for i in absent]
    here = store.absent([f"gone {rank}" for rank in ranks])
    return [rank for i, rank in enumerate(ranks) if i not in here]


def notes(store: StoreClient, ranks: Sequence[int]) -> list[str]:
    """What every rank brought to a meeting that is complete, in the order of `ranks`."""
    return store.read_all([f"note of {rank}" for rank in ranks])


def who_waits(store: StoreClient, places: Sequence[tuple[int, str]]) -> list[int]:
    """Of ranks, each with the prefix of a meeting, those that have come to it, and have not left it."""
    away = set(store.absent([f"{prefix}/note of {rank}" for rank, prefix in places]))
    stay = set(store.absent([f"{prefix}/gone {rank}" for rank, prefix in places]))
    return [rank for i, (rank, _) in enumerate(places) if i not in away and i in stay]


def until_cleared(store: StoreClient, seconds: float, look: Callable[[], None] = lambda: None) -> None:
    """Return when an earlier meeting of this prefix, if there was one, has been cleared by all who came to it.

    Called before `meet` where ranks may begin the next one while others still read the notes of this one.

    Raises:
        AbsentError: by `look`.
        TransportError: if that takes more than `seconds`, or the store is gone.
    """
    if not wait_until(store, lambda store: not store.has("complete"), seconds, look):
        raise TransportError(f"a rank has not left an earlier meeting within {seconds:g} s")


def clear(store: StoreClient, ranks: Sequence[int], *more: str) -> None:
    """Called by every rank when it is done with a meeting: the last one deletes it and `more`, and its name is free.

    "complete" goes last: for `until_cleared` nobody needs the store for this meeting once it is gone.
    """
    if store.add("read", 1) == len(ranks):
        keys = [f"{kind} {rank}" for kind in ("note of", "gone") for rank in ranks]
        store.delete(*keys, *more, "count", "read", "complete")


def new_place(store: StoreClient, rank: int, size: int, seconds: float) -> str:
    """A prefix that these processes share, and that none has used in whose place they are; every rank calls it.

    torchrun's agents keep a store when they start ranks again, with all that is in it, and each counts by itself how
    often it has. So rank 0 lists the processes that it finds, until all of them have seen themselves in the list.
    Without an agent it is no prefix: nobody comes again.

    Raises:
        AbsentError: naming the ranks that do not come within `seconds`.
        TransportError: if the store is gone, or its holder does not answer.
    """
    if not held_by_agent():
        return ""
    mine = uuid.uuid4().hex
    store.set(f"process of {rank}", mine)

    def told(store: StoreClient, what: str) -> list[str]:
        return [text or "-" for text in store.read_each([f"{what} {each}" for each in range(size)])]

    def agreed(store: StoreClient) -> bool:
        if rank == 0:
            store.set("processes", " ".join(told(store, "process of")))
        processes = store.read("processes") or ""
        if mine not in processes.split():
            return False
        store.set(f"seen by {rank}", processes)
        if rank == 0 and set(told(store, "seen by")) == {processes}:
            store.set("agreed", processes)
        return store.read("agreed") == processes

    def absent() -> list[int]:
        soon = store.at("", SOON_SECONDS)
        processes = soon.read("processes") or ""
        seen = told(soon, "seen by") if mine in processes.split() else []
        return [r for r, text in enumerate(seen) if text != processes] or [0]

    if not wait_until(store, agreed, seconds, saying(rank, range(size), seconds, absent)):
        raise AbsentError(absent(), seconds)
    return str(uuid.uuid5(uuid.NAMESPACE_OID, store.read("agreed") or ""))
