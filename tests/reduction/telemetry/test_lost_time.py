"""Time that a thread loses: what waits for a core, and what collects garbage, is told of the thread that does."""

from __future__ import annotations

import gc
import os
import threading
import time

from fastreduce.reduction.telemetry import lost_time


def _busy(seconds: float) -> None:
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def _waited_beside_another() -> float:
    """Seconds that this thread waits for a core that another process has."""
    core = {min(os.sched_getaffinity(0))}
    if not (child := os.fork()):
        os.sched_setaffinity(0, core)
        _busy(0.3)
        os._exit(0)
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, core)
    try:
        thread, start = lost_time.queued()
        _busy(0.1)
        again, end = lost_time.queued()
        assert thread == again
        return end - start
    finally:
        os.sched_setaffinity(0, before)
        os.waitpid(child, 0)


def _waited_asleep() -> float:
    """The same while it sleeps, and wants one but at the end."""
    start = lost_time.queued()[1]
    time.sleep(0.2)
    return lost_time.queued()[1] - start


def test_a_thread_that_shares_its_core_waits_for_it():
    if not os.path.exists(lost_time.SCHEDULER):
        assert lost_time.queued()[1] == 0.0
        return
    assert _waited_beside_another() > 0.02
    assert min(_waited_asleep() for _ in range(5)) < 0.1, "it did not want a core"


def test_threads_and_forks_are_told_apart():
    here, found = lost_time.queued()[0], []
    thread = threading.Thread(target=lambda: found.append(lost_time.queued()[0]))
    thread.start()
    thread.join()
    assert found and found[0] != here
    if not (child := os.fork()):
        os._exit(lost_time.queued()[0] != os.getpid())
    assert os.waitpid(child, 0)[1] == 0


def test_collections_are_added_up():
    lost_time.notice_collections()
    heap = [[i] for i in range(100_000)]
    start, begin = lost_time.collected(), time.monotonic()
    gc.collect()
    assert 0.0005 < lost_time.collected() - start <= time.monotonic() - begin and len(heap) == 100_000
