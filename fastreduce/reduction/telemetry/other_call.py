"""Ranks that would wait for each other for ever: some for averages, others in a call in which all ranks meet.

One comes to `save_checkpoint` behind an exception that it has caught, and the others are in their backward: no
connection breaks, and no process ends.
"""

from __future__ import annotations

import threading
from contextlib import suppress

from ...errors import TransportError
from ...transports.store_client import StoreClient
from .. import clocks
from .flight_record import Phase
from .flight_recorder import FlightRecorder

LOOK_SECONDS = 0.5  # until a call counts as one that waits, and between two looks
PATIENCE = 1.0  # seconds that averages are waited for, until it is asked whether they can come
PART = 20  # of the time waited so far, between two such questions


class Call:
    """A call of this rank in which all ranks meet, on the thread that trains.

    Args:
        store: where ranks tell of such calls.
        rank: this one.
        step: of which it has no averages yet.
    """

    def __init__(self, store: StoreClient, rank: int, step: int) -> None:
        self._store, self._rank, self._step = store, rank, step
        self._lock, self._since = threading.Lock(), clocks.now()
        self._told = self._counted = self._ended = False

    def tell(self) -> bool:
        """Tell the other ranks, once it waits; whether that has been done now."""
        with self._lock:
            if self._told or self._ended or clocks.now() - self._since < LOOK_SECONDS:
                return False
            self._told = True
            self._store.set(f"other call {self._rank}", str(self._step))
            self._store.add("other calls", 1)
            self._counted = True  # else the store has not answered
            return True

    def end(self) -> None:
        """All ranks have come, or it has failed."""
        with self._lock, suppress(TransportError):
            self._ended = True
            if self._told:
                self._store.set(f"other call {self._rank}", "")
            if self._counted:
                self._store.add("other calls", -1)


class Question:
    """Whether averages that one rank waits for can come, asked now and then while it does."""

    def __init__(self) -> None:
        self._next = 0.0

    def ask(self, store: StoreClient, recorder: FlightRecorder) -> list[int]:
        """Ranks that do not come to the averages that are waited for now, since they wait in another call.

        Raises:
            TransportError: if the store does not answer.
        """
        at, since, step = clocks.now(), recorder.since, recorder.row.step
        if recorder.phase is not Phase.WAITING or at - since < PATIENCE or at < self._next:
            return []
        self._next = at + (at - since) / PART
        if store.add("other calls", 0) < 1:
            return []
        ranks = [rank for rank in range(recorder.world_size) if rank != recorder.rank]
        absent = set(store.absent([f"other call {rank}" for rank in ranks]))
        told = [rank for place, rank in enumerate(ranks) if place not in absent]
        steps = store.read_all([f"other call {rank}" for rank in told])  # a key stays
        found = [rank for rank, text in zip(told, steps, strict=True) if text.isdecimal() and int(text) <= step]
        # What was waited for may have come meanwhile.
        return found if (recorder.since, recorder.row.step) == (since, step) else []
