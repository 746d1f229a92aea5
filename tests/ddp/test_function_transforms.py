"""Forwards of the wrapper inside transforms of `torch.func`: `.grad` has the averages, as it has of a plain forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from tests.support.models import assert_same_bits, batch, grads_of, mean_over_ranks, mlp, wrap
from tests.support.ranks import RankPool

Model = Callable[[Tensor], Tensor]


def _by_grad(model: Model, x: Tensor) -> Tensor:
    return grad(lambda x: model(x).exp().sum())(x).square().sum()


def _by_nested_grads(model: Model, x: Tensor) -> Tensor:
    return grad(lambda x: _by_grad(model, x))(x).square().sum()


def _by_vmap(model: Model, x: Tensor) -> Tensor:
    return vmap(grad(lambda x: model(x[None]).exp().sum()))(x).square().sum()


def _by_jvp(model: Model, x: Tensor) -> Tensor:
    output, tangent = jvp(model, (x,), (torch.ones_like(x),))
    return output.square().sum() + tangent.square().sum()


def _by_functional_call(model: nn.Module, x: Tensor) -> Tensor:
    """The loss is divided by what this rank's own gradients sum up to."""
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    grads = grad(lambda parameters: functional_call(model, parameters, (x,)).square().sum())(parameters)
    return model(x).square().sum() / sum(found.abs().sum() for found in grads.values())


def _train(rank: int, world_size: int, loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    """The forward before which buckets are laid out anew, in the second step, is inside a transform, too."""
    ddp, alone = wrap("ours", mlp(), bucket_cap_mb=1e-3), mlp()
    alone.load_state_dict(ddp.module.state_dict())
    for step in range(4):
        x = batch(rank, step, 3, 20) / 8
        for model in (ddp, alone):
            model.zero_grad()
            loss(model, x).backward()
        assert_same_bits(grads_of(ddp.module), mean_over_ranks(grads_of(alone)), f"step {step}")


@pytest.mark.parametrize("loss", [_by_grad, _by_nested_grads, _by_vmap, _by_jvp, _by_functional_call])
def test_forwards_inside_transforms_are_averaged(ranks2: RankPool, loss: Callable[[nn.Module, Tensor], Tensor]):
    """Reading a parameter's node there was an AttributeError, and laying out buckets a RuntimeError."""
    ranks2.run(_train, loss, timeout=60)
