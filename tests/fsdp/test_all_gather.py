"""`compress(all_gather=…)`: what parameters are computed with, and that the sharded ones stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastreduce.fsdp
from fastreduce import MismatchError, SettingError
from tests.support import tolerances
from tests.support.installed_torch import shards_bytes
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import batch, gradients, network, shard

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = ("bf16", "fp16", "int8", "fp8", "int4")
BY_NAME = {"*.bias": "none", "2.*": "bf16", "*": "int8"}


def _whole(model: Any) -> dict[str, Tensor]:
    """What forward and backward compute with."""
    sharded = [module for module in model.modules() if hasattr(module, "unshard")]
    for module in sharded:
        module.unshard()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for module in sharded:
        module.reshard()
    return found


def _masters(model: Any) -> dict[str, Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}


def _made(all_gather: Any, **options: Any) -> Any:
    model = shard(network(), **options)
    model[0].bias.requires_grad_(False)  # frozen ones are gathered too
    fastreduce.fsdp.compress(model, "none", all_gather=all_gather)
    return model


def _gathered(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {setting: _whole(_made(setting)) for setting in SETTINGS}
    found["by name"] = _whole(_made(BY_NAME))
    found["int8 of bf16"] = _whole(_made("int8", mp_policy=HALF))
    found["masters"] = _masters(_made("int8"))
    return found


def test_all_ranks_compute_with_the_same_numbers(ranks: RankPool):
    first, *others = ranks.run(_gathered)
    for other in others:
        assert_same_bits(other, first)
    exact = {name: parameter.detach() for name, parameter in network().named_parameters()}
    assert_same_bits(first["masters"], exact)
    assert_same_bits(first["bf16"], {name: each.bfloat16().float() for name, each in exact.items()})
    for name, each in exact.items():
        for setting in SETTINGS:
            bound = tolerances.error_bound(setting, [each])  # for two roundings, and here is one
            assert ((first[setting][name] - each).abs() <= bound.max()).all(), (setting, name)
        alone = exact if name.endswith("bias") else first["bf16" if name.startswith("2.") else "int8"]
        assert_same_bits(first["by name"][name], alone[name])
        assert first["int8 of bf16"][name].dtype is torch.bfloat16


def _trained(rank: int, world_size: int, ours: bool, reshard: bool) -> Any:
    """Gradients of three steps, where parameters are rounded to BF16 by us, or by hand; and the masters."""
    model = shard(network(), reshard_after_forward=reshard)
    masters = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    if ours:
        fastreduce.fsdp.compress(model, "none", all_gather="bf16")
    found = []
    for step in range(3):
        if not ours:
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.to_local().detach().copy_(master.bfloat16())
        model.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        found.append(gradients(model))
        for parameter, master in zip(model.parameters(), masters, strict=True):
            kept = parameter.to_local().detach() if ours else master
            kept -= 0.1 * parameter.grad.to_local()
            master.copy_(kept)
    return found, masters


@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_training_is_that_of_rounded_parameters_with_masters(ranks2: RankPool, reshard: bool):
    assert_same_bits(ranks2.run(_trained, True, reshard), ranks2.run(_trained, False, reshard))


def _refused(rank: int, world_size: int) -> dict[str, str]:
    def said(kind: type[Exception], all_gather: Any, *layers: nn.Module, **options: Any) -> str:
        model = shard(nn.Sequential(*(layers or (nn.Linear(8, 8), nn.Linear(8, 8)))), **options)
        with pytest.raises(kind) as caught:
            fastreduce.fsdp.compress(model, "none", all_gather=all_gather)
        return str(caught.value)

    frozen = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(False)  # FSDP gathers it with FP32 as bytes
    return {
        "feedback": said(SettingError, "int8:error_feedback"),
        "by chance": said(SettingError, "bf16:rounding=stochastic"),
        "summed": said(SettingError, "fp16:accumulate=wire"),
        "fewer": said(SettingError, "bf16", reshard_after_forward=2),
        "mixed": said(SettingError, "bf16", nn.Sequential(frozen, nn.Linear(8, 8))),
        "differs": said(MismatchError, [None, "int8", "int8", "int8"][rank]),
    }


@pytest.mark.long
def test_what_is_refused(ranks4: RankPool):
    for said in ranks4.run(_refused):
        assert "'int8:error_feedback': parameters are gathered from what they are each time" in said["feedback"]
        assert "it counts no steps, so it takes no rounding=stochastic" in said["by chance"]
        assert "nothing is summed in an all-gather: write 'fp16'" in said["summed"]
        assert "module '0' is gathered by fewer ranks in backward, as reshard_after_forward says" in said["fewer"]
        assert "has parameters of torch.bfloat16 and torch.float32, which FSDP gathers as bytes" in said["mixed"]
        assert "rank 0 has none, shape (8, 8)" in said["differs"] and "gathered under int8" in said["differs"]


class _Quantized(nn.Module):
    """A frozen base of bytes, sharded by itself, and what is trained beside it."""

    def __init__(self, base: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.beside: Any = fully_shard(nn.Linear(4, 4))
        if base:
            self.base = nn.Parameter(torch.arange(16, dtype=torch.int8).reshape(4, 4), requires_grad=False)
        else:
            self.register_buffer("base", torch.arange(16, dtype=torch.int8).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(x) @ self.base.to(x.dtype)


def _quantized(rank: int, world_size: int, base: bool) -> list[Tensor]:
    model = _Quantized(base)
    if base:
        fully_shard(model)
    fastreduce.fsdp.compress(model, "int8", all_gather="bf16")
    model(batch(rank)[:, :4]).square().sum().backward()
    return [p.grad.to_local().clone() for p in model.beside.parameters()]


@shards_bytes
def test_groups_of_bytes_are_gathered_by_torch(ranks2: RankPool):
    assert_same_bits(ranks2.run(_quantized, True), ranks2.run(_quantized, False))
