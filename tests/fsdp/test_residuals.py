"""What error feedback keeps of sharded gradients: nothing is lost in random histories, nor in a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import fastreduce.fsdp
from fastreduce import MismatchError, SettingError
from tests.support import tolerances
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import EACH_WAY, Given, One, batch, gradients, mesh_of, network, run_history, shard


# A training whose gradients are clipped, skipped, kept, overflow …, with random magnitudes: what was applied differs
# from what would have been without compression by what is kept, whatever has happened.
@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        ("scattered", range(2)),
        pytest.param("scattered", range(2, 12), marks=pytest.mark.long),
        pytest.param("scattered, int4", range(4), marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_in_a_history(ranks: RankPool, way: str, seeds: range):
    for seed in seeds:
        found = ranks.run(run_history, seed, EACH_WAY[way])
        assert max(found) < 1, (seed, found)


@pytest.mark.parametrize(
    ("way", "seeds"),
    [
        ("both", range(1)),
        pytest.param("both", range(1, 6), marks=pytest.mark.long),
        pytest.param("averaged", range(4), marks=pytest.mark.long),
    ],
)
def test_nothing_is_lost_between_replicas(ranks4: RankPool, way: str, seeds: range):
    for seed in seeds:
        found = ranks4.run(run_history, seed, EACH_WAY[way])
        assert max(found) < 1, (seed, found)


def _long_run(rank: int, world_size: int) -> tuple[float, float]:
    """The long-run error of constant gradients, with and without feedback."""
    errors = []
    for setting in ("int8", "int8:error_feedback"):
        torch.manual_seed(0)
        model: Any = shard(nn.Sequential(nn.Linear(30, 7)))
        fastreduce.fsdp.compress(model, setting)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        total = torch.zeros(7, 30, dtype=torch.float64)
        for _ in range(40):
            optimizer.zero_grad()
            (model(batch(rank)) ** 2).mean().backward()
            optimizer.step()
            total += model[0].weight.grad.full_tensor()
        exact: Any = shard(nn.Sequential(nn.Linear(30, 7)))
        with torch.no_grad():
            for mine, its in zip(exact.parameters(), model.parameters(), strict=True):
                mine.to_local().copy_(its.to_local())
        (exact(batch(rank)) ** 2).mean().backward()
        errors.append(float((total / 40 - exact[0].weight.grad.full_tensor()).abs().mean()))
    return errors[0], errors[1]


def test_the_mean_of_many_steps_is_exact(ranks2: RankPool):
    without, with_feedback = ranks2.run(_long_run)[0]
    assert with_feedback < without / 10


def _by_hand(rank: int, world_size: int, setting: str) -> tuple[float, float]:
    """Updates by hand, which skip the one with an infinity, of which one rank has seen nothing."""
    torch.manual_seed(0)
    model: Any = fully_shard(One((6, 64)))
    reduction = fastreduce.fsdp.compress(model, setting)
    given = torch.randn(4, world_size, 6, 64, generator=torch.Generator().manual_seed(3))
    given[2, 1, 0, 5] = torch.inf  # of rank 1, in the part that rank 0 sums
    applied = torch.zeros(6, 64, dtype=torch.float64)
    for of_ranks in given:
        model(torch.zeros((), requires_grad=True), of_ranks[rank]).backward()
        average = gradients(model)["weight"]
        model.zero_grad()
        if average.isfinite().all():
            applied += average
    kept = reduction.state_dict()["reduce_scatter"]["weight"].full_tensor()
    short = given[[0, 1, 3]].double().mean(1).sum(0) - applied
    return float((short - kept).abs().max()), float(kept.abs().max())


def test_updates_by_hand_that_skip_what_is_not_finite(ranks2: RankPool):
    for setting, rounded in (("int8:error_feedback", 0.0), ("int8:error_feedback=8bit", tolerances.KEPT_IN_8_BITS)):
        for off, kept in ranks2.run(_by_hand, setting):
            assert off < tolerances.APPLIED * 4 + 3 * rounded * kept and kept > 1e-3
            assert off > tolerances.APPLIED or not rounded


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("raises here")


def _compressed(whole: Given) -> tuple[Any, Any, torch.optim.Optimizer]:
    """It, sharded, what compresses it under error feedback, and an optimizer that steps by whole averages."""
    for part in whole.parts.values():
        fully_shard(part)
    model: Any = fully_shard(whole)
    reduction = fastreduce.fsdp.compress(model, "int8:error_feedback")
    return model, reduction, torch.optim.SGD(model.parameters(), 1.0)


def _raised(rank: int, world_size: int, to_none: bool) -> float:
    """By how much what was applied and is kept misses the sum of gradients, where a backward raises half-way."""
    whole, steps = Given(), iter(range(3))
    whole.parts["a"].register_forward_hook(lambda _, __, x: _Raises.apply(x) if next(steps) == 1 else None)
    model, reduction, optimizer = _compressed(whole)
    given = torch.randn(3, world_size, 7, 20, generator=torch.Generator().manual_seed(3))
    applied = torch.zeros(7, 20, dtype=torch.float64)
    for step, of_ranks in enumerate(given):
        loss = model(torch.zeros((), requires_grad=True), {"a": torch.ones(6, 50), "c": of_ranks[rank]})
        with pytest.raises(RuntimeError, match="raises here") if step == 1 else nullcontext():
            loss.backward()
        average = gradients(model.parts["c"])["weight"]
        if step == 1:
            model.reset_iter_state()
        else:
            applied += average
            optimizer.step()
        assert average.any()
        optimizer.zero_grad(set_to_none=to_none)
    kept = reduction.state_dict()["reduce_scatter"]["parts.c.weight"].full_tensor()
    return float((given[[0, 2]].double().mean(1).sum(0) - applied - kept).abs().max())


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_a_backward_that_raised_half_way_loses_nothing(ranks2: RankPool):
    for to_none in (True, False):
        assert max(ranks2.run(_raised, to_none)) < tolerances.APPLIED * 4, to_none


# Checkpoints


POLICY = "ndim<2: none; *: int8:error_feedback"


class _Training:
    def __init__(self, rank: int, policy: str = POLICY, **options: Any) -> None:
        self.rank, self.model = rank, shard(network(), **options)
        self.reduction = fastreduce.fsdp.compress(self.model, policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            self.model(batch(self.rank, step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            if step != 3:  # the first behind a checkpoint: it is left out
                self.optimizer.step()

    def save(self, path: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer, "reduction": self.reduction}, checkpoint_id=path)

    def load(self, path: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer, "reduction": self.reduction}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.full_tensor().detach() for name, parameter in self.model.named_parameters()}

    def residuals(self) -> dict[str, Tensor]:
        kept = self.reduction.state_dict()["reduce_scatter"]
        return {name: residual.full_tensor() for name, residual in kept.items()}


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def _save(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    training = _Training(rank, **options)
    training.run(range(3))
    training.save(path)
    training.run(range(3, 6))
    return training.parameters(), training.residuals()


def _resume(rank: int, world_size: int, path: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    training = _Training(rank, **options)
    training.run(range(7, 9))  # what it has until now is replaced
    training.model(batch(rank)).square().mean().backward()  # and of this nothing is applied
    training.load(path)
    loaded = training.residuals()
    training.run(range(3, 6))
    return training.parameters(), training.residuals(), loaded


@pytest.mark.parametrize(
    "options",
    [{"policy": f"{POLICY}=8bit"}, *(pytest.param(more, marks=pytest.mark.long) for more in ({}, {"mp_policy": BF16}))],
    ids=["8bit", "fp32", "bf16"],
)
def test_a_checkpoint_resumes_bit_for_bit(ranks2: RankPool, tmp_path: Path, options: dict[str, Any]):
    saved = ranks2.run(_save, str(tmp_path), options)
    resumed = ranks2.run(_resume, str(tmp_path), options)
    for (parameters, residuals), (its, theirs, _) in zip(saved, resumed, strict=True):
        assert_same_bits(its, parameters)
        assert_same_bits(theirs, residuals)
        assert any(bool(residual.any()) for residual in residuals.values())


def _thawed(rank: int, world_size: int, path: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Residuals and parameters of a training that thaws a layer in mid-run, and of one that goes on from there."""
    found = []
    for resumes in (False, True):
        model: Any = network()
        model[0].requires_grad_(False)
        mesh = mesh_of(2 if world_size == 4 else 1)
        model = shard(model, mesh=mesh["shard"])
        if world_size == 4:
            reduction = fastreduce.fsdp.replicate(model, mesh["replicate"], "int8:error_feedback")
        else:
            reduction = fastreduce.fsdp.compress(model, "int8:error_feedback")
        model[0].requires_grad_(resumes)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(2, 5) if resumes else range(5):
            if step == 2:
                state = {"model": model.state_dict(), "reduction": reduction}
                (dcp.load if resumes else dcp.save)(state, checkpoint_id=path)
            if step == 1:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
        (kept,) = reduction.state_dict().values()
        found.append([{name: each.full_tensor() for name, each in of.items()} for of in (kept, model.state_dict())])
    return found[0], found[1]


