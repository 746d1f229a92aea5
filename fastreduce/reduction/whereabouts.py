"""Where ranks are that others wait for: a rank that stalls tells it in the group's store, and others read it there.

1. One thread of the process looks now and then whether its recorders go on. That costs nobody anything.
2. Where none has for a quarter of the timeout, it writes what this rank does, and its Python stacks, into the store,
   and again after each such time. Ranks that wait for another do so, too: what counts is what the missing ones say.
3. Who has waited in vain reads what the missing ranks have told. One that is stopped tells nothing: its process id is
   in the store since the first look, and on the same host the system knows what has become of it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

from ..environment.exits import Exit, at_exit
from ..environment.fates import fate, introduction
from ..environment.stacks import OURS, python_stacks
from ..errors import TransportError
from ..transports.messages import decode, of_types
from ..transports.store_client import SOON_SECONDS, StoreClient
from . import clocks
from .flight_recorder import FlightRecorder, all_recorders

SHORTEST, LONGEST = 0.5, 30.0  # seconds without a change after which a rank tells where it is
PART = 4  # of the timeout
NAMED = 3  # ranks of which an error tells
FRAMES, THREADS = 20, 4  # of stacks that are told
EXIT_SECONDS = 0.5
UNKNOWN = -1  # a count of one wrapper's, in a process that has several


class Whereabouts:
    """The place where the ranks of one group tell where they are.

    Args:
        store: the client of the group's store.
        seconds: the group's timeout.
    """

    def __init__(self, store: StoreClient, seconds: float) -> None:
        self._store = store.at("fastreduce/whereabouts", SOON_SECONDS)
        self.patience = min(LONGEST, max(SHORTEST, seconds / PART))

    def introduce(self, rank: int) -> None:
        """Write which process a rank is."""
        self._store.set(f"process of {rank}", json.dumps(introduction()))

    def tell(self, rank: int) -> None:
        """Write where this rank's process is."""
        alive = all_recorders()
        if not alive:  # the last one has just ended
            return
        latest = alive[-1]  # what the process does; other wrappers stand still meanwhile
        counted = latest.unreduced_before if len(alive) == 1 else UNKNOWN
        stacks = python_stacks(FRAMES, THREADS, ours=False)
        told = [latest.doing(), time.time(), latest.row.step, counted, stacks]
        self._store.set(f"rank {rank}", json.dumps(told))

    def ask(self, rank: int, mine: FlightRecorder) -> str:
        """What is known of a rank, as sentences, and its stacks, as far as it has told them; raises nothing."""
        try:
            process, told = self._store.read(f"process of {rank}"), self._store.read(f"rank {rank}")
        except TransportError as error:
            return f"Nobody can be asked where rank {rank} is: {error}."
        fate = ""
        with suppress(TransportError):
            fate = "" if process is None else decode(process, rank, _fate)
        if told is None:
            return f"Rank {rank} has not told where it is: {fate or 'it is stopped, gone or out of reach'}."
        try:
            return decode(told, rank, lambda message: self._sentence(rank, message, fate, mine))
        except TransportError as error:
            return f"{error}."

    def _sentence(self, rank: int, told: Any, fate: str, mine: FlightRecorder) -> str:
        doing, at, step, unreduced, stacks = of_types(told, str, float, int, int, str)
        age = max(0.0, time.time() - at)
        silent = (
            f" It has told nothing since: {fate or 'it is stopped, gone or out of reach'}."
            if (fate or age > 3 * self.patience)
            else ""
        )
        apart = (
            f" Up to its last averages it ran {unreduced} forward(s) in no_sync, this rank {mine.unreduced_before}: "
            "if they are to be as many, one of its backwards was left out, or one here."
            if step == mine.row.step and unreduced not in (UNKNOWN, mine.unreduced_before)
            else ""
        )
        return f"Rank {rank}, {age:.1f} s ago, was {doing}.{silent}{apart} Its Python stacks:\n{stacks.rstrip()}"


def _fate(told: Any) -> str:
    """What has become of a process that introduced itself."""
    return fate(*of_types(told, str, int, str))


# The thread


class _Watch:
    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[FlightRecorder, Whereabouts] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()  # a recorder may end wherever this is held
        self._stop = threading.Event()  # of the thread that runs
        self._stop.set()
        self._thread: threading.Thread | None = None

    def add(self, recorder: FlightRecorder, place: Whereabouts) -> None:
        with self._lock:
            # What was registered last is called first: the recorder has left the dictionary when this one is.
            weakref.finalize(recorder, self._stop_if_idle).atexit = False
            self._places[recorder] = place
            if self._stop.is_set():
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._work, args=(self._stop,), name=f"{OURS}whereabouts", daemon=True
                )
                self._thread.start()

    def remove(self, recorder: FlightRecorder) -> None:
        with self._lock:
            self._places.pop(recorder, None)
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        with self._lock:
            if not self._places:
                self._stop.set()

    def after_fork(self) -> None:
        """A fork has no such thread, nor anybody who would give back the lock; its wrappers are those that it makes."""
        self.__init__()  # type: ignore[misc]

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(EXIT_SECONDS)

    def _work(self, stop: threading.Event) -> None:
        before: list[tuple[int, int]] = []
        introduced: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
        gone: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
        since = told = clocks.now()
        patience = SHORTEST
        while not stop.wait(patience / 2):
            with self._lock:
                if not self._places:
                    stop.set()
                    return
                ranks = {place: recorder.rank for recorder, place in self._places.items()}
                changes = sorted((id(recorder), recorder.changes) for recorder in self._places)
            patience = min((place.patience for place in ranks), default=SHORTEST)
            at = clocks.now()
            if changes != before:
                before, since, told = changes, at, 0.0
            stalls = at - since >= patience and at - told >= patience
            if stalls:
                told = at
            for place, rank in ranks.items():
                if place in gone:
                    continue
                try:
                    if place not in introduced:
                        introduced.add(place)
                        place.introduce(rank)
                    if stalls:
                        place.tell(rank)
                except TransportError as error:
                    if isinstance(error.__cause__, RuntimeError):  # its holder has ended; torch logs each call
                        gone.add(place)
                except (RuntimeError, OSError):  # a wrapper is being made at this moment, or /proc cannot be read
                    pass
            ranks.clear()


_watch = _Watch()
at_exit(Exit.REDUCERS, _watch.end)
os.register_at_fork(after_in_child=_watch.after_fork)


def watch(recorder: FlightRecorder, place: Whereabouts) -> None:
    """Let this rank tell at `place` where it is once it stalls, for as long as the recorder lives."""
    _watch.add(recorder, place)


def forget(recorder: FlightRecorder) -> None:
    """Let it tell nothing more."""
    _watch.remove(recorder)


def explain(error: TransportError, recorder: FlightRecorder, place: Whereabouts | None) -> TransportError:
    """The error, with what this rank did and what is known of those that did not come."""
    lines = [str(error), f"Rank {recorder.rank} was {recorder.doing()}."]
    if place is not None:
        lines += [place.ask(rank, recorder) for rank in error.missing[:NAMED]]
    return TransportError("\n".join(lines), error.missing)
