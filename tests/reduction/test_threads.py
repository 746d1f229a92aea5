"""Jobs on threads (`ThreadStream`): which part of which job comes when, and what becomes of errors."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastreduce.reduction.jobs import Part, StreamJob, at_once
from fastreduce.reduction.streams import ThreadStream

SECONDS = 20  # a part that is kept waiting so long has failed


@pytest.fixture(params=[False, True], ids=["one thread", "a thread a part"])
def stream(request: pytest.FixtureRequest) -> Iterator[ThreadStream]:
    made = ThreadStream(apart=request.param)
    yield made
    made.close()
    assert not any(thread.is_alive() for thread in made._threads)


class Jobs:
    """Notes parts as they are done: job "a" does a1, a2, a3. Parts in `held` wait until they are let go."""

    def __init__(self, *held: str) -> None:
        self.done: list[str] = []
        self.held = {name: threading.Event() for name in held}
        self.threads: dict[str, threading.Thread] = {}

    def job(self, name: str, parts: int = 3, fails: int = 0, number: int = 1) -> Part:
        def do() -> Part | None:
            part = f"{name}{number}"
            if part in self.held:
                assert self.held[part].wait(SECONDS), part
            self.done.append(part)
            self.threads[part] = threading.current_thread()
            if number == fails:
                raise ValueError(part)
            return None if number == parts else self.job(name, parts, fails, number + 1)

        return do

    def let_go(self, part: str) -> None:
        self.held[part].set()

    def until(self, part: str) -> None:
        end = time.monotonic() + SECONDS
        while part not in self.done:
            assert time.monotonic() < end, part
            time.sleep(1e-3)


def test_nothing_that_waits_keeps_a_job_from_beginning_or_from_being_summed():
    stream, jobs = ThreadStream(apart=True), Jobs("a2", "a3")
    a, b, c = (stream.submit(jobs.job(name)) for name in "abc")
    for pending in (a, b, c):
        pending.begun()
    assert jobs.done == ["a1", "b1", "c1"]
    jobs.let_go("a2")
    jobs.until("c2")
    assert jobs.done == ["a1", "b1", "c1", "a2", "b2", "c2"]
    jobs.let_go("a3")
    for pending in (c, b, a):
        pending.result()
    assert jobs.done[6:] == ["a3", "b3", "c3"]
    stream.close()


def test_on_one_thread_a_job_begins_before_an_earlier_one_goes_on():
    stream, jobs = ThreadStream(), Jobs("a1")
    a, b = stream.submit(jobs.job("a")), stream.submit(jobs.job("b"))
    jobs.let_go("a1")
    for pending in (b, a):
        pending.result()
    assert jobs.done == ["a1", "b1", "a2", "a3", "b2", "b3"]
    stream.close()


def test_of_the_last_job_which_the_caller_begins_the_rest_is_done_on_the_threads_while_others_are_under_way():
    stream, jobs = ThreadStream(apart=True), Jobs("a3")
    a = stream.submit(jobs.job("a"))
    b = stream.begin(jobs.job("b"))
    jobs.until("b2")
    assert "a3" not in jobs.done
    jobs.let_go("a3")
    b.result()
    a.result()
    assert jobs.threads["b1"] is threading.current_thread()
    assert all(jobs.threads[f"b{part}"] is jobs.threads[f"a{part}"] for part in (2, 3))
    stream.close()


def test_a_job_that_the_caller_begins_alone_stays_on_its_thread(stream: ThreadStream):
    jobs = Jobs()
    stream.submit(jobs.job("a")).result()
    pending = stream.begin(jobs.job("b"))
    assert jobs.done == ["a1", "a2", "a3", "b1"]
    pending.result()
    assert {jobs.threads[f"b{part}"] for part in (1, 2, 3)} == {threading.current_thread()}


def test_what_the_first_part_raises_is_raised_where_the_caller_begins_it(stream: ThreadStream):
    jobs = Jobs("a2")
    a = stream.submit(jobs.job("a"))
    a.begun()
    with pytest.raises(ValueError, match="b1"):
        stream.begin(jobs.job("b", fails=1))
    jobs.let_go("a2")
    a.result()


@pytest.mark.parametrize("apart", [False, True], ids=["one thread", "apart"])
def test_a_thread_is_not_idle_while_a_job_is_under_way_before_one_that_failed(apart: bool):
    """Whoever ends it then ends what is under way, too."""
    stream, come = ThreadStream(apart), threading.Event()

    def wait() -> None:
        come.wait(60)

    def fail() -> None:
        raise MemoryError

    first, second = stream.submit(lambda: wait), stream.submit(fail)
    with pytest.raises(MemoryError):
        second.result()
    assert not stream.idle
    come.set()
    first.result()
    assert stream.idle
    stream.close()


def _holding(kept: object, part: Part) -> Part:
    def do() -> Part | None:
        following = part()
        return following and _holding(kept, following)

    return do


def test_a_job_that_has_ended_keeps_nothing_alive(stream: ThreadStream):
    class Bucket:
        pass

    ended = list[weakref.ref[Bucket]]()
    for fails in range(4):
        bucket, jobs = Bucket(), Jobs()
        there, pending = weakref.ref(bucket), stream.submit(_holding(bucket, jobs.job("a", fails=fails)))
        if fails:
            with pytest.raises(ValueError, match=f"a{fails}"):
                pending.result()
        else:
            pending.result()
        del bucket, pending
        stream.submit(jobs.job("b")).result()
        ended.append(there)
    gc.collect()
    for fails, there in enumerate(ended):
        assert there() is None, fails


def test_a_job_that_is_cancelled_before_it_begins_keeps_nothing_alive(stream: ThreadStream):
    class Bucket:
        pass

    bucket, jobs = Bucket(), Jobs("a1")
    first, there = stream.submit(jobs.job("a")), weakref.ref(bucket)
    cancelled = stream.submit(_holding(bucket, jobs.job("b")))
    cancelled.cancel()
    jobs.let_go("a1")
    first.result()
    stream.submit(jobs.job("c")).result()
    del bucket
    gc.collect()
    assert there() is None and cancelled.done and "b1" not in jobs.done


def test_a_job_is_handed_on_before_it_is_known_to_have_begun():
    """Else one that is begun behind it, on another thread, may be handed on first."""
    job, begun = StreamJob(Jobs().job("a")), list[bool]()
    job.begin(lambda each: begun.append(each._begun.done()))
    job.begun()
    assert begun == [False]


def test_a_job_that_closes_its_stream_comes_to_its_end():
    stream, jobs = ThreadStream(), Jobs()

    def close() -> Part:
        stream.close()
        return jobs.job("a")

    stream.submit(close).begun()
    jobs.until("a3")


@pytest.mark.parametrize("apart", [False, True], ids=["one thread", "apart"])
def test_the_threads_of_a_stream_that_nobody_has_any_more_end(apart: bool):
    stream = ThreadStream(apart)
    stream.submit(Jobs().job("a")).result()
    threads = stream._threads
    del stream
    gc.collect()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=8)  # parts, and which one fails


@given(shapes=SHAPES, apart=st.booleans(), by_caller=st.booleans())
def test_parts_of_one_number_come_in_the_order_of_jobs(shapes: list[tuple[int, int]], apart: bool, by_caller: bool):
    """So ranks that send in one part of a job have one order of it, however late each of them is."""
    stream, jobs, pending = ThreadStream(apart), Jobs(), []
    for i, (parts, fails) in enumerate(shapes):
        job = jobs.job(f"{i}-", parts, fails)
        if by_caller and i == len(shapes) - 1 and fails != 1:
            for earlier in pending[-1:]:
                try:
                    earlier.begun()
                except ValueError:
                    assert shapes[i - 1][1] == 1
            pending.append(stream.begin(job))
        else:
            pending.append(stream.submit(job))
    for i, (parts, fails) in enumerate(shapes):
        if 0 < fails <= parts:
            with pytest.raises(ValueError, match=f"{i}-{fails}"):
                pending[i].result()
        else:
            pending[i].result()
    stream.close()
    found = [tuple(map(int, name.split("-"))) for name in jobs.done]
    expected = {
        (i, part)
        for i, (parts, fails) in enumerate(shapes)
        for part in range(1, 1 + (min(parts, fails) if fails else parts))
    }
    assert len(found) == len(expected) and set(found) == expected
    for part in (1, 2):
        assert [i for i, number in found if number == part] == sorted(i for i, number in found if number == part)
    for i in range(len(shapes)):
        numbers = [number for job, number in found if job == i]
        assert numbers == sorted(numbers)


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_a_job_counts_as_done_when_its_end_is_told(stream: ThreadStream, fails: int):
    heard: queue.SimpleQueue[tuple[BaseException | None, bool]] = queue.SimpleQueue()
    stream.submit(Jobs().job("a", fails=fails), lambda error: heard.put((error, stream.idle)))
    error, idle = heard.get(timeout=SECONDS)
    assert idle and repr(error) == (f"ValueError('a{fails}')" if fails else "None")


@pytest.mark.parametrize("fails", [0, 1, 3])
def test_the_end_of_what_is_done_at_once_is_told(fails: int):
    heard: list[BaseException | None] = []
    job = at_once(Jobs().job("a", fails=fails), heard.append)
    assert job.done and [repr(error) for error in heard] == [f"ValueError('a{fails}')" if fails else "None"]
