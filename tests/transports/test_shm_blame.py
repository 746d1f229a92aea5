"""How long a rank waits over shared memory, and whom it names then, by what it sees of the others' segments."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastreduce.transports import ShmTransport
from fastreduce.transports.shm.connection import ENDED, GAVE_UP, ShmConnection
from fastreduce.transports.shm.segments import BEAT, FAILED
from tests.support.ranks import RankPool, message, run_ranks, with_time


class Owned:
    """A segment as others see it: whether its rank has ended, what that has said of a failure, whether it waits."""

    def __init__(self, ended: bool = False, failed: int = 0, waits: bool = False) -> None:
        self._ended, self._words, self._waits = ended, {FAILED: failed, BEAT: 0}, waits

    def owner_is_gone(self) -> bool:
        return self._ended

    def word(self, at: int) -> int:
        if at == BEAT and self._waits:
            self._words[at] += 1
        return self._words[at]

    def set_word(self, at: int, value: int) -> None:
        self._words[at] = value


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (Owned(ended=True, failed=GAVE_UP), Owned(ended=True), [2]),
        (Owned(ended=True, failed=GAVE_UP), Owned(), [2]),
        (Owned(ended=True, failed=GAVE_UP), Owned(waits=True), [1]),
        (Owned(ended=True), Owned(waits=True), [1]),
        (Owned(failed=ENDED), Owned(ended=True, failed=GAVE_UP), [1]),
    ],
)
def test_who_gave_up_and_ended_is_not_blamed_for_who_was_missing(first: Owned, second: Owned, named: list[int]):
    here: Any = ShmConnection.__new__(ShmConnection)
    here.rank, here.size, here._names, here._gone = 0, 3, range(3), None
    here._segments = [Owned(), first, second]
    assert here._who(0.2) == named


def test_who_asks_waits_too_for_others_who_ask_at_the_same_time():
    segments = [Owned(), Owned(), Owned()]

    def ask(rank: int) -> list[int]:
        here: Any = ShmConnection.__new__(ShmConnection)
        here.rank, here.size, here._names, here._gone, here._segments = rank, 3, range(3), None, segments
        return list(here._who(0.3))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, [0, 1])) == [[2], [2]]


def _ended_here(rank: int, world_size: int) -> tuple[str, int]:
    """A wait on a thread, whose connection this process ends; how often it asked who is missing."""
    transport = ShmTransport(dist.group.WORLD)  # type: ignore[arg-type]
    transport.exchange(rank)
    ours, told, asked = transport._lease.connection, list[str](), list[float]()

    def ask(patience: float) -> list[int]:
        asked.append(patience)
        return []

    if rank == 0:
        ours._who = ask  # type: ignore[method-assign]
        waiter = threading.Thread(target=lambda: told.append(message(transport.all_reduce(torch.ones(4)).wait)))
        waiter.start()
        time.sleep(0.3)
        ours.abort()
        waiter.join(60)
    dist.barrier()
    return "".join(told), len(asked)


def test_who_waits_where_its_own_process_ends_the_connection_asks_nobody():
    (text, asked), _ = run_ranks(_ended_here, 2)
    assert text == "TransportError: rank 0 of 2: all_reduce over shm failed. It was ended here." and asked == 0


def _slowly(rank: int, world_size: int, seconds: float) -> float:
    """Ranks rest between parts of a collective, each time for less than the timeout, and longer in all."""
    transport, tensor = ShmTransport(dist.new_group()), torch.full((4 << 20,), rank + 1.0)  # type: ignore[arg-type]
    transport.exchange(None)
    made: Any = transport._lease.connection
    made._seconds, advance = seconds, made._advance

    def rest_and_advance(work: Any, patient: bool) -> bool:
        time.sleep(seconds / 6)
        done: bool = advance(work, patient=False)
        return done

    made._advance = rest_and_advance
    begun = time.monotonic()
    transport.all_reduce(tensor).wait()
    assert (tensor == 3).all()
    return time.monotonic() - begun


@pytest.mark.long
def test_the_timeout_is_of_time_without_progress(ranks2: RankPool):
    def test(seconds: float) -> None:
        assert min(ranks2.run(_slowly, seconds)) > 1.2 * seconds

    with_time(test, 0.3)
