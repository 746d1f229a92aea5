"""Training steps under our wrapper against torch's, on real ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankPool

from ..conftest import Size
from ..paired import difference, ratio, record
from .steps import Setting, measure

TIMEOUT = 280.0


def ours(compression: str, **more: Any) -> Setting:
    return Setting("fastreduce", {"compression": compression, **more})


def torchs(**options: Any) -> Setting:
    return Setting("torch", options)


VIEWS = {"gradient_as_bucket_view": True}
STEPS = {
    "none": ours("none"),
    "none, views": ours("none", **VIEWS),
    "fp16": ours("fp16"),
    "fp16, summed on the wire": ours("fp16:accumulate=wire"),
    "fp16, reference kernels": Setting("fastreduce", {"compression": "fp16"}, kernels="reference"),
    "bf16": ours("bf16"),
    "int8": ours("int8"),
    "int8, error feedback": ours("int8:error_feedback"),
    "fp8": ours("fp8"),
    "int4": ours("int4"),
    "int4, error feedback": ours("int4:error_feedback"),
    "auto4": ours("auto4"),
    "unwrapped": Setting(""),
    "torch": torchs(),
    "torch, views": torchs(**VIEWS),
    "torch, views, zeroed in place": Setting("torch", VIEWS, zero_in_place=True),
    "torch, static": torchs(static_graph=True),
    "torch, batched copy": torchs(batched_grad_copy=True),
    "torch, batched copy, static": torchs(batched_grad_copy=True, static_graph=True),
    "torch, views, batched copy, static": torchs(**VIEWS, batched_grad_copy=True, static_graph=True),
    "torch fp16 hook": Setting("torch", hook=True),
    "torch fp16 hook, views": Setting("torch", VIEWS, hook=True),
}
# Relative to the norm of the gradients that torch's own wrapper ends with; 0 is bit for bit.
TOLERANCES = {
    "none": 0.0,
    "none, views": 0.0,
    "fp16": 2.0**-10,
    "fp16, summed on the wire": 2.0**-10,
    "bf16": 2.0**-7,
    "int8": 2.0**-5,
    "int8, error feedback": 2.0**-4,
    "fp8": 2.0**-4,
    "int4": 2.0**-2,
    "int4, error feedback": 2.0**-1,
    "auto4": 2.0**-1,
}
OVERHEAD = {
    "fastreduce": ours("none"),
    "unwrapped": Setting(""),
    "torch": torchs(),
    "torch, views": torchs(**VIEWS),
    "torch, static": torchs(static_graph=True),
    "torch, batched copy": torchs(batched_grad_copy=True),
}
NO_SYNC = {
    "fastreduce": Setting("fastreduce", {"compression": "none"}, no_sync=True),
    "unwrapped": Setting(""),
    "empty Python hooks": Setting("", node_hooks=True),
    "torch": Setting("torch", no_sync=True),
}


def slowest(results: list[dict[str, Any]]) -> dict[str, list[float]]:
    """A step takes as long as its slowest rank."""
    return {
        name: [max(durations) for durations in zip(*(r["times"][name] for r in results), strict=True)]
        for name in results[0]["times"]
    }


def best_of_torch(rows: dict[str, Any], compression: str) -> str:
    """The fastest of torch's modes, with its FP16 hook beside `fp16`; none that zeroes gradients in the timed step."""
    torchs = [name for name in rows if name in STEPS and STEPS[name].wrapper == "torch"]
    rivals = [n for n in torchs if not STEPS[n].zero_in_place and STEPS[n].hook == (compression == "fp16")]
    return min(rivals, key=lambda name: float(rows[name]["median_s"]))


@pytest.fixture(scope="module")
def steps(ranks2: RankPool, size: Size) -> list[dict[str, Any]]:
    arguments = (STEPS, "linear", size.width, size.rounds, TOLERANCES, True)
    return ranks2.run(measure, *arguments, timeout=TIMEOUT)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_step(benchmark: Any, steps: list[dict[str, Any]], compression: str) -> None:
    """25 million parameters on two ranks: `none` against the best of torch's modes, `fp16` against torch's hook."""
    counts = {name: max(rank["allocations"][name] for rank in steps) for name in STEPS}
    assert counts["fp16, reference kernels"] > counts["unwrapped"], "allocations were not counted"
    times = slowest(steps)
    rows = record(benchmark, {compression: times.pop(compression), **times})
    benchmark.extra_info["best_of_torch"] = best_of_torch(rows, compression)
    for name, row in rows.items():
        row["allocations"] = counts[name] - counts["unwrapped"]
        row["stages_s"] = steps[0]["stages"].get(name)


@pytest.mark.parametrize("world_size", [1, 2])
def test_overhead(benchmark: Any, request: pytest.FixtureRequest, size: Size, world_size: int) -> None:
    """What a wrapper adds to a step with a thousand parameters of 64 elements."""
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    record_overhead(benchmark, tiny_steps(pool, OVERHEAD, size, {"fastreduce": 0.0}))


def test_overhead_of_hooks(benchmark: Any, ranks1: RankPool, size: Size) -> None:
    """The same under `no_sync`, beside hooks that do nothing."""
    record_overhead(benchmark, tiny_steps(ranks1, NO_SYNC, size, {}))


def tiny_steps(
    pool: RankPool, settings: dict[str, Setting], size: Size, tolerances: dict[str, float]
) -> dict[str, list[float]]:
    return slowest(pool.run(measure, settings, "tiny", 0, 10 * size.rounds, tolerances, timeout=TIMEOUT))


def record_overhead(benchmark: Any, times: dict[str, list[float]]) -> None:
    """What each contestant adds to the one called "unwrapped", and the first one's share of that."""
    rows, unwrapped, ours = record(benchmark, times), times.pop("unwrapped"), next(iter(times))
    over = {name: [a - b for a, b in zip(each, unwrapped, strict=True)] for name, each in times.items()}
    for name in over:
        rows[name]["overhead_s"] = difference(times[name], unwrapped)
        if rows[name]["overhead_s"][1] > 0:  # else there is nothing to divide by
            rows[name]["overhead_ratio"] = ratio(over[ours], over[name])
