"""Launches: the buckets of one reduction that are on their way, in index order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ..environment.signals import is_of_signal
from ..errors import TransportError
from .bucketed import BucketedGradients, BucketJob
from .jobs import DONE, Part, Pending

Made = Sequence[tuple[BucketJob, Pending]]


class Launches:
    """Launches buckets, each of which begins its reduction if the one before has: ranks reduce them in one order.

    Args:
        buckets: the gradients, laid out.
        used: for each parameter, whether a backward reached it on this rank; the caller changes it in place.
        launching: called with each bucket's job before it is launched.

    Attributes:
        made: jobs, and what is awaited of them.
        next: the first bucket that has neither been launched nor had nothing to do.
    """

    def __init__(
        self, buckets: BucketedGradients, used: Sequence[bool], launching: Sequence[Callable[[BucketJob], object]]
    ) -> None:
        self._buckets, self._used, self._launching = buckets, used, launching
        self._lock = threading.Lock()  # each device's hooks run on a thread of their own
        self.forget()

    def forget(self) -> None:
        """Begin another reduction."""
        self.made: list[tuple[BucketJob, Pending]] = []
        self.next = 0

    def launch_full(self, waiting: Sequence[int], end: int) -> None:
        """Launch what comes next in front of bucket `end` and, by `waiting`, waits for no more gradients."""
        with self._lock:
            while (index := self.next) < end and not waiting[index]:
                self._launch(index)

    def launch_rest(self, last_here: bool) -> None:
        """Launch all that have not been; `last_here`: the last one on this thread."""
        with self._lock:  # `Backward.finish` in a hook, where another device's hook may be launching one
            while (index := self.next) < (count := len(self._buckets.pipelines)):
                self._launch(index, here=last_here and index == count - 1)

    def launch_these(self, indices: Sequence[int]) -> None:
        """Launch these buckets alone, in ascending order, the last one on this thread."""
        for index in indices:
            self._launch(index, here=index == indices[-1])

    def _launch(self, index: int, here: bool = False) -> None:
        if not self._buckets.alone(index):
            job = self._buckets.collect(index, self._used)
            for launching in self._launching:
                launching(job)
            before = self.made[-1][1] if self.made else DONE
            start = job.stream.begin if here else job.stream.submit
            try:
                self.made.append((job, start(lambda: _begin_behind(before, job))))
            except BaseException as error:
                self.end_if_interrupted(error)
                raise
        self.next = index + 1

    def end_if_interrupted(self, error: BaseException) -> None:
        """End the connection if a signal's handler raised, which comes amid a collective, too.

        Nobody knows how far that has come: made up for, it would meet another one of the peers.
        """
        transport = self._buckets.transport
        if transport.world_size > 1 and is_of_signal(error):
            transport.abort()

    def let_go(self) -> None:
        """Their averages are nobody's, and `.grad` the user's (`BucketedGradients.let_go`)."""
        self._buckets.let_go(job for job, pending in self.made if not pending.done)

    def results(self) -> None:
        """Wait for all averages; raises what the first bucket raised that failed."""
        for _, pending in self.made:
            pending.result()

    def all_begun(self) -> None:
        """Wait until all have begun: streams leave starting collectives to this thread."""
        for _, pending in self.made[-1:]:
            pending.begun()

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        for _, pending in self.made:
            pending.cancel()

    def end_as_they_can(self) -> None:
        """Wait for all of a backward that raised; from the first on that has not begun, `next` counts anew.

        Raises:
            TransportError: if that is what one raised; what else they raise has been raised already.
        """
        try:
            for job, pending in self.made:
                if not goes_well(pending.begun):  # nor do those behind it begin
                    self.next = job.pipeline.bucket.index
                    break
                goes_well(pending.result)
        finally:
            self._buckets.streams.join()  # of what failed in its first part nobody has waited for the rest


def _begin_behind(before: Pending, job: BucketJob) -> Part:
    """Begin a bucket's reduction if the one before has begun."""
    before.begun()
    return job.begin()


def goes_well(function: Callable[[], object]) -> bool:
    """Whether it returns, where what it raises has been raised already, but for transports' errors."""
    try:
        function()
    except TransportError:
        raise
    except Exception:
        return False
    return True
