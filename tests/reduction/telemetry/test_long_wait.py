"""A long wait for other ranks: who says it in the log, of whom, and what of them."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastreduce import TransportError
from fastreduce.environment.stacks import users_line
from fastreduce.reduction import clocks
from fastreduce.reduction.telemetry import long_wait, whereabouts
from fastreduce.reduction.telemetry.flight_record import Phase
from fastreduce.reduction.telemetry.flight_recorder import DOING, Counts, FlightRecorder
from fastreduce.reduction.telemetry.whereabouts import Whereabouts
from fastreduce.transports.store_client import StoreClient
from tests.support.models import wrap
from tests.support.ranks import RankPool

LATE = "between two lines"


@pytest.fixture(scope="module")
def two() -> Iterator[RankPool]:
    """Ranks of which some give up what they wait for: no other file's."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[RankPool]:
    with RankPool(3) as pool:
        yield pool


class Heard(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _sleeps_in_a_batch() -> torch.Tensor:
    time.sleep(4)
    return torch.ones(2, 4)


def _evaluates(ddp: Any) -> torch.Tensor:
    end = time.monotonic() + 4
    while time.monotonic() < end:  # forwards that are to be averaged, as without torch.no_grad: each is a change
        ddp(torch.ones(2, 4))
        time.sleep(0.01)
    return torch.ones(2, 4)


def _one_is_late(rank: int, world_size: int, evaluates: bool) -> list[str]:
    heard = Heard(long_wait.logger.name)
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        ddp = wrap("ours", nn.Linear(4, 4))
        for step in range(4):
            is_late = step == 2 and rank == 1
            batch = _evaluates(ddp) if is_late and evaluates else _sleeps_in_a_batch() if is_late else torch.ones(2, 4)
            ddp(batch).sum().backward()
    return heard.lines


@pytest.mark.parametrize("evaluates", [pytest.param(False, marks=pytest.mark.long), True])
def test_one_rank_says_whom_all_wait_for_and_where_that_one_is(three: RankPool, evaluates: bool):
    lines = [line for told in three.run(_one_is_late, evaluates) for line in told]
    assert 1 <= len(lines) <= 3, lines  # two ranks wait for 4 s or longer: after 1.5 s, 3 and 6
    for line in lines:
        assert (
            "has not gone on for " in line and "in step 2. It waits for rank 1, up to " in line and "Rank 1, " in line
        )
        assert ("in _evaluates" if evaluates else "in _sleeps_in_a_batch") in line and __file__ in line


def _one_is_late_by_another_clock(rank: int, world_size: int) -> list[str]:
    behind = 300.0 * rank
    with patch.object(time, "time", lambda now=time.time: now() - behind):
        return _one_is_late(rank, world_size, evaluates=False)


def test_clocks_of_hosts_need_not_agree(three: RankPool):
    lines = [line for told in three.run(_one_is_late_by_another_clock) for line in told]
    assert lines
    for line in lines:
        told = re.search(r"Rank 1, (\d+\.\d) s ago, was after ", line)
        assert told is not None and float(told[1]) < 5, line
        assert "has told nothing since" not in line


def _told(step: int, phase: Phase, wrappers: int = 1, ago: float = 0.0) -> str:
    counts = list(Counts(step, step, 0, step)) if wrappers == 1 else []
    return json.dumps([f"{DOING[phase]}, for 9.0 s", -ago, step, counts, "", LATE, "stacks", "", {}])


def _place(told: dict[int, str]) -> Whereabouts:
    place = Whereabouts(StoreClient(dist.HashStore(), 20.0), 40.0)  # what was told 30 s ago is old
    for rank, text in told.items():
        place.store.set(f"rank {rank}", text)
    return place


@pytest.mark.parametrize(
    ("mine", "told", "late"),
    {
        "one loads data": ((7, Phase.WAITING), {1: (7, Phase.DATA), 2: (7, Phase.WAITING)}, "1"),
        "two do": ((7, Phase.WAITING), {1: (7, Phase.DATA), 2: (7, Phase.BACKWARD)}, "1, 2"),
        "all wait": ((7, Phase.WAITING), {1: (7, Phase.WAITING), 2: (7, Phase.WAITING)}, ""),
        "one has its averages": ((7, Phase.WAITING), {1: (8, Phase.AFTER), 2: (7, Phase.WAITING)}, ""),
        "one is silent": ((7, Phase.WAITING), {2: (7, Phase.WAITING)}, "1"),
        "one has told of an old wait": (
            (7, Phase.WAITING),
            {1: (3, Phase.DATA, 1, 100.0), 2: (7, Phase.WAITING)},
            "1",
        ),
        "who is late itself": ((7, Phase.DATA), {1: (7, Phase.WAITING), 2: (7, Phase.WAITING)}, ""),
        "all evaluate": ((7, Phase.DATA), {1: (7, Phase.DATA), 2: (7, Phase.AFTER)}, ""),
        "all evaluate, one silent": ((7, Phase.DATA), {1: (7, Phase.DATA)}, ""),
        # On a GPU the host goes on, and waits somewhere behind.
        "a host is ahead": ((8, Phase.AFTER), {1: (7, Phase.DATA), 2: (9, Phase.FORWARD)}, "1"),
        "several wrappers": ((7, Phase.WAITING), {1: (20, Phase.DATA, 2), 2: (7, Phase.WAITING, 2)}, "1"),
        "several wrappers, of which none waits": ((9, Phase.DATA), {1: (2, Phase.DATA, 2)}, ""),
    }.values(),
)
def test_who_is_late(mine: tuple[int, Phase], told: dict[int, tuple[Any, ...]], late: str):
    recorder = FlightRecorder(0, 3, [], [])
    recorder.row.begin(mine[0], clocks.now(), None)
    recorder.enter(mine[1])
    with patch.object(whereabouts, "all_recorders", lambda: [recorder]):
        found = _place({rank: _told(*each) for rank, each in told.items()}).who_is_late(recorder)
    assert found.startswith(f"It waits for rank {late}, up to 20 s. ") if late else found == ""
    for rank in (1, 2) if late == "1, 2" else (1,) if late else ():
        assert f"Rank {rank}, " in found or f"Rank {rank} has not told where it is" in found


@pytest.mark.parametrize("ago", [1.0, 100.0])
def test_a_host_is_looked_for_only_where_nothing_has_come_from_it_for_long(ago: float):
    """A firewall may keep the port at which that is done."""
    recorder = FlightRecorder(0, 2, [], [])
    recorder.row.begin(7, clocks.now(), None)
    recorder.enter(Phase.WAITING)
    place = _place({1: _told(7, Phase.DATA, ago=ago)})
    place.store.set("process of 1", json.dumps(["another host", 1, "0", "10.0.0.2"]))
    why = "its host 10.0.0.2 is out of reach (no answer within 0.5 s at port 9): its link is cut, or it is down"
    with (
        patch.object(whereabouts, "all_recorders", lambda: [recorder]),
        patch.object(whereabouts, "why_out_of_reach", lambda _: why),
    ):
        found = place.who_is_late(recorder)
    assert found.startswith("It waits for rank 1, up to 20 s. ")
    assert (f"It has told nothing since: {why}." in found) == (ago == 100.0)


def test_it_is_said_once_and_again_when_that_has_become_twice_as_long_by_who_counts_first():
    heard = Heard(long_wait.logger.name)
    place = _place({1: _told(0, Phase.DATA), 2: _told(0, Phase.WAITING)})
    recorders = [FlightRecorder(rank, 3, [], []) for rank in (0, 2)]
    waits = [long_wait.LongWait() for _ in recorders]
    at = clocks.now()
    for recorder in recorders:
        recorder.enter(Phase.WAITING)

    def look(seconds: float) -> list[str]:
        with (
            patch.object(clocks, "now", lambda: at + seconds),
            patch.object(whereabouts, "all_recorders", lambda: recorders[:1]),
        ):
            for wait, recorder in zip(waits, recorders, strict=True):
                recorder.since = at
                wait.look(recorder, place)
        lines, heard.lines = heard.lines, []
        return lines

    said = long_wait.SAY_SECONDS
    assert [len(look(seconds)) for seconds in (1.0, said - 1, said + 1, said + 2, 2 * said - 1)] == [0, 0, 1, 0, 0]
    (line,) = look(2 * said + 1)
    assert line.startswith(f"rank 0 of 3 has not gone on for {2 * said + 1:.0f} s, in step 0. It waits for rank 1, ")
    assert line.endswith(f"for 9.0 s. It was at {LATE}.")
    assert look(3 * said) == [] and len(look(5 * said)) == 1
    for recorder in recorders:  # goes on, and waits in the same step again, as where another wrapper is made
        recorder.enter(Phase.AFTER)
        recorder.enter(Phase.WAITING)
    assert look(1.0) == [] and len(look(said + 1)) == 1


def test_a_store_that_does_not_answer_is_asked_again_later():
    heard, place, recorder = Heard(long_wait.logger.name), _place({}), FlightRecorder(0, 2, [], [])
    recorder.enter(Phase.WAITING)
    wait = long_wait.LongWait()
    wait.look(recorder, place)
    recorder.since -= 40.0
    with patch.object(StoreClient, "add", side_effect=TransportError("no answer")), pytest.raises(TransportError):
        wait.look(recorder, place)
    recorder.since -= 40.0
    wait.look(recorder, place)
    assert len(heard.lines) == 1


def test_the_users_line_is_that_of_the_thread_that_trains():
    going, found = threading.Event(), list[int]()

    def trains_on_a_thread() -> None:
        found.append(threading.get_native_id())
        going.wait(20.0)

    thread = threading.Thread(target=trains_on_a_thread)
    thread.start()
    try:
        while not found:
            time.sleep(0.001)
        assert users_line(found[0]).endswith(f" of {__file__}, in trains_on_a_thread")
        assert users_line().endswith(", in test_the_users_line_is_that_of_the_thread_that_trains")
    finally:
        going.set()
        thread.join()
    assert "in trains_on_a_thread" not in users_line(found[0]), "it has ended"


def test_a_source_without_a_file_is_the_users_where_it_is_the_main_module():
    """As of `python -`, or a notebook."""
    of_main, of_module = (
        {"__name__": name, "users_line": users_line, "threading": threading} for name in ("__main__", "m")
    )
    source = "found = users_line(threading.get_native_id())"
    exec(compile(source, "<stdin>", "exec"), of_main)
    exec(compile(source, "<generated>", "exec"), of_module)
    assert of_main["found"] == "line 1 of <stdin>, in <module>"
    assert of_module["found"].endswith(", in test_a_source_without_a_file_is_the_users_where_it_is_the_main_module")


def test_who_has_no_such_log_leaves_it_to_the_others():
    heard, place, recorder = Heard(long_wait.logger.name), _place({}), FlightRecorder(0, 2, [], [])
    recorder.enter(Phase.WAITING)
    of_silent, of_other = long_wait.LongWait(), long_wait.LongWait()
    of_silent.look(recorder, place)
    of_other.look(recorder, place)
    recorder.since -= 40.0
    with patch.object(long_wait.logger, "isEnabledFor", lambda level: level > logging.WARNING):
        of_silent.look(recorder, place)
    of_other.look(recorder, place)
    assert len(heard.lines) == 1


def test_a_handler_that_raises_does_not_end_the_thread(capsys: pytest.CaptureFixture[str]):
    place, recorder, wait = _place({}), FlightRecorder(0, 2, [], []), long_wait.LongWait()
    recorder.enter(Phase.WAITING)
    wait.look(recorder, place)
    recorder.since -= 40.0
    with patch.object(logging.Handler, "handle", side_effect=ValueError("of a handler")):
        wait.look(recorder, place)
    assert "ValueError: of a handler" in capsys.readouterr().err


def test_the_count_of_a_wrapper_that_is_gone_keeps_no_other_from_saying_it():
    """As where one trial follows another, each with its model."""
    heard, wait = Heard(long_wait.logger.name), long_wait.LongWait()
    group = StoreClient(dist.HashStore(), 20.0)
    recorders = [FlightRecorder(0, 2, [], []) for _ in range(2)]
    for recorder in recorders:
        recorder.enter(Phase.WAITING)
        place = Whereabouts(group, 40.0)
        wait.look(recorder, place)
        recorder.since -= 40.0
        wait.look(recorder, place)
        del place
    assert len(heard.lines) == 2


def _trains_elsewhere(rank: int, _: int) -> list[str]:
    heard = Heard(long_wait.logger.name)
    first, second = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2])]
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        ddp = wrap("ours", nn.Linear(4, 4), process_group=first) if rank < 2 else None
        other = wrap("ours", nn.Linear(4, 4), process_group=second) if rank > 0 else None
        if ddp is not None:
            ddp(torch.ones(2, 4)).sum().backward()
        for _ in range(200 if other is not None else 0):
            other(torch.ones(2, 4)).sum().backward()
            time.sleep(0.02)
        if ddp is not None:
            ddp(torch.ones(2, 4)).sum().backward()
    return heard.lines


