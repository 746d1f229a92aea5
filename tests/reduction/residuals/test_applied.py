"""Error feedback follows what was applied: over any history, applied and exact gradients differ by what it keeps.

A history is a list of steps: gradients of several sizes, used by all, one or no rank, accumulated with and without
`no_sync`, clipped by us or by torch, applied, skipped, kept or overflowing, with and without a GradScaler, an optimizer
or a checkpoint in between. What a step's optimizer gets is recorded, and what it would have got without compression is
worked out in FP64. Their sums differ by the residuals that are saved at the end, and by nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import SGD

import fastreduce
from fastreduce import hooks
from fastreduce.reduction import one_call
from fastreduce.reduction.residuals import notices
from tests.support.histories import (
    NAMES,
    Given,
    Setup,
    Step,
    Training,
    check_law,
    gradient,
    of_trainings,
    train,
)
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

FEW = st.sampled_from


def steps(world_size: int) -> st.SearchStrategy[Step]:
    used = st.tuples(*[FEW(["abc", "abc", "abc", "ab", "c", "bc"])] * world_size)
    return st.builds(
        Step,
        seed=st.integers(0, 3),
        magnitude=FEW([1.0, 1.0, 1e-3, 1e3]),
        used=used,
        micro_batches=FEW([1, 1, 2]),
        clip=FEW(["", "ours", "torch"]),
        max_norm=FEW([1.0, 0.1, 100.0]),
        ends=FEW(["step", "step", "step", "skip", "keep"]),
        overflows=FEW(["", "", "", "a", "c"]),
        zero_late=st.booleans(),
        to_none=FEW([True, True, False]),
        saved=FEW([False, False, False, True]),
    )


SETUPS = st.builds(
    Setup,
    way=FEW(["ddp", "ddp", "hook", "call"]),
    optimizer=FEW(["sgd", "adam", "fused"]),
    scaled=st.booleans(),
    setting=FEW(["int8:block=16", "int8:block=64", "int4:block=32", "fp8:block=64"]),
    bucket_cap_mb=FEW([1e-6, 1e-3, 25.0]),
    views=st.booleans(),
)


def hunt(ranks: RankPool, examples: int) -> None:
    @of_trainings(examples)
    @given(SETUPS, st.lists(steps(ranks.world_size), min_size=1, max_size=12))
    def search(setup: Setup, history: list[Step]) -> None:
        check_law(setup, ranks.run(train, setup, history))

    search()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_applied_and_exact_gradients_differ_by_what_is_kept(request: pytest.FixtureRequest, world_size: int):
    hunt(request.getfixturevalue(f"ranks{world_size}"), 4)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_over_many_histories(request: pytest.FixtureRequest, world_size: int):
    hunt(request.getfixturevalue(f"ranks{world_size}"), 250)


# The cases that lost accuracy, one by one


@pytest.mark.parametrize("way", ["ddp", *(pytest.param(way, marks=pytest.mark.long) for way in ("hook", "call"))])
@pytest.mark.parametrize(
    "history",
    [
        [Step(), Step(magnitude=1e4, overflows="a"), Step()],
        [Step(), Step(magnitude=1e3, clip="ours"), Step()],
        [Step(), Step(magnitude=1e3, clip="torch"), Step()],
        [Step(), Step(magnitude=1e3, ends="skip"), Step()],
        [Step(), Step(magnitude=1e3, ends="skip", zero_late=True), Step(zero_late=True)],
        [Step(), Step(used=("ab", "ab")), Step(used=("ab", "ab")), Step()],
    ],
    ids=["overflow elsewhere", "clipped by us", "clipped by torch", "skipped", "skipped late", "unused"],
)
def test_what_was_not_applied_is_not_added_to_the_next_step(ranks2: RankPool, way: str, history: list[Step]):
    setup = Setup(way=way, scaled=any(step.overflows for step in history))
    before = ranks2.run(train, setup, history[:-1])
    after = ranks2.run(train, setup, history)
    check_law(setup, after)
    for name in NAMES:
        got, wanted = (after[0][key][name] - before[0][key][name] for key in ("applied", "wanted"))
        # Half a step of INT8 of each of two roundings, now and then: 4 · 0.5 / 127 of the largest gradient.
        assert float((got - wanted).abs().max()) <= 4 * 0.5 / 127 * 4 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("setting", ["int4:block=32", "fp8:block=64", "int8:block=16"])
def test_a_clipped_gradient_that_no_wire_of_this_step_held_is_followed(ranks2: RankPool, setting: str):
    """It stays for a step in which nobody uses its parameter: what was sent then is something else, rounded anew."""
    history = [Step(), Step(ends="keep"), Step(used=("bc", "bc"), clip="torch", max_norm=0.1), Step()]
    check_law(Setup(setting=setting), ranks2.run(train, Setup(setting=setting), history))


def _by_hand(rank: int, world_size: int, told: bool) -> dict[str, Any]:
    """An update that is no optimizer of torch's, which leaves every other step out."""
    training = Training(Setup(), rank, world_size)
    for index in range(8):
        step = Step(magnitude=1e3 if index % 2 else 1.0)
        training.zero(step)
        mine = {n: gradient(step, index, 0, rank, n) for n in NAMES}
        training.ddp(mine).backward()
        training.add_exact(index, step)
        if index % 2:
            if told:
                fastreduce.note_applied(training.module.parameters(), 0.0)
        else:
            training.record()
            with torch.no_grad():
                for parameter in training.module.parameters():
                    parameter -= parameter.grad
    training.zero(Step())
    return training.books()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("switched", [False, True])
