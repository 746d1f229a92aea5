"""Trainings under stochastic rounding: what bits follow from, and what they do not."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce import MismatchError, all_reduce_gradients, load_checkpoint, save_checkpoint
from fastreduce.hooks import CompressState, compress
from tests.support.models import Constant, assert_same_bits, batch, equal_on_all, grads_of, mlp, train, wrap
from tests.support.ranks import RankPool, message, run_ranks
from tests.support.snapshots import FEEDBACK, Training

SPECS = [f"{name}:rounding=stochastic" for name in ("bf16", "int8", "int4", "fp8")]
SPEC = "int4:rounding=stochastic,seed=5"

# The mean

DRAWS = 400


def gradient(rank: int) -> Tensor:
    """Numbers that lie between the steps of their block."""
    return torch.cat([torch.tensor([1.0]), batch(rank, 0, 127) * 0.3]).clamp(-1, 1)


def _means(rank: int, world_size: int, settings: list[str]) -> list[Tensor]:
    means = []
    for setting in settings:
        model = wrap("ours", Constant(DRAWS * 128), compression=setting)
        model([gradient(rank).repeat(DRAWS)]).backward()
        means.append(model.module.values[0].grad.view(DRAWS, 128).double().mean(0))
    return means


def test_the_mean_of_many_draws_comes_near_the_exact_average_and_that_of_nearest_does_not(ranks2: RankPool):
    """Draws of ranks and of the average are independent.

    Each of the three is off by a standard deviation of half a step at most: together, with half of each rank's,
    sqrt(1/16 + 1/16 + 1/4) of a step. A mean of 400 is off by a twentieth of that, and the largest of 128 by no more
    than 5 times as much. Seeds are fixed.
    """
    names = ["int8", "int4", "bf16"]
    means = equal_on_all(ranks2.run(_means, [name + end for name in names for end in ("", ":rounding=stochastic")]))
    exact = (gradient(0).double() + gradient(1).double()) / 2
    for name, nearest, stochastic in zip(names, means[::2], means[1::2], strict=True):
        step = {"int8": 1 / 127, "int4": (1 + 2**-7) / 7, "bf16": 2.0**-7}[name]
        assert (stochastic - exact).abs().max() <= 5 * math.sqrt(3 / 8 / DRAWS) * step, name
        assert (stochastic - exact).norm() < (nearest - exact).norm() / 4, name


def _opposite(rank: int, world_size: int) -> Tensor:
    tensor = torch.full((64,), (1 + 2.0**-8) * (-1) ** rank)
    all_reduce_gradients([tensor], "bf16:rounding=stochastic", op="sum")
    return tensor * 2**7


def test_ranks_draw_by_themselves(ranks2: RankPool):
    """Numbers of two signs, halfway between two that can be sent, would always cancel if both ranks drew alike."""
    found = equal_on_all(ranks2.run(_opposite))
    assert set(found.tolist()) == {-1.0, 0.0, 1.0}


# What bits follow from


def _trained(rank: int, world_size: int) -> Any:
    return {
        (setting, cap): train("ours", mlp, rank, steps=3, compression=setting, bucket_cap_mb=cap)
        for setting in SPECS
        for cap in (25, 0.002)
    }


def test_bits_are_those_of_all_ranks_and_depend_on_no_bucket_size(ranks: RankPool):
    found = equal_on_all(ranks.run(_trained))
    for setting in SPECS:
        assert_same_bits(found[setting, 0.002], found[setting, 25], setting)


def _first_two(rank: int, world_size: int, settings: list[str]) -> Any:
    found = []
    for setting in settings:
        model = wrap("ours", Constant(300, 300), compression=setting)
        for _ in range(2):
            model.zero_grad()
            model([gradient(0).repeat(3)[:300]] * 2).backward()
            found += [p.grad.clone() for p in model.module.values]
    return found


def test_another_step_parameter_or_seed_is_another_draw(ranks2: RankPool):
    (draws, _) = ranks2.run(_first_two, ["int4:rounding=stochastic", SPEC])
    for one, other in itertools.combinations(draws, 2):
        assert not torch.equal(one, other)
    assert_same_bits(ranks2.run(_first_two, ["int4:rounding=stochastic", SPEC])[0], draws, "in a second training")


def _resumed(rank: int, world_size: int, path: Path) -> Any:
    training = Training(SPEC)
    training.steps(2)
    save_checkpoint(path, **training.parts())
    training.steps(2)
    again = Training(SPEC, seed=9, bucket_cap_mb=25)
    load_checkpoint(path, **again.parts())
    again.steps(2)
    found = [each.all() for each in (training, again)]
    return [{name: state[name] for name in ("model", "optimizer")} for state in found]


def test_a_checkpoint_goes_on_with_the_draws_of_its_step(ranks: RankPool, tmp_path: Path):
    for uninterrupted, resumed in ranks.run(_resumed, tmp_path / "snapshot.pt"):
        assert_same_bits(resumed, uninterrupted)


def _switched(rank: int, world_size: int, path: Path, old: str, new: str) -> Any:
    training = Training(old)
    training.steps(2)
    save_checkpoint(path, **training.parts())
    training.model.set_compression(new)
    training.steps(3)
    again = Training(new, seed=9)
    load_checkpoint(path, **again.parts())
    again.steps(3)
    return [each.model.module.state_dict() for each in (training, again)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("int8", SPEC, marks=pytest.mark.long),
        pytest.param(SPEC, FEEDBACK, marks=pytest.mark.long),
        (FEEDBACK, SPEC),
        (SPEC, SPECS[0]),
    ],
)
def test_a_switch_has_the_bits_of_a_checkpoint_resumed(ranks2: RankPool, tmp_path: Path, old: str, new: str):
    for switched, resumed in ranks2.run(_switched, tmp_path / "snapshot.pt", old, new):
        assert_same_bits(resumed, switched)


def _hooked(rank: int, world_size: int, setting: str) -> list[Any]:
    torch.manual_seed(0)
    model = mlp()
    stock, ours = TorchDDP(mlp(), bucket_cap_mb=0.005), wrap("ours", model, compression=setting)
    stock.module.load_state_dict(model.state_dict())
    states = [CompressState(setting, named_parameters=stock.module.named_parameters())]
    stock.register_comm_hook(states[0], compress)
    found = []
    for step in range(4):
        for each in (stock, ours):
            each.zero_grad()
            each(batch(rank, step, 4, 20)).square().mean().backward()
        found.append([grads_of(each.module) for each in (stock, ours)])
    saved = states[0].state_dict()
    again = TorchDDP(mlp(), bucket_cap_mb=25)
    again.module.load_state_dict(model.state_dict())
    resumed = CompressState(setting, named_parameters=again.module.named_parameters())
    again.register_comm_hook(resumed, compress)
    again(batch(rank, 5, 4, 20)).square().mean().backward()  # of which nothing stays
    resumed.load_state_dict(saved)
    for each in (again, ours):
        each.zero_grad()
        each(batch(rank, 4, 4, 20)).square().mean().backward()
    return [*found, [grads_of(each.module) for each in (again, ours)]]


@pytest.mark.parametrize("setting", SPECS[::2])
def test_the_hook_on_torchs_class_draws_as_ours_does_and_goes_on_with_its_step(ranks2: RankPool, setting: str):
    for found in ranks2.run(_hooked, setting):
        for step, (stock, ours) in enumerate(found):
            assert_same_bits(stock, ours, f"step {step}")


def _called(rank: int, world_size: int) -> list[Tensor]:
    found = []
    for _ in range(2):
        tensor = gradient(rank)
        all_reduce_gradients([tensor], SPEC)
        found.append(tensor)
    return found


@pytest.mark.long
def test_calls_draw_anew_and_alike_in_every_process():
    runs = [equal_on_all(run_ranks(_called, 2)) for _ in range(2)]
    assert_same_bits(runs[1], runs[0])
    assert not torch.equal(*runs[0])


# Ranks that differ


def _different(rank: int, world_size: int) -> list[str]:
    spec = SPEC if rank else "int4"
    return [
        message(lambda: wrap("ours", mlp(), compression=spec)),
        message(lambda: all_reduce_gradients([torch.ones(4)], SPEC if rank else "int4:rounding=stochastic")),
    ]


def test_ranks_that_round_differently_are_told_so(ranks2: RankPool):
    for wrapped, called in ranks2.run(_different):
        for text in (wrapped, called):
            assert text.startswith(MismatchError.__name__) and SPEC in text
        assert f"rank 0 has int4, rank 1 has {SPEC}." in wrapped


def test_a_step_that_follows_the_last_is_counted_on_the_device(alone: None):
    """There a CUDA graph may have counted further than the host knows."""
    ddp = wrap("ours", mlp(), compression="int8:rounding=stochastic")
    for _ in range(2):
        ddp(batch(0, 0, 4, 20)).sum().backward()
    (counted,) = ddp.reducer.buckets._steps.values()
    counted.fill_(7)
    ddp(batch(0, 0, 4, 20)).sum().backward()
    assert counted.tolist() == [8]
