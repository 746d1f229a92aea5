"""Error feedback: it helps, and no bad step poisons it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fastreduce import Compression, TensorError
from fastreduce.errors import ReducerError
from fastreduce.reduction import saved_residuals
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.residuals import error_feedback, rows
from fastreduce.reduction.residuals.applied import Applied
from fastreduce.reduction.residuals.notices import multiplied, note_applied
from fastreduce.reduction.wires.flat import FlatWires
from fastreduce.transports import LocalTransport
from tests.support import tolerances
from tests.support.models import Branches, Constant, Grads, assert_same_bits, batch, bits, grads_of, spread, wrap
from tests.support.ranks import RankPool
from tests.support.thread_ranks import in_threads, make_reducer, seeded
from tests.support.waiting import no_waiting

FEEDBACK = "int8:error_feedback"


# It helps


def _long_run(rank: int, world_size: int, setting: str, steps: int) -> list[Tensor]:
    """The mean of what arrives over many steps with the same gradients."""
    model = wrap("ours", Constant(1000, 64), compression=setting, bucket_cap_mb=0.003)
    gradients = spread(rank, 1000, 64)
    total = [torch.zeros(n, dtype=torch.float64) for n in (1000, 64)]
    for _ in range(steps):
        model.zero_grad()
        model(gradients).backward()
        for at, parameter in zip(total, model.module.values, strict=True):
            at += parameter.grad.double()
    return [at / steps for at in total]


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.long), "int4"])
def test_the_long_run_mean_converges_to_the_exact_average(ranks: RankPool, kind: str):
    of_ranks = [spread(rank, 1000, 64) for rank in range(ranks.world_size)]
    exact = [torch.stack(of).double().mean(0) for of in zip(*of_ranks, strict=True)]
    errors = {}
    for setting in (kind, f"{kind}:error_feedback"):
        found = ranks.run(_long_run, setting, 200)
        for other in found[1:]:
            assert_same_bits(other, found[0])
        errors[setting] = sum(float((a - b).abs().sum()) for a, b in zip(found[0], exact, strict=True))
    assert errors[f"{kind}:error_feedback"] < tolerances.LONG_RUN * errors[kind], errors


def test_a_layer_that_is_used_every_other_step_keeps_its_residual(ranks2: RankPool):
    for before, after, unused, other_before, other_after in ranks2.run(_every_other):
        assert before.any()
        assert unused is None
        assert_same_bits(after, before)
        assert not torch.equal(bits(other_after), bits(other_before)), "others went on"


def _every_other(rank: int, world_size: int) -> tuple[Any, ...]:
    model = wrap("ours", Branches(16), compression=FEEDBACK)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().backward()
    before = model.reducer.state_dict()["residuals"]
    model.zero_grad()
    model(batch(rank, 3, 4, 16), use="a").square().mean().backward()
    after = model.reducer.state_dict()["residuals"]
    return before["b.weight"], after["b.weight"], model.module.b.weight.grad, before["a.weight"], after["a.weight"]


def test_a_layer_that_one_rank_used_goes_on_with_its_residual_on_all(ranks2: RankPool):
    def moved(result: tuple[Tensor, Tensor]) -> bool:
        return not torch.equal(bits(result[0]), bits(result[1]))

    assert [moved(r) for r in ranks2.run(_used_by_one)] == [True, True]


def _used_by_one(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    model = wrap("ours", Branches(16), compression=FEEDBACK)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 16)).square().mean().backward()
    before = model.reducer.state_dict()["residuals"]["b.weight"]
    model.zero_grad()
    model(batch(rank, 3, 4, 16), use="ab" if rank else "a").square().mean().backward()
    return before, model.reducer.state_dict()["residuals"]["b.weight"]


class Backwards(nn.Module):
    """Uses its layers in the order opposite to that of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