def test_the_first_compressed_step_is_followed_where_an_optimizer_has_stepped_before(switched: bool):
    parameter = torch.nn.Parameter(torch.zeros(256))
    model = torch.nn.Module()
    model.parameter, model.forward = parameter, lambda gradient: (parameter * gradient).sum()
    feedback = "int4:error_feedback"
    ddp = fastreduce.DistributedDataParallel(model, compression="none" if switched else f"{feedback},warm_up=2")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    if switched:
        ddp.set_compression(feedback, at=2)
    for step in range(3):
        optimizer.zero_grad()
        ddp(torch.linspace(0, 1, 256)).backward()
        if step < 2:
            optimizer.step()
    assert not torch.equal(parameter.grad, torch.linspace(0, 1, 256))  # type: ignore[arg-type]
    optimizer.zero_grad()  # thrown away: so nothing of it is owed
    assert not ddp.reducer.state_dict()["residuals"]["parameter"].any()
    ddp.reducer.close()


def test_an_update_by_hand_tells_what_it_applied(ranks2: RankPool):
    check_law(Setup(), ranks2.run(_by_hand, True))
    with pytest.raises(AssertionError, match="differ by"):
        check_law(Setup(), ranks2.run(_by_hand, False))


def test_a_factor_that_is_no_number_is_refused():
    with pytest.raises(fastreduce.SettingError, match="factor=nan; allowed: finite numbers"):
        fastreduce.note_applied([], float("nan"))
    for factor in (None, "1", [1.0], torch.tensor([1.0, 2.0]), torch.tensor(1j)):
        with pytest.raises(fastreduce.SettingError, match="; allowed: finite numbers"):
            fastreduce.note_applied([], factor)  # type: ignore[arg-type]
    fastreduce.note_applied([], torch.tensor(0.5))  # type: ignore[arg-type]  # as clipping computes it


