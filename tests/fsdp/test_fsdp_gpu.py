"""FSDP2's reductions on a real GPU: the bits that CPU ranks have, on whatever streams FSDP calls them.

One rank always; two and four share the GPU under NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later). Without a GPU two
CPU ranks run the same cases, so that nothing in them is wrong but what only a GPU can tell.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fastreduce.fsdp
from fastreduce.ops.backends import ENVIRONMENT_VARIABLE
from tests.support import gpu_pools
from tests.support.gpu_pools import HAS_GPU, MANY
from tests.support.models import assert_same_bits, batch
from tests.support.ranks import RankPool
from tests.support.sharded import SHAPES, Given, Step, given, mesh_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
SECONDS = 100.0  # CUDA, NCCL and kernels start in every rank, where several share a GPU one after the other
SCATTERED = ("none:accumulate=fp32", "fp16", "bf16", "int8", "fp8", "int4", "parts.a.*: int4; *: bf16")
EACH_WAY = {
    "scattered": {"reduce_scatter": "int8:error_feedback"},
    "scattered in fp8 and int4": {"reduce_scatter": "parts.a.*: fp8:error_feedback; *: int4:error_feedback"},
    "averaged": {"all_reduce": "int8:error_feedback"},
    "both": {"reduce_scatter": "fp16", "all_reduce": "int4:error_feedback"},
}

pytestmark = [pytest.mark.timeout(240), pytest.mark.gpu if HAS_GPU else pytest.mark.long]


pools, ranks = gpu_pools.pools, gpu_pools.of_each([1, *MANY])


def _mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """Of all ranks, on a device: so many replicas, and a shard on each of the others."""
    if device.type == "cpu":
        return mesh_of(replicas)
    ranks, mine = torch.arange(dist.get_world_size()).view(replicas, -1), []
    for rows in (ranks.t(), ranks):
        groups = [dist.new_group(row.tolist(), backend="nccl") for row in rows]
        mine.append(next(group for group, row in zip(groups, rows, strict=True) if dist.get_rank() in row))
    return DeviceMesh.from_group(mine, "cuda", mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _sharded(mesh: DeviceMesh, root: bool) -> Any:
    """Without a root each part is one, with streams of its own."""
    model: Any = Given()
    for part in [*model.parts.values(), *([model] if root else [])]:
        fully_shard(part, mesh=mesh["shard"])
    return model


def _kernels(device: torch.device) -> Any:
    return patch.dict(os.environ, {ENVIRONMENT_VARIABLE: "triton" if device.type == "cuda" else "numba_cpu"})


def _trained(rank: int, device: torch.device, replicas: int, way: str, root: bool) -> list[dict[str, Tensor]]:
    """This rank's part of the averages of some steps, one of which is skipped."""
    settings, mesh = EACH_WAY[way], _mesh(device, replicas)
    model = _sharded(mesh, root)
    with _kernels(device):
        if "all_reduce" in settings:
            reduction = fastreduce.fsdp.replicate(model, mesh["replicate"], settings["all_reduce"])
        if "reduce_scatter" in settings:
            reduction = fastreduce.fsdp.compress(model, settings["reduce_scatter"])
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(5):
        grads = {name: given(step, rank, name, Step()).to(device) for name in SHAPES}
        model(torch.zeros((), device=device, requires_grad=True), grads).backward()
        found.append({name: p.grad.to_local().cpu() for name, p in model.named_parameters()})
        if step != 2:
            optimizer.step()
        optimizer.zero_grad()
    reduction.close()
    return found


def _same_bits(rank: int, size: int, way: str, root: bool) -> None:
    # A reduce-scatter of one rank is none, and FSDP calls nobody for it.
    replicas = size if way == "averaged" else 2 if way == "both" and size > 2 else 1
    found, expected = (_trained(rank, device, replicas, way, root) for device in (GPU, CPU))
    assert_same_bits(found, expected, f"{way}, root={root}")


@pytest.mark.parametrize("root", [True, False], ids=["", "without a root"])
@pytest.mark.parametrize("way", EACH_WAY)
def test_averages_have_the_bits_of_the_cpus_under_fsdp(way: str, root: bool, ranks: RankPool):
    ranks.run(_same_bits, way, root, timeout=SECONDS)


def _called(rank: int, size: int, device: torch.device, setting: str) -> list[Tensor]:
    """Our reduce-scatter as FSDP calls it: on a stream of its own, and the input is not needed any more."""
    model = _sharded(_mesh(device, 1), root=True)
    with _kernels(device):
        reduction = fastreduce.fsdp.compress(model, setting)
    found = []
    for k, scatter in enumerate(reduction._scatters):
        group = scatter._group
        group.present = list(range(len(group.members)))
        numel = sum(member.piece for member in group.members)
        for step in range(2):
            sent = batch(rank, 10 * k + step, numel * size).to(device)
            if device.type == "cuda":
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    summed = scatter.allocate((numel,), dtype=torch.float32, device=device)
                    scatter(summed, sent, group.ranks, dist.ReduceOp.AVG)
                torch.cuda.current_stream().wait_stream(stream)
            else:
                summed = scatter.allocate((numel,), dtype=torch.float32, device=device)
                scatter(summed, sent, group.ranks, dist.ReduceOp.AVG)
            found.append(summed.cpu())
    reduction.close()
    return found


def _same_bits_called(rank: int, size: int) -> None:
    for setting in SCATTERED:
        found, expected = (_called(rank, size, device, setting) for device in (GPU, CPU))
        assert_same_bits(found, expected, setting)


def test_a_reduce_scatter_that_is_called_has_the_bits_of_the_cpus(ranks: RankPool):
    ranks.run(_same_bits_called, timeout=SECONDS)


def _let_go(rank: int, size: int) -> None:
    """FSDP lets go of a shard whose average it casts or adds up, as soon as that is enqueued."""
    mesh = _mesh(GPU, size)
    with _kernels(GPU):
        average = fastreduce.fsdp.replicate(_sharded(mesh, root=True), mesh["replicate"], "int8")._averages[0]
    average._group.present = list(range(len(average._group.members)))
    numel = sum(member.piece for member in average._group.members)
    its, ours = torch.cuda.Stream(), torch.cuda.Stream()
    ours.wait_stream(torch.cuda.current_stream())  # on which buckets were laid out
    for asleep in (0, 1_000_000_000):  # first, whatever waits for the GPU when it is done for the first time
        with torch.cuda.stream(its):
            shard = torch.ones(numel, device=GPU)
        ours.wait_stream(its)
        with torch.cuda.stream(ours):
            torch.cuda._sleep(asleep)
            average(shard)
        address = shard.data_ptr()
        del shard
        with torch.cuda.stream(its):
            reused = torch.zeros(numel, device=GPU).data_ptr() == address
    assert not ours.query(), "it had ended: this shows nothing"
    assert not reused
    torch.cuda.synchronize()


@pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")
def test_a_shard_that_is_let_go_is_nobody_elses_before_its_average_has_ended(ranks: RankPool):
    ranks.run(_let_go, timeout=SECONDS)


def test_these_are_in_the_run_for_gpus():
    assert Path(__file__).name in (Path(__file__).parents[2] / "bench" / "gpu" / "phases.py").read_text()
