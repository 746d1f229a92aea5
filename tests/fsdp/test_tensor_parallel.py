"""Sharded parameters that tensor parallelism has divided before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fastreduce.fsdp
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import batch, gradients


def _train(
    rank: int, world_size: int, setting: str | None, path: str, resumed: bool = False
) -> list[dict[str, Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    torch.manual_seed(resumed)
    model: Any = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 8))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for child in (model[0], model[2]):
        fully_shard(child, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    state = {"model": model.state_dict()}
    if setting is not None:
        state["reduction"] = fastreduce.fsdp.compress(model, setting)
    if resumed:
        dcp.load(state, checkpoint_id=path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(2 * resumed, 4):
        optimizer.zero_grad()
        model(batch(rank // 2, step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(gradients(model))
        optimizer.step()
        if step == 1:
            dcp.save(state, checkpoint_id=path)
    return found


def test_none_has_the_bits_of_fsdp(ranks4: RankPool, tmp_path: Path):
    torchs, ours = (ranks4.run(_train, setting, str(tmp_path / str(setting))) for setting in (None, "none"))
    assert_same_bits(ours, torchs)


def test_a_checkpoint_resumes_bit_for_bit(ranks4: RankPool, tmp_path: Path):
    went_on, resumed = (ranks4.run(_train, "int8:error_feedback", str(tmp_path), again) for again in (False, True))
    assert_same_bits(resumed, [steps[2:] for steps in went_on])
