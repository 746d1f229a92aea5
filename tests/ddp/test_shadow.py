"""Shadow: what settings would lose of real gradients, by an oracle of its own; the training keeps its bits."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastreduce import MismatchError, SettingError, Shadow
from fastreduce.ddp.shadow import modules_of
from fastreduce.errors import FastreduceError
from tests.support.models import Branches, Heads, assert_same_bits, batch, grads_of, local_grads, mlp, wrap
from tests.support.ranks import RankPool
from tests.support.tolerances import SHADOW

STEPS, EVERY = 7, 3
CURRENT = ["none", "int8:error_feedback"]
MORE = ["none", "fp16:accumulate=wire", "*.bias|ndim<2: fp16; *: int4", "bf16:rounding=stochastic"]


def _lost_in_int8(gradient: Tensor) -> float:
    """The squared error of rounding to the nearest of 255 steps, a scale for each 128 elements."""
    flat = gradient.flatten().double()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % 128)).view(-1, 128)
    step = blocks.abs().amax(1, keepdim=True) / 127
    return float((blocks - torch.where(step > 0, (blocks / step).round() * step, 0.0)).square().sum())


def _lost_in_fp16(gradient: Tensor) -> float:
    return float((gradient.double() - gradient.half().double()).square().sum())


ORACLES: dict[str, Callable[[Tensor], float]] = {"int8": _lost_in_int8, "fp16": _lost_in_fp16, "none": lambda _: 0.0}


def _errors(of_ranks: list[dict[str, Tensor]], setting: str) -> dict[str, float]:
    """By module, and of all, as the oracle has it."""
    groups: dict[str, list[float]] = {}
    for grads in of_ranks:
        for name, grad in grads.items():
            for group in (name.rpartition(".")[0], "all"):
                sums = groups.setdefault(group, [0.0, 0.0])
                sums[0] += ORACLES[setting](grad)
                sums[1] += float(grad.double().square().sum())
    return {group: lost / whole for group, (lost, whole) in groups.items()}


def _trained(rank: int, world_size: int, current: list[str]) -> list[Any]:
    """Gradients with a shadow and without, and what it has found, under each current setting."""
    seen = []
    for setting in current:
        found: dict[bool, list[Any]] = {}
        measured = []
        for shadowed in (False, True):
            torch.manual_seed(0)
            ddp = wrap("ours", mlp(96, 4), compression=setting, bucket_cap_mb=0.05)
            assert len(ddp.reducer.plan.buckets) > 1
            shadow = Shadow(ddp, ORACLES, every=EVERY) if shadowed else None
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0 if setting == "none" else 0.1)
            found[shadowed] = []
            for step in range(STEPS):
                optimizer.zero_grad()
                if step == 1:
                    with ddp.no_sync():
                        ddp(batch(rank, 99, 4, 96)).square().mean().backward()
                    optimizer.zero_grad()
                ddp(batch(rank, step, 4, 96)).square().mean().backward()
                found[shadowed].append(grads_of(ddp.module))
                optimizer.step()
                if shadow is not None and shadow.last is not None and shadow.last.step == step:
                    measured.append((step, shadow.last.errors))
                    assert ddp.reducer.counters()["relative_errors"] == shadow.last.errors
            if shadow is not None:
                assert 0 < shadow.seconds < 100
                shadow.close()
                assert not ddp.reducer.events.met and len(ddp.reducer.events.launching) == 2
            ddp.reducer.close()
        assert_same_bits(found[True], found[False], setting)
        seen.append(measured)
    return seen


@pytest.mark.parametrize("current", [CURRENT, pytest.param(MORE, marks=pytest.mark.long)], ids=["some", "more"])
def test_it_finds_what_is_lost_and_leaves_the_bits_alone(ranks2: RankPool, current: list[str]):
    mine, theirs = ranks2.run(_trained, current)
    assert mine == theirs, "all ranks find the same"
    grads = local_grads(lambda: mlp(96, 4), 0, STEPS, 2, 96)
    for measured in mine:
        assert [step for step, _ in measured] == [0, 3, 6]
    for step, errors in mine[0]:  # with a learning rate of 0: gradients are those on the first weights
        for setting, groups in errors.items():
            expected = _errors(grads[step], setting)
            assert groups.keys() == expected.keys()
            for group, error in groups.items():
                assert math.isclose(error, expected[group], rel_tol=SHADOW), (setting, group)
    for (_, first), *_ in mine[1:]:
        assert first == mine[0][0][1], "the first step's gradients are the same, whatever they are sent in"


def _uneven(rank: int, world_size: int) -> Any:
    """Ranks that use different parameters, that join early, and one whose backward raises."""
    torch.manual_seed(0)
    ddp = wrap("ours", Branches(), compression="int8", bucket_cap_mb=64 / 2**20)
    shadow = Shadow(ddp, ["int4", "fp16", "auto4"], every=1, groups=["*.bias|ndim<2", "*"])
    seen = []
    for step in range(4):
        ddp.zero_grad()
        output = ddp(batch(rank, step, 3, 4), use="abc" if step < 2 or rank else "a")
        if step == 3 and rank == 1:
            output.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                output.sum().backward()
        else:
            output.square().sum().backward()
        if step < 3:
            assert shadow.last is not None and shadow.last.step == step
            seen.append(shadow.last.errors)
    with ddp.join():
        for step in range(2 + rank):
            ddp.zero_grad()
            ddp(batch(rank, step, 3, 4), use="abc").square().sum().backward()
    assert shadow.last is not None and shadow.last.step == 6
    ddp.reducer.close()
    return [*seen, shadow.last.errors]


def test_ranks_that_differ_find_the_same(ranks2: RankPool):
    mine, theirs = ranks2.run(_uneven)
    assert mine == theirs
    for errors in mine:
        assert list(errors) == ["int4", "fp16", "auto4"] and {"all", "*.bias|ndim<2"} <= errors["int4"].keys()
        assert 1e-9 < errors["fp16"]["all"] < 2.0**-22 < 1e-4 < errors["int4"]["all"] < 0.1
        assert errors["auto4"]["*.bias|ndim<2"] == errors["fp16"]["*.bias|ndim<2"], "small ones go in 16 bits"


def _second_backward(rank: int, world_size: int) -> None:
    """What a second backward through one forward brings is of no measurement: not of the next one either."""
    found = []
    for twice in (False, True):
        torch.manual_seed(3)
        ddp = wrap("ours", Heads())
        shadow = Shadow(ddp, ["int8"], every=2)
        for step in range(3):
            ddp.zero_grad()
            out = ddp(batch(rank, step, 3, 4))
            first, rest = out["first"].square().sum(), out["rest"][0].square().sum()
            if step != 1:
                (first + rest).backward()
            else:
                first.backward()
                if twice:
                    (1000 * rest).backward()
        assert shadow.last is not None and shadow.last.step == 2
        found.append(shadow.last.errors)
        shadow.close()
    assert found[0] == found[1]


def test_a_second_backward_through_a_forward_is_not_measured(ranks2: RankPool):
    ranks2.run(_second_backward)


def _disagreeing(rank: int, world_size: int) -> list[str]:
    ddp, said = wrap("ours", nn.Linear(8, 8)), []
    for settings, more in (
        (["int8", "fp16"][: 1 + rank], {}),
        (["int8"], {"every": 10 + rank}),
        (["int9"] if rank else ["int8"], {}),
    ):
        try:
            Shadow(ddp, settings, **more)
        except FastreduceError as error:
            said.append(f"{type(error).__name__}: {error}")
    ddp(torch.ones(1, 8)).sum().backward()
    ddp.reducer.close()
    return said


def test_ranks_that_disagree_are_told(ranks2: RankPool):
    mine, theirs = ranks2.run(_disagreeing)
    assert mine[:2] == theirs[:2] and mine[0].startswith(
        "MismatchError: ranks differ in a Shadow's settings: rank 0 has"
    )
    assert "ranks differ in a Shadow's every: rank 0 has 10, rank 1 has 11" in mine[1]
    assert mine[2].startswith("MismatchError: rank 1 could not be set up: SettingError: unknown compression 'int9'")
    assert theirs[2].startswith("SettingError: unknown compression 'int9'")
    assert MismatchError.__name__ in mine[2]


def test_alone_and_wrong(alone: None):
    """One process trains under `none` without a reduction, and is measured too; nothing keeps the reducer alive."""
    model = mlp(96, 2)
    ddp = wrap("ours", model)
    for settings, more, message in (
        ([], {}, "measures nothing"),
        (["int8"], {"every": 0}, "every=0: give a number of steps"),
        (["int8"], {"groups": ["*.bias"]}, "'1.weight' matches no key|'0.weight' matches no key"),
        (["int8"], {"groups": ["ndim!2"]}, "is no condition"),
        ([{"no.*": "int8", "*": "fp16"}], {}, "matches no parameter"),
    ):
        with pytest.raises(SettingError, match=message):
            Shadow(ddp, settings, **more)  # type: ignore[arg-type]
    low_rank = Shadow(ddp, ["powersgd:rank=4", "powersgd:rank=1"])
    shadow = Shadow(ddp, "int8")
    ddp(batch(0, 0, 4, 96)).square().mean().backward()
    assert shadow.last is not None
    expected = _errors([{name: grad for name, grad in grads_of(model).items() if grad is not None}], "int8")
    assert shadow.last.errors["int8"] == pytest.approx(expected, rel=SHADOW)
    assert low_rank.last is not None  # of four gradients, each an outer product
    assert low_rank.last.errors["powersgd"]["all"] < 1e-9 and 0.01 < low_rank.last.errors["powersgd:rank=1"]["all"] < 1
    low_rank.close()
    model[0].weight.grad = None
    ddp.zero_grad()
    Shadow(ddp, ["fp16"], every=1)
    (ddp(batch(0, 1, 4, 96)).square().mean() * torch.inf).backward()
    assert math.isnan(ddp.reducer.counters()["relative_errors"]["fp16"]["all"])
    assert ddp.reducer.counters()["relative_errors"]["int8"] == shadow.last.errors["int8"]
    reducer = weakref.ref(ddp.reducer)
    del ddp, model
    gc.collect()
    assert reducer() is None
    shadow.close()


def test_of_gradients_that_are_zeros_there_is_no_error(alone: None):
    ddp = wrap("ours", mlp(96, 2))
    shadow = Shadow(ddp, "int8", every=1, groups=["0.*", "*"])
    (0 * ddp(batch(0, 0, 4, 96)).sum()).backward()
    assert shadow.last is not None and shadow.last.errors == {"int8": {}}


def test_what_is_no_wrapper_or_no_list_is_named(alone: None):
    model = mlp(96, 2)
    ddp = wrap("ours", model)
    for no_wrapper, settings, message in (
        (None, ["int8"], "ddp=None; allowed: a fastreduce.DistributedDataParallel"),
        (model, ["int8"], "ddp=Sequential.*; allowed: a fastreduce"),
        (ddp, 3, "settings=3; allowed: a list of settings"),
    ):
        with pytest.raises(SettingError, match=f"(?s){message}"):
            Shadow(no_wrapper, settings)  # type: ignore[arg-type]


def test_groups_are_modules():
    assert modules_of(["0.weight", "0.bias", "scale", "head.fc.weight"]) == ["0", "0", "scale", "head.fc"]
    names = [f"blocks.{i}.{part}.{kind}" for i in range(20) for part in ("qkv", "fc1") for kind in ("weight", "bias")]
    assert set(modules_of([*names, "conv2d.1x1.weight"])) == {"blocks.*.qkv", "blocks.*.fc1", "conv2d.1x1"}
