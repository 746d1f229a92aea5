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
    Heads,
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


@pytest.mark.parametrize("part", ["trunk", "b"])
def test_what_was_frozen_while_the_model_moved_is_averaged_once_it_is_thawed(ranks2: RankPool, part: str):
    ranks2.run(_thawed, part)


def _thawed(rank: int, world_size: int, part: str) -> None:
    ddp = wrap("ours", whole_(Branches()))
    for step in range(5):
        getattr(ddp.module, part).requires_grad_(step != 2)
        if step == 2:
            ddp.double().float()
        ddp.zero_grad()
        (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        expected = average_of_whole(lambda: whole_(Branches()), step, range(world_size))
        found = grads_of(ddp.module)
        if step == 2:
            expected |= {name: None for name in expected if name.startswith(part)}
        assert_same_bits(found, expected, f"rank {rank}, step {step}")


class _Losses(Heads):
    def forward(self, x: torch.Tensor) -> Any:
        outputs = super().forward(x)
        return [outputs["first"].sum() * EXACT, outputs["rest"][0].sum() * EXACT]


class _Second(Heads):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)["rest"][0]


class _SumOfBoth(Heads):
    def forward(self, x: torch.Tensor) -> Any:
        outputs = super().forward(x)
        return outputs["first"] + outputs["rest"][0]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("move", ["all", "second"])
def test_what_was_moved_and_comes_in_a_second_backward_is_averaged(ranks2: RankPool, move: str, to_none: bool):
    ranks2.run(_in_a_second_backward, move, to_none)


def _in_a_second_backward(rank: int, world_size: int, move: str, to_none: bool) -> None:
    ddp = wrap("ours", whole_(_Losses()))
    for step in range(5):
        ddp.zero_grad(to_none)
        if step in (1, 3):
            (ddp if move == "all" else ddp.module.second).double().float()
        for loss in ddp(whole_batch(rank, step, 3, 4)):
            loss.backward()
        expected = average_of_whole(lambda: whole_(_SumOfBoth()), step, range(world_size))
        assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, step {step}")


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("searches", [False, True])
def test_a_step_that_uses_nothing_but_what_was_moved_is_averaged(ranks2: RankPool, local: bool, searches: bool):
    """No hook sees anything come; `autograd.grad` before it, with averages in `.grad` still, brings nothing."""
    ranks2.run(_only_what_was_moved, local, searches)


def _only_what_was_moved(rank: int, world_size: int, local: bool, searches: bool) -> None:
    ddp = wrap("ours", whole_(_Losses()))
    total: dict[str, Any] = {}
    for step in range(6):
        if step in (1, 4):
            ddp.module.second.double().float()
        with ddp.no_sync() if local and step in (1, 4) else nullcontext():
            loss = ddp(whole_batch(rank, step, 3, 4))[1]
            if searches:
                torch.autograd.grad(loss, list(ddp.module.second.parameters()), retain_graph=True)
            loss.backward()
        expected = average_of_whole(lambda: whole_(_Second()), step, range(world_size))
        total = {name: g if g is None else g + total.get(name, 0) for name, g in expected.items()}
        if not local or step not in (1, 4):
            assert_same_bits(grads_of(ddp.module), total, f"rank {rank}, step {step}")


