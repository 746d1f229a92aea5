"""Gradients of several backwards, of which some modules, or all, reduce the last one's alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import fastreduce.fsdp
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import batch, gradients


def _model(reshards: bool) -> Any:
    """Three blocks, and a root with a layer of its own."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 33), nn.ReLU(), nn.Linear(33, 32)) for _ in range(3)]
    model = nn.Sequential(nn.Linear(30, 32), *blocks)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshards)
    return fully_shard(model, reshard_after_forward=reshards)


def _waits(model: Any, who: str, is_last: bool, reshards: bool) -> None:
    """Let some modules reduce, and give parameters back, in the last backward alone."""
    reshards = reshards or is_last
    if who == "all":
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(reshards)
    for module in [model] if who == "root" else model[1:3] if who == "some" else []:
        module.set_requires_gradient_sync(is_last, recurse=False)
        module.set_reshard_after_backward(reshards, recurse=False)


def _train(rank: int, world_size: int, who: str, reshards: bool, ours: bool) -> list[dict[str, Tensor]]:
    model = _model(reshards)
    if ours:
        fastreduce.fsdp.compress(model, "none")
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(3):
        for module in model.modules() if who == "all" and not reshards else ():
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)  # as before a pipeline's micro-batches
        for micro in range(3):
            _waits(model, who, micro == 2, reshards)
            model(batch(rank, 3 * step + micro)).square().mean().backward()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))
    return found


@pytest.mark.parametrize(
    ("who", "reshards"),
    [
        ("some", True),
        *(pytest.param(*way, marks=pytest.mark.long) for way in (("some", False), ("root", True), ("root", False))),
        *(pytest.param("all", reshards, marks=pytest.mark.long) for reshards in (True, False)),
    ],
)
def test_none_has_the_bits_of_fsdp(ranks2: RankPool, who: str, reshards: bool):
    torchs, ours = (ranks2.run(_train, who, reshards, way) for way in (False, True))
    assert_same_bits(ours, torchs)
