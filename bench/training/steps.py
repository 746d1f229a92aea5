"""What ranks do in the step benchmarks: train under several wrappers in turn, and time or watch each step."""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.distributed_c10d import _get_process_group_store
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import fastreduce
from fastreduce import elastic
from fastreduce.ops.backends import ENVIRONMENT_VARIABLE
from fastreduce.reduction.streams import ThreadStream
from fastreduce.reduction.telemetry.trace import VARIABLE as TRACE
from fastreduce.transports import Transport
from tests.support.models import InlineStream

from ..paired import by_turns, turns
from .timed_models import build

WARM_UP = 3  # steps: buckets are rebuilt, and kernels chosen again, after the first


@dataclass(frozen=True)
class Setting:
    """How a contestant wraps the model, and what it does besides."""

    wrapper: str  # "fastreduce", "torch", or "" for none
    options: dict[str, Any] = field(default_factory=dict)  # of the wrapper
    hook: bool = False  # torch's FP16 hook
    powersgd: int = 0  # the rank of torch's PowerSGD hook
    no_sync: bool = False  # gradients stay on their rank
    zero_in_place: bool = False  # in place of zero_grad's None
    node_hooks: bool = False  # a Python function on each parameter that does nothing
    clip: bool = False  # gradients by their norm, with what the wrapper offers for it
    applies: bool = False  # averages, behind the step: what becomes of others error feedback has to measure
    recording: str = "record"  # as wrappers of ours do; "nothing" of a flight record; also "count", or "trace"
    kernels: str = "numba_cpu"
    transport: Callable[[dist.ProcessGroup], Transport] | str | None = "gloo"  # of our class; None: it chooses
    elastic: bool = False  # our class, among ranks that may be lost


class Contestant:
    """A model under one setting; all contestants' parameters lie in the same memory."""

    def __init__(self, setting: Setting, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.setting, self.plain = setting, copy.deepcopy(model)
        for mine, shared in zip(self.plain.parameters(), model.parameters(), strict=True):
            mine.data = shared.data
        self.wrapped: Any = self.plain
        if setting.wrapper == "fastreduce":
            os.environ[ENVIRONMENT_VARIABLE] = setting.kernels  # still set in the first steps, which lay out buckets
            asked = setting.transport
            transport = asked(group) if callable(asked) else asked
            if setting.recording == "trace":
                self._folder = tempfile.TemporaryDirectory(prefix="fastreduce-bench-", ignore_cleanup_errors=True)
                os.environ[TRACE] = self._folder.name
            if setting.elastic:
                self.wrapped = _elastic(self.plain, group, transport, setting.options)
            else:
                self.wrapped = fastreduce.DistributedDataParallel(
                    self.plain, process_group=group, transport=transport, **setting.options
                )
            os.environ.pop(TRACE, None)
            if setting.recording == "nothing":
                mute(self.wrapped.reducer)
            if setting.recording == "count":
                self.wrapped.reducer.counters()  # from now on
        if setting.wrapper == "torch":
            self.wrapped = TorchDDP(self.plain, process_group=group, **setting.options)
        if setting.hook:
            self.wrapped.register_comm_hook(group, fp16_compress_hook)
        if setting.powersgd:
            # Its earliest beginning, so that the steps that warm up are over before times are taken.
            options: dict[str, Any] = {"start_powerSGD_iter": 2, "orthogonalization_epsilon": 1e-8}
            self.wrapped.register_comm_hook(PowerSGDState(group, setting.powersgd, **options), powerSGD_hook)
        self.optimizer: torch.optim.Optimizer | None = None
        if setting.applies:
            self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=1e-12, foreach=True)  # moves no parameter
        if setting.node_hooks:
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.plain.parameters()]
            self.hooks = [(node, node.register_hook(lambda *_: None)) for node in nodes]

    def step(self, x: Tensor) -> float:
        """Forward and backward. Returns how long the host was in `backward`."""
        if self.setting.zero_in_place:
            self.plain.zero_grad(set_to_none=False)
        with self.wrapped.no_sync() if self.setting.no_sync else nullcontext():
            loss = self.wrapped(x).square().sum()
            start = time.perf_counter()
            loss.backward()
            host = time.perf_counter() - start
        if self.setting.clip and self.setting.wrapper == "fastreduce":
            self.wrapped.clip_grad_norm_(1.0)
        elif self.setting.clip:
            nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        return host

    def drop_gradients(self) -> None:
        """Give their memory back, as `zero_grad` does, behind an optimizer's step if there is one."""
        if self.optimizer is not None:
            self.optimizer.step()
        if not self.setting.zero_in_place:
            self.plain.zero_grad()

    def gradients(self) -> Tensor:
        """All of them in one tensor."""
        return torch.cat([p.grad.flatten() for p in self.plain.parameters() if p.grad is not None])


_trainings = itertools.count()  # each with a name of its own in the store
_joined: list[elastic.Members] = []  # the last one: a process is a member once


