"""A model that is moved between steps, as `model.to(…)` does: error feedback goes on following what was applied.

`Module.to` swaps what a DTensor is made of. The parameter and its gradient stay the objects that they are, and hold
other memory.
"""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

import fastreduce.fsdp
from fastreduce.reduction.residuals.notices import is_optimized, know_optimized, notice
from tests.support import tolerances
from tests.support.ranks import RankPool
from tests.support.sharded import EACH_WAY, SHAPES, Given, Step, Training, gradients, run_history, run_steps, shard


@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        ("scattered", range(2)),
        pytest.param("scattered", range(2, 20), marks=pytest.mark.long),
        pytest.param("scattered, int4", range(4), marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_in_a_history_of_moves(ranks: RankPool, way: str, seeds: range):
    for seed in seeds:
        found = ranks.run(run_history, seed, EACH_WAY[way], True)
        assert max(found) < 1, (seed, found)


@pytest.mark.long
@pytest.mark.parametrize(("way", "seeds"), [("both", range(6)), ("averaged", range(4))])
def test_nothing_is_lost_between_replicas_that_are_moved(ranks4: RankPool, way: str, seeds: range):
    for seed in seeds:
        found = ranks4.run(run_history, seed, EACH_WAY[way], True)
        assert max(found) < 1, (seed, found)


@pytest.mark.parametrize(
    "history",
    [
        [Step(), Step(magnitude=100, moved="before", ends="skip"), Step()],
        [Step(), Step(magnitude=100, moved="behind", ends="skip"), Step()],
        [Step(), Step(magnitude=100, moved="behind", ends="skip", to_none=False), Step()],
        [Step(), Step(magnitude=100, ends="skip"), Step(moved="before")],
        [Step(), Step(magnitude=100, moved="behind", ends="keep"), Step(), Step()],
        [Step(), Step(magnitude=100, moved="behind", ends="keep"), Step(ends="skip"), Step()],
    ],
    ids=["before", "behind", "zeroed", "then moved", "kept", "kept, left out"],
)
def test_what_became_of_averages_is_known_beside_a_move(ranks2: RankPool, history: list[Step]):
    found = ranks2.run(run_steps, history, EACH_WAY["scattered"], False)
    assert max(found) < 1, found


def _applied_before(rank: int, world_size: int) -> float:
    """A gradient that was applied and zeroed is moved, and divided by a loss scale that others have."""
    training = Training(rank, world_size, False, EACH_WAY["scattered"])
    training.step(0, Step(to_none=False))
    training.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    training.step(1, Step(names="bc", moved="behind"))
    training.step(2, Step())
    return training.worst()


def test_what_was_applied_before_a_move_is_not_followed_any_more(ranks2: RankPool):
    found = ranks2.run(_applied_before)
    assert max(found) < 1, found


def _saved_elsewhere(rank: int, world_size: int) -> float:
    """Behind each step the model is somewhere else, is saved there, and comes back."""
    training = Training(rank, world_size, False, EACH_WAY["scattered"])
    for index, ends in enumerate(["step", "keep", "step", "skip", "step"]):
        training.step(index, Step(ends=ends))
        training.model.double()
        training.reduction.state_dict()
        training.model.float()
    training.optimizer.zero_grad()
    return training.worst()


def test_a_save_while_the_model_is_elsewhere_changes_nothing(ranks2: RankPool):
    found = ranks2.run(_saved_elsewhere)
    assert max(found) < 1, found


def _assigned(rank: int, world_size: int, ends: str) -> float:
    """Behind a step that ended so, other parameters are put in the place of the model's, which have no gradients."""
    training = Training(rank, world_size, False, EACH_WAY["scattered"])
    training.step(0, Step())
    training.step(1, Step(magnitude=100, ends=ends))
    state = {name: each.detach().clone() for name, each in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)
    training.exact = {}
    training.optimizer.param_groups[0]["params"] = list(training.model.parameters())
    training.step(2, Step())
    return training.worst()


@pytest.mark.parametrize("ends", ["step", "skip", "keep"])
def test_what_became_of_averages_is_known_of_parameters_that_others_replace(ranks2: RankPool, ends: str):
    found = ranks2.run(_assigned, ends)
    assert max(found) < 1, found


def _several_optimizers(rank: int, world_size: int, seed: int) -> float:
    """By how much the law is missed under several optimizers, of which some leave a step out, and one is dropped."""
    draw = random.Random(seed)
    whole = Given()
    for part in whole.parts.values():
        fully_shard(part)
    model: Any = fully_shard(whole)
    reduction = fastreduce.fsdp.compress(model, "int8:error_feedback")
    optimizers = {names: SGD([model.parts[name].weight for name in names], 1.0) for names in ("a", "c", "ac")}
    applied, exact, due = ({name: torch.zeros(SHAPES[name], dtype=torch.float64) for name in "ac"} for _ in range(3))
    largest = 0.0
    for step in range(10):
        mine = {}
        for name in due:
            generator = torch.Generator().manual_seed(99 * step + ord(name))
            of_ranks = torch.randn(world_size, *SHAPES[name], generator=generator) * 10 ** draw.uniform(-1, 1)
            mine[name] = of_ranks[rank]
            due[name] = due[name] + of_ranks.double().mean(0)
        if draw.random() < 0.5:
            model.double().float()
        model(torch.zeros((), requires_grad=True), mine).backward()
        if draw.random() < 0.5:
            model.double().float()
        stepping = [("ac",), ("a", "c")][step] if step < 2 else draw.choice([("a",), ("c",), ("a", "c"), ("ac",), ()])
        if step == 4:
            del optimizers["ac"]
        if step > 1 and draw.random() < 0.25:
            continue  # the next ones are added
        for names in stepping:
            if names in optimizers:
                for name in names:
                    applied[name] += gradients(model.parts[name])["weight"]
                    exact[name] += due[name]
                    largest = max(largest, float(due[name].abs().max()))
                optimizers[names].step()
        model.zero_grad()
        due = {name: torch.zeros_like(each) for name, each in due.items()}
    model.zero_grad()
    kept = reduction.state_dict()["reduce_scatter"]
    short = [exact[name] - applied[name] - kept[f"parts.{name}.weight"].full_tensor() for name in due]
    return max(float(each.abs().max()) for each in short) / (tolerances.APPLIED * largest)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=["", "more"])
