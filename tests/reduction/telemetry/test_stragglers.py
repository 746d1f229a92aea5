"""Who is late: found on real ranks by part, and not where nobody is, in made-up noise and on this machine."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from fastreduce.reduction.telemetry import stragglers
from fastreduce.reduction.telemetry.flight_record import Phase, StepRow
from fastreduce.reduction.telemetry.flight_recorder import FlightRecorder
from fastreduce.reduction.telemetry.stragglers import EVERY, TIMES, Comparison, Stragglers, _figures
from tests.support.models import wrap
from tests.support.ranks import RankPool, with_time

PART = (TIMES + 1) * EVERY  # steps, in which all of the comparisons that count are of the same kind
SLEEP = 0.008  # seconds by which a rank is late; a step of these takes as long, on a machine that does nothing else
EACH = {"clean": None, "compute": 1, "data": 0}
"""What happens in a part of the training → to which rank."""


@patch.object(stragglers, "LOG_SECONDS", math.inf)  # one line, however long it takes
def _train(rank: int, world_size: int, sleep: float) -> dict[str, Any]:
    ddp = wrap("ours", nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    alarms: list[Comparison] = []
    lines: list[str] = []
    raised: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: (raised if record.exc_info else lines).append(record.getMessage())  # type: ignore[method-assign]
    stragglers.logger.addHandler(handler)
    ddp.reducer.on_straggler(lambda _: 1 // 0)
    ddp.reducer.on_straggler(alarms.append)
    slow = False
    ddp.module[0].weight.register_hook(lambda _: time.sleep(sleep * slow))
    seen: dict[str, Any] = {}
    assert ddp.reducer.stragglers() is None
    for what, late in EACH.items():
        alarms.clear()
        for step in range(PART):
            if what == "data" and rank == late and step % 2:  # every second batch is slow
                time.sleep(2 * sleep)
            slow = what == "compute" and rank == late
            optimizer.zero_grad()
            if step % 4 == 3:
                with ddp.no_sync():
                    ddp(torch.randn(4, 64)).sum().backward()
            ddp(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        found = ddp.reducer.stragglers()
        assert found is not None
        seen[what] = found.as_dict(), len(alarms)
    with ddp.join():
        for _ in range(EVERY * (1 + rank)):
            ddp(torch.randn(4, 64)).sum().backward()
    seen["join"] = ddp.reducer.stragglers(), 0
    stragglers.logger.removeHandler(handler)
    ddp.reducer.close()
    return {"seen": seen, "lines": lines, "raised": raised}


def test_who_is_late_on_real_ranks(ranks2: RankPool):
    def test(sleep: float) -> None:
        mine, theirs = ranks2.run(_train, sleep)
        _check(mine, theirs, sleep)

    with_time(test, SLEEP)


def _check(mine: dict[str, Any], theirs: dict[str, Any], sleep: float) -> None:
    assert repr(mine["seen"]) == repr(theirs["seen"])  # NaN among them
    seen = {what: found for what, (found, _) in mine["seen"].items()}
    assert seen["clean"]["late"] == [] and mine["seen"]["clean"][1] == 0
    for what, rank in EACH.items():
        if rank is not None:
            (late,) = seen[what]["late"]
            assert (late["rank"], late["part"]) == (rank, what), seen[what]
            assert 0.5 * sleep < late["seconds"] < 3 * sleep and late["share"] > 0.1
            start = list(EACH).index(what) * PART
            assert late["since"] <= start + EVERY  # earlier where the machine's other work has held the same rank up
            assert mine["seen"][what][1] >= 1
    assert not mine["lines"] == theirs["lines"] == [] and len(mine["lines"]) == 1, mine["lines"]
    assert "rank 1 is late by" in mine["lines"][0] and "mostly in compute, since about step " in mine["lines"][0]
    assert len(mine["raised"]) == len(theirs["raised"]) >= 2  # an alarm's error is told and ends nothing
    assert seen["join"] is None, "the other rank has joined: nobody is left to be compared with"


def _row(compute: float, data: float) -> StepRow:
    row = StepRow()
    row.begin(0, 1.0, None)
    row.seconds[Phase.BACKWARD], row.seconds[Phase.DATA] = compute, data
    return row


def _comparisons(seed: int, steps: int, slow: float) -> list[Comparison]:
    """Of two ranks with noise: some ten slow steps in a row now and then, and single pauses ten times a step."""
    chance = random.Random(seed)
    judge = Stragglers(FlightRecorder(0, 2, [], []))
    found = []
    burst = [1.0, 1.0]
    for end in range(EVERY, steps + 1, EVERY):
        rows: list[list[StepRow]] = [[], []]
        for _ in range(EVERY):
            times = []
            for rank in range(2):
                if chance.random() < (0.1 if burst[rank] > 1 else 0.01):
                    burst[rank] = 1.0 if burst[rank] > 1 else 1.5
                pause = 0.2 if chance.random() < 0.005 else 0.0
                compute = 0.02 * burst[rank] * chance.lognormvariate(0, 0.3) * (1 + slow * rank) + pause
                rows[rank].append(_row(compute, 0.005))
                times.append(compute + 0.005)
            for rank in range(2):
                rows[rank][-1].seconds[Phase.WAITING] = max(times) - times[rank]
                rows[rank][-1].end = 1.0 + max(times)
        verdict = judge._judge(end - 1, [_figures(each) for each in rows])
        assert verdict is not None
        found.append(verdict)
    return found


def test_noise_is_no_straggler_and_a_straggler_is_found_in_noise():
    clean = [comparison for seed in range(30) for comparison in _comparisons(seed, 500, 0.0)]
    assert not [comparison.late for comparison in clean if comparison.late]
    late = [_comparisons(seed, 1000, 0.5) for seed in range(20)]
    assert sum(any(comparison.late for comparison in each) for each in late) >= 19
    assert {straggler.rank for each in late for comparison in each for straggler in comparison.late} == {1}


def test_one_long_pause_is_none():
    rows = [[_row(0.02, 0.0) for _ in range(EVERY)] for _ in range(2)]
    rows[1][17].seconds[Phase.DATA] = 5.0  # a checkpoint
    judge = Stragglers(FlightRecorder(0, 2, [], []))
    for time_ in range(2 * TIMES):
        for each in rows:
            for row in each:
                row.end = 1.02
        verdict = judge._judge(time_ * EVERY, [_figures(each) for each in rows])
        assert verdict is not None and verdict.late == []


def _told(seconds: Callable[[int, int], tuple[float, float, float, float]], comparisons: int) -> list[Comparison]:
    """Of two ranks; by rank and comparison: a step's compute, what of it waits for a core, is garbage, and waiting."""
    judge, chance, found = Stragglers(FlightRecorder(0, 2, [], [])), random.Random(0), []
    for place in range(comparisons):
        rows: list[list[StepRow]] = [[], []]
        for rank in range(2):
            compute, queued, collected, waiting = seconds(rank, place)
            for i in range(EVERY):
                row = _row(compute * chance.lognormvariate(0, 0.05), 0.001)
                row.queued[Phase.BACKWARD], row.collected[Phase.BACKWARD] = queued, collected
                row.seconds[Phase.WAITING], row.step, row.end = waiting, place * EVERY + i, 1.0 + compute + waiting
                rows[rank].append(row)
        verdict = judge._judge((place + 1) * EVERY - 1, [_figures(each) for each in rows])
        assert verdict is not None
        found.append(verdict)
    return found


