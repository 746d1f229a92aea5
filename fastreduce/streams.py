"""Where a bucket's work is enqueued: for CPU tensors one thread, so that reduction overlaps with backward."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

Finish = Callable[[], None]
Begin = Callable[[], Finish]


class Job:
    """Work in two parts: `begin` starts transfers and returns what is to be done when they have come."""

    def __init__(self, begin: Begin) -> None:
        self._begin: Begin | None = begin
        self._finish: Finish | None = None
        self._begun: Future[None] = Future()
        self._ended: Future[None] = Future()

    def begin(self) -> bool:
        """Do the first part; returns whether the second is to be done."""
        begin, self._begin = self._begin, None
        if begin is None or not self._begun.set_running_or_notify_cancel():
            self._ended.cancel()
            return False
        try:
            self._finish = begin()
        except BaseException as error:
            self._begun.set_exception(error)
            self._ended.set_exception(error)
            return False
        self._begun.set_result(None)
        return True

    def finish(self) -> None:
        """Do the second part."""
        finish, self._finish = self._finish, None  # what has ended keeps no bucket, and so no model, alive
        if finish is None:
            return
        try:
            finish()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    @property
    def done(self) -> bool:
        """Whether both parts have ended."""
        return self._ended.done()

    def begun(self) -> None:
        """Wait until the first part has ended; raises what it raised."""
        self._begun.result()

    def result(self) -> None:
        """Wait until both parts have ended; raises what they raised."""
        self._ended.result()

    def cancel(self) -> None:
        """Leave it out if it has not begun."""
        self._begun.cancel()


class ThreadStream:
    """Runs jobs on a thread that starts with the first one, in the order of `submit`.

    The next job is begun before the last one is finished, so that one bucket is compressed while
    another's wire is on its way.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, begin: Begin) -> Job:
        """Enqueue a job."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="fastreduce-communication", daemon=True
            )
            self._thread.start()
        self._last = job = Job(begin)
        self._jobs.put(job)
        return job

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._last is None or self._last.done

    def close(self) -> None:
        """End the thread after the jobs already enqueued, and wait a little for its end."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    under_way: deque[Job] = deque()
    while True:
        try:
            job = jobs.get(block=not under_way)
        except queue.Empty:
            under_way.popleft().finish()
            continue
        if job is None:
            break
        if job.begin():
            under_way.append(job)
        del job
    for job in under_way:
        job.finish()
