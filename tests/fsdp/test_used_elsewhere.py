"""A parameter that a rank does not use while others do: its part of the average has no place there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fastreduce.fsdp
from fastreduce import ReducerError
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import batch, gradients

HALF = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


class _Either(nn.Module):
    """Uses one layer or both."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(30, 8), nn.Linear(8, 9)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if uses_both else x


def _backward(model: Any, rank: int, uses_both: bool) -> None:
    model.zero_grad()
    model(batch(rank), uses_both).square().mean().backward()


def _on_one_rank(rank: int, world_size: int, setting: str, transport: str, half: bool, frozen: bool, user: int) -> str:
    """What is said on each rank, where `user` alone uses a layer that none has used in the backward before."""
    model: Any = _Either()
    model.sometimes.requires_grad_(not frozen)
    fully_shard(model, mp_policy=HALF if half else MixedPrecisionPolicy())
    reduction = fastreduce.fsdp.compress(model, setting, transport=transport)
    _backward(model, rank, uses_both=False)
    model.sometimes.requires_grad_(True)  # where it was frozen, no wire has a place for it
    try:
        _backward(model, rank, uses_both=rank == user)
        reduction._follower.look()  # as the next backward does
    except ReducerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("setting", "half", "frozen"),
    [
        ("none", False, False),
        ("int8", False, True),
        ("*.bias: int4:error_feedback; *: int8:error_feedback", False, False),
        pytest.param("none", True, True, marks=pytest.mark.long),
        pytest.param("bf16", False, False, marks=pytest.mark.long),
        pytest.param("fp8", False, False, marks=pytest.mark.long),
        pytest.param("*.bias: fp16; *: int4", True, False, marks=pytest.mark.long),
        pytest.param("*.bias: none; *: int8", False, False, marks=pytest.mark.long),
        pytest.param("int8:error_feedback", False, True, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("transport", ["gloo", pytest.param("shm", marks=pytest.mark.long)])
def test_a_parameter_that_other_ranks_use(ranks: RankPool, setting: str, transport: str, half: bool, frozen: bool):
    """Its gradient would be that of some rows, and none of others."""
    for user in (0, ranks.world_size - 1):
        unused = dict(enumerate(ranks.run(_on_one_rank, setting, transport, half, frozen, user)))
        assert unused.pop(user) == ""
        for rank, said in unused.items():
            assert "parameter 'sometimes." in said
            assert f"has a gradient on another rank, and none on rank {rank} of {ranks.world_size}" in said
            assert "Call set_reduce_scatter_unused_params(True) on the model" in said


def _as_told(rank: int, world_size: int, setting: str | None) -> list[dict[str, Tensor]]:
    """Gradients, where FSDP reduces zeros of what a rank has not used; and where no rank has used a layer."""
    torch.manual_seed(0)
    model: Any = fully_shard(_Either())
    if setting is not None:
        fastreduce.fsdp.compress(model, setting)
    found = []
    for uses_both in (rank == 0, False, True):
        model.set_reduce_scatter_unused_params(not found)
        _backward(model, rank, uses_both)
        found.append(gradients(model))
    return found


def test_zeros_are_reduced_where_fsdp_is_told_to(ranks2: RankPool):
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    torchs, ours = (ranks2.run(_as_told, setting) for setting in (None, "none"))
    assert_same_bits(ours, torchs)
    assert [len(grads) for grads in ours[0]] == [4, 2, 4]
