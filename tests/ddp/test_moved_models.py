"""Models that are cast or moved after wrapping and come back, as to the host between two phases of a training.

Autograd gives a parameter whose dtype or device has changed another AccumulateGrad node, without our hook; in torch's
class gradients are this rank's own from then on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from tests.support.models import (
    EXACT,
    Branches,
    assert_same_bits,
    average_of_whole,
    batch,
    grads_of,
    mlp,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool


def _in_place(model: nn.Module) -> None:
    for tensor in model.parameters():
        tensor.data = tensor.data.double()
        tensor.data = tensor.data.float()


MOVES: dict[str, Callable[[Any], object]] = {
    "the wrapper": lambda ddp: ddp.double().float(),
    "the module inside": lambda ddp: ddp.module.to(torch.float64).to(torch.float32),
    "its parameters": lambda ddp: _in_place(ddp.module),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("frozen", [False, True])
def test_what_was_moved_and_is_back_is_averaged(ranks: RankPool, move: str, frozen: bool):
    ranks.run(_moved, move, frozen)


def _moved(rank: int, world_size: int, move: str, frozen: bool) -> None:
    ddp = wrap("ours", whole_(Branches()))
    expected = [average_of_whole(lambda: whole_(Branches()), step, range(world_size)) for step in range(4)]
    for step in range(4):
        ddp.zero_grad()
        if step in (1, 3):
            MOVES[move](ddp)
        if frozen and step == 1:
            ddp.module.trunk.weight.requires_grad_(False)  # the first
        (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        found = grads_of(ddp.module)
        if frozen and step > 0:
            found["trunk.weight"] = expected[step]["trunk.weight"]
        assert_same_bits(found, expected[step], f"rank {rank}, step {step}")


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "none, views": {"gradient_as_bucket_view": True},
    "fp16, views": {"compression": "fp16", "gradient_as_bucket_view": True},
    "int8 with residuals": {"compression": "int8:error_feedback"},
    "int4 with residuals, views": {"compression": "int4:error_feedback=8bit", "gradient_as_bucket_view": True},
    "powersgd": {"compression": "powersgd:rank=2"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=["", "more"])
def test_a_history_with_moves_has_the_bits_of_one_without(ranks2: RankPool, options: str, seeds: range):
    for seed in seeds:
        ranks2.run(_beside_one_that_stays, options, seed)


def _beside_one_that_stays(rank: int, world_size: int, options: str, seed: int) -> None:
    """FP32 numbers are the same ones in FP64 and back."""
    twins = []
    for _ in range(2):
        torch.manual_seed(seed)
        twins.append(wrap("ours", mlp(), bucket_cap_mb=0.003, **OPTIONS[options]))
    optimizers = [torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9) for ddp in twins]
    draw = random.Random(seed)
    for step in range(8):
        micro_batches, clips, steps = draw.choice([1, 1, 2]), draw.random() < 0.3, draw.random() < 0.8
        to_none, zeroes, move = draw.random() < 0.6, draw.random() < 0.9, draw.choice(list(MOVES.values()))
        moved = {moment for moment in ("before", "between", "amid", "behind", "after") if draw.random() < 0.25}
        for ddp, optimizer in zip(twins, optimizers, strict=True):
            goes = moved if ddp is twins[1] else set[str]()

            def at(moment: str, ddp: Any = ddp, goes: set[str] = goes, move: Callable[[Any], object] = move) -> None:
                if moment in goes:
                    move(ddp)

            at("before")
            for micro in range(micro_batches):
                with ddp.no_sync() if micro < micro_batches - 1 else nullcontext():
                    loss = ddp(batch(rank, 10 * step + micro, 4, 20)).square().mean() * 10
                    at("amid")
                    loss.backward()
                at("between")
            at("behind")
            if clips:
                ddp.clip_grad_norm_(0.5)
            if steps:
                optimizer.step()
            if zeroes:
                optimizer.zero_grad(to_none)
            at("after")
        where = f"rank {rank}, seed {seed}, step {step}, moved {sorted(moved)}"
        assert_same_bits(grads_of(twins[1].module), grads_of(twins[0].module), where)
        assert_same_bits(twins[1].module.state_dict(), twins[0].module.state_dict(), where)
        stayed, went = (ddp.reducer.state_dict()["residuals"] for ddp in twins)
        assert_same_bits(went, stayed, where)


PARTS: dict[str, Callable[[nn.Module], object]] = {
    "moved": lambda part: part.double().float(),
    "set": torch.no_grad()(lambda part: part.weight.set_(part.weight.detach().clone())),
    "parametrized": lambda part: register_parametrization(part, "weight", nn.Identity()),
}


@pytest.mark.parametrize("change", PARTS)
@pytest.mark.parametrize("before", [0, 1, 3])
def test_where_a_part_was_moved_its_first_gradients_are_averaged_too(ranks: RankPool, change: str, before: int):
    ranks.run(_moved_in_part, change, before)


def _moved_in_part(rank: int, world_size: int, change: str, before: int) -> None:
    """In buckets of a parameter each, so that others are launched meanwhile; one step leaves the part out."""
    ddp = wrap("ours", whole_(Branches()), bucket_cap_mb=1e-6)
    parameters = dict(ddp.module.named_parameters())  # their names change
    for step in range(6):
        if step == before:
            PARTS[change](ddp.module.b)
        use = "ac" if step == 4 else "abc"
        ddp.zero_grad()
        (ddp(whole_batch(rank, step, 3, 4), use).sum() * EXACT).backward()
        expected = average_of_whole(partial(_Using, use), step, range(world_size))
        found = {f"body.{name}": each.grad for name, each in parameters.items()}
        assert_same_bits(found, expected, f"rank {rank}, step {step}")


class _Using(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.body, self.use = Branches(), use

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x, self.use)
