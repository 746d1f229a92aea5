"""Backwards in `join()` that are no plain ones: a gradient penalty, one that raises, a second one through a forward."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from fastreduce.errors import ReducerError
from tests.support.models import Boom, Shared, assert_same_bits, wrap
from tests.support.ranks import RankPool


def _penalty(rank: int, world_size: int, which: str, setting: str) -> list[list[Tensor]]:
    torch.manual_seed(0)
    options = {"compression": setting} if which == "ours" else {}
    ddp = wrap(which, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), **options)
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    with ddp.join():
        for _ in range(2 + 2 * rank):
            optimizer.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            out = ddp(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.mean() + slope.square().mean()).backward()
            found.append([p.grad.clone() for p in ddp.parameters()])
            optimizer.step()
    return found


def test_a_gradient_penalty_is_no_reduction(ranks2: RankPool):
    """Of its `autograd.grad` a rank that has joined knows nothing."""
    for ours, torchs in zip(ranks2.run(_penalty, "ours", "none"), ranks2.run(_penalty, "torch", ""), strict=True):
        assert_same_bits(ours, torchs)
    assert [len(steps) for steps in ranks2.run(_penalty, "ours", "int8:error_feedback")] == [2, 4]


class _Embedded(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(10, 4, sparse=sparse), nn.Linear(4, 4, bias=False)

    def forward(self, rows: Tensor, raises: bool, late: bool) -> Tensor:
        # Late: the layer has its gradient when backward raises; else nothing has.
        x = Boom.apply(self.table(rows), raises and late)  # type: ignore[no-untyped-call]
        return Boom.apply(self.layer(x), raises and not late)  # type: ignore[no-any-return, no-untyped-call]


def _raising(
    rank: int, world_size: int, sparse: bool, late: bool, divides: bool, setting: str, last: bool = False
) -> list[Any]:
    """The gradients of each step, or True where backward raises: on rank 1 in the third of four, or on rank 0 in its
    last."""
    raises = (0, 0) if last else (1, 2)
    ddp = wrap("ours", _Embedded(sparse), compression=setting, bucket_cap_mb=1e-5)
    found: list[Any] = []
    with ddp.join(divide_by_initial_world_size=divides):
        for step in range(1 + 3 * rank):
            ddp.zero_grad()
            with suppress(ValueError):
                ddp(torch.tensor([1, 2]), (rank, step) == raises, late).sum().backward()
            found.append(
                (rank, step) == raises or [None if p.grad is None else p.grad.to_dense() for p in ddp.parameters()]
            )
    return found


FEEDBACK = "int8:error_feedback"
PICKED = [  # any two together
    ("sparse", "at once", "over those left", "none"),
    ("sparse", "behind a bucket", "over all", FEEDBACK),
    ("dense", "at once", "over all", FEEDBACK),
    ("dense", "behind a bucket", "over those left", FEEDBACK),
    ("dense", "behind a bucket", "over all", "none"),
]
CASES = itertools.product(
    ["sparse", "dense"], ["at once", "behind a bucket"], ["over those left", "over all"], ["none", FEEDBACK]
)


@pytest.mark.parametrize(
    ("kind", "when", "over", "setting"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case not in PICKED)) for case in CASES],
)
def test_one_that_raises_is_made_up_for(ranks2: RankPool, kind: str, when: str, over: str, setting: str):
    """By the next forward, before anybody counts who takes part in that: who has joined comes to it later."""
    sparse, late, divides = kind == "sparse", when == "behind a bucket", over == "over all"
    _, steps = ranks2.run(_raising, sparse, late, divides, setting, timeout=60)
    assert steps[2] is True
    for before, behind in zip(steps[1], steps[3], strict=True):
        assert torch.isfinite(behind).all() and (behind - before).abs().max() < 0.05


@pytest.mark.parametrize(
    "setting", ["none", pytest.param(FEEDBACK, marks=pytest.mark.long), pytest.param("int8", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_that_raises_as_the_last_of_a_rank_is_made_up_for(ranks2: RankPool, late: bool, setting: str):
    (raised,), steps = ranks2.run(_raising, False, late, True, setting, True, timeout=60)
    assert raised is True
    assert all(torch.isnan(gradient).any() for gradient in steps[0])
    for step in steps[1:]:
        assert all(torch.isfinite(gradient).all() and gradient.any() for gradient in step)


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def _one_by_one(rank: int, world_size: int) -> tuple[str, float]:
    ddp = wrap("ours", _Two())
    why, seconds = "", 0.0
    with ddp.join():
        for _ in range(1 + rank):
            ddp.zero_grad()
            first, second = ddp(torch.ones(1, 2))
            first.sum().backward()
            start = time.monotonic()
            try:
                second.sum().backward()
            except ReducerError as error:
                why, seconds = str(error), time.monotonic() - start
    return why, seconds


def test_a_second_one_is_refused_at_once_where_a_rank_has_joined(ranks2: RankPool):
    """That rank knows of none, and would be waited for."""
    (why_first, _), (why, seconds) = ranks2.run(_one_by_one, timeout=60)
    assert why_first == ""
    assert why.startswith("rank 1: a second backward through one forward brought first gradients for 'second.")
    assert why.endswith("where ranks have joined, which know of no second one, sum the losses and call backward once")
    assert seconds < 5


class _Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor, both: bool, meets: bool) -> Tensor:
        x = self.low(x)
        if meets:
            x = Shared.apply(x)  # type: ignore[no-untyped-call]
        return self.a(x) + self.b(x) if both else self.a(x)  # type: ignore[no-any-return]


def _behind_a_join(rank: int, world_size: int) -> list[Tensor]:
    # The heads' bucket is full before the backward of what lies below meets the other rank, where both are used.
    ddp = wrap("ours", _Heads(), find_unused_parameters=True, bucket_cap_mb=40 / 2**20)
    ddp(torch.ones(1, 4), True, False).sum().backward()
    with ddp.join():
        for _ in range(2 + rank):
            ddp(torch.ones(1, 4), True, False).sum().backward()
    ddp.zero_grad()
    ddp(torch.ones(1, 4), rank == 0, True).sum().backward()
    return [p.grad for p in ddp.parameters()]


def test_in_the_step_behind_a_join_ranks_meet_where_all_do(ranks2: RankPool):
    """What became of the last averages is told then, at the end of backward: buckets fill where ranks differ."""
    first, second = ranks2.run(_behind_a_join, timeout=60)
    assert_same_bits(first, second)


def _two_modules(rank: int, world_size: int) -> list[float]:
    one, two = wrap("ours", nn.Linear(1, 1)), wrap("ours", _Two())
    with Join([one, two]):
        one(torch.ones(1, 1)).sum().backward()
        first, second = two(torch.full((1, 2), 1.0 + 4 * rank))
        first.sum().backward()
        second.sum().backward()
        found = [float(layer.weight.grad[0, 0]) for layer in (two.module.first, two.module.second)]
    return found


def test_a_second_one_is_reduced_where_no_rank_has_joined_yet(ranks2: RankPool):
    assert ranks2.run(_two_modules, timeout=60) == [[3.0, 3.0]] * 2
