"""all_reduce_gradients with error feedback, of tensors in ever other lists: nothing is lost, nor sent twice."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastreduce import TensorError, all_reduce_gradients
from fastreduce.reduction import one_call
from tests.support import tolerances
from tests.support.models import batch
from tests.support.ranks import OVER_HOSTS, RankPool

SIZES, STEPS, ZEROS = (200, 130, 1, 700), 16, 14


def _owed(rank: int, world_size: int, setting: str, op: str, seed: int) -> list[float]:
    """By tensor, the largest difference between the sum of what came and that of what was due, once zeros have come."""
    draw = random.Random(seed)
    tensors = [torch.zeros(size) for size in SIZES]
    came, due = ([torch.zeros(size, dtype=torch.float64) for size in SIZES] for _ in range(2))
    for step in range(STEPS + ZEROS):
        chosen = draw.sample(range(len(SIZES)), draw.randint(1, len(SIZES))) if step < STEPS else range(len(SIZES))
        for i in chosen:
            grads: list[Tensor] = [batch(r, 10 * step + i, SIZES[i]) * (step < STEPS) for r in range(world_size)]
            tensors[i].copy_(grads[rank])
            due[i] += torch.stack(grads).double().sum(0) / (world_size if op == "mean" else 1)
        all_reduce_gradients([tensors[i] for i in chosen], setting, op=op)
        for i in chosen:
            came[i] += tensors[i].double()
    return [float((a - b).abs().max()) for a, b in zip(came, due, strict=True)]


@OVER_HOSTS
@pytest.mark.parametrize(
    ("setting", "op"),
    [
        pytest.param(setting, op, marks=[pytest.mark.long] * (op != of_short))
        for setting, of_short in (
            ("int8:error_feedback", "mean"),
            ("int4:error_feedback", "sum"),
            ("fp8:error_feedback", ""),
            ("topk:ratio=0.3,min_numel=1", ""),
        )
        for op in ("mean", "sum")
    ],
)
def test_what_is_kept_goes_to_the_list_in_which_a_tensor_comes_next(ranks: RankPool, setting: str, op: str):
    for seed in range(3):
        for owed in ranks.run(_owed, setting, op, seed):
            bound = tolerances.IN_CHANGING_LISTS * (1 if op == "mean" else ranks.world_size)
            assert max(owed) <= bound, (seed, owed)


def _accumulated(rank: int, world_size: int, setting: str, op: str, times: int, in_turn: bool) -> float:
    """Averages to which others accumulate in `.grad`, and that are averaged again: how far that is from `none`.

    `in_turn`: in another list than the last time.
    """
    found = []
    for each in (setting, "none"):
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES[:2]]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        for step in range(6 + ZEROS):
            optimizer.zero_grad()
            for micro in range(times):
                for parameter in parameters:
                    given = batch(rank, 10 * step + micro, parameter.numel())
                    (parameter * given * (step < 6)).sum().backward()
                all_reduce_gradients(parameters[:: -1 if in_turn and micro % 2 else 1], each, op=op)
            optimizer.step()
        found.append(torch.cat([parameter.detach() for parameter in parameters]))
    return float((found[0] - found[1]).abs().max() / found[1].abs().max())


@OVER_HOSTS
@pytest.mark.parametrize(
    ("setting", "op"),
    [
        pytest.param(setting, op, marks=[pytest.mark.long] * (op != of_short))
        for setting, of_short in (("int4:error_feedback", "mean"), ("topk:ratio=0.3,min_numel=1", "sum"))
        for op in ("mean", "sum")
    ],
)
def test_what_is_averaged_again_loses_nothing(ranks: RankPool, setting: str, op: str):
    for times, in_turn in ((2, False), (3, False), (2, True), (3, True)):
        assert max(ranks.run(_accumulated, setting, op, times, in_turn)) <= tolerances.APPLIED


@pytest.mark.usefixtures("group_of_one")
def test_what_is_averaged_again_behind_many_other_lists_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    """Its list is kept while residuals are there, so that what accumulates on an average is seen."""
    monkeypatch.setattr(one_call, "KEPT", 0)
    parameter, due = torch.nn.Parameter(torch.zeros(200)), torch.zeros(200)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for step in range(6 + ZEROS):
        optimizer.zero_grad()
        for micro in range(2):
            given = batch(0, 10 * step + micro, 200) * (step < 6)
            due -= given
            (parameter * given).sum().backward()
            all_reduce_gradients([parameter], "int4:error_feedback")
            for _ in range(2):
                all_reduce_gradients([torch.ones(3)], "int4:error_feedback")
        optimizer.step()
    assert float((parameter.detach() - due).abs().max() / due.abs().max()) <= tolerances.APPLIED


def _laid_out_otherwise(rank: int, world_size: int, op: str, lists: str) -> list[float]:
    """As `_owed`, of weights whose memory format changes, on some ranks alone in `one list`."""
    weights = [torch.nn.Parameter(torch.zeros(4, 5, 3, 2)) for _ in range(2)]
    came, due = ([torch.zeros(4, 5, 3, 2, dtype=torch.float64) for _ in range(2)] for _ in range(2))
    for step in range(STEPS + ZEROS):
        last = step % 3 == 1 and (rank > 0 or lists != "one list")
        for i, weight in enumerate(weights):
            weight.data = weight.to(memory_format=torch.channels_last if last else torch.contiguous_format)
            grads = [batch(r, 10 * step + i, 120).view(4, 5, 3, 2) * (step < STEPS) for r in range(world_size)]
            weight.grad = torch.empty_like(weight).copy_(grads[rank])
            due[i] += torch.stack(grads).double().sum(0) / (world_size if op == "mean" else 1)
        chosen = [0, 1] if lists == "one list" or step % 2 else [1, 0]
        all_reduce_gradients([weights[i] for i in chosen], "int8:error_feedback", op=op)
        for i, weight in enumerate(weights):
            assert weight.grad is not None
            came[i] += weight.grad.double()
    return [float((a - b).abs().max()) for a, b in zip(came, due, strict=True)]


@OVER_HOSTS
@pytest.mark.parametrize("lists", ["one list", "two lists"])
@pytest.mark.parametrize("op", ["mean", pytest.param("sum", marks=pytest.mark.long)])
def test_what_is_kept_of_weights_with_another_memory_format_is_of_the_same_elements(
    ranks: RankPool, op: str, lists: str
):
    for owed in ranks.run(_laid_out_otherwise, op, lists):
        assert max(owed) <= tolerances.IN_CHANGING_LISTS * (1 if op == "mean" else ranks.world_size), owed


@pytest.mark.parametrize("shape", [(3,), (5000,), (20, 60)])
@pytest.mark.usefixtures("group_of_one")
def test_a_parameter_that_gets_another_size_is_named_in_another_list_too(shape: tuple[int, ...]):
    parameters = [torch.nn.Parameter(torch.zeros(1000)), torch.nn.Parameter(torch.zeros(10))]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    all_reduce_gradients(parameters[:1], "int8:error_feedback")
    parameters[0].grad = None
    parameters[0].data = torch.zeros(shape)
    with pytest.raises(TensorError, match=r"tensor 0 has \d+ numbers, and had 1000 when error feedback"):
        all_reduce_gradients(parameters, "int8:error_feedback")