def test_what_is_no_parameters_is_refused():
    """It was taken for parameters that nobody averages, without a word."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    for kind, parameters in {
        "a Parameter": model[0].weight,
        "is a Linear": model,
        "is a tuple": model.named_parameters(),
        "is a str": model.state_dict(),
        "a NoneType": None,
        "a float": 1.0,
        "a SGD": torch.optim.SGD(model.parameters(), 0.1),
    }.items():
        with pytest.raises(fastreduce.TensorError, match=f"{kind}; allowed: parameters, as model.parameters"):
            fastreduce.note_applied(parameters)  # type: ignore[arg-type]


def _closure(rank: int, world_size: int) -> dict[str, Any]:
    """Gradients are averaged and clipped inside the optimizer's step."""
    training = Training(Setup(), rank, world_size)
    training.optimizer._optimizer_step_pre_hooks.clear()  # our books are kept in the closure
    (group,) = training.optimizer.param_groups
    for index, magnitude in enumerate((1.0, 1e3, 1.0, 1.0)):
        if index == 2:  # a step that raises has told what it was about to apply, and the next one tells it anew
            was, group["lr"] = group["lr"], None
            with pytest.raises(TypeError):
                training.optimizer.step()
            group["lr"] = was
        step = Step(magnitude=magnitude)

        def backward(index: int = index, step: Step = step) -> Tensor:
            training.zero(step)
            loss: Tensor = training.ddp({n: gradient(step, index, 0, rank, n) for n in NAMES})
            loss.backward()
            training.add_exact(index, step)
            norm = torch.nn.utils.clip_grad_norm_(training.module.parameters(), 1.0)
            training.multiply(float((1.0 / (norm + 1e-6)).clamp(max=1.0)))
            training.record()
            return loss

        training.optimizer.step(backward)
    training.zero(Step())
    return training.books()


def test_gradients_averaged_inside_an_optimizers_closure(ranks2: RankPool):
    check_law(Setup(), ranks2.run(_closure))


def _accumulated_into_a_closure(rank: int, world_size: int) -> dict[str, Any]:
    """The last micro-batch's backward is in the optimizer's step, as Lightning has it; local steps lie in between."""
    training = Training(Setup(), rank, world_size)
    training.optimizer._optimizer_step_pre_hooks.clear()
    for index, magnitude in enumerate((1.0, 100.0, 1.0, 0.01, 100.0, 1.0)):
        step = Step(magnitude=magnitude, micro_batches=2)
        training.zero(step)
        with training.ddp.no_sync():
            training.ddp({n: gradient(step, index, 0, rank, n) for n in NAMES}).backward()

        def backward(index: int = index, step: Step = step) -> Tensor:
            loss: Tensor = training.ddp({n: gradient(step, index, 1, rank, n) for n in NAMES})
            loss.backward()
            training.add_exact(index, step)
            training.record()
            return loss

        training.optimizer.step(backward)
        training.zero(step)
        with training.ddp.no_sync():  # a step on this rank's own gradients, of which no residual knows
            training.ddp({n: gradient(step, index, 2, rank, n) for n in NAMES}).backward()
        training.optimizer.step()
    training.zero(Step())
    return training.books()


def test_what_comes_before_a_closure_and_after_a_step_is_not_taken_for_averages(ranks2: RankPool):
    check_law(Setup(), ranks2.run(_accumulated_into_a_closure))


