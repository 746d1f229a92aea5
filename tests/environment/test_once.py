"""What a process does once, though threads ask for it at one time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastreduce.environment.once import once


def test_threads_that_come_at_once_wait_for_the_first():
    calls, ends, together = [], [], threading.Barrier(4)

    @once
    def register() -> None:
        calls.append(threading.get_ident())
        time.sleep(0.2)
        ends.append(threading.get_ident())

    def come(_: int) -> int:
        together.wait(60)
        register()
        return len(ends)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(come, range(4))) == [1] * 4
    assert len(calls) == 1


def test_what_raised_is_done_by_the_next_call():
    calls: list[int] = []

    @once
    def register() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("not yet")

    with pytest.raises(RuntimeError, match="not yet"):
        register()
    register()
    register()
    assert calls == [0, 1]
