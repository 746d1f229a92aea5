"""Where a bucket's work is enqueued: for CPU tensors one thread, so that reduction overlaps with backward."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future

Job = tuple[Callable[[], None], "Future[None]"]


class ThreadStream:
    """Runs jobs one after the other, in the order of `submit`, on a thread that starts with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future[None] | None = None
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Enqueue `job`; the future holds its end or its exception."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="fastreduce-communication", daemon=True
            )
            self._thread.start()
        future: Future[None] = Future()
        self._jobs.put((job, future))
        self._last = future
        return future

    @property
    def idle(self) -> bool:
        """Whether all jobs have ended."""
        return self._last is None or self._last.done()

    def close(self) -> None:
        """End the thread after the jobs already enqueued, and wait a little for its end."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (item := jobs.get()) is not None:
        job, future = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            job()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, job, future  # an idle thread keeps no bucket, and so no model, alive
