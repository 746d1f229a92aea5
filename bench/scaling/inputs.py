"""What the cost model is told: seconds of kernels, memory that ranks share, and sockets, on ranks of this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fastreduce import Compression
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.wires.flat import FlatWires
from fastreduce.transports import GlooTransport, ShmTransport, Transport
from tests.support.ranks import RankPool

from ..training.steps import set_up_process
from .model import FP32_BYTES, SETTINGS, Inputs, Kernels

ROUNDS = 15
SMALL = 64  # bytes for each rank, of a collective that is all latency
TIMES = 10  # of them in a row: a barrier leaves ranks some time apart
TIMEOUT = 280.0


Typical = Callable[[list[float]], float]


def measure(ranks: int, here: int, elements: int, typical: Typical = statistics.median) -> Inputs:
    """Seconds of the slowest of so many ranks, who all do the same at once.

    Args:
        ranks: their number.
        here: as many of them share memory.
        elements: of a bucket.
        typical: of the seconds of several rounds; `min` leaves out what other processes have taken.
    """
    with RankPool(ranks) as pool:
        each = pool.run(_on_rank, here, elements, typical, timeout=TIMEOUT)
    found = {name: max(of_rank[name] for of_rank in each) for name in each[0]}
    kernels = {
        setting: Kernels(*(found[f"{setting} {stage}"] for stage in ("compress", "reduce", "decompress")))
        for setting in SETTINGS
    }
    message = max(0.0, found["of all"] - found["of two"]) / max(1, ranks - 2)
    return Inputs(kernels, found["shared"], found["socket"], found["of two"], message)


def _timed(call: Callable[[], Any], typical: Typical) -> float:
    """Seconds of a call that all ranks make at once."""
    times = []
    for _ in range(2 + ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return typical(times[2:])


def _on_rank(rank: int, world_size: int, here: int, elements: int, typical: Typical) -> dict[str, float]:
    """Seconds an element of each setting's kernels, a byte of what moves them, and of collectives of a few bytes."""
    set_up_process()
    world: Any = dist.group.WORLD
    pair, host = dist.new_subgroups(2)[0], dist.new_subgroups(here)[0]
    sockets = GlooTransport(world)
    found: dict[str, float] = {}
    for setting in SETTINGS:
        stages = _kernels(sockets, setting, elements, typical)
        found |= {f"{setting} {stage}": seconds / elements for stage, seconds in stages.items()}
    found["socket"] = _all_to_all(sockets, FP32_BYTES * elements, typical)
    found["shared"] = _all_to_all(ShmTransport(host), FP32_BYTES * elements, typical) if here > 1 else 0.0
    found |= {"of two": _small(GlooTransport(pair), typical), "of all": _small(sockets, typical)}
    return found


def _all_to_all(transport: Transport, nbytes: int, typical: Typical) -> float:
    """Seconds for each byte that goes from a rank to others."""
    wire = torch.zeros(nbytes // transport.world_size * transport.world_size, dtype=torch.uint8)
    received = torch.empty_like(wire).view(transport.world_size, -1)
    seconds = _timed(lambda: transport.all_to_all(received, wire).wait(), typical)
    return seconds / (wire.numel() - wire.numel() // transport.world_size)


def _small(transport: Transport, typical: Typical) -> float:
    """Seconds of an all-gather of a few bytes."""
    wire = torch.zeros(SMALL * transport.world_size, dtype=torch.uint8)

    def some() -> None:
        for _ in range(TIMES):
            transport.all_gather(wire).wait()

    return _timed(some, typical) / TIMES


def _kernels(transport: Transport, setting: str, elements: int, typical: Typical) -> dict[str, float]:
    """Seconds of each stage of one bucket."""
    compression = Compression.parse(setting if setting != "none" else "none:accumulate=fp32")
    size = elements // 8
    specs = [ParameterSpec(str(i), size, torch.float32, torch.device("cpu")) for i in range(8)]
    plan = build_plan(specs, [list(range(8))], alignment=compression.alignment, shards=transport.world_size)
    pipeline = BucketPipeline(plan.buckets[0], compression, transport)
    generator = torch.Generator().manual_seed(transport.rank)
    gradients = [torch.randn(size, generator=generator) for _ in range(8)]
    pipeline.compress(gradients)
    wires = pipeline.wires
    assert isinstance(wires, FlatWires)
    received = wires.received
    assert received is not None
    received.view(-1).copy_(pipeline.wire)
    return {
        "compress": _timed(lambda: pipeline.compress(gradients), typical),
        "reduce": _timed(lambda: wires.reduce_shards(received), typical),
        "decompress": _timed(lambda: pipeline.decompress(gradients), typical),
    }
