"""Gradients that are zeroed in place behind a backward that raised: its averages, still on their way, do not come."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.support.models import Boom, Grads, assert_same_bits, grads_of, wrap
from tests.support.ranks import RankPool


class _Layers(nn.Module):
    """Backward may raise in front of the first layer, whose bucket is the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: Tensor, raises: bool = False) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = Boom.apply(layer(x), raises and i == 0)  # type: ignore[no-untyped-call]
        return x.square().mean()


def _zero(ddp: Any) -> None:
    for parameter in ddp.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _train(rank: int, world_size: int, options: dict[str, Any], raises: list[bool], hook: Any = None) -> list[Grads]:
    """The averages of the steps that do not raise."""
    ddp, found = wrap("ours", _Layers(), bucket_cap_mb=1e-5, **options), []
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))
    for step, raising in enumerate(raises):
        if raising:
            with pytest.raises(ValueError):
                ddp(100 * x, True).backward()
        else:
            ddp((1 + step % 3) * x).backward()
            found.append(grads_of(ddp))
        _zero(ddp)
    ddp.reducer.close()
    return found


def _compared(rank: int, world_size: int, options: dict[str, Any], seed: int, hook: Any = None) -> None:
    draw = random.Random(seed)
    raises = [False] + [draw.random() < 0.5 for _ in range(15)]
    right, found = (_train(rank, world_size, options, which, hook) for which in ([False] * len(raises), raises))
    for mine, expected in zip(found, (right[step] for step, raising in enumerate(raises) if not raising), strict=True):
        assert_same_bits(mine, expected)


PICKED = {("none", False, "gloo", 0), ("none", True, "shm", 0), ("fp16", False, "shm", 0), ("int8", True, "gloo", 0)}
CASES = list(itertools.product(["none", "fp16", "int8"], [False, True], ["gloo", "shm"], range(3)))


@pytest.mark.parametrize(
    ("compression", "views", "transport", "seed"),
    [pytest.param(*case, marks=[pytest.mark.long] * (case not in PICKED)) for case in CASES],
)
def test_gradients_zeroed_in_place_behind_backwards_that_raised(
    ranks2: RankPool, compression: str, views: bool, transport: str, seed: int
):
    options = {"compression": compression, "gradient_as_bucket_view": views, "transport": transport}
    ranks2.run(_compared, options, seed)


@pytest.mark.parametrize(
    ("hook", "views"),
    [
        (default_hooks.allreduce_hook, False),
        pytest.param(default_hooks.allreduce_hook, True, marks=pytest.mark.long),
        pytest.param(default_hooks.fp16_compress_hook, False, marks=pytest.mark.long),
        (default_hooks.fp16_compress_hook, True),
    ],
)
def test_so_it_is_where_a_users_hook_averages_which_is_waited_for_on_the_callers_thread(
    ranks2: RankPool, hook: Any, views: bool
):
    ranks2.run(_compared, {"gradient_as_bucket_view": views}, 1, hook)


def _in_one(rank: int, world_size: int, transport: str) -> None:
    """All gradients are views of one tensor, which an optimizer of the user's reads."""
    ddp = wrap("ours", _Layers(), bucket_cap_mb=1e-5, transport=transport)
    parameters = list(ddp.parameters())
    flat = torch.zeros(sum(map(Tensor.numel, parameters)))
    pieces = flat.split([p.numel() for p in parameters])
    grads = [piece.view_as(p) for piece, p in zip(pieces, parameters, strict=True)]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    for step in range(8):
        with pytest.raises(ValueError) if step % 2 else nullcontext():
            ddp(torch.ones(4, 64), bool(step % 2)).backward()
        assert all(parameter.grad is grad for parameter, grad in zip(parameters, grads, strict=True)), step
        flat.zero_()


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_gradients_that_a_user_keeps_in_one_tensor_stay_there(ranks2: RankPool, transport: str):
    ranks2.run(_in_one, transport)
