"""While frames are walked through no garbage is collected, and that ends with the walk, whoever else walks."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from fastreduce.environment.frames import walking_frames


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """Of each collection from now on, its phases, under a threshold that each few objects pass."""
    seen, threshold = list[str](), gc.get_threshold()
    hear = lambda phase, info: seen.append(phase)  # noqa: E731 (one that can be removed)
    gc.callbacks.append(hear)
    gc.set_threshold(2)
    yield seen
    gc.set_threshold(*threshold)
    gc.callbacks.remove(hear)


def _make_objects() -> list[list[int]]:
    return [[i] for i in range(100)]


def test_nothing_is_collected_meanwhile(collections: list[str]):
    _make_objects()
    assert collections
    with walking_frames():
        collections.clear()
        with walking_frames():  # as a signal's handler does
            assert threading.get_ident() in sys._current_frames()
        _make_objects()
        assert collections == []
    _make_objects()
    assert collections


def test_who_collects_nothing_goes_on_so():
    gc.disable()
    try:
        with walking_frames():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_another_thread_walks_next_and_a_fork_amid_a_walk_is_as_any_other():
    inside, go_on, walks = threading.Event(), threading.Event(), list[bool]()

    def walk() -> None:
        with walking_frames():
            inside.set()
            go_on.wait()
            walks.append(gc.isenabled())

    def fork() -> None:
        pid = os.fork()  # waits for the walk's end
        if not pid:
            with walking_frames():
                pass
            os._exit(gc.isenabled())
        walks.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1)

    threads = [threading.Thread(target=target) for target in (walk, walk, fork)]
    threads[0].start()
    assert inside.wait(10)
    for thread in threads[1:]:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert sorted(walks) == [False, False, True] and gc.isenabled()
