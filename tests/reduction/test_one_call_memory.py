"""all_reduce_gradients: into whose memory averages go, and how long what is kept between calls stays."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fastreduce import all_reduce_gradients
from fastreduce.reduction import one_call
from fastreduce.reduction.averaging import CompressedAveraging
from fastreduce.transports import LocalTransport, Work
from tests.support.memory import bytes_of
from tests.support.models import assert_same_bits, batch
from tests.support.ranks import RankPool


def _inference(rank: int, world_size: int, setting: str) -> list[float]:
    """Averages of inference tensors and of others, first under inference mode and then outside of it."""
    plain, parameter = torch.ones(40), nn.Parameter(torch.ones(40))
    with torch.inference_mode():
        contiguous, strided, grad = torch.ones(40), torch.ones(80)[::2], torch.ones(80)[::2]
    parameter.grad, found = grad, list[float]()
    for mode in (True, False):
        with torch.inference_mode():
            for tensor in (plain, contiguous, strided, grad):
                tensor.fill_(rank + 1.0)
        with torch.inference_mode(mode):
            all_reduce_gradients([plain, contiguous, strided, parameter], setting)
        found += [float(tensor[-1]) for tensor in (plain, contiguous, strided, grad)]
    return found


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_inference_tensors_are_averaged_within_inference_mode_and_outside(ranks2: RankPool, setting: str):
    for found in ranks2.run(_inference, setting):
        assert found == pytest.approx(8 * [1.5], abs=0.02)


class Frozen(LocalTransport):
    """A user's own transport that takes no attributes once it is made."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        if "_meeting" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("setting", ["int8", "int8:error_feedback"])
def test_a_users_transport_ends_with_its_last_name(setting: str):
    parameter, gone = nn.Parameter(torch.ones(1000)), list[Any]()
    for _ in range(2):
        transport = Frozen()
        gone.append(weakref.ref(transport))
        parameter.grad = torch.ones(1000)
        all_reduce_gradients([parameter], setting, transport=transport)
        del transport
        gc.collect()
    assert [each() for each in gone] == [None, None]


class _Counting(LocalTransport):
    calls = 0

    def all_reduce(self, tensor: Tensor) -> Work:
        self.calls += 1
        return super().all_reduce(tensor)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        self.calls += 1
        return super().all_to_all(received, wire)


def test_a_copy_of_a_transport_reduces_itself():
    first = _Counting()
    all_reduce_gradients([torch.ones(300)], "int8", transport=first)
    before, second = first.calls, copy.copy(first)
    all_reduce_gradients([torch.ones(300)], "int8", transport=second)
    assert before > 0 and (first.calls, second.calls) == (before, 2 * before)


def _growth(rank: int, world_size: int, setting: str) -> float:
    """By how many lists of 32 MB the process has grown behind the first of eight, each longer than the last."""

    def resident() -> int:
        gc.collect()
        return bytes_of("VmRSS")

    tensors = [torch.ones(1 << 18) for _ in range(40)]
    before = 0
    for count in range(33, 41):
        for _ in range(2):
            all_reduce_gradients(tensors[:count], setting, transport="gloo")
        before = before or resident()
    return (resident() - before) / (1 << 25)


@pytest.mark.parametrize("setting", ["none", "int8", "fp16:accumulate=wire"])
def test_lists_have_the_memory_of_one_for_their_wires(ranks2: RankPool, setting: str):
    assert max(ranks2.run(_growth, setting)) < 0.75


SETTINGS = (
    "none",
    "int8",
    "bf16:rounding=stochastic",
    "fp16:accumulate=wire",
    "int4:error_feedback",
    "fp8",
    "powersgd:rank=2",
)