@pytest.mark.long
def test_who_trains_in_another_group_tells_where_it_is(three: RankPool):
    lines = three.run(_trains_elsewhere)[0]
    assert lines, "nothing was said"
    for line in lines:
        assert "waits for rank 1" in line and "in _trains_elsewhere" in line and "stopped" not in line


def test_of_a_process_that_runs_here_and_tells_nothing_it_is_not_said_that_it_is_stopped():
    recorder, place = FlightRecorder(0, 2, [], []), _place({})
    recorder.enter(Phase.WAITING)
    assert place.who_is_late(recorder).endswith(f"Rank 1 has not told where it is: {whereabouts.UNKNOWN}.")
    place.introduce(1)
    assert place.who_is_late(recorder).endswith(f"Rank 1 has not told where it is: {whereabouts.BUSY}.")
    (text,) = place.ask([1], recorder, clocks.now() - whereabouts.LEAVING_SECONDS)
    assert text == f"Rank 1 has not told where it is: {whereabouts.BUSY}."


ORDER = "for it, until the timeout of 60 s: the backwards of their wrappers run in another order. "


def _two(groups: str, transport: str | None = None) -> tuple[Any, Any]:
    """Two wrappers that have been trained, the first one twice."""
    of = [dist.new_group(timeout=timedelta(seconds=60)) for _ in range(2)]
    first = wrap("ours", nn.Linear(4, 4), process_group=of[0], transport=transport)
    second = wrap("ours", nn.Sequential(nn.Linear(4, 4)), process_group=of[groups == "two groups"], transport=transport)
    for each in (first, second, first):
        each(torch.ones(2, 4)).sum().backward()
    return first, second


