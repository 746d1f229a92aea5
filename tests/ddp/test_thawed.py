"""Parameters that are frozen when a model is wrapped and trained later, as in gradual unfreezing.

In torch's class their gradients stay local, silently; here they are averaged from the next forward on.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from fastreduce import SettingError, Shadow, load_checkpoint, save_checkpoint
from tests.reduction.residuals.test_applied import FEW, SETUPS
from tests.reduction.test_switched_histories import SETTINGS, switching_steps
from tests.support.histories import Setup, Step, check_law, of_trainings, train
from tests.support.installed_torch import needs_streams
from tests.support.models import (
    EXACT,
    Branches,
    Checkpointed,
    Words,
    assert_same_bits,
    average_of_whole,
    batch,
    grads_of,
    mlp,
    whole_,
    whole_batch,
    word_indices,
    wrap,
)
from tests.support.ranks import OVER_HOSTS, RankPool

OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "small buckets": {"bucket_cap_mb": 1e-6},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


@OVER_HOSTS
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_is_thawed_is_averaged_from_the_next_forward_on(ranks: RankPool, options: str, at: int):
    ranks.run(_thawed, options, at)


def _thawed(rank: int, world_size: int, options: str, at: int) -> None:
    model = whole_(Branches())
    model.trunk.requires_grad_(False)
    model.b.bias.requires_grad_(False)
    ddp = wrap("ours", model, **OPTIONS[options])
    parameters = len(ddp.reducer.buckets.specs)
    for step in range(7):
        if step == at:
            model.trunk.requires_grad_(True)
        if step == at + 2:
            model.b.requires_grad_(True)
        ddp.zero_grad()
        (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        expected: dict[str, Any] = dict(average_of_whole(lambda: whole_(Branches()), step, range(world_size)))
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        assert_same_bits(grads_of(model), expected | dict.fromkeys(frozen), f"rank {rank}, step {step}")
    told = ddp._get_ddp_logging_data()
    assert (parameters, told["num_parameter_tensors"]) == (4, 7)
    assert told["total_parameter_size_bytes"] == sum(p.nbytes for p in model.parameters())
    assert "trunk.weight" in told["compression_by_parameter"]


SAME_BITS = ["none", "fp16", "int8", "fp8", "auto4", "int8:warm_up=3"]


@pytest.mark.parametrize("setting", SAME_BITS)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 12), marks=pytest.mark.long)], ids=["", "more"])
def test_a_history_has_the_bits_of_one_in_which_all_was_wrapped_trained(ranks2: RankPool, setting: str, seeds: range):
    """There what is thawed later is frozen behind the wrapping, and counts as unused until then."""
    for seed in seeds:
        ranks2.run(_beside_one_that_was_frozen_later, setting, seed)


def _beside_one_that_was_frozen_later(rank: int, world_size: int, setting: str, seed: int) -> None:
    draw = random.Random(seed)
    options = {"compression": setting, "gradient_as_bucket_view": draw.random() < 0.5, "bucket_cap_mb": 0.003}
    twins, frozen = [], draw.sample(range(8), draw.randint(1, 6))
    for late in (True, False):
        torch.manual_seed(seed)
        model = mlp()
        parameters = list(model.parameters())
        for i in frozen if late else ():
            parameters[i].requires_grad_(False)
        twins.append(wrap("ours", model, **options))
        for i in frozen:
            parameters[i].requires_grad_(False)
    optimizers = [torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9) for ddp in twins]
    thawed: list[int] = []
    for step in range(9):
        micro_batches, clips, zeroes = draw.choice([1, 1, 2, 3]), draw.random() < 0.3, draw.random() < 0.9
        goes, back = draw.random() < 0.4, draw.random() < 0.2
        moment = draw.choice(["before", "between", "behind"])
        for ddp, optimizer in zip(twins, optimizers, strict=True):
            parameters = list(ddp.parameters())
            for micro in range(micro_batches):
                if goes and frozen and (moment, micro) in {("before", 0), ("between", micro_batches - 1)}:
                    parameters[frozen[-1]].requires_grad_(True)
                if back and thawed:
                    parameters[thawed[0]].requires_grad_(False)
                with ddp.no_sync() if micro < micro_batches - 1 else nullcontext():
                    (ddp(batch(rank, 10 * step + micro, 4, 20)).square().mean() * 10).backward()
            if back and thawed:
                parameters[thawed[0]].requires_grad_(True)
            if goes and frozen and moment == "behind":
                parameters[frozen[-1]].requires_grad_(True)
            if clips:
                ddp.clip_grad_norm_(0.5)
            optimizer.step()
            if zeroes:
                optimizer.zero_grad()
        if goes and frozen:
            thawed.append(frozen.pop())
        where = f"rank {rank}, seed {seed}, step {step}"
        assert_same_bits(grads_of(twins[0].module), grads_of(twins[1].module), where)
        assert_same_bits(twins[0].module.state_dict(), twins[1].module.state_dict(), where)


def _thawing(world_size: int) -> st.SearchStrategy[list[Step]]:
    settings = [setting for setting in SETTINGS if ";" not in setting]  # keys that match nothing yet are errors

    def thaw(steps: list[Step], first: int, second: int) -> list[Step]:
        for name, at in (("a", first), ("c", second)):
            step = steps[at % len(steps)]
            steps[at % len(steps)] = dataclasses.replace(step, thaws=step.thaws + name)
        return steps

    steps = st.lists(switching_steps(world_size, settings), min_size=2, max_size=12)
    return st.builds(thaw, steps, FEW(range(12)), FEW(range(12)))


def _hunt(ranks: RankPool, examples: int) -> None:
    @of_trainings(examples)
    @given(SETUPS, _thawing(ranks.world_size), FEW(["a", "c", "ac"]))
    def search(setup: Setup, history: list[Step], frozen: str) -> None:
        setup = dataclasses.replace(setup, way="ddp", frozen=frozen)
        check_law(setup, ranks.run(train, setup, history))

    search()


def test_nothing_of_what_is_kept_is_lost(ranks2: RankPool):
    _hunt(ranks2, 6)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_nothing_of_what_is_kept_is_lost_over_many_histories(request: pytest.FixtureRequest, world_size: int):
    _hunt(request.getfixturevalue(f"ranks{world_size}"), 150)


def one_step(ddp: Any, rank: int, step: int) -> None:
    ddp.zero_grad()
    (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()


def half_frozen() -> nn.Module:
    model = whole_(Branches())
    model.trunk.requires_grad_(False)
    return model


# What a wrapper does besides


def test_buckets_follow_the_new_order_once_all_have_reduced_in_it(ranks2: RankPool):
    ranks2.run(_in_order)


def _in_order(rank: int, world_size: int) -> None:
    """Each rank runs other numbers of forwards before its first backward with what was thawed."""
    model = whole_(Branches())
    model.a.requires_grad_(False)
    ddp = wrap("ours", model, bucket_cap_mb=1e-6)
    for step in range(5):
        if step == 2:
            model.a.requires_grad_(True)
        ddp.zero_grad()
        with ddp.no_sync():
            for _ in range(1 + rank):
                ddp(whole_batch(rank, 9, 3, 4))
        (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    order = [slot.name for bucket in ddp.reducer.plan.buckets for slot in bucket.slots]
    assert order == [ddp.reducer.buckets.gradients.names[i] for i in ddp.reducer.arrival_order]
    assert (order[0], order[-1][:5]) == ("c.weight", "trunk")


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_twice_is_averaged_once_it_is_thawed(ranks2: RankPool, reentrant: bool):
    ranks2.run(_checkpointed, reentrant)


def _checkpointed(rank: int, world_size: int, reentrant: bool) -> None:
    def make() -> nn.Module:
        return whole_(Checkpointed(reentrant, twice=True))

    model = make()
    assert isinstance(model, Checkpointed)
    model.inner.requires_grad_(False)
    ddp = wrap("ours", model, bucket_cap_mb=1e-6)
    for step in range(6):
        model.inner.requires_grad_(step > 2)
        one_step(ddp, rank, step)
        expected: dict[str, Any] = dict(average_of_whole(make, step, range(world_size)))
        if step < 3:
            expected |= dict.fromkeys(("inner.weight", "inner.bias"))
        assert_same_bits(grads_of(model), expected, f"rank {rank}, step {step}")


def test_two_wrappers_that_share_it_average_it_one_after_the_other(ranks2: RankPool):
    ranks2.run(_shared)


def _shared(rank: int, world_size: int) -> None:
    tied = nn.Linear(4, 4)
    bodies = [nn.Sequential(nn.Linear(4, 4), tied) for _ in range(2)]
    tied.requires_grad_(False)
    wrapped = [wrap("ours", whole_(body)) for body in bodies]
    alone = copy.deepcopy(bodies)
    for step in range(4):
        thawed = step > 1
        expected = []
        for each in (bodies, alone):
            each[0][1].requires_grad_(thawed)
            each[1][1].requires_grad_(thawed)
        for ddp in wrapped:
            ddp.zero_grad()
        sum(ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT for ddp in wrapped).backward()
        for body in alone:
            body.zero_grad()
        for other in range(world_size):
            sum(body(whole_batch(other, step, 3, 4)).sum() * EXACT / world_size for body in alone).backward()
        expected = [grads_of(body) for body in alone]
        assert_same_bits([grads_of(body) for body in bodies], expected, f"rank {rank}, step {step}")
        assert [len(ddp.reducer.backward.siblings) for ddp in wrapped] == [thawed, thawed]


def test_sparse_gradients_are_averaged_too(ranks: RankPool):
    ranks.run(_sparse)


def _sparse(rank: int, world_size: int) -> None:
    model = Words()
    model.bags.requires_grad_(False)
    ddp = wrap("ours", model)
    for step in range(4):
        model.bags.requires_grad_(step > 1)
        ddp.zero_grad()
        ddp(word_indices(rank, step)).sum().backward()
        expected: dict[str, torch.Tensor] = {}
        for other in range(world_size):
            alone = Words()
            alone.bags.requires_grad_(step > 1)
            alone(word_indices(other, step)).sum().backward()
            for name, parameter in alone.named_parameters():
                if parameter.grad is not None:
                    expected[name] = expected.get(name, 0) + parameter.grad.to_dense() / world_size
        found = {name: grad.to_dense() for name, grad in grads_of(model).items() if grad is not None}
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert model.bags.weight.grad is None or model.bags.weight.grad.is_sparse


@pytest.mark.parametrize("low", [False, pytest.param(True, marks=needs_streams)], ids=["", "mixed precision"])
def test_a_copy_and_a_snapshot_go_on_with_what_was_thawed(ranks2: RankPool, low: bool, tmp_path: Path):
    ranks2.run(_copied, low, tmp_path / "snapshot.pt")


def _copied(rank: int, world_size: int, low: bool, path: Path) -> None:
    precision = {"mixed_precision": _MixedPrecision(param_dtype=torch.bfloat16)} if low else {}
    options: dict[str, Any] = {} if low else {"compression": "int8:block=16,error_feedback"}
    ddp = wrap("ours", half_frozen(), **options, **precision)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.125, momentum=0.5)

    def train(ddp: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            one_step(ddp, rank, step)
            optimizer.step()

    train(ddp, optimizer, range(2))
    ddp.module.trunk.requires_grad_(True)
    train(ddp, optimizer, range(2, 4))
    save_checkpoint(path, model=ddp, optimizer=optimizer)
    train(ddp, optimizer, range(4, 6))
    for late in (False, True):  # unfrozen behind the wrapping, and before the state is loaded
        model = whole_(Branches())
        model.trunk.requires_grad_(not late)
        again = wrap("ours", model, **options, **precision)
        model.trunk.requires_grad_(True)
        optimizer = torch.optim.SGD(again.parameters(), 0.125, momentum=0.5)
        load_checkpoint(path, model=again, optimizer=optimizer)
        train(again, optimizer, range(4, 6))
        assert_same_bits(again.module.state_dict(), ddp.module.state_dict(), f"rank {rank}, late: {late}")
    if not low:
        copied = pickle.loads(pickle.dumps(ddp))
        assert len(copied.reducer.buckets.specs) == 7


@pytest.mark.parametrize("resumed", [False, True], ids=["set", "resumed"])
def test_the_setting_that_begins_with_the_same_forward_is_its_too(ranks2: RankPool, resumed: bool):
    """The one before knows nothing of it: a policy without a key for it, or what a snapshot was saved under."""
    ranks2.run(_set_at_once, resumed)


def _set_at_once(rank: int, world_size: int, resumed: bool) -> None:
    ddp = wrap("ours", half_frozen(), compression="fp16" if resumed else {"a.*|b.*|c.*": "int8"})
    one_step(ddp, rank, 0)
    if resumed:
        saved = ddp.reducer.state_dict()
        ddp = wrap("ours", half_frozen(), compression="none")
        ddp.reducer.load_state_dict(saved)
    else:
        ddp.module.trunk.requires_grad_(True)
        with pytest.raises(SettingError, match=r"'trunk.weight' matches no key"):
            one_step(ddp, rank, 1)
        ddp.set_compression("none")
    ddp.module.trunk.requires_grad_(True)
    for step in (1, 2):
        one_step(ddp, rank, step)
        expected = average_of_whole(lambda: whole_(Branches()), step, range(world_size))
        assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, step {step}")


def test_a_shadow_measures_it_too(ranks2: RankPool):
    first, second = ranks2.run(_shadowed)
    assert first == second
    before, after = first
    assert "trunk" not in before and after["trunk"] > 0


def _shadowed(rank: int, world_size: int) -> list[dict[str, float]]:
    torch.manual_seed(0)
    model = Branches(8)
    model.trunk.requires_grad_(False)
    ddp = wrap("ours", model)
    shadow, found = Shadow(ddp, ["int8"], every=1), []
    for step in range(4):
        model.trunk.requires_grad_(step > 1)
        ddp.zero_grad()
        ddp(batch(rank, step, 3, 8)).square().mean().backward()
        assert shadow.last is not None
        found.append(shadow.last.errors["int8"])
    return [found[1], found[3]]


def test_a_shadow_whose_keys_match_none_of_it_says_so_and_ends(ranks2: RankPool):
    for said, last in ranks2.run(_shadowed_without_a_key):
        assert last == 1
        assert said == [
            "this Shadow measures no more: parameter 'trunk.weight' matches no key: '[abc].*'; '*' matches all"
        ]


def _shadowed_without_a_key(rank: int, world_size: int) -> tuple[list[str], int]:
    ddp = wrap("ours", half_frozen())
    shadow, said = Shadow(ddp, ["int8"], every=1, groups=["[abc].*"]), list[str]()
    with patch("fastreduce.ddp.shadow.logger.warning", lambda text, *given: said.append(text % given)):
        for step in range(4):
            ddp.module.trunk.requires_grad_(step > 1)
            one_step(ddp, rank, step)
    assert shadow.last is not None
    shadow.close()
    return said, shadow.last.step


def test_a_policy_that_names_it_can_be_set_at_once(ranks2: RankPool):
    ranks2.run(_named_by_a_policy)


def _named_by_a_policy(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen())
    for step in range(4):
        if step == 2:
            ddp.module.trunk.requires_grad_(True)
            ddp.set_compression({"trunk.*": "fp16", "*": "none"})
            assert ddp.compression_by_parameter()["trunk.weight"] == "fp16"
        one_step(ddp, rank, step)
    expected = average_of_whole(lambda: whole_(Branches()), 3, range(world_size))
    assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}")


def test_a_policy_may_name_what_is_still_frozen(ranks2: RankPool):
    """Else one that fits the whole model would be an error until all of it is trained."""
    ranks2.run(_named_while_frozen)


def _named_while_frozen(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen(), compression={"trunk.*": "fp16", "*": "none"})
    one_step(ddp, rank, 0)
    shadow = Shadow(ddp, ["trunk.*: int8; *: fp16"])
    ddp.set_compression({"trunk.*": "none", "*": "fp16"})
    with pytest.raises(SettingError, match=r"the key 'trnk.*' of the policy, for 'none', matches no parameter"):
        ddp.set_compression({"trnk.*": "none", "*": "fp16"})
    one_step(ddp, rank, 1)
    shadow.close()
    saved = ddp.reducer.state_dict()
    ddp.set_compression("int8")
    ddp.reducer.load_state_dict(saved)
    ddp.module.trunk.requires_grad_(True)
    one_step(ddp, rank, 2)
    found = ddp.compression_by_parameter()
    assert {name for name, setting in found.items() if setting == "none"} == {"trunk.weight", "trunk.bias"}
    expected = average_of_whole(lambda: whole_(Branches()), 2, range(world_size))
    trunk = {name.removeprefix("trunk."): grad for name, grad in expected.items() if name.startswith("trunk.")}
    assert_same_bits(grads_of(ddp.module.trunk), trunk, f"rank {rank}")


def test_where_inputs_are_uneven_it_is_averaged_too(ranks2: RankPool):
    ranks2.run(_joined)


def _joined(rank: int, world_size: int) -> None:
    """Thawed between two epochs, each of which has fewer inputs on rank 0."""
    ddp = wrap("ours", half_frozen())
    for epoch in range(3):
        ddp.module.trunk.requires_grad_(epoch > 0)
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                one_step(ddp, rank, step)
                active = range(world_size) if step < 2 else [1]
                expected: dict[str, Any] = dict(average_of_whole(lambda: whole_(Branches()), step, active))
                if epoch == 0:
                    expected |= dict.fromkeys(name for name in expected if name.startswith("trunk"))
                assert_same_bits(grads_of(ddp.module), expected, f"rank {rank}, epoch {epoch}, step {step}")


@needs_streams
def test_a_forward_that_some_ranks_alone_ran_in_low_precision_is_no_difference(ranks2: RankPool):
    ranks2.run(_lowered_on_one)


def _lowered_on_one(rank: int, world_size: int) -> None:
    ddp = wrap("ours", half_frozen(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    for step in range(2):
        one_step(ddp, rank, step)
    if rank == 0:
        with ddp.no_sync():
            ddp(whole_batch(rank, 9, 3, 4))
    ddp.module.trunk.requires_grad_(True)
    wrapped_trained = wrap("ours", whole_(Branches()), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))
    for step in (2, 3):
        for each in (ddp, wrapped_trained):
            one_step(each, rank, step)
        assert_same_bits(grads_of(ddp.module), grads_of(wrapped_trained.module), f"rank {rank}, step {step}")


def test_what_is_kept_of_it_is_loaded_into_what_has_not_come_to_a_forward_yet(alone: None):
    found = []
    for steps in (2, 0):
        ddp = wrap("ours", half_frozen(), compression="int4:error_feedback")
        ddp.module.trunk.requires_grad_(True)
        for step in range(steps):
            (ddp(whole_batch(0, step, 3, 4)).sum() / 3).backward()
        if found:
            ddp.reducer.load_state_dict(found[0])
        found.append(ddp.reducer.state_dict())
    assert found[0]["residuals"]["trunk.weight"].any()
    assert_same_bits(found[1]["residuals"], found[0]["residuals"])
