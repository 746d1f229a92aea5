"""all_reduce_gradients with error feedback, of tensors in ever other lists: nothing is lost, nor sent twice."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fastreduce import all_reduce_gradients
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