def test_residuals_move_with_their_parameters_when_buckets_are_rebuilt():
    def run(rank: int, transport: Any) -> tuple[Any, Any, bool]:
        model = seeded(Backwards)
        reducer = make_reducer(model, transport, FEEDBACK, bucket_caps=[3000])
        plan = reducer.plan
        output = model(batch(rank, 0, 4, 20))
        reducer.arm()
        reducer.watch([output])
        output.square().mean().backward()
        before = reducer.state_dict()
        assert reducer.rebuild_buckets()
        return before, reducer.state_dict(), reducer.plan == plan

    results = in_threads(2, run)
    of_shards = saved_residuals.of_shards(
        [before for before, _, _ in results], saved_residuals.alignments(results[0][0])
    )
    for name, of_shard in of_shards.items():
        before, after = (
            torch.stack([result[i]["residuals"][name] for result in results]).double().mean(0) for i in (0, 1)
        )
        assert of_shard.any() and before.any()
        torch.testing.assert_close(after, before + of_shard, rtol=0.0, atol=float(after.abs().max()) * 2**-22)
    for before, after, same_plan in results:
        assert not same_plan and list(before["residuals"]) != list(after["residuals"])
        assert not any(shard.any() for shard in after["shard_residuals"]), "they are part of the first stage now"


# No bad step poisons it


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus inf"])
def test_residuals_after_a_bad_step_are_those_before_and_training_goes_on(ranks2: RankPool, bad: float):
    results = ranks2.run(_poisoned, bad)
    for before, after, non_finite, good in results:
        assert_same_bits(after, before)
        assert non_finite
        assert_same_bits(good, results[0][3])
        assert all(g is not None and g.isfinite().all() for g in good.values())


def _poisoned(rank: int, world_size: int, bad: float) -> tuple[Any, Any, bool, Grads]:
    model = wrap("ours", Constant(1000, 64), compression=FEEDBACK)
    for _ in range(3):
        model.zero_grad()
        model(spread(rank, 1000, 64)).backward()
    before = model.reducer.state_dict()
    gradients = spread(rank, 1000, 64)
    if rank == 1:
        gradients[0][500] = bad
    model.zero_grad()
    model(gradients).backward()
    non_finite = not model.module.values[0].grad.isfinite().all()
    after = model.reducer.state_dict()
    model.zero_grad()
    model(spread(rank, 1000, 64)).backward()
    keys = ("residuals", "shard_residuals")
    return {k: before[k] for k in keys}, {k: after[k] for k in keys}, non_finite, grads_of(model.module)


def test_the_residuals_of_finite_buckets_stay_in_a_bad_step_too(ranks2: RankPool):
    """A GradScaler skips the whole step: what another bucket lost in it was never applied."""
    assert ranks2.run(_poisoned_apart) == [(True, True), (True, True)]


def _poisoned_apart(rank: int, world_size: int) -> tuple[bool, bool]:
    model = wrap("ours", Constant(1000, 64), compression=FEEDBACK, bucket_cap_mb=1e-6)
    for _ in range(3):
        model(spread(rank, 1000, 64)).backward()
    before = model.reducer.state_dict()["residuals"]
    gradients = spread(rank, 1000, 64)
    gradients[0][500] = torch.nan if rank == 0 else 1.0
    model.zero_grad()
    model(gradients).backward()
    after = model.reducer.state_dict()["residuals"]
    return torch.equal(after["values.0"], before["values.0"]), torch.equal(after["values.1"], before["values.1"])


def test_rescaling_follows_the_loss_scale(ranks2: RankPool):
    """With residuals rescaled, training under another power-of-two loss scale is the same but for the scale."""
    for same, other in ranks2.run(_rescaled):
        assert same
        assert not other, "and without it is not: the test shows something"


def _rescaled(rank: int, world_size: int) -> tuple[bool, bool]:
    def run(scale: float, rescale: bool) -> list[Tensor]:
        model = wrap("ours", Constant(1000, 64), compression=FEEDBACK)
        for step in range(6):
            model.zero_grad()
            factor = scale if step >= 3 else 1.0
            if step == 3 and rescale:
                model.reducer.rescale_residuals(scale)
            model([g * factor for g in spread(rank, 1000, 64)]).backward()
        return [p.grad / scale for p in model.module.values]

    plain = run(1.0, False)
    same = all(map(torch.equal, run(1024.0, True), plain))
    return same, all(map(torch.equal, run(1024.0, False), plain))


