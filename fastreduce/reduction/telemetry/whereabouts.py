"""Where ranks are that others wait for: a rank that stalls tells it in the group's store, and others read it there.

1. One thread of the process (`watch.py`) looks now and then whether its recorders go on. That costs nobody anything.
2. Where no step has ended for a quarter of the timeout, it writes what this rank does, and its Python stacks, into the
   store, and again after each such time. Ranks that wait for another do so, too: what counts is what the missing ones
   say.
3. A rank that ends tells why: an exception, or the end of its script.
4. Who has waited in vain reads what the missing ranks have told. One that is stopped, or was killed, tells nothing: its
   process id is in the store since the first look, and on the same host the system knows what has become of it; of
   another host it is looked whether it can be reached. How old a message is does not depend on hosts' clocks, which
   may differ: each rank counts seconds from a moment at which all were in one call.
   Collectives of torch's name nobody: there, those are looked for that have ended, are stopped or do something else.
5. Long before that, one of the ranks that wait says in the log whom they wait for (`who_is_late`).
   Where two wait for each other, in the backwards of two wrappers, it says that.
6. A rank that waits in another call, where all ranks meet, tells that at once (`other_call.py`), and those that wait
   for its gradients do so no longer.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ...environment.fates import fate, introduction, runs_here
from ...environment.hosts import addresses, why_out_of_reach
from ...environment.stacks import collective_under_way, only_one_trains, python_stacks, users_line
from ...errors import TransportError, listed
from ...transports.meeting import clear, meet, wait_until
from ...transports.messages import decode, of_types
from ...transports.store_client import SOON_SECONDS, StoreClient
from .flight_record import Phase
from .flight_recorder import DOING, Counts, FlightRecorder, all_recorders

SHORTEST, LONGEST = 0.5, 30.0  # seconds without the end of a step after which a rank tells where it is
PART = 4  # of the timeout
NAMED = 3  # ranks of which an error tells
AT_ONCE = 64  # ranks that the store is asked for in one call
FRAMES, THREADS = 20, 4  # of stacks that are told
LEAVING_SECONDS = 2.0  # for the last words of ranks that were interrupted, say, and whose scripts clean up
LAST_FRAMES, LAST_TEXT = 3, 1000  # of an exception: calls, and characters of what it says
UNKNOWN = "it is stopped, gone or out of reach"
BUSY = "its process runs, but no Python in it: it is in C code that keeps the GIL, or has no core"
NO_LAST_WORD = (
    ". It said nothing at its end, as exceptions and the ends of scripts do: it was killed (kill -9, out of memory), "
    "has crashed, or had destroyed its process group"
)
COUNTED = (  # of `Counts`: what, and what it means where ranks differ
    ("forwards", "forward(s) to be averaged", "a forward had no backward, or evaluated without torch.no_grad()"),
    ("unreduced", "forward(s) in no_sync", "if they are to be as many, one of its backwards was left out, or one here"),
    ("optimizer_steps", "optimizer step(s)", "if they are to be as many, it ran another number of backwards for each"),
)


class Whereabouts:
    """The place where the ranks of one group tell where they are.

    Args:
        store: the client of the group's store.
        seconds: the group's timeout.
        wrapped: the group's name, and the class of what is wrapped, as in "0 Linear".

    Attributes:
        group: the client.
        wrapped: as given.
        store: the same behind the place's prefix, of which answers come soon or not at all.
        patience: seconds without the end of a step after which a rank tells where it is.
    """

    def __init__(self, store: StoreClient, seconds: float, wrapped: str = "") -> None:
        self.group, self.wrapped, self._holder = store, wrapped, ""  # the address of who holds the store
        note_meeting(store)
        self.store = store.at("fastreduce/whereabouts", SOON_SECONDS)
        self.patience = min(LONGEST, max(SHORTEST, seconds / PART))

    def introduce(self, rank: int) -> None:
        """Write which process a rank is, and where."""
        own, self._holder = addresses()
        self.store.set(f"process of {rank}", json.dumps([*introduction(), own]))

    def tell(self, rank: int) -> None:
        """Write where this rank's process is."""
        alive = all_recorders()
        if not alive:  # the last one has just ended
            return
        latest = alive[-1]  # what the process does; other wrappers stand still meanwhile
        counted = list(latest.counts_before) if len(alive) == 1 else []  # these are of one wrapper
        stacks = python_stacks(FRAMES, THREADS, ours=False)
        line = users_line(latest.thread)
        where = [latest.doing(), self._now(), latest.row.step, counted, collective_under_way(), line, stacks]
        self.store.set(f"rank {rank}", json.dumps([*where, *_averages(alive)]))

    def say_last_word(self, rank: int) -> None:
        """Write why this rank's process ends, and what it did, where a wrapper is there still."""
        alive = all_recorders()
        doing = f", {alive[-1].doing()}" if alive else ""
        self.store.set(f"end of {rank}", json.dumps([introduction(), f"{doing}: {_why_it_ends()}"]))

    def meet(self, name: str, rank: int, world_size: int, why: str) -> None:
        """Wait for all ranks at a meeting of this name, which is free again when all have left.

        Raises:
            TransportError: if some do not come within the group's timeout; begins with `why`.
        """
        store = self.group.at(f"fastreduce/{name}")
        try:
            meet(store, rank, range(world_size), self.group.seconds)
            clear(store, range(world_size))
        except TransportError as error:
            raise TransportError(f"{why}{error}.", error.missing) from error

    def ask(self, ranks: Sequence[int], mine: FlightRecorder, failed_at: float) -> list[str]:
        """What is known of each rank, as sentences, and its stacks, as far as it has told them; raises nothing.

        Those that are there and have told nothing are waited for a little, from `failed_at` on: they have just left,
        and may be about to end.
        """
        answers: list[str] = []

        def all_are_known(_: StoreClient) -> bool:
            answers[:] = [self._answer(rank, partial(self._sentence, rank, mine=mine)) for rank in ranks]
            return not any(answer.endswith((f"{UNKNOWN}.", f"{BUSY}.")) for answer in answers)

        with suppress(TransportError):
            wait_until(self.store, all_are_known, failed_at + LEAVING_SECONDS - time.monotonic())
        return answers

    def _answer(self, rank: int, sentence: Callable[[Any, str, str], str]) -> str:
        """What is known of a rank.

        If it has told where it is: `sentence` of that, of its process's fate, "" without one, and of why it may be
        silent else.
        """
        keys = [f"process of {rank}", f"rank {rank}", f"end of {rank}"]
        try:
            process, told, end = [self.store.read(key) for key in keys]
        except TransportError as error:
            return f"Nobody can be asked where rank {rank} is: {error}."
        fate, address, unknown = "", "", UNKNOWN
        with suppress(TransportError):
            if process is not None:
                known, address = _introduced(process, rank)
                fate = _fate(known)
                if (last := _last_words(end, rank, known)) is not None:
                    return f"Rank {rank} has ended{last.rstrip()}"
                unknown = BUSY if runs_here(*of_types(known, str, int, str)) else UNKNOWN
        fate += NO_LAST_WORD if fate.endswith("has ended") else ""
        if told is None:
            return f"Rank {rank} has not told where it is: {fate or why_out_of_reach(address) or unknown}."
        try:
            message = decode(told, rank, lambda given: of_types(given, *_TOLD))
        except TransportError as error:
            return f"{error}."
        if not fate and self._is_old(message[1]):  # else its host is not looked for: what it told has just come
            fate = why_out_of_reach(address)
        return sentence(message, fate, unknown)

    def _sentence(self, rank: int, told: Any, fate: str, unknown: str, mine: FlightRecorder) -> str:
        _, _, step, counted, _, _, stacks, _, _ = told
        apart = _apart(counted, mine) if step == mine.row.step else ""
        return f"{self._where(rank, told, fate, unknown)}{apart} Its Python stacks:\n{stacks.rstrip()}"

    def _where(self, rank: int, told: Any, fate: str, unknown: str) -> str:
        doing, at, _, _, collective, *_ = told
        age = max(0.0, self._now() - at)
        silent = f" It has told nothing since: {fate or unknown}." if fate or self._is_old(at) else ""
        within = f" It was in {collective}, while this rank averages gradients." if collective else ""
        return f"Rank {rank}, {age:.1f} s ago, was {doing}.{silent}{within}"

    def _is_old(self, at: float) -> bool:
        return self._now() - at > 3 * self.patience

    def _now(self) -> float:
        """Seconds since the ranks met."""
        return time.monotonic() - _met[self.group]

    def who_is_late(self, mine: FlightRecorder) -> str:
        """Whom this rank waits for, and what they do, as sentences; "" where it waits for nobody, as far as is told.

        Who has ended its backward of a step waits for those that have not. Where processes have several wrappers, whose
        steps are not each other's, only who says that it waits does; it is a deadlock where one that waits for another
        wrapper's averages cannot begin those of this one before it has these, and this rank not those.

        Raises:
            TransportError: if the store does not answer.
        """
        waits, first = mine.phase is Phase.WAITING, mine.row.step
        alive = all_recorders()
        told, silent, alike = dict[int, tuple[int, bool]](), list[int](), len(alive) == 1
        awaited, to_begin = _averages(alive)
        in_calls, crosswise = set[int](), dict[int, str]()
        for rank, text in enumerate(self._read_of_all("rank", mine.world_size)):
            if rank == mine.rank:
                continue
            message = None if text is None else decode(text, rank, lambda given: of_types(given, *_TOLD))
            if message is None or self._is_old(message[1]):
                silent.append(rank)
                continue
            doing, _, step, counted, call, line, _, theirs, they_begin = message
            told[rank], alike = (step, _waits(doing)), alike and bool(counted)
            if call:
                in_calls.add(rank)
            if awaited == mine.wrapper and they_begin.get(awaited) == mine.row.step and to_begin.get(theirs) == step:
                crosswise[rank] = _in_backward(rank, theirs, line)
        if there := [rank for rank in list(crosswise)[:NAMED] if self._is_there(rank)]:
            return self._deadlock(mine, {rank: crosswise[rank] for rank in there})
        if alike:
            first = min([first, *(step for step, _ in told.values())])
            late = [rank for rank, (step, waiting) in told.items() if step == first and not waiting]
        else:
            late = [rank for rank, (_, waiting) in told.items() if not waiting]
        late = sorted([*late, *silent])
        if not late or not (waits or (alike and mine.row.step > first)):
            return ""
        answers = [self._answer(rank, partial(self._place, rank)) for rank in late[:NAMED]]
        if waits and in_calls.intersection(late[:NAMED]) and (line := users_line(mine.thread)):
            answers.append(f"This rank is at {line}.")
        return " ".join([f"It waits for rank {listed(late)}, up to {self.group.seconds:g} s.", *answers])

    def _deadlock(self, mine: FlightRecorder, others: dict[int, str]) -> str:
        """That these ranks, each with where it is, and this one wait for each other, as sentences."""
        whom, seconds = listed(list(others)), self.group.seconds
        here = _in_backward(mine.rank, mine.wrapper, users_line(mine.thread))
        verdict = f"It waits for rank {whom}, and rank {whom} for it, until the timeout of {seconds:g} s"
        why = "the backwards of their wrappers run in another order."
        return " ".join([f"{verdict}: {why}", here, *others.values()])

    def _is_there(self, rank: int) -> bool:
        """Whether a rank has told where it is, and is not known to have ended, or to be stopped or out of reach."""
        return not self._answer(rank, lambda told, fate, unknown: fate)

    def _read_of_all(self, what: str, world_size: int) -> Iterator[str | None]:
        """What is there of each rank, in calls that are answered soon."""
        for start in range(0, world_size, AT_ONCE):
            yield from self.store.read_each([f"{what} {r}" for r in range(start, min(start + AT_ONCE, world_size))])

    def _place(self, rank: int, told: Any, fate: str, unknown: str) -> str:
        """Where a rank says that it is, without its stacks."""
        _, _, _, _, collective, line, *_ = told
        return self._where(rank, told, fate, unknown) + (f" It was at {line}." if line and not collective else "")

    def elsewhere(self, mine: FlightRecorder) -> list[int]:
        """Ranks that are known to have ended, to be stopped, or to do something else than this one; raises nothing."""
        ranks = [rank for rank in range(mine.world_size) if rank != mine.rank]
        waits, call, found = _waits(mine.doing()), _name(collective_under_way()), list[int]()

        def look(store: StoreClient) -> bool:
            told = [store.read_each([f"{key} {r}" for r in ranks]) for key in ("process of", "end of", "rank")]
            found[:] = [rank for rank, *texts in zip(ranks, *told, strict=True) if is_elsewhere(rank, *texts)]
            return bool(found)

        def is_elsewhere(rank: int, process: str | None, end: str | None, told: str | None) -> bool:
            known: list[Any] = []
            with suppress(TransportError):
                if process is not None:
                    known, _ = _introduced(process, rank)
                if (last := _last_words(end, rank, known)) is not None:
                    return f": {TransportError.__name__}: " not in last  # which is another rank's matter
                if known and _fate(known):
                    return True
                if told is not None:
                    doing, _, step, _, collective, *_ = decode(told, rank, lambda message: of_types(message, *_TOLD))
                    apart = waits or _name(collective) != call
                    return bool(step == mine.row.step and not _waits(doing) and apart)
            return False

        with suppress(TransportError):
            wait_until(self.store, look, SOON_SECONDS)  # a process that ends closes its connections first
        return found

    def about_store(self) -> str:
        """Where the store does not answer, whether its host can be reached, as a sentence."""
        try:
            self.store.has("any")
        except TransportError:
            why = why_out_of_reach(self._holder)
            return f"As to the store: {why}." if why else ""
        return ""


