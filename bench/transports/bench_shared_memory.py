"""Shared memory beside gloo and torch on one host: whole steps, what a wrapper adds, and the all-reduce alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastreduce.transports import GlooTransport, ShmTransport
from tests.support.ranks import RankPool

from ..conftest import Size
from ..paired import by_turns, record, seconds_of
from ..training.bench_steps import (
    OVERHEAD,
    STEPS,
    TIMEOUT,
    TOLERANCES,
    best_of_torch,
    record_overhead,
    slowest,
    tiny_steps,
)
from ..training.steps import Setting, measure, set_up_process

WARM_UP = 2  # sums of each contestant
SHARED = ("none", "none, views", "fp16", "int8")
TORCH = [name for name, setting in STEPS.items() if setting.wrapper == "torch" and "zeroed" not in name]


def shared(name: str, settings: dict[str, Setting]) -> Setting:
    setting = settings[name]
    return Setting(setting.wrapper, setting.options, transport="shm")


OVER_SHM = {f"{name}, shared memory": shared(name, STEPS) for name in SHARED}
STEPS_HERE = {**OVER_SHM, "none": STEPS["none"], "fp16": STEPS["fp16"], **{name: STEPS[name] for name in TORCH}}
MANY = {
    name: STEPS_HERE[name] for name in (*OVER_SHM, "none", "fp16", "torch", "torch, views", "torch fp16 hook, views")
}
BOUNDS = {name: TOLERANCES[name.removesuffix(", shared memory")] for name in (*OVER_SHM, "none", "fp16")}


def _against(benchmark: Any, times: dict[str, list[float]], compression: str) -> None:
    ours = f"{compression}, shared memory"
    rows = record(benchmark, {ours: times.pop(ours), **times})
    benchmark.extra_info["best_of_torch"] = best_of_torch(rows, compression)


@pytest.fixture(scope="module")
def shared_steps(ranks2: RankPool, size: Size) -> dict[str, list[float]]:
    return slowest(ranks2.run(measure, STEPS_HERE, "linear", size.width, size.rounds, BOUNDS, timeout=TIMEOUT))


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_shared_step(benchmark: Any, shared_steps: dict[str, list[float]], compression: str) -> None:
    """25 million parameters on two ranks: `none` against the best of torch's modes, `fp16` against torch's hook."""
    _against(benchmark, dict(shared_steps), compression)


def _on_two_cores(rank: int, world_size: int, *arguments: Any) -> dict[str, Any]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    try:
        return measure(rank, world_size, *arguments)
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture(scope="module")
def crowded_steps(size: Size) -> dict[str, list[float]]:
    with RankPool(4) as pool:
        # On four ranks torch's own modes sum in orders of their own.
        arguments = (MANY, "linear", size.width // 2, size.rounds, {})
        return slowest(pool.run(_on_two_cores, *arguments, timeout=TIMEOUT))


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_shared_crowded_step(benchmark: Any, crowded_steps: dict[str, list[float]], compression: str) -> None:
    """Six million parameters on four ranks that share two cores."""
    _against(benchmark, dict(crowded_steps), compression)


def test_shared_overhead(benchmark: Any, ranks2: RankPool, size: Size) -> None:
    """What a wrapper adds to a step with a thousand parameters of 64 elements, on two ranks."""
    settings = {"fastreduce, shared memory": shared("fastreduce", OVERHEAD), **OVERHEAD}
    record_overhead(benchmark, tiny_steps(ranks2, settings, size, {"fastreduce, shared memory": 0.0}))


def _sums(rank: int, world_size: int, elements: int, rounds: int) -> dict[str, Any]:
    """Seconds of sums of the same tensor, by what moves it, and of a copy of it on each rank."""
    set_up_process()
    group: Any = dist.group.WORLD
    transports = {"shared memory": ShmTransport(group), "gloo": GlooTransport(group)}
    tensor = torch.empty(elements)
    other, start = torch.empty_like(tensor), torch.randn(elements, generator=torch.Generator().manual_seed(rank))

    def sum_over(name: str) -> None:
        transports[name].all_reduce(tensor).wait()

    calls: dict[str, Any] = {name: partial(sum_over, name) for name in transports}
    calls |= {"torch's all_reduce": lambda: dist.all_reduce(tensor), "copy": lambda: other.copy_(tensor)}
    found = {}
    for name, call in calls.items():
        for _ in range(WARM_UP):
            tensor.copy_(start)
            call()
        found[name] = tensor.clone()
    assert found["shared memory"].equal(found["gloo"])  # two terms have one order
    del found

    def timed(call: Callable[[], Any]) -> float:
        tensor.copy_(start)
        dist.barrier()
        return seconds_of(call)

    return {"times": by_turns({name: partial(timed, call) for name, call in calls.items()}, rounds)}


@pytest.mark.parametrize("megabytes", [100, 1])
def test_shared_sum(benchmark: Any, ranks2: RankPool, size: Size, megabytes: int) -> None:
    """The all-reduce of FP32 alone, on two ranks."""
    elements = megabytes * 250_000 if size.rounds > 3 else 1000 * megabytes
    record(benchmark, slowest(ranks2.run(_sums, elements, size.rounds, timeout=TIMEOUT)))
