"""Parameters that two wrappers share, with one backward through both, and through each by itself."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import models
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

SMALL = {"bucket_cap_mb": 1e-6}  # a bucket for each parameter
STEPS = 12
Pair = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _wrap(kind: str, module: nn.Module, **arguments: Any) -> Any:
    return models.wrap(kind, module, **SMALL, **arguments) if kind else module


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(step * 7 + rank))


def _beside(kind: str, shared: nn.Module, **arguments: Any) -> tuple[Pair, list[nn.Parameter]]:
    first, second = nn.Sequential(nn.Linear(3, 3), shared), nn.Sequential(shared, nn.Linear(3, 3))
    wrapped = _wrap(kind, first, **arguments), _wrap(kind, second, **arguments)
    return wrapped, [*first[0].parameters(), *shared.parameters(), *second[1].parameters()]


def _within(kind: str, shared: nn.Module, **arguments: Any) -> tuple[Pair, list[nn.Parameter]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that both average it
        inner = _wrap(kind, shared, **arguments)
        outer = _wrap(kind, nn.Sequential(nn.Linear(3, 3), inner), **arguments)
    return (outer, torch.zeros_like), list(outer.parameters())


def _train(kind: str, made: Any, rank: int, apart: bool, **arguments: Any) -> list[list[Tensor]]:
    torch.manual_seed(0)
    (first, second), parameters = made(kind, nn.Linear(3, 3), **arguments)
    found = []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = None
        x = _batch(rank, step)
        if apart:
            first(x).square().sum().backward()
            second(x).square().sum().backward()
        else:
            (first(x).square().sum() + second(x).square().sum()).backward()
        if not kind:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        found.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
    return found


def _together(rank: int, _: int, made: Any, transport: str, views: bool) -> None:
    ours = _train("ours", made, rank, False, transport=transport, gradient_as_bucket_view=views)
    for grads, expected in zip(ours, _train("", made, rank, False), strict=True):
        assert_same_bits(grads, expected)


PICKED = [(_beside, "shm", False), (_beside, "gloo", True), (_within, "shm", True), (_within, "gloo", False)]


@pytest.mark.parametrize(
    ("made", "transport", "views"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in PICKED))
        for case in itertools.product([_beside, _within], ["shm", "gloo"], [False, True])
    ],
)
def test_one_backward_through_both_averages_what_they_share(ranks2: RankPool, made: Any, transport: str, views: bool):
    ranks2.run(_together, made, transport, views)


def _each_by_itself(rank: int, _: int) -> None:
    for ours, torchs in zip(*[_train(kind, _beside, rank, True) for kind in ("ours", "torch")], strict=True):
        assert_same_bits(ours, torchs)


def test_a_backward_through_each_equals_torch(ranks2: RankPool):
    ranks2.run(_each_by_itself)
