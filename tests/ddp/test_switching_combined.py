"""Settings that change in mid-run, beside everything else that a wrapper does."""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

from fastreduce import MismatchError, TransportError
from fastreduce.reduction import pipeline
from fastreduce.reduction.residuals.bucket_residuals import BucketResiduals
from tests.support.installed_torch import needs_streams
from tests.support.models import Branches, Grads, assert_same_bits, batch, grads_of, mlp, one_by_one, wrap
from tests.support.ranks import RankPool, with_time

EMPTY: Any = BucketResiduals.__dict__["is_empty"].fget
LOW = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _backward(ddp: Any, rank: int, step: int, uses: str | None, accumulates: bool, clips: bool) -> Grads:
    more = {} if uses is None else {"use": uses}
    width = 20 if uses is None else 4
    ddp.zero_grad(set_to_none=step % 2 == 0)
    if accumulates:
        with ddp.no_sync():
            ddp(batch(rank, 100 + step, 4, width), **more).square().mean().backward()
    ddp(batch(rank, step, 4, width), **more).square().mean().backward()
    if clips:
        ddp.clip_grad_norm_(0.01)
    return grads_of(ddp.module)


def _beside(rank: int, world_size: int, new: str, how: str, options: dict[str, Any]) -> list[tuple[Grads, Grads]]:
    """Gradients after a switch, and those of a wrapper that was under the new setting from its beginning."""
    torch.manual_seed(0)
    model = Branches() if how == "unused" else mlp()
    other = copy.deepcopy(model)
    found = []
    with one_by_one() if how == "one by one" else contextlib.nullcontext():
        switched = wrap("ours", model, compression="none", **options)
        always = wrap("ours", other, compression=new, **options)
        for step in range(6):
            if step == 3:
                switched.set_compression(new)
            if step == 4 and how == "accumulates":  # between micro-batches, too
                with switched.no_sync():
                    switched(batch(rank, 7, 4, 20)).square().mean().backward()
                switched.set_compression(new, bucket_cap_mb=0.0001)
            uses = ["abc", "ab", "c" if rank else "a"][step % 3] if how == "unused" else None
            told = [
                _backward(ddp, rank, step, uses, how == "accumulates", how == "clips") for ddp in (switched, always)
            ]
            if step >= 3:
                found.append((told[0], told[1]))
    assert switched.reducer.transport is switched._transport
    return found


WAYS: list[tuple[str, dict[str, Any]]] = [
    ("plain", {"bucket_cap_mb": 0.001}),
    ("views", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
    ("static graph", {"static_graph": True}),
    ("unused", {"find_unused_parameters": True}),
    ("accumulates", {"bucket_cap_mb": 0.001}),
    ("accumulates", {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}),
    ("clips", {"bucket_cap_mb": 0.001}),
    ("mixed precision", {"mixed_precision": LOW}),
    ("one by one", {"bucket_cap_mb": 0.001}),
]


@pytest.mark.parametrize(
    ("how", "options", "new"),
    [
        pytest.param(
            how,
            options,
            new,
            marks=[pytest.mark.long] * (new != "int8" and (how, new) != ("plain", "none:accumulate=fp32"))
            + [needs_streams] * (how == "mixed precision"),
        )
        for how, options in WAYS
        for new in ("int8", "fp16", "none:accumulate=fp32")
    ],
)
def test_after_a_switch_gradients_are_those_of_a_wrapper_under_the_new_setting(
    ranks2: RankPool, new: str, how: str, options: dict[str, Any]
):
    for rank, found in enumerate(ranks2.run(_beside, new, how, options)):
        for step, (switched, always) in enumerate(found):
            assert_same_bits(switched, always, f"rank {rank}, {step} after the switch")


def _join(rank: int, world_size: int) -> tuple[list[str], Grads]:
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression="int8:error_feedback")
    ddp.set_compression("none", at=3)
    ddp.set_compression("int4:error_feedback", at=5)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(2 if rank else 7):
            optimizer.zero_grad()
            ddp(batch(rank, step, 4, 20)).square().mean().backward()
            optimizer.step()
    ddp.set_compression("int8")  # outside again
    optimizer.zero_grad()
    ddp(batch(rank, 9, 4, 20)).square().mean().backward()
    return [str(ddp.reducer.step), str(ddp.reducer.buckets.compression)], grads_of(ddp.module)


def test_ranks_that_have_joined_switch_with_the_others(ranks2: RankPool):
    (said, grads), (other, others) = ranks2.run(_join)
    assert said == other == ["8", "int8"]
    assert_same_bits(grads, others)


