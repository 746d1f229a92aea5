"""What a hook, a signal handler or another thread asks or changes while a backward goes on; moments are made long."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fastreduce import GradientReducer, ReducerError, SettingError
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.residuals.applied import Applied
from fastreduce.reduction.telemetry.flight_record import step_of
from fastreduce.reduction.telemetry.flight_recorder import STEPS, FlightRecorder
from fastreduce.reduction.wires.flat import FlatWires
from fastreduce.transports import LocalTransport
from tests.support.models import assert_same_bits, batch, grads_of, mlp, wrap
from tests.support.ranks import RankPool
from tests.support.thread_ranks import make_reducer, seeded

FEEDBACK = "int8:error_feedback"


def _layers() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(20, 20) for _ in range(4)])


def _step(reducer: GradientReducer, model: nn.Module, step: int) -> None:
    reducer.look()
    reducer.arm()
    output = model(batch(0, step, 4, 20))
    reducer.watch([output])
    output.square().mean().backward()


# Signal handlers, on the thread that they interrupt


@pytest.mark.parametrize("moment", ["residuals are turned", "fates are settled"])
def test_a_handler_that_asks_for_residuals_amid_their_change_gets_an_error_and_waits_for_nobody(moment: str):
    model = seeded(_layers)
    reducer = make_reducer(model, LocalTransport(), FEEDBACK, bucket_caps=[1 << 20])
    for step in range(2):
        _step(reducer, model, step)
    told: list[str] = []

    def ask(*_: Any) -> None:
        try:
            reducer.state_dict()
        except ReducerError as error:
            told.append(str(error))

    def then_interrupted(do: Callable[..., Any], *given: Any) -> Any:
        done = do(*given)
        os.kill(os.getpid(), signal.SIGUSR2)
        return done

    wires, before = reducer.pipelines[0].wires, signal.signal(signal.SIGUSR2, ask)
    assert isinstance(wires, FlatWires)
    try:
        if moment == "residuals are turned":
            dequantize = partial(then_interrupted, wires._kernels.dequantize)
            with patch.object(wires, "_kernels", replace(wires._kernels, dequantize=dequantize)):
                _step(reducer, model, 2)
        else:
            common = Applied.common
            with patch.object(Applied, "common", lambda applied: then_interrupted(common, applied)):
                _step(reducer, model, 2)
        os.kill(os.getpid(), signal.SIGUSR2)  # between two steps
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert len(told) == 1 and told[0].startswith("a signal handler asks for residuals"), told
    reducer.close()


def test_a_handler_that_asks_for_counters_amid_their_change_has_them():
    model = seeded(_layers)
    reducer = make_reducer(model, LocalTransport(), "int8")
    counters, told = reducer._telemetry.counters, list[int]()
    reducer.counters()
    add = counters._add

    def then_interrupted(row: Any) -> None:
        add(row)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, lambda *_: told.append(reducer.counters()["reductions"]))
    try:
        with patch.object(counters, "_add", then_interrupted):
            _step(reducer, model, 0)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert told == [1]
    reducer.close()


# Hooks


def _hooked(rank: int, world_size: int, transport: str) -> list[Any]:
    """What every rank's hook is told, while one rank is slow to begin its first bucket."""
    ddp = wrap("ours", _layers(), compression="int8", bucket_cap_mb=0.003, transport=transport)
    begin, told = BucketPipeline.begin, list[str]()

    def slowly(*given: Any) -> Any:
        time.sleep(0.2)
        return begin(*given)

    def switch(_: Tensor) -> None:
        try:
            ddp.set_compression("bf16")
        except SettingError as error:
            told.append(str(error))

    for step in range(6):
        if step == 3:
            ddp.module[0].weight.register_hook(switch)
        ddp.zero_grad()
        with patch.object(BucketPipeline, "begin", slowly if rank == 0 and step == 4 else begin):
            ddp(batch(rank, step, 4, 20)).square().mean().backward()
    return [told, grads_of(ddp)]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_a_setting_is_refused_in_a_backward_alike_though_a_rank_is_slow(ranks2: RankPool, transport: str):
    (told, grads), (other, others) = ranks2.run(_hooked, transport)
    assert told == other == ["set_compression('bf16') in a backward: call it between two steps"] * 3
    assert_same_bits(grads, others)


