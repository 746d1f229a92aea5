"""Contestants of a benchmark take turns in an order that changes, warmed up and without garbage collections between."""

from __future__ import annotations

import gc
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("pytest_benchmark")

from bench.host_step import behind_neutral_steps
from bench.paired import by_turns
from bench.scaling import timed_rank
from bench.scaling.model import SETTINGS
from bench.training.bench_steps import STEPS, best_of_torch
from bench.training.steps import Contestant, Setting, stage_seconds
from bench.transports import bench_shared_memory
from tests.support.ranks import RankPool

ORDERS = ["A", "B", "C", "C", "B", "A", "B", "C", "A"]  # of three rounds


class Watched:
    """Notes who has a turn, and whether garbage is collected meanwhile."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self.collecting: set[bool] = set()

    def turn(self, name: str) -> str:
        self.turns.append(name)
        self.collecting.add(gc.isenabled())
        return name


def test_what_takes_turns_does_so_in_an_order_that_changes():
    watched = Watched()
    found = by_turns({name: lambda name=name: watched.turn(name) for name in "ABC"}, 3)
    assert found == {name: [name] * 3 for name in "ABC"}
    assert watched.turns == ORDERS and watched.collecting == {False} and gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        by_turns({"A": lambda: 1 // 0}, 1)
    assert gc.isenabled()


def test_stages_are_read_by_turns_and_the_first_reading_is_left_out():
    watched, readings = Watched(), Counter()

    class Stages(Contestant):
        def __init__(self, name: str) -> None:
            self.name, self.setting = name, Setting("fastreduce")
            self.wrapped = SimpleNamespace(reducer=self)

        def step(self, x: object) -> float:
            watched.turn(self.name)
            return 0.0

        def drop_gradients(self) -> None:
            pass

        @property
        def seconds(self) -> Any:
            readings[self.name] += 1
            taken = 100.0 if readings[self.name] == 1 else 1.0
            return SimpleNamespace(compress=taken, reduce=taken, decompress=taken)

    contestants: dict[str, Contestant] = {name: Stages(name) for name in "ABC"}
    stages = stage_seconds(contestants, torch.zeros(1), 3)
    assert stages == {name: {"compress": 1.0, "reduce": 1.0, "decompress": 1.0} for name in "ABC"}
    assert watched.turns == ["A", "B", "C", *ORDERS] and watched.collecting == {False}


def _timed_rank(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """The check's ranks, told apart by the order of their wrappers' steps."""
    watched = Watched()
    taken = timed_rank.step

    def step(wrapper: Any, gradients: Any) -> float:
        watched.turn(str(wrapper.reducer.compression))
        return taken(wrapper, gradients)

    arguments = ["timed_rank.py", "500,70", "4", f"{folder}/medians.json"]
    with (
        patch.object(timed_rank, "step", step),
        patch.object(timed_rank, "set_up_process"),  # these are ranks of other tests, too
        patch("sys.argv", arguments),
        patch.dict("os.environ", LOCAL_WORLD_SIZE="1"),
        patch.object(dist, "init_process_group"),
        patch.object(dist, "destroy_process_group"),
    ):
        timed_rank.main()
    return {"turns": watched.turns, "collecting": watched.collecting}


def test_ranks_of_the_models_check_take_turns(ranks2: RankPool, tmp_path: Any):
    for found in ranks2.run(_timed_rank, str(tmp_path)):
        settings = len(SETTINGS)
        rounds = [found["turns"][i : i + settings] for i in range(0, len(found["turns"]), settings)]
        assert len(rounds) == timed_rank.WARM_UP + 4 and found["collecting"] == {False}
        timed = rounds[timed_rank.WARM_UP :]
        assert {frozenset(each) for each in timed} == {frozenset(timed[0])} and len(set(timed[0])) == settings
        assert timed[1] == timed[0][::-1] and timed[2] != timed[0]


def _sums(rank: int, world_size: int, rounds: int) -> dict[str, Any]:
    """How often torch's all-reduce was called by then, and whether garbage was collected, before each timed sum."""
    calls, before = Counter[str](), []
    all_reduce, barrier = dist.all_reduce, dist.barrier

    def counted(tensor: torch.Tensor) -> None:
        calls["all_reduce"] += 1
        all_reduce(tensor)

    def noted() -> None:
        before.append((calls["all_reduce"], gc.isenabled()))
        barrier()

    with (
        patch.object(dist, "all_reduce", counted),
        patch.object(dist, "barrier", noted),
        patch.object(bench_shared_memory, "set_up_process"),
    ):
        times = bench_shared_memory._sums(rank, world_size, 1000, rounds)["times"]
    return {"rounds": {name: len(each) for name, each in times.items()}, "before": before}


def test_sums_are_warmed_up_and_timed_without_garbage_collections(ranks2: RankPool):
    for found in ranks2.run(_sums, 3):
        assert len(found["rounds"]) == 4 and set(found["rounds"].values()) == {3}
        assert len(found["before"]) == 12 and found["before"][0] == (bench_shared_memory.WARM_UP, False)
        assert not any(collecting for _, collecting in found["before"])


def test_steps_on_the_host_come_each_behind_the_same_neutral_one_in_an_order_that_changes():
    watched = Watched()
    steps = {name: lambda name=name: float(len(watched.turn(name))) for name in "ABC"}
    for number in range(3):
        assert behind_neutral_steps(steps, lambda: watched.turn("neutral"), number) == dict.fromkeys("ABC", 1.0)
    assert watched.turns[::2] == ["neutral"] * 9 and watched.turns[1::2] == ORDERS


def test_the_best_of_torch_is_of_those_whose_steps_are_timed_alike():
    """Gradients are zeroed within the timed step in one of torch's modes, and behind it in all others."""
    rows = {name: {"median_s": 3.0} for name in STEPS}
    rows |= {name: {"median_s": 1.0} for name in ("none", "unwrapped", "torch, views, zeroed in place")}
    rows |= {name: {"median_s": 2.0} for name in ("torch, static", "torch fp16 hook, views")}
    assert best_of_torch(rows, "none") == "torch, static"
    assert best_of_torch(rows, "fp16") == "torch fp16 hook, views"