def _clipped_in_a_hook(rank: int, world_size: int) -> dict[str, Any]:
    training = Training(Setup(), rank, world_size)

    def clip(*_: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(training.module.parameters(), 0.5)
        training.multiply(float((0.5 / (norm + 1e-6)).clamp(max=1.0)))

    training.optimizer._optimizer_step_pre_hooks.clear()
    training.optimizer.register_step_pre_hook(clip)
    training.optimizer.register_step_pre_hook(training.record)
    for index in range(6):
        training.step(index, Step(), True)
    training.zero(Step())
    return training.books()


def test_an_optimizers_own_hooks_are_seen(ranks2: RankPool):
    check_law(Setup(), ranks2.run(_clipped_in_a_hook))


def _two_optimizers(rank: int, world_size: int) -> dict[str, float]:
    training = Training(Setup(views=True, bucket_cap_mb=25.0), rank, world_size)
    optimizers = [torch.optim.SGD([p], lr=1e-3) for p in training.module.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for index in range(4):
        training.zero(Step())
        loss = training.ddp({n: gradient(Step(), index, 0, rank, n) for n in NAMES})
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    units: dict[str, float] = training.state.state_dict()["units"]
    return units


def test_views_of_one_bucket_under_several_optimizers_have_the_loss_scale_as_their_unit(ranks2: RankPool):
    for units in ranks2.run(_two_optimizers):
        assert units == dict.fromkeys(NAMES, 1 / 1024), "what one optimizer unscales changes the version of all views"


def _changed(rank: int, world_size: int, how: str) -> dict[str, Tensor]:
    training = Training(Setup(), rank, world_size)
    for index in range(3):
        training.zero(Step())
        training.ddp({n: gradient(Step(), index, 0, rank, n) for n in NAMES}).backward()
        if how == "clipped by value":
            torch.nn.utils.clip_grad_value_(training.module.parameters(), 0.5)
        elif how == "decayed":
            for parameter in training.module.parameters():
                parameter.grad.add_(torch.full_like(parameter, 0.3))
        with torch.no_grad():
            training.optimizer._optimizer_step_pre_hooks.clear()
            training.optimizer.step()
    residuals: dict[str, Tensor] = training.state.state_dict()["residuals"]
    return residuals


@pytest.mark.parametrize("how", ["clipped by value", "decayed"])
def test_a_change_that_is_no_multiplication_is_not_followed(ranks2: RankPool, how: str):
    assert_same_bits(ranks2.run(_changed, how), ranks2.run(_changed, "as they were"))


def _frozen(rank: int, world_size: int) -> bool:
    module = Given()
    module.b.requires_grad_(False)
    ddp = TorchDDP(module)
    state = hooks.CompressState("int8:error_feedback", named_parameters=module.named_parameters())
    ddp.register_comm_hook(state, hooks.compress)
    ddp({n: gradient(Step(), 0, 0, rank, n) for n in "ac"}).backward()
    return sorted(state.state_dict()["residuals"]) == ["a", "c"]


def test_a_frozen_parameter_among_the_named_ones(ranks2: RankPool):
    assert ranks2.run(_frozen) == [True, True]


def _with_a_loss(rank: int, world_size: int) -> tuple[int, int]:
    module = Given()
    for _ in range(8):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        fastreduce.all_reduce_gradients([*module.parameters(), torch.ones(1)], "int8:error_feedback")
    return _entries(rank, world_size), len(module.a._backward_hooks or ())


@pytest.mark.usefixtures("group_of_one")
def test_a_step_of_other_gradients_does_not_apply_an_average_that_is_gone():
    """As those of a backward in `no_sync`, behind an average that was thrown away."""
    torch.manual_seed(0)
    ddp = fastreduce.DistributedDataParallel(torch.nn.Linear(64, 4), compression="int4:error_feedback")
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    for thrown_away in (False, True):
        ddp(torch.randn(2, 64)).sum().backward()
        if thrown_away:
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: kept.clone() for name, kept in ddp.reducer.state_dict()["residuals"].items()})
    assert_same_bits(found[1], found[0])
    ddp.reducer.close()


INT4 = "int4:block=32,error_feedback"


def _averaged(parameter: torch.nn.Parameter, bring: Callable[[Tensor], None], zeroed: bool, thrown_away: bool) -> SGD:
    """An average that is applied, and where `thrown_away` another one that is not; their optimizer."""
    torch.manual_seed(0)
    optimizer = SGD([parameter], lr=1.0)
    for applied in [True, False][: 1 + thrown_away]:
        bring(torch.randn(64))
        fastreduce.all_reduce_gradients([parameter], INT4)
        if applied:
            optimizer.step()
        optimizer.zero_grad(set_to_none=not zeroed)
    return optimizer


