"""Two-shots piece by piece in shared memory beside those of whole wires over gloo: everything they leave, by bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce import Compression
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.wires.node_level import parts_of
from fastreduce.transports import GlooTransport, ShmTransport, Transport
from tests.support.models import TWO_SHOT, assert_same_bits
from tests.support.ranks import RankPool

SIZES = (3, 200_001, 0, 128, 70_000, 1)  # some pieces on two ranks and on three; slots that pieces cut
STEPS = ("usual", "unused", "sums overflow", "not finite", "after that", "with statistics")
OTHER_DTYPES = (("fp16", torch.float64), ("bf16", torch.float16), ("int8:error_feedback", torch.bfloat16))
TIMEOUT = 240.0  # kernels may have to be compiled first
PICKED = ("none:accumulate=fp32", "fp16", "bf16", "int8:error_feedback", "int4", "fp8:error_feedback")


@cache
def _drawn(rank: int, number: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    found = []
    for size in SIZES:
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        values *= 10.0 ** torch.randint(-6, 4, (size,), generator=generator)
        found.append(values)
    return found


def _gradients(rank: int, number: int, dtype: torch.dtype) -> list[Tensor]:
    found = [values.to(dtype, copy=True) for values in _drawn(rank, number)]
    if STEPS[number] == "sums overflow":
        found[1][5000:5100] = 0.9 * torch.finfo(dtype).max
    if STEPS[number] == "not finite" and rank == 1:
        found[1][150_000], found[4][-1] = torch.nan, -torch.inf
    return found


def left_behind(rank: int, transport: Transport, setting: str, dtype: torch.dtype) -> list[Any]:
    """What each step leaves: averages in place or elsewhere, flags, the verdict, residuals and statistics."""
    compression = Compression.parse(setting)
    specs = [ParameterSpec(str(i), size, dtype, torch.device("cpu")) for i, size in enumerate(SIZES)]
    order = [list(range(len(SIZES)))]
    parts = [parts_of(transport, compression)]
    plan = build_plan(specs, order, alignment=compression.alignment, shards=transport.world_size, parts=parts)
    pipeline = BucketPipeline(plan.buckets[0], compression, transport)
    pipeline.launch_kernels([torch.zeros(size, dtype=dtype) for size in SIZES])
    seen: list[Any] = []
    for number, step in enumerate(STEPS):
        if step == "with statistics":
            pipeline.keep_statistics()
        grads = _gradients(rank, number, dtype)
        averages = grads if number % 2 else [torch.full_like(grad, torch.nan) for grad in grads]
        pipeline.run(grads, averages, {"unused": [0, 2], "after that": [rank]}.get(step, []))
        seen += [averages, pipeline.used_by_any.clone(), None if pipeline.finite is None else bool(pipeline.finite)]
        if pipeline.feedback is not None:
            seen += [pipeline.feedback.residual.clone(), pipeline.feedback.shard_residual.clone()]
            seen.append(pipeline.magnitudes())
    statistics = pipeline.statistics
    seen += [statistics and statistics.rows, statistics is not None and statistics.made]
    return seen


def _differences(rank: int, world_size: int, cases: list[tuple[str, torch.dtype]]) -> None:
    group: Any = dist.group.WORLD
    shm, gloo = ShmTransport(group), GlooTransport(group)
    for setting, dtype in cases:
        found, expected = left_behind(rank, shm, setting, dtype), left_behind(rank, gloo, setting, dtype)
        assert_same_bits(found, expected, f"{setting} of {dtype}, rank {rank} of {world_size}")


def test_pieces_have_the_bits_of_whole_wires(ranks2: RankPool):
    ranks2.run(_differences, [(setting, torch.float32) for setting in PICKED], timeout=TIMEOUT)


@pytest.mark.long
def test_pieces_of_three_ranks_have_them_in_every_setting_and_dtype(ranks3: RankPool):
    ranks3.run(_differences, [*((setting, torch.float32) for setting in TWO_SHOT), *OTHER_DTYPES], timeout=TIMEOUT)
