"""Training steps on one GPU under our wrapper against torch's, and what they need of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastreduce import backends
from fastreduce.transports.nccl import NcclTransport
from tests.ranks import RankPool

from .conftest import Size
from .paired import TAPE, difference, record
from .steps import Setting, measure, peaks

TIMEOUT = 200.0
VIEWS = {"gradient_as_bucket_view": True}


def ours(compression: str, **more: Any) -> Setting:
    return Setting("fastreduce", {"compression": compression}, **{"kernels": "triton", **more})


STEPS = {
    "fp16": ours("fp16"),
    "fp16, numba_cuda": ours("fp16", kernels="numba_cuda"),
    "fp16, a communicator of one": ours("fp16", transport=NcclTransport),
    "int8": ours("int8"),
    "int8, error feedback": ours("int8:error_feedback"),
    "none": ours("none"),
    "unwrapped": Setting(""),
    "torch": Setting("torch"),
    "torch, views": Setting("torch", VIEWS),
    "torch fp16 hook": Setting("torch", hook=True),
    "torch fp16 hook, views": Setting("torch", VIEWS, hook=True),
}
RIVAL = "torch fp16 hook, views"
# Two backwards of torch's own need not agree to the last bit here; that ours does is what tests/test_gpu.py shows.
TOLERANCES = {"none": 2.0**-18, "fp16": 2.0**-9, "int8": 2.0**-5, "int8, error feedback": 2.0**-4}


def test_gpu_step(benchmark: Any, pytestconfig: pytest.Config, ranks1: RankPool, size: Size) -> None:
    """GPT-2 124M, one sequence of 128 tokens: small enough for a wrapper to show. One rank."""
    rehearsal = pytestconfig.getoption("--rehearse")
    # NCCL needs a GPU, and the simulator a process of its own.
    left_out = ["numba_cuda", "communicator"] if rehearsal else []
    if not rehearsal and backends.why_not("numba_cuda", torch.device("cuda")):
        left_out.append("numba_cuda")
    settings = {name: s for name, s in STEPS.items() if not any(part in name for part in left_out)}
    arguments = ("gpt2", size.width, size.rounds, TOLERANCES, False, "cpu" if rehearsal else "cuda")
    (result,) = ranks1.run(measure, settings, *arguments, timeout=TIMEOUT)
    times = result["times"]
    rows, unwrapped = record(benchmark, times), times["unwrapped"]
    over = {name: [a - b for a, b in zip(each, unwrapped, strict=True)] for name, each in times.items()}
    for name in (name for name in over if name != "unwrapped"):
        rows[name]["overhead_s"] = difference(times[name], unwrapped)
        rows[name]["stages_s"] = result["stages"].get(name)
    benchmark.extra_info["share_of_rival"] = [
        rows["fp16"]["overhead_s"][0] / rows[RIVAL]["overhead_s"][0],
        rows["fp16"]["overhead_s"][1] / rows[RIVAL]["overhead_s"][2],
        rows["fp16"]["overhead_s"][2] / rows[RIVAL]["overhead_s"][1],
    ]


def test_gpu_memory(benchmark: Any, pytestconfig: pytest.Config, size: Size) -> None:
    """What steps need of the GPU's memory, with and without what NCCL allocates itself."""
    if pytestconfig.getoption("--rehearse"):
        pytest.skip("there is no GPU whose memory could be watched")
    found = {}
    for name in ("fp16", "fp16, a communicator of one", "unwrapped", RIVAL):
        with RankPool(1) as pool:
            (found[name],) = pool.run(peaks, STEPS[name], "gpt2", size.width, timeout=TIMEOUT)
    benchmark.extra_info.update(ours="fp16", contestants=found)
    TAPE.load([1.0])
    benchmark.pedantic(lambda: None)
