"""A long wait for other ranks: one of those that wait says in the log for whom, and what these do."""

from __future__ import annotations

import logging
import traceback
import weakref

from ...transports.store_client import StoreClient
from .. import clocks
from .flight_recorder import FlightRecorder
from .other_call import LOOK_SECONDS
from .whereabouts import LONGEST, Whereabouts

logger = logging.getLogger(__name__)

SAY_SECONDS = LONGEST + 2 * LOOK_SECONDS  # without anything new, until which all have told where they are


class LongWait:
    """What this process waits for, if it does: said once a job, after a while, and again each time that it is twice.

    Who says it counts first in the store, where the count is until this rank goes on. Without such a log it does not.
    """

    def __init__(self) -> None:
        self._of = 0, 0  # which recorder, and how often it had changed
        self._due = SAY_SECONDS
        self._counts: list[str] = []
        self._group: weakref.ref[StoreClient] | None = None  # of the counts that are this rank's to delete

    def look(self, recorder: FlightRecorder, place: Whereabouts) -> None:
        """Called now and then, with what was begun last in this process, and where its ranks tell where they are.

        Raises:
            TransportError: if the store does not answer.
        """
        if (of := (id(recorder), recorder.changes)) != self._of:
            self._of, self._due = of, SAY_SECONDS
            before, counts = None if self._group is None else self._group(), self._counts
            self._group, self._counts = None, []
            if before is not None:  # the wrapper may be gone: the next one of its group counts at the same place
                Whereabouts(before, before.seconds).store.delete(*counts)
        if (waited := clocks.now() - recorder.since) < self._due:
            return
        if not logger.isEnabledFor(logging.WARNING):
            return
        count = f"late {recorder.row.step} {recorder.phase} {self._due:g}"
        self._due *= 2
        if place.store.add(count, 1) == 1:
            self._group = weakref.ref(place.group)
            self._counts.append(count)
            if (whom := place.who_is_late(recorder)) and of == (id(recorder), recorder.changes):
                says = "rank %d of %d has not gone on for %.0f s, in step %d. %s"
                try:
                    logger.warning(says, recorder.rank, recorder.world_size, waited, recorder.row.step, whom)
                except Exception:  # of a user's handler: this thread goes on, which tells others where this rank is
                    traceback.print_exc()