_met: weakref.WeakKeyDictionary[StoreClient, float] = weakref.WeakKeyDictionary()


def note_meeting(group: StoreClient) -> None:
    """All ranks of a group are in this call now; the first time counts, which is the same one on all of them."""
    _met.setdefault(group, time.monotonic())


# doing, at, step, counts, collective, the user's line, stacks, and what `_averages` says
_TOLD = str, float, int, list, str, str, str, str, dict


def _averages(alive: Sequence[FlightRecorder]) -> tuple[str, dict[str, int]]:
    """The wrapper of which this process waits for averages, and, by wrapper, the steps that it cannot begin meanwhile.

    Nothing of that is said where it does not wait, nor where another of its threads may begin them.
    """
    *others, latest = alive
    if not latest.awaits or not latest.wrapper or not only_one_trains():
        return "", {}
    steps = {each.wrapper: each.row.step for each in others if each.wrapper and each.is_to_begin}
    return latest.wrapper, steps


def _introduced(process: str, rank: int) -> tuple[list[Any], str]:
    """What a rank's process has introduced itself as, and the address of its host."""
    *known, address = decode(process, rank, lambda message: of_types(message, str, int, str, str))
    return known, address


def _in_backward(rank: int, wrapper: str, line: str) -> str:
    """Where a rank is that waits for the averages of a wrapper (`FlightRecorder.wrapper`), as a sentence."""
    wrapped = wrapper.rpartition(" ")[2]
    return f"Rank {rank} is in that of {wrapped}" + (f" ({line})." if line else ".")