def test_residuals_are_not_rescaled_in_a_backward_and_are_after_one_that_raised():
    model = seeded(_layers)
    reducer = make_reducer(model, LocalTransport(), FEEDBACK)
    for step in range(2):
        _step(reducer, model, step)
    before = reducer.state_dict()["residuals"]
    model[0].weight.register_hook(lambda _: reducer.rescale_residuals(2.0))
    with pytest.raises(SettingError, match="rescale_residuals in a backward: call it between"):
        _step(reducer, model, 2)
    reducer.rescale_residuals(2.0)
    assert_same_bits(reducer.state_dict()["residuals"].values(), [2 * each for each in before.values()])
    wrong: list[Any] = [math.nan, math.inf, 0.0, -1.0, "2", None, torch.tensor([1.0, 2.0]), torch.tensor(1j)]
    for factor in wrong:  # which averages were made of, or the next backward ended by
        with pytest.raises(SettingError, match=r"rescale_residuals: factor=.*; allowed: a finite number above 0"):
            reducer.rescale_residuals(factor)
    for factor in (1e300, 1e-300, 1e39, 1e-40):  # infinite in FP32, or nothing
        said = rf"factor={re.escape(str(factor))}; allowed: a finite number above 0, here from \S+ to \S+, so .*"
        with pytest.raises(SettingError, match=said):
            reducer.rescale_residuals(factor)
    assert_same_bits(reducer.state_dict()["residuals"].values(), [2 * each for each in before.values()])
    reducer.rescale_residuals(2.0**100)
    with pytest.raises(SettingError, match=r"factor=1e\+30; allowed: .* to [\d.]+e\+\d\d, so"):  # the two together
        reducer.rescale_residuals(1e30)
    reducer.rescale_residuals(2.0**-101)
    assert_same_bits(reducer.state_dict()["residuals"].values(), list(before.values()))
    reducer.close()


def _statistics(rank: int, world_size: int, asks: bool) -> Any:
    """Averages of a backward in which statistics are asked for the first time, while a bucket is reduced."""
    ddp = wrap("ours", mlp(), compression="int8", bucket_cap_mb=0.001, transport="shm")
    between, under_way = BucketPipeline._reduce_between, threading.Event()

    def slowly(*given: Any) -> Any:
        work = between(*given)
        under_way.set()
        time.sleep(0.2)
        return work

    def ask(_: Tensor) -> None:
        under_way.wait(10)
        ddp.reducer.keep_statistics()

    for step in range(3):
        ddp.zero_grad()
        output = ddp(batch(rank, step, 4, 20)).square().mean()
        if step == 2 and asks:
            ddp.module[0].weight.register_hook(ask)
            with patch.object(BucketPipeline, "_reduce_between", slowly):
                output.backward()
        else:
            output.backward()
    return grads_of(ddp)


def test_statistics_that_are_asked_for_while_a_bucket_is_reduced_begin_with_the_next(ranks2: RankPool):
    plain, asked = (ranks2.run(_statistics, asks) for asks in (False, True))
    for grads, others in zip(plain, asked, strict=True):
        assert_same_bits(others, grads)


# Other threads


def test_a_flight_record_that_another_thread_reads_has_each_step_once_and_in_order():
    model = seeded(_layers)
    reducer = make_reducer(model, LocalTransport(), "int8")
    for step in range(STEPS + 1):
        _step(reducer, model, step)
    reading, found = threading.Event(), list[int]()

    def slowly(row: Any) -> Any:
        if not reading.is_set():
            reading.set()
            time.sleep(0.3)
        return step_of(row)

    thread = threading.Thread(target=lambda: found.extend(each.step for each in reducer.flight_record().steps))
    with patch("fastreduce.reduction.telemetry.flight_recorder.step_of", slowly):
        thread.start()
        reading.wait(10)
        _step(reducer, model, STEPS + 1)
        thread.join()
    assert found == list(range(found[0], found[0] + STEPS + 1))
    reducer.close()


def test_a_wrapper_may_be_made_on_another_thread_while_an_optimizer_steps():
    made: list[FlightRecorder] = []

    class Parameters(frozenset[int]):
        def isdisjoint(self, other: Any) -> bool:
            thread = threading.Thread(target=lambda: made.append(FlightRecorder(0, 1, [], [])))
            thread.start()
            thread.join(10)
            return super().isdisjoint(other)

    recorders = [FlightRecorder(0, 1, [], []) for _ in range(2)]
    for each in recorders:
        each.parameters = Parameters()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert len(made) == 2