def _elastic(model: nn.Module, group: dist.ProcessGroup, transport: Any, options: dict[str, Any]) -> Any:
    """Our class among the ranks of a group, each of which is a group of its own besides, as in an elastic training."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size(group))][dist.get_rank(group)]
    with (
        patch("fastreduce.ddp.wrapper.group_of_one"),
        patch("fastreduce.ddp.wrapper.group_asked_for", lambda *_: alone),
    ):
        ddp = fastreduce.DistributedDataParallel(model, transport=transport, elastic=True, **options)
    store = dist.PrefixStore(f"elastic {next(_trainings)}", _get_process_group_store(group))
    while _joined:
        _joined.pop().leave()
    _joined.append(elastic.join(ddp, store=store, least=dist.get_world_size(group)))
    return ddp


def mute(reducer: Any) -> None:
    """Let a reducer's flight recorder do nothing more."""
    recorder = reducer.recorder
    reducer.events.launching.remove(recorder.ready)
    recorder.enter = recorder.end_step = lambda *_: None


def wrapped(
    settings: dict[str, Setting], module: nn.Module, x: Tensor, group: dist.ProcessGroup, warm_up: int = WARM_UP
) -> tuple[dict[str, Contestant], dict[str, float]]:
    """The contestants after some steps, and how far each one's gradients are from those of the one called "torch".

    That is relative to the gradients' norm, and 0 for the same bits; it is known only if there is such a contestant.
    """
    contestants, errors, expected = {}, {}, None
    for name in sorted(settings, key=lambda name: name != "torch"):
        contestants[name] = contestant = Contestant(settings[name], module, group)
        for _ in range(warm_up):
            contestant.drop_gradients()
            contestant.step(x)
        if name == "torch":
            expected = contestant.gradients()
        elif expected is not None:
            errors[name] = float((contestant.gradients() - expected).norm() / expected.norm())
        contestant.drop_gradients()
    return {name: contestants[name] for name in settings}, errors


def too_far(errors: dict[str, float], tolerances: dict[str, float]) -> list[str]:
    """Contestants whose gradients are not within their tolerance; NaN never is."""
    return [
        f"{name}: gradients differ from torch's by {errors[name]:.2g}"
        for name, most in tolerances.items()
        if name in errors and not errors[name] <= most
    ]


def stage_seconds(contestants: dict[str, Contestant], x: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of our own stages, by turns, in rounds that nothing else is measured in: reading them costs time."""

    def read(contestant: Contestant) -> Any:
        contestant.step(x)
        contestant.drop_gradients()
        return contestant.wrapped.reducer.seconds

    ours = {name: partial(read, each) for name, each in contestants.items() if each.setting.wrapper == "fastreduce"}
    by_turns(ours, 1)  # on a stream the first reading asks for the next step to be timed
    seen, stages = by_turns(ours, rounds), ("compress", "reduce", "decompress")
    return {name: {s: statistics.median(getattr(r, s) for r in reads) for s in stages} for name, reads in seen.items()}


def measure(
    rank: int,
    world_size: int,
    settings: dict[str, Setting],
    model: str,
    width: int,
    rounds: int,
    tolerances: dict[str, float],
    count: bool = False,
) -> dict[str, Any]:
    """Seconds of every step by contestant, alternating, our own stages' medians, and allocations.

    First, gradients are held against torch's own wrapper: `tolerances` are by contestant.
    """
    set_up_process()
    group = dist.group.WORLD
    assert group is not None
    module, x = build(model, width, rank)
    contestants, errors = wrapped(settings, module, x, group)
    assert not too_far(errors, tolerances), too_far(errors, tolerances)
    times: dict[str, list[float]] = {name: [] for name in settings}
    gc.collect()
    gc.disable()
    for name in turns(contestants, rounds):
        dist.barrier()
        start = time.perf_counter()
        contestants[name].step(x)
        times[name].append(time.perf_counter() - start)
        contestants[name].drop_gradients()
    gc.enable()
    dist.barrier()
    stages = stage_seconds(contestants, x, min(rounds, 11))
    allocations = _allocations(contestants, x, width * width) if count else {}
    return {"times": times, "stages": stages, "allocations": allocations}


def set_up_process() -> None:
    """One thread, and memory as a training script has it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # tests fill new memory with NaN, which takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Freed memory stays with the process: else glibc gives it back or not by how the heap happens to lie,
    # and one contestant or another, by chance, pays for 16,000 page faults a step.
    libc, no_more_mappings, never_trim = ctypes.CDLL(None), (-4, 0), (-1, 2**31 - 1)
    libc.mallopt(*no_more_mappings)
    libc.mallopt(*never_trim)


def _allocations(contestants: dict[str, Contestant], x: Tensor, nbytes: int) -> dict[str, int]:
    """Allocations of `nbytes` and more that torch makes in one more step.

    torch's profiler sees memory on its own thread only, so our communication happens there too.
    """
    counts = {}
    with patch.object(ThreadStream, "submit", InlineStream.submit):
        for name, contestant in contestants.items():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                contestant.step(x)
            contestant.drop_gradients()
            events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            counts[name] = sum(e.nbytes() >= nbytes for e in events if e.name() == "[memory]")
    return counts