def test_several_optimizers_tell_of_a_model_that_is_moved(ranks2: RankPool, seeds: range):
    for seed in seeds:
        found = ranks2.run(_several_optimizers, seed)
        assert max(found) < 1, (seed, found)


@pytest.mark.usefixtures("group_of_one")
def test_what_is_optimized_is_known_while_an_optimizer_that_steps_it_has_it():
    notice()
    model: Any = shard(nn.Linear(3, 2))
    weight, bias = model.weight, model.bias
    both, of_bias = SGD([weight, bias]), SGD([bias])
    model.double().float()
    assert not is_optimized(weight)
    for each in (both, of_bias):
        each.step()
    for _ in range(2):
        model.double().float()
        assert is_optimized(weight) and is_optimized(bias)
    ended = weakref.ref(both)
    del both, each
    gc.collect()
    assert ended() is None
    assert is_optimized(weight), "nothing has been moved"
    model.double().float()
    assert is_optimized(bias) and not is_optimized(weight)
    SGD([weight]).step()
    assert is_optimized(weight)
    model.double().float()
    assert not is_optimized(weight)
    know_optimized([weight])
    assert is_optimized(weight)


@pytest.mark.usefixtures("group_of_one")
def test_a_parameter_that_an_optimizer_has_no_more_is_forgotten():
    """Another one may be where it was."""
    notice()
    model: Any = shard(nn.Linear(3, 2))
    optimizer = SGD(model.parameters())
    optimizer.step()
    weight = model.weight
    optimizer.param_groups[0]["params"].remove(weight)
    model.double().float()
    assert is_optimized(model.bias) and not is_optimized(weight)
