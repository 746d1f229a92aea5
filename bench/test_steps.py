"""Training steps under our wrapper against torch's, on real ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import RankPool

from .conftest import Size
from .paired import difference, ratio, record
from .steps import Setting, count_allocations, time_steps

TIMEOUT = 250.0


def ours(compression: str = "none", **options: Any) -> Setting:
    return Setting("fastreduce", {"compression": compression, **options})


def torchs(**options: Any) -> Setting:
    return Setting("torch", options)


VIEWS = {"gradient_as_bucket_view": True}

STEPS = {
    "none": ours(),
    "none, views": ours(**VIEWS),
    "fp16": ours("fp16"),
    "fp16, sum on the wire": ours("fp16:accumulate=wire"),
    "bf16": ours("bf16"),
    "int8": ours("int8"),
    "int8, error feedback": ours("int8:error_feedback"),
    "unwrapped": Setting(""),
    "torch": torchs(),
    "torch, views": torchs(**VIEWS),
    "torch, views, zeroed in place": Setting("torch", VIEWS, zero_in_place=True),
    "torch, static": torchs(static_graph=True),
    "torch, batched copy": torchs(batched_grad_copy=True),
    "torch, batched copy, static": torchs(batched_grad_copy=True, static_graph=True),
    "torch fp16 hook": Setting("torch", hook=True),
    "torch fp16 hook, views": Setting("torch", VIEWS, hook=True),
}
OVERHEAD = {
    "fastreduce": ours(),
    "unwrapped": Setting(""),
    "torch": torchs(),
    "torch, views": torchs(**VIEWS),
    "torch, static": torchs(static_graph=True),
    "torch, batched copy": torchs(batched_grad_copy=True),
}
HOOKS = {
    "fastreduce": Setting("fastreduce", {"compression": "none"}, no_sync=True),
    "unwrapped": Setting(""),
    "empty Python hooks": Setting("", node_hooks=True),
    "torch": Setting("torch", no_sync=True),
}
ALLOCATIONS = {
    "none": ours(),
    "none, views": ours(**VIEWS),
    "fp16": ours("fp16"),
    "fp16, sum on the wire": ours("fp16:accumulate=wire"),
    "bf16": ours("bf16"),
    "int8": ours("int8"),
    "int8, error feedback": ours("int8:error_feedback"),
    "unwrapped": Setting(""),
    "torch": torchs(),
    "torch fp16 hook": Setting("torch", hook=True),
    "reference kernels": Setting("fastreduce", {"compression": "fp16"}, kernels="reference"),
}
# Relative to the norm of the gradients that torch's wrapper ends with; 0 is bit for bit.
EXACT = {"none": 0.0, "none, views": 0.0}
ROUNDED = {
    "fp16": 2.0**-10,
    "fp16, sum on the wire": 2.0**-10,
    "bf16": 2.0**-7,
    "int8": 2.0**-5,
    "int8, error feedback": 2.0**-4,
}


def slowest(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """A step takes as long as its slowest rank."""
    return {
        name: [max(durations) for durations in zip(*(r["times"][name] for r in results), strict=True)]
        for name in results[0]["times"]
    }


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_step(benchmark: Any, steps: list[dict[str, Any]], compression: str) -> None:
    """25 million parameters: `none` against the best of torch's modes, `fp16` against torch's hook."""
    times = slowest(steps)
    described = record(benchmark, {compression: times.pop(compression), **times})
    rivals = [name for name in times if name.startswith("torch fp16 hook" if compression == "fp16" else "torch,")]
    if compression == "none":
        rivals.append("torch")
    best = min(rivals, key=lambda name: described[name]["median_s"])
    benchmark.extra_info.update(best_of_torch=best, ratio_to_best=described[best]["ratio"])
    benchmark.extra_info["stages_s"] = steps[0]["stages"]


@pytest.fixture(scope="module")
def steps(ranks2: RankPool, size: Size) -> list[dict[str, Any]]:
    return ranks2.run(time_steps, STEPS, "linear", size.width, size.rounds, EXACT | ROUNDED, timeout=TIMEOUT)


@pytest.mark.parametrize("world_size", [1, 2])
def test_overhead(benchmark: Any, request: pytest.FixtureRequest, size: Size, world_size: int) -> None:
    """What a wrapper adds to a step with a thousand tiny parameters."""
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    rounds = 10 * size.rounds
    times = slowest(pool.run(time_steps, OVERHEAD, "tiny", 0, rounds, {"fastreduce": 0.0}, timeout=TIMEOUT))
    add_overheads(record(benchmark, times), times)
    over = {name: [a - b for a, b in zip(each, times["unwrapped"], strict=True)] for name, each in times.items()}
    benchmark.extra_info["overhead_ratio"] = ratio(over["fastreduce"], over["torch"])


def test_hooks(benchmark: Any, ranks1: RankPool, size: Size) -> None:
    """What hooks alone cost: the same step without a reduction."""
    times = slowest(ranks1.run(time_steps, HOOKS, "tiny", 0, 10 * size.rounds, {}, timeout=TIMEOUT))
    add_overheads(record(benchmark, times), times)


def add_overheads(described: dict[str, Any], times: dict[str, list[float]]) -> None:
    for name, row in described.items():
        if name != "unwrapped":
            row["overhead_s"] = difference(times[name], times["unwrapped"])


def test_allocations(benchmark: Any, ranks2: RankPool, size: Size) -> None:
    """Allocations as large as a gradient, per step; counts stand in for seconds."""
    counted = ranks2.run(count_allocations, ALLOCATIONS, min(size.width, 512), 3, timeout=TIMEOUT)
    more = {name: max(c[name] - c["unwrapped"] for c in counted) for name in counted[0] if name != "unwrapped"}
    assert more["reference kernels"] > 0, "nothing was counted"
    benchmark.extra_info["allocations"] = more