@contextmanager
def _given_up_later(*wrappers: Any) -> Iterator[None]:
    """By threads that do not train, before a third line is said (6 s).

    They are waited for: one might be letting go of gloo when Python ends.
    """
    timers = [threading.Timer(4.5, ddp.reducer.buckets.transport.abort) for ddp in wrappers]
    for timer in timers:
        timer.start()
    yield
    for timer in timers:
        timer.join()


def _crosswise(rank: int, world_size: int, groups: str, transport: str) -> list[str]:
    heard = Heard(long_wait.logger.name)
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        wrappers = _two(groups, transport)
        losses = [each(torch.ones(2, 4)).sum() for each in wrappers]
        with _given_up_later(*wrappers), pytest.raises(TransportError):
            for loss in losses if rank < world_size - 1 else reversed(losses):
                loss.backward()
    return heard.lines


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "groups", "transport"),
    [(2, "one group", "shm"), (2, "two groups", "gloo"), (3, "one group", "gloo")],
)
def test_backwards_that_run_in_another_order_on_a_rank_are_said_to_wait_for_each_other(
    two: RankPool, three: RankPool, world_size: int, groups: str, transport: str
):
    told = (two if world_size == 2 else three).run(_crosswise, groups, transport)
    last, here = world_size - 1, rf"\(line \d+ of {re.escape(__file__)}, in _crosswise\)\."
    firsts = [line for lines in told[:last] for line in lines]
    assert firsts and told[last]
    for line in firsts:  # of one of those that wait for the first wrapper
        (rank,) = re.findall(rf"^rank (\d) of {world_size} has not gone on for .* in step 2\. It waits for rank", line)
        assert f"It waits for rank {last}, and rank {last} {ORDER}" in line
        assert re.search(rf"Rank {rank} is in that of Linear {here} Rank {last} is in that of Sequential {here}$", line)
    others = ", ".join(map(str, range(last)))
    for line in told[last]:
        assert f"in step 1. It waits for rank {others}, and rank {others} {ORDER}" in line
        assert re.search(rf"Rank {last} is in that of Sequential {here} Rank 0 is in that of Linear {here}", line)


