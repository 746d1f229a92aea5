"""Collectives that return their result, and gradients through them, beside one process that computes the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

import fastreduce.distributed as dist
from fastreduce.distributed import functional
from tests.support.collective_cases import COMPOSED
from tests.support.models import assert_same_bits, whole_batch
from tests.support.ranks import RankPool

FROM_ROOT = ("broadcast", "scatter")


def function_of(case: str) -> Callable[[Tensor], Tensor]:
    name, *options = case.split()
    return partial(getattr(functional, name), **{k: int(v) for k, v in (option.split("=") for option in options)})


def leaf_of(rank: int) -> Tensor:
    return (whole_batch(rank, 0, 6, 12).double() * 6).requires_grad_()  # six: ties share by two and by three


def loss_of(out: Tensor, rank: int) -> Tensor:
    weight = whole_batch(rank, 1, *out.shape).double()
    return (out * weight * out.detach() + out * 6).sum()


def _returning(rank: int, world_size: int, case: str) -> tuple[Tensor, Tensor | None]:
    leaf = leaf_of(rank)
    out = function_of(case)(leaf)
    loss_of(out, rank).backward()
    return out.detach(), leaf.grad


@pytest.mark.parametrize("case", COMPOSED)
def test_values_and_gradients_are_those_of_one_process(ranks: RankPool, case: str):
    leaves = [leaf_of(r) for r in range(ranks.world_size)]
    outs = COMPOSED[case](leaves)
    sum(loss_of(out, r) for r, out in enumerate(outs)).backward()
    for rank, (out, grad) in enumerate(ranks.run(_returning, case)):
        assert_same_bits(out, outs[rank].detach(), case)
        if case.split()[0] in FROM_ROOT and rank > 0:
            assert grad is not None and not grad.any()
        else:
            assert_same_bits(grad, leaves[rank].grad, case)


def _gradcheck(rank: int, world_size: int, case: str) -> bool:
    """Rank 0 checks the sum of all losses against its inputs; before each pass it tells the others to join in."""
    torch.manual_seed(3)
    inputs = torch.randn(world_size, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6 * world_size, 6 * world_size, dtype=torch.float64)
    end, forward, backward = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)

    def total(x: Tensor) -> Tensor:
        out = function_of(case)(functional.scatter(x)[0].tanh())
        loss = (out * weight[: out.shape[0], : out.shape[1]]).square().sum()
        return functional.reduce_sum(loss.reshape(1))

    def watched(x: Tensor) -> Tensor:
        dist.broadcast(forward)
        out = total(x)
        out.register_hook(lambda _: dist.broadcast(backward) and None)
        return out

    if rank == 0:
        passed = torch.autograd.gradcheck(watched, [inputs], check_undefined_grad=False, fast_mode=True)
        dist.broadcast(end)
        return passed
    order = torch.zeros(1)
    while dist.broadcast(order) or order.item():
        if order.item() == 1:
            out = total(inputs)
        else:
            out.backward(torch.ones_like(out), retain_graph=True)
    return True


@pytest.mark.parametrize("case", COMPOSED)
def test_gradients_are_the_slopes_of_the_sum_of_all_losses(ranks2: RankPool, case: str):
    assert ranks2.run(_gradcheck, case) == [True, True]


def _twice(rank: int, world_size: int) -> tuple[Tensor, Tensor | None]:
    """Gradients of gradients: the square of a sum over ranks."""
    leaf = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    out = functional.all_reduce_sum(leaf * leaf)
    (first,) = torch.autograd.grad((out * out).sum(), leaf, create_graph=True)
    first.sum().backward()
    return first.detach(), leaf.grad


def test_gradients_have_gradients(ranks2: RankPool):
    leaves = [torch.full((2,), r + 1.0, dtype=torch.float64, requires_grad=True) for r in range(2)]
    out = sum(leaf * leaf for leaf in leaves)
    first = torch.autograd.grad(2 * (out * out).sum(), leaves, create_graph=True)
    sum(g.sum() for g in first).backward()
    for rank, (once, twice) in enumerate(ranks2.run(_twice)):
        assert_same_bits((once, twice), (first[rank].detach(), leaves[rank].grad))


def _penalty(rank: int, world_size: int, function: str) -> list[list[float]]:
    """Gradients of the squares of the gradients of what rank 0 has passed, by that and by each rank's weight."""
    given = torch.full((2,), 2.0, requires_grad=True)
    weight = torch.tensor([3.0 + rank], requires_grad=True)
    loss = (weight * getattr(functional, function)(given) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, given, create_graph=True)
    return [each.tolist() for each in torch.autograd.grad((gradient**2).sum(), [given, weight])]


@pytest.mark.parametrize(
    ("function", "weights", "by_weight"),
    [("broadcast", [7.0, 7.0], [448.0, 448.0]), ("scatter", [3.0, 4.0], [96.0, 128.0])],  # 8 · weight · given²
)
def test_gradients_of_what_one_rank_passes_have_gradients(
    ranks2: RankPool, function: str, weights: list[float], by_weight: list[float]
):
    (given, first), (others, second) = ranks2.run(_penalty, function)
    assert given == [8 * weight**2 * 2 for weight in weights]
    assert [*first, *second] == by_weight and others == [0.0, 0.0]


def _without_input(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    weight = torch.ones(4, 2, dtype=torch.float16, requires_grad=True)
    for function in (functional.broadcast, functional.scatter):
        out = function(weight if rank == 0 else None)
        seen.append((out.shape, out.dtype, out.requires_grad))
        out.sum().backward()
        with torch.no_grad():
            seen.append(function(weight if rank == 0 else None).requires_grad)
        seen.append(function(weight.detach() if rank == 0 else weight).requires_grad)  # who passes it decides
    numbers = functional.broadcast(torch.arange(3) if rank == 0 else None)
    seen += [numbers.tolist(), None if weight.grad is None else weight.grad.tolist()]
    return seen


def test_only_the_rank_it_comes_from_needs_an_input(ranks2: RankPool):
    for rank, seen in enumerate(ranks2.run(_without_input)):
        assert seen[:3] == [((4, 2), torch.float16, True), False, False]
        assert seen[3:6] == [((2, 2), torch.float16, True), False, False]
        assert seen[6] == [0, 1, 2]
        assert seen[7] == ([[3.0, 3.0]] * 4 if rank == 0 else None)


def _of_the_first(rank: int, world_size: int) -> list[list[float]]:
    """What comes from, and goes to, the first of a group that rank 0 is not in."""
    group = torch_dist.new_group([1])
    if rank == 0:
        return []
    given = torch.ones(2)
    return [f(given, group).tolist() for f in (functional.broadcast, functional.reduce_sum, functional.gather)]


def test_without_a_rank_it_is_the_first_of_the_group(ranks2: RankPool):
    assert ranks2.run(_of_the_first) == [[], [[1.0, 1.0]] * 3]


def _of_no_rows(rank: int, world_size: int) -> list[tuple[int, ...]]:
    shapes = []
    for case in COMPOSED:
        leaf = torch.zeros(0, 12, dtype=torch.float64, requires_grad=True)
        if "axis=1" not in case:
            out = function_of(case)(leaf)
            out.sum().backward()
            shapes.append(tuple(out.shape))
    return shapes


def test_a_batch_of_no_rows_goes_through(ranks2: RankPool):
    for shapes in ranks2.run(_of_no_rows):
        assert shapes and set(shapes) == {(0, 12)}
