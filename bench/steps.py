"""What ranks do in the step benchmarks: train under several wrappers in turn, and time or watch each step."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import statistics
import time
from collections.abc import Callable
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
from fastreduce.streams import InlineStream, ThreadStream
from fastreduce.transports import Transport

from .models import build

WARM_UP = 3  # steps: buckets are rebuilt, and kernels chosen again, after the first


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
    transport: Callable[[dist.ProcessGroup], Transport] | None = None  # else the default


class Contestant:
    """A model under one setting; all contestants' parameters lie in the same memory."""

    def __init__(self, setting: Setting, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.setting, self.plain = setting, copy.deepcopy(model)
        for mine, shared in zip(self.plain.parameters(), model.parameters(), strict=True):
            mine.data = shared.data
        self.wrapped: Any = self.plain
        if setting.wrapper == "fastreduce":
            os.environ[ENVIRONMENT_VARIABLE] = setting.kernels  # still set in the first steps, which lay out buckets
            transport = setting.transport and setting.transport(group)
            self.wrapped = fastreduce.DistributedDataParallel(
                self.plain, process_group=group, transport=transport, **setting.options
            )
        if setting.wrapper == "torch":
            self.wrapped = TorchDDP(self.plain, process_group=group, **setting.options)
        if setting.hook:
            self.wrapped.register_comm_hook(group, fp16_compress_hook)
        if setting.node_hooks:
            nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self.plain.parameters()]
            self.hooks = [(node, node.register_hook(lambda *_: None)) for node in nodes]

    def step(self, x: Tensor) -> None:
        """Forward and backward; no optimizer."""
        if self.setting.zero_in_place:
            self.plain.zero_grad(set_to_none=False)
        with self.wrapped.no_sync() if self.setting.no_sync else nullcontext():
            self.wrapped(x).square().sum().backward()

    def drop_gradients(self) -> None:
        """Give their memory back, as `zero_grad` does."""
        if not self.setting.zero_in_place:
            self.plain.zero_grad()

    def gradients(self) -> Tensor:
        """All of them in one tensor."""
        return torch.cat([p.grad.flatten() for p in self.plain.parameters() if p.grad is not None])


def measure(
    rank: int,
    world_size: int,
    settings: dict[str, Setting],
    model: str,
    width: int,
    rounds: int,
    tolerances: dict[str, float],
    count: bool = False,
    device: str = "cpu",
) -> dict[str, Any]:
    """Seconds of every step by contestant, alternating, our own stages' medians, and allocations.

    First, gradients are held against torch's own wrapper: `tolerances` are by contestant, relative to
    the gradients' norm, 0 for the same bits.
    """
    _set_up_process()
    group = _group(device)
    module, x = (each.to(device) for each in build(model, width, rank))
    contestants, expected = {}, torch.zeros(0)
    for name in sorted(settings, key=lambda name: name != "torch"):
        contestants[name] = contestant = Contestant(settings[name], module, group)
        for _ in range(WARM_UP):
            contestant.drop_gradients()
            contestant.step(x)
        if name == "torch":
            expected = contestant.gradients()
        if name in tolerances:
            error = float((contestant.gradients() - expected).norm() / expected.norm())
            assert error <= tolerances[name], f"{name}: gradients differ from torch's by {error:.2g}"
        contestant.drop_gradients()

    times: dict[str, list[float]] = {name: [] for name in settings}
    stages: dict[str, list[Any]] = {name: [] for name, s in settings.items() if s.wrapper == "fastreduce"}
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name in settings:
            contestant = contestants[name]
            dist.barrier()
            start = time.perf_counter()
            contestant.step(x)
            finish()
            times[name].append(time.perf_counter() - start)
            contestant.drop_gradients()
            if name in stages:
                stages[name].append(contestant.wrapped.reducer.seconds)
    gc.enable()
    dist.barrier()
    medians = {
        name: {
            stage: statistics.median(getattr(each, stage) for each in seen)
            for stage in ("compress", "reduce", "decompress")
        }
        for name, seen in stages.items()
    }
    allocations = _allocations(contestants, x, width * width) if count else {}
    return {"times": times, "stages": medians, "allocations": allocations}


def peaks(rank: int, world_size: int, setting: Setting, model: str, width: int) -> dict[str, int]:
    """Bytes of the GPU after some steps in a process of its own.

    `peak_bytes` is the most that torch has allocated at once, `device_bytes` what is in use in the end, with what
    CUDA, NCCL and torch's cache hold.
    """
    _set_up_process()
    group = _group("cuda")
    module, x = (each.to("cuda") for each in build(model, width, rank))
    contestant = Contestant(setting, module, group)
    for _ in range(WARM_UP):
        contestant.drop_gradients()
        contestant.step(x)
    free, total = torch.cuda.mem_get_info()
    return {"peak_bytes": torch.cuda.max_memory_allocated(), "device_bytes": total - free}


def _group(device: str) -> dist.ProcessGroup:
    """All ranks, for tensors on `device`."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        nccl: dist.ProcessGroup = dist.new_group(backend="nccl")
        return nccl
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _set_up_process() -> None:
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