@pytest.mark.usefixtures("group_of_one")
def test_an_average_zeroed_in_place_is_seen_where_no_gradient_comes_before_the_next_call():
    found = []
    for thrown_away in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(64))
        _averaged(parameter, lambda grad, p=parameter: (p * grad).sum().backward(), True, thrown_away)
        fastreduce.all_reduce_gradients([parameter], INT4)  # what is owed of the first
        found.append(parameter.grad)
    assert_same_bits(found[1], found[0])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("other", ["none", "int8:error_feedback"])
def test_a_step_behind_a_call_under_another_setting_does_not_apply_an_average_that_is_gone(other: str):
    """No gradient has come to the parameter that would have told: this rank has none, and others have."""
    found = []
    for thrown_away in (False, True):
        parameter = torch.nn.Parameter(torch.zeros(64))
        optimizer = _averaged(parameter, lambda grad, p=parameter: setattr(p, "grad", grad), False, thrown_away)
        parameter.grad = torch.randn(64)
        fastreduce.all_reduce_gradients([parameter], other)
        optimizer.step()
        parameter.grad = torch.zeros(64)
        fastreduce.all_reduce_gradients([parameter], INT4)  # what is owed of the first
        found.append(parameter.grad)
    assert_same_bits(found[1], found[0])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("ends", ["skipped", "kept", "clipped"])
def test_lists_that_share_a_parameter_follow_as_one_list_does(ends: str):
    """Its residuals move from list to list while what becomes of its neighbours' averages is open."""
    found = []
    for lists in (["sab"], ["sa", "sb"]):
        torch.manual_seed(0)
        parameters = {name: torch.nn.Parameter(torch.zeros(64)) for name in "sab"}
        optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
        for step in range(20):
            if step % 4 != 3 or ends != "kept":
                optimizer.zero_grad()
            sum((parameters[name] * torch.randn(64)).sum() for name in "sab").backward()  # type: ignore[union-attr]
            for names in lists:
                fastreduce.all_reduce_gradients([parameters[name] for name in names], "int4:block=32,error_feedback")
            if ends == "clipped":
                torch.nn.utils.clip_grad_norm_(parameters.values(), 2.0)
            if step % 4 != 2 or ends == "clipped":
                optimizer.step()
        found.append([parameters[name].detach() for name in "ab"])
    assert_same_bits(found[1], found[0])


def test_a_list_that_lives_for_one_call_leaves_nothing_behind(ranks2: RankPool):
    before = ranks2.run(_entries)
    for (entries, hooks_left), had in zip(ranks2.run(_with_a_loss), before, strict=True):
        assert entries <= had + 1 and hooks_left <= 1


def _entries(rank: int, world_size: int) -> int:
    gc.collect()
    return sum(len(owners._reductions) for kept in one_call._alive for owners in kept.owners.values())


class _Steps:
    """A `Listener` that counts steps."""

    def __init__(self) -> None:
        self.count = 0
        notices.listen(self)

    def intact(self) -> dict[int, int]:
        return {}

    def refresh(self, positions: object) -> None: ...

    def multiply(self, *_: object) -> None: ...

    def tell(self, *_: object) -> None: ...

    def step(self, *_: object) -> None:
        self.count += 1


def test_a_step_with_a_closure_behind_one_that_raised_is_told():
    """The one that raised was told before it began, and would be taken for this one, which is told behind itself."""
    parameter, told = torch.nn.Parameter(torch.ones(2)), _Steps()
    optimizer = SGD([parameter], lr=1.0)
    parameter.grad = torch.ones(2)
    with pytest.raises(ZeroDivisionError), patch.object(optimizer, "_init_group", side_effect=ZeroDivisionError):
        optimizer.step()
    optimizer.step(lambda: 0.0)
    assert told.count == 2