def _by_turns(rank: int, world_size: int, transport: str, whole: bool) -> list[list[Tensor]]:
    """Averages of lists that come by turns, larger ones between smaller ones; `whole`: each with wires of its own."""

    def own(settings: Any, steps: Any, divisor: Any, memory: Any) -> CompressedAveraging:
        return CompressedAveraging(settings, steps, divisor)

    lists = [
        [torch.zeros(size, dtype=dtype) for size in sizes]
        for sizes in ((40,), (3000, 7), (129, 1, 64))
        for dtype in (torch.float32, torch.bfloat16)
    ]
    found = []
    with (
        patch.object(one_call, "CompressedAveraging", own if whole else CompressedAveraging),
        patch.object(one_call, "BUCKET_BYTES", 2000),
    ):
        one_call._Kept.of(one_call.transport_of(None, "a test", "cpu", transport)).reductions.clear()
        for step in range(3):
            for i, setting in enumerate(SETTINGS):
                for tensors in lists[i % 2 :] + lists[: i % 2]:
                    for j, tensor in enumerate(tensors):
                        tensor.copy_(batch(rank, 10 * step + j, len(tensor)))
                    all_reduce_gradients(tensors, setting, transport=transport)
                    found.append([tensor.clone() for tensor in tensors])
    return found


@pytest.mark.parametrize(("pool", "transport"), [("ranks2", "gloo"), ("ranks21", "two_level")])
def test_lists_that_share_memory_by_turns_have_the_bits_of_those_that_have_their_own(
    request: pytest.FixtureRequest, pool: str, transport: str
):
    ranks: RankPool = request.getfixturevalue(pool)
    assert_same_bits(ranks.run(_by_turns, transport, False), ranks.run(_by_turns, transport, True))


def _in_ever_other_orders(rank: int, world_size: int, setting: str, op: str, lets_go: bool) -> tuple[int, list[Tensor]]:
    """The most lists of some parameters that have had pipelines at once, and all averages.

    They are applied whole, clipped or not at all, or more is accumulated on them.
    """
    draw, found, most = random.Random(0), list[Tensor](), 0
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((20, 30), (200,), (1,), (12, 12))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    orders = [draw.sample(range(4), 4) for _ in range(5)]
    let_go = one_call._Reduction.let_go
    with patch.object(one_call._Reduction, "let_go", let_go if lets_go else lambda _: None):
        for step in range(30):
            order = draw.choice(orders)[: 4 if draw.random() < 0.8 else 2]
            for i, parameter in enumerate(parameters):
                (parameter * batch(rank, 10 * step + i, parameter.numel()).view_as(parameter)).sum().backward()
            all_reduce_gradients([parameters[i] for i in order], setting, op=op)
            found += [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
            if (end := draw.choice(["whole", "clipped", "not at all", "accumulated"])) == "clipped":
                nn.utils.clip_grad_norm_(parameters, 0.5)
            if end in ("whole", "clipped"):
                optimizer.step()
            if end != "accumulated":
                optimizer.zero_grad()
            most = max(most, sum(bool(reduction.pipelines) for reduction in one_call._sharing(parameters)))
    return most, found


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("pool", ["ranks2", pytest.param("ranks21", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "setting", ["int8:error_feedback", "int4:error_feedback=8bit", "topk:ratio=0.3,min_numel=1", "powersgd:rank=2"]
)
def test_lists_without_residuals_have_no_memory_for_them_and_get_it_again(
    request: pytest.FixtureRequest, pool: str, setting: str, op: str
):
    ranks: RankPool = request.getfixturevalue(pool)
    for (most, found), (all_of_them, expected) in zip(
        ranks.run(_in_ever_other_orders, setting, op, True),
        ranks.run(_in_ever_other_orders, setting, op, False),
        strict=True,
    ):
        assert most < all_of_them
        assert_same_bits(found, expected)


def _all_orders(rank: int, world_size: int) -> int:
    """How many lists of the same parameters have pipelines, of six."""
    parameters = [nn.Parameter(torch.zeros(100)) for _ in range(6)]
    for i in range(12):
        for parameter in parameters:
            parameter.grad = torch.ones(100)
        all_reduce_gradients(parameters[i % 6 :] + parameters[: i % 6], "int8:error_feedback")
    found = one_call._sharing(parameters)
    assert len(found) == 6
    return sum(bool(reduction.pipelines) for reduction in found)


def test_of_lists_of_the_same_parameters_two_have_residuals(ranks2: RankPool):
    """The last one, and the one before it, since two may come by turns."""
    assert ranks2.run(_all_orders) == [2, 2]