def _broken(rank: int, world_size: int) -> tuple[int, list[str]]:
    """A backward that raises on one rank counts on all of them."""
    ddp = wrap("ours", mlp(), compression="none", bucket_cap_mb=0.001)
    ddp.set_compression("int8", at=3)
    settings = []
    for step in range(5):
        ddp.zero_grad()
        loss = ddp(batch(rank, step, 4, 20)).square().mean()
        handles = []
        if step == 1 and rank == 1:
            handles = [ddp.module[0].weight.register_hook(_raise)]
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        for handle in handles:
            handle.remove()
        settings.append(str(ddp.reducer.buckets.compression))
    return ddp.reducer.step, settings


def _raise(_: object) -> None:
    raise ZeroDivisionError


def test_a_backward_that_raises_is_a_step_on_every_rank(ranks2: RankPool):
    assert ranks2.run(_broken) == [(5, ["none", "none", "none", "int8", "int8"])] * 2


def _one_calls(rank: int, world_size: int, seconds: float) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    ddp = wrap("ours", mlp(), compression="none", process_group=group)
    ddp(batch(rank, 0, 4, 20)).square().mean().backward()
    try:
        if rank == 0:
            ddp.set_compression("int8")
        ddp(batch(rank, 0, 4, 20)).square().mean().backward()
    except TransportError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_call_it_is_an_error_within_the_timeout(ranks2: RankPool):
    def test(seconds: float) -> None:
        first, second = ranks2.run(_one_calls, seconds)
        assert "Settings are compared where set_compression is called" in first and "has reduced 1" in first
        assert second

    with_time(test, 3.0)


def _by_environment(rank: int, world_size: int) -> list[str]:
    os.environ["FASTREDUCE_COMPRESSION"] = "int8:warm_up=2"
    ddp = wrap("ours", mlp())
    found = []
    for step in range(4):
        ddp(batch(rank, step, 4, 20)).square().mean().backward()
        found.append(ddp._get_ddp_logging_data()["compression"])
    return found


def test_a_warm_up_comes_by_the_environment_and_the_log_data_say_what_is_in_force(ranks2: RankPool):
    assert ranks2.run(_by_environment) == [["none", "none", "int8", "int8"]] * 2


def _switched_over(rank: int, world_size: int, transport: str) -> list[Grads]:
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression="int8:error_feedback", transport=transport, bucket_cap_mb=0.002)
    optimizer, found = torch.optim.SGD(ddp.parameters(), lr=0.1), []
    for step, setting in enumerate(["", "", "none", "", "fp16", "int4:error_feedback", "", "none", ""]):
        if setting:
            ddp.set_compression(setting)
        found.append(_backward(ddp, rank, step, None, False, clips=step % 3 == 2))
        optimizer.step()
    return found


def test_switching_over_shared_memory_gives_the_bits_of_gloo(ranks2: RankPool):
    """Under `none` gradients go straight into the rings there, but for what an earlier setting has left."""
    for rank, (shm, gloo) in enumerate(
        zip(*(ranks2.run(_switched_over, name) for name in ("shm", "gloo")), strict=True)
    ):
        assert_same_bits(shm, gloo, f"rank {rank}")


def _after_a_broken_one(rank: int, world_size: int) -> Grads:
    """A call between a backward that raised on one rank and the next forward: the others are in their reduction yet."""
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression="none", bucket_cap_mb=0.001)
    for step in range(3):
        ddp.zero_grad()
        loss = ddp(batch(rank, step, 4, 20)).square().mean()
        handle = ddp.module[0].weight.register_hook(_raise) if step == 1 and rank == 1 else None
        with contextlib.suppress(ZeroDivisionError):
            loss.backward()
        if handle is not None:
            handle.remove()
        if step == 1:
            ddp.set_compression("int8")
    assert (ddp.reducer.step, str(ddp.reducer.buckets.compression)) == (3, "int8")
    return grads_of(ddp.module)


def test_after_a_backward_that_raised_it_can_be_called(ranks2: RankPool):
    first, second = ranks2.run(_after_a_broken_one)
    assert_same_bits(first, second)


def _join_switched_off(rank: int, world_size: int) -> list[str]:
    ddp = wrap("ours", mlp())
    found = []
    with ddp.join(enable=False):
        ddp.set_compression("int8")
        found.append(str(ddp.compression))
    ddp.set_compression("bf16")
    return [*found, str(ddp.compression)]


def test_a_join_that_is_switched_off_does_not_count(ranks2: RankPool):
    assert ranks2.run(_join_switched_off) == [["int8", "bf16"]] * 2