def test_what_a_core_or_garbage_takes_is_a_part_of_its_own():
    for queued, collected, part in ((0.01, 0.0, "cpu"), (0.0, 0.008, "gc"), (0.0, 0.0, "compute")):
        usual, late = (0.01, 0.0, 0.0, 0.01), (0.02, queued, collected, 0.0)
        last = _told(lambda rank, _, usual=usual, late=late: late if rank else usual, TIMES)[-1]  # type: ignore[misc]
        assert [(each.rank, each.part) for each in last.late] == [(1, part)], last


def test_ranks_that_wait_for_cores_by_turns_are_not_late():
    noisy = _told(lambda rank, place: (0.03, 0.02, 0.0, 0.0) if (place + rank) % 2 else (0.01, 0.0, 0.0, 0.02), 8)
    assert not any(each.late for each in noisy)

    def one_is_late_too(rank: int, place: int) -> tuple[float, float, float, float]:
        queued = 0.02 * ((place + rank) % 2)
        return 0.01 + queued + 0.005 * rank, queued, 0.0, 0.02 - queued

    both = _told(one_is_late_too, 8)
    assert [(each.rank, each.part) for each in both[-1].late] == [(1, "compute")]


def test_a_link_that_becomes_slow_or_was_interrupted():
    slow = _told(lambda _, place: (0.01, 0.0, 0.0, 0.03 if place >= 5 else 0.002), 5 + TIMES)
    assert not any(each.notes for each in slow[:-1]) and not any(each.late for each in slow)
    (note,) = slow[-1].notes
    assert note.startswith("the link has become slow: since about step 250 all ranks wait 30.0 ms a step")
    alone = _told(lambda rank, place: (0.01, 0.0, 0.0, 0.03 if place >= 5 and rank else 0.002), 5 + TIMES)
    assert not any(each.notes for each in alone), "one rank waits for the other, not for the link"
    judge = Stragglers(FlightRecorder(0, 2, [], []))
    rows = [[_row(0.01, 0.0) for _ in range(EVERY)] for _ in range(2)]
    for each in rows:
        for i, row in enumerate(each):
            row.step, row.end = i, 1.02
        each[17].seconds[Phase.WAITING] = 3.1
    verdict = judge._judge(EVERY - 1, [_figures(each) for each in rows])
    assert verdict is not None
    assert verdict.notes == [
        "all ranks waited 3.1 s for their averages in step 17: the link was interrupted, or the machines stood still"
    ]
    rows[1][17].seconds[Phase.WAITING], rows[1][17].seconds[Phase.DATA] = 0.0, 3.1  # one rank paused, the other waited
    verdict = judge._judge(EVERY - 1, [_figures(each) for each in rows])
    assert verdict is not None and verdict.notes == []