def _last_words(end: str | None, rank: int, known: list[Any]) -> str | None:
    """What a process that is known has said at its end."""
    if end is None:
        return None
    ended, text = decode(end, rank, lambda message: of_types(message, list, str))
    return str(text) if ended == known else None


def _waits(doing: str) -> bool:
    return doing.startswith(DOING[Phase.WAITING])


def _name(collective: str) -> str:
    """Without the line where it was called."""
    return collective.partition(" (")[0]


def _apart(counted: list[Any], mine: FlightRecorder) -> str:
    """What a rank did oftener, or less often, than this one, up to their last averages."""
    if len(counted) != len(Counts._fields) or not all(type(count) is int for count in counted):
        return ""
    theirs = Counts(*counted)
    for name, what, meaning in COUNTED:
        of, here = getattr(theirs, name), getattr(mine.counts_before, name)
        if of != here:
            return f" Up to its last averages it ran {of} {what}, this rank {here}: {meaning}."
    return ""


def _why_it_ends() -> str:
    """Why this process ends, where its exit handlers run."""
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None:
        return "its script has come to its end, or called sys.exit."
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, TransportError):  # another rank's matter
        return text.partition("\n")[0][:LAST_TEXT]
    frames = "".join(traceback.format_tb(error.__traceback__)[-LAST_FRAMES:])
    return f"it raised {text[:LAST_TEXT]}\n{frames}"


def _fate(told: Any) -> str:
    """What has become of a process that introduced itself."""
    return fate(*of_types(told, str, int, str))


def _first(error: TransportError) -> TransportError:
    """What the error comes from: behind it, ranks of two levels have waited for each other already."""
    while isinstance(error.__cause__, TransportError):
        error = error.__cause__
    return error


def explain(error: TransportError, recorder: FlightRecorder, place: Whereabouts | None) -> TransportError:
    """The error, with what this rank did and what is known of those that did not come."""
    lines = [str(error), f"Rank {recorder.rank} was {recorder.doing()}."]
    missing, recorder.missing = error.missing or recorder.missing, ()
    if place is not None:
        lines += place.ask(missing[:NAMED], recorder, _first(error).at) or [place.about_store()]
    return TransportError("\n".join(filter(None, lines)), missing)
