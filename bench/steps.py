"""What ranks do in the step benchmarks: train under several wrappers in turn, and time or watch each step."""

from __future__ import annotations

import copy
import gc
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.profiler import ProfilerActivity, profile

import fastreduce
from fastreduce.backends import ENVIRONMENT_VARIABLE
from fastreduce.streams import ThreadStream

WARM_UP = 3  # steps: buckets are rebuilt after the first


@dataclass(frozen=True)
class Setting:
    """How a contestant wraps the model, and what it does besides."""

    wrapper: str  # "fastreduce", "torch", or "" for none
    options: dict[str, Any] = field(default_factory=dict)  # of the wrapper
    hook: bool = False  # torch's FP16 hook
    no_sync: bool = False  # gradients stay on their rank
    zero_in_place: bool = False  # in place of zero_grad's None
    node_hooks: bool = False  # a Python function on each parameter that does nothing
    kernels: str = "numba_cpu"


class TinyParameters(nn.Module):
    """A thousand parameters of 64 elements, used one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(64) + i / 1000 for i in range(1000)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


def linear_layers(width: int) -> nn.Module:
    """12 linear layers: 24.9 million parameters at a width of 1440."""
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(width, width), nn.ReLU())))


class Contestant:
    """A copy of a model under one setting."""

    def __init__(self, setting: Setting, model: nn.Module) -> None:
        self.setting, self.plain = setting, copy.deepcopy(model)
        os.environ[ENVIRONMENT_VARIABLE] = setting.kernels
        self.wrapped: Any = self.plain
        if setting.wrapper == "fastreduce":
            self.wrapped = fastreduce.DistributedDataParallel(self.plain, **setting.options)
        if setting.wrapper == "torch":
            self.wrapped = TorchDDP(self.plain, **setting.options)
        if setting.hook:
            self.wrapped.register_comm_hook(None, fp16_compress_hook)
        if setting.node_hooks:
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.plain.parameters()]
            self.hooks = [(node, node.register_hook(lambda *_: None)) for node in nodes]

    def step(self, x: Tensor) -> None:
        """Forward and backward; no optimizer."""
        os.environ[ENVIRONMENT_VARIABLE] = self.setting.kernels
        self.plain.zero_grad(set_to_none=not self.setting.zero_in_place)
        with self.wrapped.no_sync() if self.setting.no_sync else nullcontext():
            self.wrapped(x).square().mean().backward()

    def gradients(self) -> Tensor:
        """All of them in one tensor."""
        return torch.cat([p.grad.flatten() for p in self.plain.parameters() if p.grad is not None])


def prepare(settings: dict[str, Setting], model: nn.Module, x: Tensor) -> dict[str, Contestant]:
    """Build the contestants and let each make its first steps."""
    torch.use_deterministic_algorithms(False)  # tests fill new memory with NaN, which takes time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    contestants = {name: Contestant(setting, model) for name, setting in settings.items()}
    for contestant in contestants.values():
        for _ in range(WARM_UP):
            contestant.step(x)
    return contestants


def make(model: str, width: int, rank: int) -> tuple[nn.Module, Tensor]:
    """A model, the same on every rank, and this rank's data."""
    torch.manual_seed(0)
    made, inputs = (TinyParameters(), 64) if model == "tiny" else (linear_layers(width), width)
    torch.manual_seed(1 + rank)
    return made, torch.randn(8, inputs) / (1 if model == "tiny" else 1)


def time_steps(
    rank: int, world_size: int, settings: dict[str, Setting], model: str, width: int, rounds: int, tolerance: dict[str, float]
) -> dict[str, Any]:
    """Seconds of every step by contestant, alternating, and the medians of our own stages.

    First, gradients are held against torch's own wrapper: `tolerance` is by contestant, relative to
    the gradients' norm, 0 for the same bits.
    """
    module, x = make(model, width, rank)
    contestants = prepare(settings, module, x)
    expected = contestants["torch"].gradients()
    for name, allowed in tolerance.items():
        error = (contestants[name].gradients() - expected).norm() / expected.norm()
        assert error <= allowed, f"{name}: gradients differ from torch's by {error:.2g}, more than {allowed:g}"
    del expected

    times: dict[str, list[float]] = {name: [] for name in settings}
    stages: dict[str, list[Any]] = {name: [] for name, s in settings.items() if s.wrapper == "fastreduce"}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, contestant in contestants.items():
            dist.barrier()
            start = time.perf_counter()
            contestant.step(x)
            times[name].append(time.perf_counter() - start)
            if name in stages:
                stages[name].append(contestant.wrapped.reducer.seconds)
    gc.enable()
    dist.barrier()
    return {
        "times": times,
        "stages": {
            name: {
                stage: statistics.median(getattr(each, stage) for each in seen)
                for stage in ("compress", "reduce", "decompress")
            }
            for name, seen in stages.items()
        },
    }


def count_allocations(
    rank: int, world_size: int, settings: dict[str, Setting], width: int, steps: int
) -> dict[str, float]:
    """Allocations a step that torch makes, of as many bytes as a weight has elements, by contestant.

    torch's profiler sees memory on its own thread only, so our communication happens there too.
    """
    module, x = make("linear", width, rank)
    counts = {}
    with patch.object(ThreadStream, "submit", _at_once):
        for name, contestant in prepare(settings, module, x).items():
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                for _ in range(steps):
                    contestant.step(x)
            events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
            sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
            counts[name] = sum(size >= width * width for size in sizes) / steps
    return counts


def _at_once(_: ThreadStream, job: Callable[[], None]) -> Future[None]:
    job()
    future: Future[None] = Future()
    future.set_result(None)
    return future