def test_what_was_thawed_before_a_checkpoint_is_loaded_has_its_residuals(
    ranks2: RankPool, ranks4: RankPool, tmp_path: Path
):
    """The training that resumes is sharded and compressed as at its beginning, and thawed then."""
    for pool in (ranks2, ranks4):
        for saved, resumed in pool.run(_thawed, str(tmp_path / str(pool.world_size))):
            assert saved[0]["0.weight"].any()
            assert_same_bits(resumed, saved)


def _assigned(rank: int, world_size: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Parameters and residuals of a training, and of those whose parameters were replaced behind `compress`."""
    found = []
    for way in ("as it is", "assign", "full"):
        training = _Training(rank)
        if way == "assign":
            others = {name: each.detach().clone() for name, each in training.model.state_dict().items()}
            training.model.load_state_dict(others, assign=True)
        elif way == "full":  # on the meta device torch assigns them
            whole = training.parameters()
            training.model.to_empty(device="meta")
            set_model_state_dict(training.model, whole, options=StateDictOptions(full_state_dict=True))
        training.optimizer = torch.optim.AdamW(training.model.parameters(), 0.01)
        training.run(range(4))
        found.append((training.parameters(), training.residuals()))
    return found


def test_parameters_that_are_replaced_are_followed(ranks2: RankPool):
    for first, *others in ranks2.run(_assigned):
        assert all(bool(residual.any()) for residual in first[1].values())
        for other in others:
            assert_same_bits(other, first)


def _moved(rank: int, world_size: int) -> list[Any]:
    """A training, and one whose model is moved in mid-run, as to the host while a GPU has other work, and back."""
    found = []
    for moves in (False, True):
        training = _Training(rank)
        training.run(range(2))
        if moves:
            training.model.double().float()
        training.run(range(2, 4))
        found.append((training.parameters(), training.residuals()))
    return found


def test_a_model_is_moved_and_back(ranks2: RankPool):
    """`Module.to` swaps DTensors, and refuses those that somebody refers to weakly."""
    for stays, moved in ranks2.run(_moved):
        assert all(bool(residual.any()) for residual in stays[1].values())
        assert_same_bits(moved, stays)


def _saved(rank: int, world_size: int, path: str) -> dict[str, Tensor]:
    training = _Training(rank)
    training.run(range(3))
    training.save(path)
    return training.residuals()


def test_another_number_of_ranks_has_the_same_residuals(ranks2: RankPool, ranks3: RankPool, tmp_path: Path):
    for saving, loading in ((ranks3, ranks2), (ranks2, ranks3)):
        path = str(tmp_path / str(saving.world_size))
        saved, (*_, loaded) = saving.run(_saved, path)[0], loading.run(_resume, path, {})[0]
        assert loaded.keys() == saved.keys()
        for name, residual in saved.items():
            bound = tolerances.MEAN_OF_THREE * (loading is ranks3)
            assert residual.any() and ((loaded[name] - residual).abs() <= bound * residual.abs()).all()


def _load_of_other_parameters(rank: int, world_size: int) -> str:
    state = _Training(rank).reduction.state_dict()
    with pytest.raises(SettingError) as caught:
        _Training(rank, "int8:error_feedback").reduction.load_state_dict(state)
    assert _Training(rank, "fp16").reduction.state_dict() == {}
    return str(caught.value)


def test_a_state_of_other_parameters_is_refused(ranks2: RankPool):
    for said in ranks2.run(_load_of_other_parameters):
        assert said == "fastreduce.fsdp: only this model has residuals of parameter '0.bias' under 'reduce_scatter'"


def _load_what_does_not_fit(rank: int, world_size: int) -> dict[str, str]:
    reduction = _Training(rank).reduction
    kept = reduction.state_dict()["reduce_scatter"]
    first, last = kept["0.weight"], kept["2.0.weight"]
    said = {}
    for name, state in {
        "none": None,
        "no mapping": {"reduce_scatter": 3},
        "whole": {"reduce_scatter": {name: each.full_tensor() for name, each in kept.items()}},
        "numbered": {"reduce_scatter": dict(enumerate(kept.values()))},
        "swapped": {"reduce_scatter": {**kept, "0.weight": last, "2.0.weight": first}},
        "on one rank": {"reduce_scatter": {n: each for n, each in kept.items() if n != "2.0.weight" or rank == 0}},
    }.items():
        with pytest.raises((SettingError, MismatchError)) as caught:
            reduction.load_state_dict(state)  # type: ignore[arg-type]
        said[name] = str(caught.value)
    reduction.load_state_dict({"reduce_scatter": kept})
    return said


def test_a_state_that_does_not_fit_is_an_error_on_every_rank(ranks2: RankPool):
    for rank, said in enumerate(ranks2.run(_load_what_does_not_fit)):
        assert said["none"] == "fastreduce.fsdp: load_state_dict(None); allowed: what state_dict() has given"
        assert "load_state_dict({'reduce_scatter': 3}); allowed" in said["no mapping"]
        assert "residual of parameter '0.weight' under 'reduce_scatter' is a Tensor; allowed: a DT" in said["whole"]
        assert "is a DTensor of shape" in said["swapped"]
        assert "has residuals of parameter" in said["numbered"]
        assert "only this model has residuals of parameter '2.0.weight'" in said["on one rank"]
        assert ("another rank cannot load its state" in said["on one rank"]) == (rank == 0)


def _thawed_amid(rank: int, world_size: int, settings: dict[str, str], amid: str) -> float:
    """By how much the law is missed, where others are thawed behind a step that ends otherwise than the rest."""
    whole = Given()
    whole.parts["c"].weight.requires_grad_(False)
    mesh = mesh_of(2 if "all_reduce" in settings else 1)
    model: Any = fully_shard(whole, mesh=mesh["shard"])
    if "all_reduce" in settings:
        reduction = fastreduce.fsdp.replicate(model, mesh["replicate"], settings["all_reduce"])
        model.set_force_sum_reduction_for_comms(True)
    else:
        reduction = fastreduce.fsdp.compress(model, settings["reduce_scatter"])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    given = torch.randn(4, world_size, 6, 50, generator=torch.Generator().manual_seed(3))
    exact = {"a": given, "b": given[:, :, :1, :40]}
    applied = {name: torch.zeros(each.shape[2:], dtype=torch.float64) for name, each in exact.items()}
    share, let_go = 1.0, False
    for step in range(4):
        mine = {name: each[step, rank] / share for name, each in exact.items()}
        mine |= {"c": torch.ones(7, 20)} if step > 1 else {}
        x = torch.zeros((), requires_grad=True)
        raises = step == 1 and amid.startswith("raised")
        with pytest.raises(RuntimeError, match="raises here") if raises else nullcontext():
            model(_Raises.apply(x) if raises else x, mine).backward()
        if step == 1:
            model.parts["c"].weight.requires_grad_(True)
        if step == 1 and amid.startswith("saved"):
            reduction.state_dict()
        elif raises:
            model.reset_iter_state()
            let_go = model.parts["a"].weight.grad is None  # it does so from torch 2.15 on
            if amid == "raised":
                continue  # the next averages are added to these, unless it has let go of them
        elif step != 1 or amid == "divided":
            for name in applied:
                applied[name] += gradients(model.parts[name])["weight"]
            optimizer.step()
        if step == 1 and amid == "divided":
            model.set_gradient_divide_factor(8.0)
            share = world_size / 8.0
        optimizer.zero_grad(set_to_none="zeroed" not in amid)
    kept = next(iter(reduction.state_dict().values()))
    missed, counted = [], [0, 1, 2, 3] if amid in ("raised", "divided") and not let_go else [0, 2, 3]
    for name, each in exact.items():
        of_it = kept[f"parts.{name}.weight"].full_tensor()
        assert of_it.any()
        missed.append(float((each[counted].double().mean(1).sum(0) - applied[name] - of_it).abs().max()))
    return max(missed)


@pytest.mark.parametrize("amid", ["saved", "saved, zeroed"])
@pytest.mark.parametrize("way", ["scattered", "averaged"])
def test_nothing_is_lost_where_others_are_thawed_before_a_step_is_left_out(ranks2: RankPool, way: str, amid: str):
    assert max(ranks2.run(_thawed_amid, EACH_WAY[way], amid)) < tolerances.APPLIED * 8


@pytest.mark.parametrize("amid", ["left out", "divided", "raised", "raised, zeroed"])
@pytest.mark.parametrize(("way", "pool"), [("scattered", "ranks2"), ("averaged", "ranks4")])
def test_nothing_is_lost_where_others_are_thawed_behind_a_step(
    request: pytest.FixtureRequest, way: str, pool: str, amid: str
):
    if amid.startswith("raised") and not hasattr(FSDPModule, "reset_iter_state"):
        pytest.skip("this torch has no reset_iter_state")
    assert max(request.getfixturevalue(pool).run(_thawed_amid, EACH_WAY[way], amid)) < tolerances.APPLIED * 8


def _saved_amid(rank: int, world_size: int, saves: bool) -> float:
    """By how much what was applied and is kept misses gradients that a save comes between, and a multiplication."""
    model, reduction, optimizer = _compressed(Given())
    given = torch.randn(4, world_size, 7, 20, generator=torch.Generator().manual_seed(3))
    applied, exact, due = (torch.zeros(7, 20, dtype=torch.float64) for _ in range(3))
    for step, of_ranks in enumerate(given):
        model(torch.zeros((), requires_grad=True), {"c": of_ranks[rank]}).backward()
        due += of_ranks.double().mean(0)
        if step == 1:  # and others accumulate
            if saves:
                reduction.state_dict()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(3)
            due *= 3
            continue
        applied += gradients(model.parts["c"])["weight"]
        exact += due
        due.zero_()
        optimizer.step()
        optimizer.zero_grad()
    kept = reduction.state_dict()["reduce_scatter"]["parts.c.weight"].full_tensor()
    return float((exact - applied - kept).abs().max())


@pytest.mark.parametrize("saves", [False, True], ids=["", "saved"])
def test_a_save_amid_accumulation_changes_nothing(ranks2: RankPool, saves: bool):
    assert max(ranks2.run(_saved_amid, saves)) <= tolerances.IN_CHANGING_LISTS