class _ThreeLosses(_Losses):
    """Its first parameters tell whether the whole model was moved: they stay where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return [*super().forward(x), self.third(x).sum() * EXACT]


class _SecondAndThird(_ThreeLosses):
    def forward(self, x: torch.Tensor) -> Any:
        return self.second(x) + self.third(x)


@pytest.mark.parametrize("then_all", [False, True])
def test_of_two_moved_parts_what_one_got_under_no_sync_is_averaged_in_a_step_that_uses_the_other_alone(
    ranks2: RankPool, then_all: bool
):
    ranks2.run(_two_parts_moved, then_all)


def _two_parts_moved(rank: int, world_size: int, then_all: bool) -> None:
    ddp = wrap("ours", whole_(_ThreeLosses()))
    for part in (ddp.module.second, ddp.module.third):
        part.double().float()
    with ddp.no_sync():
        ddp(whole_batch(rank, 0, 3, 4))[1].backward()
    if then_all:
        ddp.double().float()
    ddp(whole_batch(rank, 0, 3, 4))[2].backward()
    expected = average_of_whole(lambda: whole_(_SecondAndThird()), 0, range(world_size))
    assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}")


@pytest.mark.parametrize("inside", [False, True], ids=["", "of the module inside"])
@pytest.mark.parametrize("part", ["b", "trunk"])
def test_what_a_part_that_was_moved_got_under_no_sync_is_averaged_if_the_rest_moves_too(
    ranks2: RankPool, part: str, inside: bool
):
    ranks2.run(_moved_under_no_sync, part, inside)


def _moved_under_no_sync(rank: int, world_size: int, part: str, inside: bool) -> None:
    """The backward that is reduced does not use it, and follows a move of the whole model."""
    ddp = wrap("ours", whole_(_Using("abc")))
    for step in range(4):
        ddp.zero_grad()
        getattr(ddp.module.body, part).double().float()
        with ddp.no_sync():
            ((ddp.module if inside else ddp)(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        ddp.double().float()
        ddp.module.use = "ac"
        (ddp(whole_batch(rank, step + 10, 3, 4)).sum() * EXACT).backward()
        ddp.module.use = "abc"
        before = average_of_whole(partial(_Using, "abc"), step, range(world_size))
        after = average_of_whole(partial(_Using, "ac"), step + 10, range(world_size))
        expected = {name: g if (more := after[name]) is None else g + more for name, g in before.items()}
        assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, step {step}")


def test_a_backward_of_a_forward_before_the_move_is_averaged_behind_another_forward(ranks2: RankPool):
    """Its graph has the nodes from before the move."""
    ranks2.run(_forward_before)


def _forward_before(rank: int, world_size: int) -> None:
    ddp = wrap("ours", whole_(Branches()), bucket_cap_mb=1e-6)
    for step in range(4):
        ddp.zero_grad()
        output = ddp(whole_batch(rank, step, 3, 4))
        ddp.double().float()
        ddp(whole_batch(rank, 10, 3, 4))
        (output.sum() * EXACT).backward()
        expected = average_of_whole(lambda: whole_(Branches()), step, range(world_size))
        assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, step {step}")


def test_a_local_backward_of_an_earlier_step_lets_no_old_average_count_as_used(alone: None):
    ddp = wrap("ours", Branches())
    with ddp.no_sync():
        ddp(torch.ones(2, 4)).sum().backward()
    for use in ("abc", "ac"):  # and averages stay in `.grad`
        ddp.double().float()
        ddp(torch.ones(2, 4), use).sum().backward()
    brought = dict(zip(ddp.reducer.buckets.gradients.names, ddp.reducer.backward.brought, strict=True))
    assert {name for name, is_brought in brought.items() if not is_brought} == {"b.weight", "b.bias"}


def test_hooks_on_nodes_that_are_gone_are_forgotten(alone: None):
    ddp = wrap("ours", Branches())
    for _ in range(20):
        ddp.double().float()
        ddp(torch.ones(2, 4)).sum().backward()
    assert len(ddp.reducer.backward.arrivals._handles) <= 2 * len(list(ddp.parameters()))


@pytest.mark.parametrize("has_reducer", [True, False])
def test_a_wrapper_with_torchs_reducer_or_none_moves_too(alone: None, has_reducer: bool):
    """As in the rounds of a comparison that are torch's, and before there is any."""
    ddp, torchs = wrap("ours", Branches()), wrap("torch", Branches())
    if has_reducer:
        ddp.reducer = torchs.reducer
    else:
        del ddp.reducer
    assert ddp.double().float() is ddp