@pytest.mark.parametrize("first", ["zeroed", "kept", "stepped late"])
def test_rescaling_behind_a_skipped_step_rescales_what_was_kept_before_it(ranks2: RankPool, first: str):
    for after, before in ranks2.run(_skipped_and_rescaled, first):
        assert before["residuals"]["values.0"].any()
        for kind in ("residuals", "shard_residuals"):
            assert_same_bits(after[kind], before[kind])


def _skipped_and_rescaled(rank: int, world_size: int, first: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is kept where an optimizer left a step out, or not, and the loss scale is halved, and half of it without."""

    def run(rescales: bool) -> dict[str, Any]:
        model = wrap("ours", Constant(1000, 64), compression=FEEDBACK)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            model.zero_grad()
            model(spread(rank, 1000, 64)).backward()
            if step < 3:
                optimizer.step()
        if first == "zeroed":
            model.zero_grad()
        if rescales:
            model.reducer.rescale_residuals(0.5)
        if first == "stepped late":
            optimizer.step()
        model.zero_grad()
        model(spread(rank, 1000, 64))
        state: dict[str, Any] = model.reducer.state_dict()
        return state

    half = run(rescales=False)
    half["residuals"] = {name: kept / 2 for name, kept in half["residuals"].items()}
    half["shard_residuals"] = [kept / 2 for kept in half["shard_residuals"]]
    return run(rescales=True), half


def _pipeline(setting: str = FEEDBACK, count: int = 3) -> tuple[BucketPipeline, list[nn.Parameter]]:
    """One rank's pipeline of so many parameters, which has run once."""
    compression, sizes = Compression.parse(setting), (1000, 300, 1)[:count]
    specs = [ParameterSpec(f"p{i}", size, torch.float32, torch.device("cpu")) for i, size in enumerate(sizes)]
    (bucket,) = build_plan(specs, [range(count)], alignment=compression.alignment, shards=1).buckets
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    return BucketPipeline(bucket, compression, LocalTransport()), parameters


Outcome = Callable[[int, list[nn.Parameter], torch.optim.Optimizer], None]


def _shrink(factor: float | Tensor) -> Outcome:
    def apply(step: int, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        with multiplied([p.grad for p in parameters], lambda: factor):
            torch._foreach_mul_([p.grad for p in parameters], factor)
        optimizer.step()

    return apply


OUTCOMES: dict[str, Outcome] = {
    "applied": lambda step, parameters, optimizer: optimizer.step(),
    "clipped": _shrink(torch.tensor(0.25, dtype=torch.float64)),
    "clipped to nothing": _shrink(torch.tensor(float("nan"), dtype=torch.float64)),
    "skipped": lambda step, parameters, optimizer: optimizer.zero_grad() if step else optimizer.step(),
    "unknown": lambda step, parameters, optimizer: None,
}


@pytest.mark.parametrize(
    ("setting", "share"),
    [
        (FEEDBACK, 8 * 2**-24),  # weights in FP32 there, in FP64 here: a rounding of each in each of four steps
        # Which may tip the rounding to what is kept in.
        pytest.param(f"{FEEDBACK}=8bit", 4 * tolerances.KEPT_IN_8_BITS, marks=pytest.mark.long),
    ],
    ids=["fp32", "8bit"],
)
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_only_a_device_knows_is_followed_as_on_the_host_without_waiting(
    outcome: str, finite: bool, setting: str, share: float
):
    found = []
    for late in (False, True):
        pipeline, parameters = _pipeline(setting)
        kept = pipeline.feedback
        assert kept is not None
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        asked = [patch.object(where, "reads_late", lambda _, late=late: late) for where in (error_feedback, rows)]
        with asked[0], asked[1]:
            for step in range(4):
                for i, parameter in enumerate(parameters):
                    parameter.grad = batch(i, step, len(parameter))
                grads = [parameter.grad for parameter in parameters]
                pipeline.run(grads, grads, unused=[1] if step == 2 else [])
                kept.follow(parameters, [1] if step == 2 else [], pipeline.magnitudes, watched=outcome != "unknown")
                kept.finite = torch.tensor(finite)
                OUTCOMES[outcome](step, parameters, optimizer)
                kept.look()
                with no_waiting() if late else nullcontext():
                    kept.commit()
        found.append((kept.residual.clone(), kept.shard_residual.clone()))
    for late, host in zip(*found, strict=True):
        torch.testing.assert_close(late, host, rtol=0.0, atol=share * float(host.abs().max()))
    assert found[0][0].any() == (outcome in ("applied", "clipped", "skipped") or (outcome == "unknown" and finite))


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_cuda_graph_is_not_captured_behind_a_step_that_only_a_device_knows(outcome: str):
    """It would read numbers that the host lets go, and go by them in every replay. After the error all is as before."""
    found = []
    for captured in (False, True):
        pipeline, parameters = _pipeline()
        kept = pipeline.feedback
        assert kept is not None
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        asked = [patch.object(where, "reads_late", lambda _: True) for where in (error_feedback, rows)]
        with asked[0], asked[1]:
            for step in range(3):
                for i, parameter in enumerate(parameters):
                    parameter.grad = batch(i, step, len(parameter))
                grads = [parameter.grad for parameter in parameters]
                pipeline.run(grads, grads)
                kept.follow(parameters, [], pipeline.magnitudes, watched=outcome != "unknown")
                OUTCOMES[outcome](step, parameters, optimizer)
                kept.look()
                refused = captured and not (outcome == "applied" or (outcome == "skipped" and step == 0))
                with (
                    patch.object(error_feedback, "is_captured", lambda _, captured=captured: captured),
                    pytest.raises(ReducerError, match="CUDA graph") if refused else nullcontext(),
                ):
                    kept.commit()
                kept.commit()
        found.append(kept.residual.clone())
    assert torch.equal(*found)


def _one_of_three(step: int, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    torch.optim.SGD(parameters[:1], lr=1.0).step()


def _two_clipped(step: int, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    _shrink(0.5)(step, parameters[1:], optimizer)


def _told(step: int, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    note_applied(parameters, 0.5)


ALIKE: dict[str, Outcome] = {"applied": OUTCOMES["applied"], "clipped": _shrink(0.25), "thrown away": _shrink(0.0)}
NOT_ALIKE: dict[str, Outcome] = {"one": _one_of_three, "two clipped": _two_clipped, "told": _told}


@pytest.mark.parametrize("outcome", [*ALIKE, *NOT_ALIKE])
def test_what_holds_for_all_slots_is_what_holds_for_each(outcome: str):
    found, ask = [], Applied.common
    for together in (True, False):
        pipeline, parameters = _pipeline()
        kept = pipeline.feedback
        assert kept is not None
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        seen = []

        def common(applied: Applied, together: bool = together, seen: list[bool] = seen) -> Any:
            seen.append(ask(applied) is not None)
            return ask(applied) if together else None

        with patch.object(Applied, "common", common):
            for step in range(4):
                for i, parameter in enumerate(parameters):
                    parameter.grad = batch(i, step, len(parameter))
                grads = [parameter.grad for parameter in parameters]
                pipeline.run(grads, grads, unused=[1] if step == 2 else [])
                kept.follow(parameters, [1] if step == 2 else [], pipeline.magnitudes)
                (ALIKE | NOT_ALIKE)[outcome](step, parameters, optimizer)
                kept.look()
                kept.commit()
        assert seen == [outcome in ALIKE and step != 2 for step in range(4)]
        found.append([kept.residual.clone(), kept.shard_residual.clone(), torch.tensor(kept.units_now())])
    assert_same_bits(*found)


def test_what_is_told_of_one_parameter_leaves_the_unit_as_it_is():
    pipeline, (parameter,) = _pipeline(count=1)
    kept = pipeline.feedback
    assert kept is not None
    for outcome in (_shrink(2.0), _told):
        parameter.grad = batch(0, 0, 1000)
        pipeline.run([parameter.grad], [parameter.grad])
        kept.follow([parameter], [], pipeline.magnitudes)
        outcome(0, [parameter], torch.optim.SGD([parameter], lr=1.0))
        kept.commit()
    assert kept.units_now() == [2.0]


def test_what_is_over_is_told_no_more():
    pipeline, parameters = _pipeline()
    kept = pipeline.feedback
    assert kept is not None
    for step in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        grads = [parameter.grad for parameter in parameters]
        pipeline.run(grads, grads)
        with patch.object(Applied, "step", autospec=True) as told:
            kept.follow(parameters, [], pipeline.magnitudes)
            torch.optim.SGD(parameters, lr=1.0).step()
        applied = [call.args[0] for call in told.call_args_list]  # those of earlier tests may live on
        assert len([each for each in applied if each._parameters[0]() is parameters[0]]) == 1, f"step {step}"


@pytest.mark.parametrize("setting", [FEEDBACK, f"{FEEDBACK}=8bit", "topk:ratio=0.1,min_numel=100"])
def test_what_a_reduction_starts_from_is_told_at_any_moment_of_it(setting: str):
    """Over random fates of the averages; the moments at which rows and what the host notes differ are made long."""
    pipeline, parameters = _pipeline(setting)
    kept, draw = pipeline.feedback, random.Random(1)
    assert kept is not None
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    wires, common = pipeline.wires, Applied.common

    def slowly(do: Callable[..., Any], *given: Any) -> Any:
        done = do(*given)
        time.sleep(0.003)
        return done

    def settled() -> list[Tensor]:
        residual, shard, units = kept.settled()
        return [residual, shard, torch.tensor(units)]

    def settled_until(over: threading.Event) -> list[list[Tensor]]:
        return [settled() for _ in iter(over.is_set, True)]

    if isinstance(wires, FlatWires):
        wires._kernels = replace(wires._kernels, dequantize=partial(slowly, wires._kernels.dequantize))
    fates: list[Outcome] = [*OUTCOMES.values(), *NOT_ALIKE.values()]
    for step in range(40):
        left = [1] if draw.random() < 0.2 else []
        optimizer.zero_grad()
        kept.look()
        for i, parameter in enumerate(parameters):
            parameter.grad = batch(i, step, len(parameter))
        before, over = settled(), threading.Event()
        with ThreadPoolExecutor(1) as reader, patch.object(Applied, "common", lambda applied: slowly(common, applied)):
            reading = reader.submit(settled_until, over)
            grads = [parameter.grad for parameter in parameters]
            pipeline.run(grads, grads, unused=left)
            over.set()
        during = reading.result()
        assert during
        for each in during:
            assert_same_bits(each, before, f"step {step}")
        kept.follow(parameters, left, pipeline.magnitudes)
        draw.choice(fates)(step, parameters, optimizer)
    assert before[0].any()


def _refuse(*_: object) -> None:
    raise TensorError("no")


@pytest.mark.parametrize("refused", [False, True], ids=["not stored", "not dequantized"])
def test_averages_that_nobody_has_stored_leave_the_residuals_as_they_were(refused: bool):
    pipeline, parameters = _pipeline()
    kept = pipeline.feedback
    assert kept is not None
    seen = []
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = batch(i, step, len(parameter))
        grads = [parameter.grad for parameter in parameters]
        if refused and step:
            wires = pipeline.wires
            assert isinstance(wires, FlatWires)
            wires._kernels = replace(wires._kernels, dequantize=_refuse)
        with pytest.raises(TensorError) if refused and step else nullcontext():
            pipeline.run(grads, grads)
        if step == 0:
            kept.follow(parameters, [], pipeline.magnitudes)
            torch.optim.SGD(parameters, lr=1.0).step()
        seen.append([kept.residual.clone(), kept.shard_residual.clone()])
    assert seen[0][0].any()
    assert_same_bits(seen[1:], [seen[0], seen[0]])
