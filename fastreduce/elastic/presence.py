"""Who is there: processes of a job that announce themselves in a store, beat there, and look for each other."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

from ..environment.fates import has_ended, introduction
from ..environment.stacks import OURS
from ..errors import TransportError
from ..transports.hosts import this_host
from ..transports.messages import decode, of_types
from ..transports.store_client import StoreClient
from .times import Times

EXIT_SECONDS = 0.5

logger = logging.getLogger(__name__)


class Process(NamedTuple):
    """What a process says of itself.

    Args:
        place: where it wants to stand among the others: its RANK.
        host: what ranks of one host have in common.
        digest: of its model and settings.
        transport: that it asked for; "" for none.
        born: its host, process id and beginning.
    """

    place: int
    host: str
    digest: str
    transport: str
    born: tuple[str, int, str]


class Presence:
    """This process among the others of its job: a number that no other gets, and a thread that beats and looks.

    1. Each beats ten times in the timeout: it counts up a number in the store.
    2. Who has ended on this host is known at once, since the system tells; who has left has said so; of others it is
       known when their number has not changed for the timeout.
    3. Where one of those that are watched is gone, or has said that a collective failed, `on_loss` is called at each
       look: what this process begins with the lost must end, too.

    Args:
        store: the job's part of the store.
        times: that follow from the timeout.
        place: see `Process`.
        digest: likewise.
        transport: likewise.
        on_loss: called on the thread, with the number of the generation that was watched.
    """

    def __init__(
        self,
        store: StoreClient,
        times: Times,
        place: int,
        digest: str,
        transport: str,
        on_loss: Callable[[int], None],
    ) -> None:
        self.store, self.times, self._digest, self._on_loss = store, times, digest, on_loss
        self.id = store.add("ids", 1) - 1
        self._known: dict[int, Process] = {}
        self._beats: dict[int, tuple[str, float]] = {}  # a number, and since when
        self._looked, self._looking = time.monotonic(), threading.Lock()  # at them
        self._watched: tuple[int, tuple[int, ...], frozenset[int]] | None = None
        self.waiting: frozenset[int] = frozenset()  # those who could come in, as the thread has seen it last
        store.set(f"beat {self.id}", "0")
        store.set(f"process {self.id}", json.dumps([place, this_host(), digest, transport, introduction()]))
        store.append("knocks", f"{self.id} ")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"{OURS}elastic", daemon=True)
        self._thread.start()

    def process(self, number: int) -> Process:
        """What a process has said of itself."""
        if number not in self._known:
            told = self.store.read(f"process {number}")
            if told is None:
                raise TransportError(f"process {number} has not introduced itself in the store")
            self._known[number] = decode(told, number, _process)
        return self._known[number]

    def gone(self, numbers: Collection[int]) -> list[int]:
        """Which of these processes are known to be gone."""
        others = [number for number in numbers if number != self.id]
        if not others:
            return []
        left = set(self._numbers("left"))
        beats = self.store.read_all([f"beat {number}" for number in others])
        silent = self._silent(dict(zip(others, beats, strict=True)))
        return [
            number for number in others if number in left or number in silent or has_ended(*self.process(number).born)
        ]

    def _silent(self, beats: Mapping[int, str]) -> set[int]:
        """Of which processes the number has not changed for the timeout.

        Between two looks half a timeout counts at most: in what is more this process may have stood still itself.
        """
        found = set[int]()
        with self._looking:  # the thread, and who meets
            now = time.monotonic()
            paused, self._looked = now - self._looked - self.times.timeout / 2, now
            if paused > 0:
                self._beats = {number: (beat, since + paused) for number, (beat, since) in self._beats.items()}
            for number, beat in beats.items():
                before, since = self._beats.get(number, ("", now))
                if before != beat:
                    self._beats[number] = beat, now
                elif now - since > self.times.timeout:
                    found.add(number)
        return found

    def outside(self, known: Collection[int]) -> list[int]:
        """Processes that have knocked, are alike and there, beside those that are known."""
        came = [number for number in self.knocked() if number not in known]
        alike = [number for number in came if self.process(number).digest == self._digest]
        gone = self.gone(alike)
        return [number for number in alike if number not in gone]

    def knocked(self) -> list[int]:
        """All processes that have ever come, in the order in which they did."""
        return self._numbers("knocks")

    def _numbers(self, key: str) -> list[int]:
        return [int(number) for number in (self.store.read(key) or "").split() if number.isdecimal()]

    def watch(self, generation: int, members: Collection[int], known: Collection[int]) -> None:
        """Look for these processes from now on, and for those that come beside the ones that are known."""
        self._watched = generation, tuple(members), frozenset(known)

    def leave(self) -> None:
        """Say that this process takes part no more, and end the thread."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(EXIT_SECONDS)
        with suppress(TransportError):  # the store is gone: nobody will ask
            self.store.at("", EXIT_SECONDS).append("left", f"{self.id} ")

    def _work(self) -> None:
        count, beaten, answered = 0, time.monotonic(), True
        while not self._stop.wait(self.times.look):
            try:
                if time.monotonic() - beaten >= self.times.beat:
                    count, beaten = count + 1, time.monotonic()
                    self.store.set(f"beat {self.id}", str(count))
                watched = self._watched
                if watched is not None:
                    generation, members, known = watched
                    if self.store.has(f"broken {generation}") or self.gone(members):
                        self.store.set(f"broken {generation}", "")
                        self._on_loss(generation)
                    self.waiting = frozenset(self.outside(known))
                answered = True
            except TransportError as error:
                if answered and not self._stop.is_set():
                    logger.warning(
                        "process %d: %s. Training goes on until a rank is lost or comes, and ends then", self.id, error
                    )
                answered = False


def _process(told: object) -> Process:
    place, host, digest, transport, born = of_types(told, int, str, str, str, list)
    name, pid, began = of_types(born, str, int, str)
    return Process(place, host, digest, transport, (name, pid, began))
