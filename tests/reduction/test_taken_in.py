"""Gradients under bucket views on GPUs: each moves into its view in mid-backward, so that none is in memory twice."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce
from fastreduce.reduction.gradients import Gradients
from fastreduce.transports import GlooTransport
from tests.support.models import assert_same_bits, grads_of
from tests.support.ranks import RankPool

STEPS = 4


class Layers(nn.Module):
    """A bucket each; the last one, whose gradient would come first, may be left out, as one bias is."""

    def __init__(self, complex_too: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))
        self.turn = nn.Parameter(torch.ones(30, dtype=torch.complex64 if complex_too else torch.float32))

    def forward(self, x: Tensor, leaves_out: bool) -> Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:3]:
            x = nn.functional.linear(x, layer.weight, None if leaves_out else layer.bias)
        x = (x * self.turn).abs() if self.turn.is_complex() else x * self.turn
        return x if leaves_out else self.layers[3](x)


@patch.object(Gradients, "_takes_in", staticmethod(lambda _: True))
def _trained(
    rank: int, world_size: int, kind: str, hooked: bool, leaves_out: bool, complex_too: bool, micro: int
) -> tuple[list[Any], list[list[str]]]:
    """Gradients of all steps; and of each backward those that are there, and not in their views, at its last one.

    As on a GPU, where memory itself is looked at (tests/simulated_gpu).
    """
    torch.manual_seed(0)
    model = Layers(complex_too)
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "find_unused_parameters": leaves_out}
    if kind == "ours":
        options["transport"] = GlooTransport(dist.group.WORLD)
    make: Any = fastreduce.DistributedDataParallel if kind == "ours" else TorchDDP
    ddp = make(model, bucket_cap_mb=0.003, **options)
    if hooked:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    apart: list[list[str]] = []

    def look(_: Tensor) -> None:
        if kind == "ours":
            gradients = ddp.reducer.buckets.gradients
            views = dict(zip(gradients.names, gradients.views, strict=True))
            behind = {f"layers.{i}.{name}" for i in (2, 3) for name in ("weight", "bias")} | {"turn"}
            there = {name: p.grad for name, p in model.named_parameters() if p.grad is not None and name in behind}
            apart.append([name for name, grad in there.items() if grad.data_ptr() != views[name].data_ptr()])

    model.layers[0].weight.register_hook(look)
    found = []
    for step in range(STEPS):
        ddp.zero_grad()
        for part in range(micro):
            inputs = torch.full((2, 30), 1.0 + rank + step + part)
            ddp(inputs, leaves_out and (rank == 0 or step < STEPS - 1)).square().sum().backward()
        found.append(grads_of(model))
    return found, apart


@pytest.mark.parametrize("complex_too", [False, True])
@pytest.mark.parametrize(
    ("hooked", "leaves_out", "micro"),
    [(False, False, 1), (True, False, 1), (False, True, 1), (False, False, 2)],
)
def test_in_mid_backward_gradients_are_in_their_views_and_nowhere_else(
    ranks2: RankPool, hooked: bool, leaves_out: bool, complex_too: bool, micro: int
):
    told = hooked, leaves_out, complex_too, micro
    ours, torchs = ranks2.run(_trained, "ours", *told), ranks2.run(_trained, "torch", *told)
    for (grads, apart), (expected, _) in zip(ours, torchs, strict=True):
        known = len(apart) - leaves_out  # at last rank 1 uses what none had, whose buckets come behind all others
        assert apart[:known] == [[]] * (STEPS * micro - leaves_out)
        for found, wanted in zip(grads, expected, strict=True):
            assert_same_bits(found, wanted)


class Two(nn.Module):
    """Of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(30, 30), nn.Linear(30, 30)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.first(x) + self.second(x) if both else self.first(x)


@patch.object(Gradients, "_takes_in", staticmethod(lambda _: True))
def _kept(rank: int, world_size: int, kind: str, setting: str) -> list[Any]:
    """Gradients that lie in the wire and stay there: what nobody uses in one step, one rank alone uses in the next."""
    torch.manual_seed(0)
    ours = {"compression": setting, "transport": GlooTransport(dist.group.WORLD)} if kind == "ours" else {}
    make: Any = fastreduce.DistributedDataParallel if kind == "ours" else TorchDDP
    ddp = make(Two(), gradient_as_bucket_view=True, find_unused_parameters=True, **ours)
    found = []
    for step, users in enumerate(((0, 1), (), (0,), (), (1,), (0, 1))):
        ddp(torch.full((2, 30), 1.0 + rank + step), rank in users).square().sum().backward()
        found.append(grads_of(ddp.module))
    return found


@pytest.mark.parametrize("setting", ["none", "none:accumulate=fp32"])
def test_who_uses_what_lies_in_the_wire_is_told_in_each_step(ranks2: RankPool, setting: str):
    assert_same_bits(ranks2.run(_kept, "ours", setting), ranks2.run(_kept, "torch", setting))