def _on_two_threads(rank: int, _: int) -> list[str]:
    heard = Heard(long_wait.logger.name)
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        wrappers = _two("two groups")
        first, second = [each(torch.ones(2, 4)).sum() for each in wrappers]
        if rank == 0:

            def later() -> None:
                time.sleep(4)
                second.backward()

            thread = threading.Thread(target=later)
            thread.start()
            first.backward()
            thread.join()
        else:
            second.backward()
            first.backward()
    return heard.lines


@pytest.mark.long
def test_a_wrapper_that_another_thread_may_train_is_in_no_deadlock(two: RankPool):
    assert not [line for told in two.run(_on_two_threads) for line in told if ORDER in line or "for it" in line]


def _late_in_each(rank: int, _: int) -> list[str]:
    heard = Heard(long_wait.logger.name)
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        for late, each in zip([1, 0], _two("one group"), strict=True):
            loss = each(torch.ones(2, 4)).sum()
            time.sleep(4 * (rank == late))
            loss.backward()
    return heard.lines


@pytest.mark.long
def test_ranks_that_are_late_by_turns_are_in_no_deadlock(two: RankPool):
    lines = [line for told in two.run(_late_in_each) for line in told]
    assert any("It waits for rank 1, up to" in line for line in lines)
    assert any("It waits for rank 0, up to" in line for line in lines)
    assert not [line for line in lines if "for it" in line]


def _in_a_collective(rank: int, _: int) -> list[str]:
    heard = Heard(long_wait.logger.name)
    with patch.object(whereabouts, "LONGEST", 0.5), patch.object(long_wait, "SAY_SECONDS", 1.5):
        ddp = wrap("ours", nn.Linear(4, 4))
        loss = ddp(torch.ones(2, 4)).sum()
        if rank == 0:
            with _given_up_later(ddp), pytest.raises(TransportError):
                loss.backward()
        dist.all_reduce(torch.ones(4))
    return heard.lines


@pytest.mark.long
def test_where_one_is_in_a_collective_of_torchs_it_is_said_where_both_are(two: RankPool):
    lines, _ = two.run(_in_a_collective)
    assert lines
    for line in lines:
        here = rf"line \d+ of {re.escape(__file__)}, in _in_a_collective"
        assert re.search(rf"It was in torch\.distributed\.all_reduce \({here}\), while this rank averages", line), line
        assert re.search(rf" This rank is at {here}\.$", line), line