def test_a_rank_without_steps_is_left_out():
    judge = Stragglers(FlightRecorder(0, 2, [], []))
    full = _figures([_row(0.02, 0.0) for _ in range(EVERY)])
    none = _figures([])
    assert all(map(math.isnan, none))
    assert judge._judge(49, [full, none]) is None and judge._judge(49, [full, none, full]) is not None


@pytest.mark.parametrize("part", stragglers.PARTS)
def test_parts_cover_the_phases(part: str):
    phases = [phase for phases in stragglers.PARTS.values() for phase in phases]
    assert sorted([*phases, Phase.WAITING]) == list(Phase) and stragglers.PARTS[part]


def _restored_on_one_rank(rank: int, world_size: int) -> tuple[int, Any]:
    ddp = wrap("ours", nn.Linear(64, 64))
    for step in range(2 * EVERY):
        if step == 5:
            state = ddp.reducer.state_dict()
        if step == 20 and rank == 1:
            ddp.reducer.load_state_dict(state)
        ddp(torch.randn(4, 64)).sum().backward()
    found = ddp.reducer.step, ddp.reducer.stragglers()
    ddp.reducer.close()
    return found


@pytest.mark.long
def test_a_rank_that_restored_another_step_is_compared_with_the_others(ranks2: RankPool):
    (mine, one), (theirs, other) = ranks2.run(_restored_on_one_rank)
    assert (mine, theirs) == (2 * EVERY, 2 * EVERY - 15) and one is not None
    assert (one.seconds, one.parts) == (other.seconds, other.parts)


def test_what_only_rank_0_logs_is_kept_by_no_other():
    judge = Stragglers(FlightRecorder(1, 2, [], []))
    with patch.object(stragglers, "LOG_SECONDS", 0.0):
        for step in range(100):
            judge._log(Comparison(step, [], 0.0, {}, 0.0, [f"a pause in step {step}"]), rank=1)
    assert judge._unsaid == []
