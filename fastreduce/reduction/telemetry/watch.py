"""The thread that looks whether this process's ranks go on, and lets those that stall, or end, tell where they are."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from ...environment.exits import Exit, at_exit
from ...environment.stacks import OURS
from ...errors import TransportError
from ...transports.store_client import StoreClient
from .. import clocks
from .flight_recorder import FlightRecorder, all_recorders
from .long_wait import LongWait
from .other_call import LOOK_SECONDS, Call, Question
from .whereabouts import SHORTEST, Whereabouts, explain

EXIT_SECONDS = 0.5


class _Stall:
    """Since when no step of a group's wrappers has ended in this process, and when that was told."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int]] = []
        self._since = self._told = 0.0

    def is_due(self, steps: list[tuple[int, int]], patience: float) -> bool:
        """Whether to tell now, given the wrappers, by number, each with its step."""
        at = clocks.now()
        if steps != self._steps:
            self._steps, self._since, self._told = steps, at, 0.0
        if at - self._since < patience or at - self._told < patience:
            return False
        self._told = at
        return True


class _Watch:
    def __init__(self) -> None:
        self._places: weakref.WeakKeyDictionary[FlightRecorder, Whereabouts] = weakref.WeakKeyDictionary()
        self._give_up: weakref.WeakKeyDictionary[FlightRecorder, Callable[[], None]] = weakref.WeakKeyDictionary()
        self._call: Call | None = None  # in which this rank meets the others outside its backward
        self._question, self._long_wait = Question(), LongWait()
        self._lock = threading.RLock()  # a recorder may end wherever this is held
        self._stop = threading.Event()  # of the thread that runs
        self._stop.set()
        self._thread: threading.Thread | None = None
        # Groups of this process's wrappers, each with its rank, and those whose store is gone.
        self._ranks: weakref.WeakKeyDictionary[StoreClient, int] = weakref.WeakKeyDictionary()
        self._gone: weakref.WeakSet[StoreClient] = weakref.WeakSet()
        self._wrappers: weakref.WeakKeyDictionary[StoreClient, int] = weakref.WeakKeyDictionary()  # so many so far

    def add(self, recorder: FlightRecorder, place: Whereabouts, give_up: Callable[[], None]) -> None:
        """Let this rank tell at `place` where it is once it stalls, for as long as the recorder lives.

        `give_up` is called on a thread of its own where averages are waited for that cannot come: it ends the
        collectives.
        """
        thread = None
        with self._lock:
            # What was registered last is called first: the recorder has left the dictionary when this one is.
            weakref.finalize(recorder, self._stop_if_idle).atexit = False
            self._places[recorder], self._give_up[recorder] = place, give_up
            self._ranks[place.group] = recorder.rank
            self._wrappers[place.group] = number = self._wrappers.get(place.group, 0) + 1
            recorder.wrapper = f"{number} {place.wrapped}"  # ranks wrap in the same order: all meet there
            if self._stop.is_set():
                self._stop = threading.Event()
                thread = self._thread = threading.Thread(
                    target=self._work, args=(self._stop,), name=f"{OURS}whereabouts", daemon=True
                )
        if thread is not None:
            thread.start()  # waits for it, while another recorder may end on it, for which it needs the lock

    def remove(self, recorder: FlightRecorder) -> None:
        """Let it tell nothing more."""
        with self._lock:
            self._places.pop(recorder, None)
            self._stop_if_idle()

    def _stop_if_idle(self) -> None:
        with self._lock:
            if not self._places:
                self._stop.set()

    @contextmanager
    def in_other_call(self, recorder: FlightRecorder) -> Iterator[None]:
        place = self._places.get(recorder)
        if place is None or len(self._places) > 1 or not recorder.on_this_thread:  # another backward may go on
            yield
            return
        self._call = call = Call(place.store, recorder.rank, recorder.row.step)
        try:
            yield
        finally:
            self._call = None
            call.end()

    def _meet(self, recorder: FlightRecorder, place: Whereabouts) -> None:
        """End what this rank waits for, where another one that is to bring it waits in another call."""
        call = self._call
        if call is not None:  # of a signal's handler it may be, while averages are waited for
            if call.tell():
                place.tell(recorder.rank)
            return
        if ranks := self._question.ask(place.store, recorder):
            recorder.missing = tuple(ranks)
            self._give_up[recorder]()

    def explain_elsewhere(self, error: TransportError, recorder: FlightRecorder | None) -> TransportError:
        """The error of a collective of torch's, which names nobody, with what is known of ranks that do not come."""
        place = None if recorder is None else self._places.get(recorder)
        if recorder is None or place is None:
            return error
        return explain(TransportError(str(error), place.elsewhere(recorder)), recorder, place)

    def after_fork(self) -> None:
        """A fork has no such thread, nor anybody who would give back the lock; its wrappers are those that it makes."""
        self.__init__()  # type: ignore[misc]

    def say_last_words(self) -> None:
        """As the process ends: those who wait for it learn why."""
        for group, rank in list(self._ranks.items()):
            if group not in self._gone:
                with suppress(TransportError, RuntimeError, OSError):
                    place = Whereabouts(group, EXIT_SECONDS)
                    place.introduce(rank)  # the thread may not have come to it
                    place.say_last_word(rank)

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread.is_alive():  # and not about to start, on another thread
            self._thread.join(EXIT_SECONDS)

    def _work(self, stop: threading.Event) -> None:
        # By group: a rank that trains in another one meanwhile tells where it is all the same.
        stalls: weakref.WeakKeyDictionary[StoreClient, _Stall] = weakref.WeakKeyDictionary()
        met: weakref.WeakSet[Whereabouts] = weakref.WeakSet()
        pause = 0.0  # a process that is killed in its first step is to be known
        while not stop.wait(pause):
            with self._lock:
                if not self._places:
                    stop.set()
                    return
                ranks = {place: recorder.rank for recorder, place in self._places.items()}
                steps = self._steps()
                only = list(self._places.items()) if len(self._places) == 1 else []
            patience = min((place.patience for place in ranks), default=SHORTEST)
            pause = min(patience / 2, LOOK_SECONDS)
            for place, rank in ranks.items():
                if place.group in self._gone:
                    continue
                with self._asking(place.group):
                    if place not in met:
                        met.add(place)
                        place.introduce(rank)
                    own = steps.pop(place.group, None)  # once a group, which several wrappers may have
                    if own is not None and stalls.setdefault(place.group, _Stall()).is_due(own, place.patience):
                        place.tell(rank)
                    if only:
                        self._meet(*only[0])
            ranks.clear()
            steps.clear()
            only.clear()
            self._look_for_long_wait()

    def _steps(self) -> dict[StoreClient, list[tuple[int, int]]]:
        """By group, its wrappers, by number, each with its step."""
        steps: dict[StoreClient, list[tuple[int, int]]] = {}
        for recorder, place in self._places.items():
            steps.setdefault(place.group, []).append((id(recorder), recorder.row.step))
        return steps

    def _look_for_long_wait(self) -> None:
        latest = next(reversed(all_recorders()), None)
        with self._lock:
            place = None if latest is None else self._places.get(latest)
        if latest is not None and place is not None and place.group not in self._gone:
            with self._asking(place.group):
                self._long_wait.look(latest, place)

    @contextmanager
    def _asking(self, group: StoreClient) -> Iterator[None]:
        """Around questions to a group's store, which are asked again later, unless its holder has ended."""
        try:
            yield
        except TransportError as error:
            if isinstance(error.__cause__, RuntimeError):  # its holder has ended; torch logs each call
                self._gone.add(group)
        except (RuntimeError, OSError):  # a wrapper is being made at this moment, or /proc cannot be read
            pass


_watch = _Watch()
at_exit(Exit.TELL, _watch.say_last_words)
at_exit(Exit.REDUCERS, _watch.end)
os.register_at_fork(after_in_child=_watch.after_fork)


watch, forget, explain_elsewhere = _watch.add, _watch.remove, _watch.explain_elsewhere


@contextmanager
def in_other_call(recorders: Iterable[FlightRecorder]) -> Iterator[None]:
    """Around a call in which all ranks meet: those that wait for this one's gradients meanwhile give up."""
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(_watch.in_other_call(recorder))
        yield