def _without_optimizer(rank: int, world_size: int) -> tuple[list[list[bool]], list[bool]]:
    """Verdicts by step of an update by hand, in which an overflow follows a switch of one of two parameters."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    ddp = wrap("ours", module, compression="int8:error_feedback")
    verdicts = []
    for step in range(5):
        if step == 2:
            ddp.set_compression({"0.*": "none", "*": "int8:error_feedback"})
        x = torch.randn(4, 8)
        x[0, 0] = torch.inf if step == 2 else 1.0
        ddp.zero_grad()
        ddp(x).sum().backward()
        verdicts.append([bool(feedback.finite) for feedback in ddp.reducer.buckets.feedbacks])
    return verdicts[2:], [pipeline.remainder is None for pipeline in ddp.reducer.pipelines]


def test_an_overflow_counts_for_its_own_step_only(ranks2: RankPool):
    for verdicts, over in ranks2.run(_without_optimizer):
        assert verdicts == [[False, False], [True, True], [True]]
        assert all(over), "what was kept has been added"


def _looks(rank: int, world_size: int, on_device: bool) -> tuple[int, list[bool]]:
    """How often it is asked whether anything is left, in 20 steps that clip behind a switch, and whether it is over."""
    asked: list[bool] = []

    def ask(kept: BucketResiduals) -> bool:
        asked.append(EMPTY(kept))
        return asked[-1]

    ddp = wrap("ours", mlp(), compression="int8:error_feedback")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with (
        patch.object(BucketResiduals, "is_empty", property(ask)),
        patch.object(pipeline, "reads_late", lambda _: on_device),
    ):
        for step in range(24):
            if step == 4:
                ddp.set_compression("fp16")
            ddp.zero_grad()
            ddp(batch(rank, step, 4, 20)).square().mean().backward()
            if step < 8:
                ddp.clip_grad_norm_(1e-3)
            optimizer.step()
    return len(asked), [each.remainder is None for each in ddp.reducer.pipelines]


@pytest.mark.parametrize(("on_device", "most"), [(False, 20), (True, 3)])
def test_a_device_is_asked_now_and_then_whether_anything_is_left(ranks2: RankPool, on_device: bool, most: int):
    """Where gradients are clipped, something is for long."""
    for asked, over in ranks2.run(_looks, on_device):
        assert 1 <= asked <= most * len(over)
        assert all(over)


def _zeroed_late(rank: int, world_size: int, new: str, skips: bool, to_none: bool, micro_batches: int) -> Grads:
    """Averages of a step, under another setting if any, whose loop zeroes gradients between forward and backward."""
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression="int4:error_feedback")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        ddp(batch(rank, step, 4, 20)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    if skips:  # this step is left out
        ddp(batch(rank, 3, 4, 20)).square().mean().backward()
    if new:
        ddp.set_compression(new)
    for micro in range(micro_batches):
        ddp.require_backward_grad_sync = micro == micro_batches - 1
        loss = ddp(batch(rank, 4 + micro, 4, 20)).square().mean()
        if micro == 0:
            optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
    return grads_of(ddp.module)


PICKED = [("", True, 1), ("none", False, 2), ("int8:error_feedback", True, 2), ("topk:ratio=0.1,min_numel=8", False, 1)]


@pytest.mark.parametrize(
    ("new", "to_none", "micro_batches"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case not in PICKED))
        for case in itertools.product([new for new, *_ in PICKED], [True, False], [1, 2])
    ],
)
def test_a_step_that_was_left_out_before_a_switch_leaves_nothing(
    ranks2: RankPool, new: str, to_none: bool, micro_batches: int
):
    skipped, never = (ranks2.run(_zeroed_late, new, skips, to_none, micro_batches) for skips in (True, False))
    assert_same_bits(skipped, never)


def test_callables_that_differ_where_a_state_stopped_are_told_in_the_first_forward(ranks2: RankPool):
    """Not a thousand steps later, when what is to come there is compared the next time."""
    ranks2.run(_differ_far_on)


def _differ_far_on(rank: int, world_size: int) -> None:
    ddp = wrap("ours", nn.Linear(20, 1), compression=lambda step: "int8" if step == 5001 + rank else "none")
    state = ddp.reducer.state_dict()
    ddp.reducer.load_state_dict({**state, "schedule": {**state["schedule"], "step": 5000}})
    with pytest.raises(MismatchError, match="from step 5001 on int8"):
        ddp(batch(rank, 0, 4, 20))
