"""Training steps on one GPU under our wrapper and torch's: time, the host's part of it, memory, a trace, a switch."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce.ops import backends
from fastreduce.transports import NcclTransport

from ..paired import describe, difference, ratio, turns
from ..training.steps import Contestant, Setting, set_up_process, stage_seconds, too_far, wrapped
from ..training.timed_models import build
from .trace import write_trace
from .two_clocks import Work, timed
from .worker_cases import Case, NotHere

VIEWS = {"gradient_as_bucket_view": True}
WARM_UP = 11  # steps: torch's logger and ours record events in the first ten
ROUNDS = 21  # in which contestants take turns, where a goal stands on it
# Steps of a turn. In the first ones gradients lie elsewhere than in this contestant's last turn, where others have been
# at work since: tables of addresses are made anew, which a training of its own makes once.
SETTLING, TIMED = 2, 3


def ours(compression: str, options: dict[str, Any] | None = None, **more: Any) -> Setting:
    """Our wrapper with an NCCL communicator of this rank alone, which torch's class pays for as well."""
    options = {"compression": compression, **(options or {})}
    return Setting("fastreduce", options, **{"kernels": "triton", "transport": NcclTransport, **more})


OURS, RIVAL = "fp16", "torch fp16 hook, views"
HEADLINE = {
    OURS: ours("fp16"),
    "fp16, views": ours("fp16", VIEWS),
    "fp16, no communicator": ours("fp16", transport=None),
    "unwrapped": Setting(""),
    "torch": Setting("torch"),
    RIVAL: Setting("torch", VIEWS, hook=True),
}
SETTINGS = {
    "int8": ours("int8"),
    "int8, error feedback": ours("int8:error_feedback"),
    "int4": ours("int4"),
    "none": ours("none"),
    "none, views": ours("none", VIEWS),
    "unwrapped": Setting(""),
    "torch": Setting("torch"),
    "torch, views": Setting("torch", VIEWS),
}
FORMATS = {
    "int4, error feedback": ours("int4:error_feedback"),
    "fp8": ours("fp8"),
    "fp8, error feedback": ours("fp8:error_feedback"),
    "bf16": ours("bf16"),
    "bf16, stochastic": ours("bf16:rounding=stochastic"),
    "int8, stochastic": ours("int8:rounding=stochastic"),
    "auto4": ours("auto4"),
    "by name": ours("*.bias|*norm*: fp16; *: int8:error_feedback"),
    OURS: ours("fp16"),
    "unwrapped": Setting(""),
    "torch": Setting("torch"),
}
RECORDING = {
    OURS: ours("fp16"),
    "fp16, not recorded": ours("fp16", recording="nothing"),
    "fp16, traced": ours("fp16", recording="trace"),
    "unwrapped": Setting(""),
}
SWITCHED = ("int8", "int4:error_feedback", "bf16:rounding=stochastic", "auto4", "fp16")
CLIPPING = {
    "fp16, clipped": ours("fp16", clip=True),
    OURS: ours("fp16"),
    "unwrapped": Setting(""),
    "torch fp16 hook, views, clipped": Setting("torch", VIEWS, hook=True, clip=True),
    RIVAL: Setting("torch", VIEWS, hook=True),
}
NUMBA = {
    "fp16, numba_cuda": ours("fp16", kernels="numba_cuda"),
    OURS: ours("fp16"),
    "unwrapped": Setting(""),
    RIVAL: Setting("torch", VIEWS, hook=True),
}
# Two backwards of torch's own need not agree to the last bit here; that ours does is what tests/ddp/test_gpu.py shows.
TOLERANCES = {
    **dict.fromkeys(("none", "none, views"), 2.0**-18),
    **dict.fromkeys((OURS, "fp16, views", "fp16, no communicator"), 2.0**-9),
    "int8": 2.0**-5,
    "int8, error feedback": 2.0**-4,
    "int4": 2.0**-2,
    "fp8": 2.0**-4,
    "bf16": 2.0**-8,
    **dict.fromkeys(("bf16, stochastic", "fp8, error feedback"), 2.0**-3),
    **dict.fromkeys(("int8, stochastic", "by name"), 2.0**-4),
    **dict.fromkeys(("int4, error feedback", "auto4"), 2.0**-1),
}


def cases(rehearsal: bool, out: Path) -> list[Case]:
    """The headline and its memory first, on which goals stand, with more rounds than the others.

    With 128 tokens the GPU waits for the host, with 4,096 the host for the GPU.
    """
    device = "cpu" if rehearsal else "cuda"

    def memory(*names: str) -> Iterator[Case]:
        for name in names:
            yield Case(f"memory: {name}", 12, partial(_memory, HEADLINE[name], device), alone=True)

    return [
        Case("gpt2, 128 tokens", 50, partial(_steps, HEADLINE, device, 128, ROUNDS)),
        Case("gpt2, 4096 tokens", 45, partial(_steps, HEADLINE, device, 4096)),
        Case("gpt2, 1024 tokens", 45, partial(_steps, HEADLINE, device, 1024, ROUNDS)),
        *memory(OURS, RIVAL),
        Case("gpt2, 128 tokens, settings", 40, partial(_steps, SETTINGS, device, 128)),
        Case("trace", 15, partial(_trace, device, out)),
        Case("switch", 20, partial(_switch, device)),
        Case("gpt2, 128 tokens, formats", 60, partial(_steps, FORMATS, device, 128)),
        Case("gpt2, 128 tokens, recording", 25, partial(_steps, RECORDING, device, 128)),
        Case("gpt2, 128 tokens, clipped", 30, partial(_steps, CLIPPING, device, 128)),
        *memory("unwrapped", "fp16, no communicator"),
    ]


def numba_cases(rehearsal: bool) -> list[Case]:
    """The headline with Numba's kernels."""
    return [Case("gpt2, 128 tokens, numba_cuda", 60, partial(_steps, NUMBA, "cpu" if rehearsal else "cuda", 128))]


@contextmanager
def group_of_one(device: str) -> Iterator[dist.ProcessGroup]:
    """A group of this process alone."""
    set_up_process()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD if device == "cpu" else dist.new_group(backend="nccl")
    finally:
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def _model(device: str, tokens: int) -> Iterator[tuple[nn.Module, Tensor, dist.ProcessGroup]]:
    """GPT-2, its batch, and a group of this process alone."""
    with group_of_one(device) as group:
        module, x = build("gpt2", 64 if device == "cpu" else 768, 0, 8 if device == "cpu" else tokens)
        yield module.to(device), x.to(device), group


def _can_run(settings: dict[str, Setting], device: str) -> dict[str, Setting]:
    """All of them; in a rehearsal without NCCL, and with interpreted kernels for the first one that has Triton's."""
    settings = {name: replace(setting, applies=True) for name, setting in settings.items()}
    if device == "cpu":
        found, first = {}, next((name for name, setting in settings.items() if setting.kernels == "triton"), "")
        for name, setting in settings.items():
            kernels = "triton" if name == first else "numba_cpu"
            found[name] = replace(setting, transport=None, kernels=kernels)
        return found
    for setting in settings.values():
        if setting.wrapper == "fastreduce" and (reason := backends.why_not(setting.kernels, torch.device(device))):
            raise NotHere(reason)
    return settings


def _steps(settings: dict[str, Setting], device: str, tokens: int, rounds: int = 9) -> dict[str, Any]:
    """Times of steps, alternating: until the GPU is done; of `backward` on the host; stages in rounds of their own.

    A contestant's turn is `SETTLING + TIMED` steps in a row. Of a round counts the median of the last ones; the first
    one's time stands beside it.
    """
    rounds = 2 if device == "cpu" else rounds
    settings = _can_run(settings, device)
    with _model(device, tokens) as (module, x, group):
        contestants, errors = wrapped(settings, module, x, group, 3 if device == "cpu" else WARM_UP)
        finish = torch.cuda.synchronize if device == "cuda" else lambda: None
        times: dict[str, list[float]] = {name: [] for name in settings}
        backward: dict[str, list[float]] = {name: [] for name in settings}
        moved: dict[str, list[float]] = {name: [] for name in settings}

        def step(contestant: Contestant) -> tuple[float, float]:
            finish()
            start = time.perf_counter()
            host = contestant.step(x)
            finish()
            seconds = time.perf_counter() - start
            contestant.drop_gradients()
            return seconds, host

        gc.collect()
        gc.disable()
        for name in turns(contestants, rounds):
            (first, _), *more = [step(contestants[name]) for _ in range(SETTLING + TIMED)]
            moved[name].append(first)
            for found, taken in zip((times, backward), zip(*more[-TIMED:], strict=True), strict=True):
                found[name].append(statistics.median(taken))
        gc.enable()

        def of(contestant: Contestant) -> Work:
            return Work(lambda: contestant.step(x), contestant.drop_gradients)

        clocks = timed({name: of(each) for name, each in contestants.items()}, device, 4.0, least=3, most=21)
        stages = stage_seconds(contestants, x, 1 if device == "cpu" else 11)
        for contestant in contestants.values():
            if contestant.setting.wrapper == "fastreduce":
                contestant.wrapped.reducer.close()
        del contestants, of
    rows = _described(times, backward, clocks.gpu, clocks.late, stages)
    for name, row in rows["contestants"].items():
        row["first_of_turn_s"] = statistics.median(moved[name])
        row |= {"error": errors[name]} if name in errors else {}
    return {**rows, "wrong": "; ".join(too_far(errors, TOLERANCES))}


def _described(
    times: dict[str, list[float]],
    backward: dict[str, list[float]],
    gpu: dict[str, list[float]],
    late: dict[str, int],
    stages: dict[str, dict[str, float]],
) -> dict[str, Any]:
    rows, unwrapped = describe(times), times["unwrapped"]
    first = next(iter(times))
    over = {name: [a - b for a, b in zip(each, unwrapped, strict=True)] for name, each in times.items()}
    for name, row in rows.items():
        row["backward_host_s"] = describe({name: backward[name]})[name]["median_s"]
        row["gpu_s"], row["late"] = describe({name: gpu[name]})[name]["median_s"], late[name]
        row["stages_s"] = stages.get(name)
        if name != "unwrapped":
            row["overhead_s"] = difference(times[name], unwrapped)
            host = [a - b for a, b in zip(backward[name], backward["unwrapped"], strict=True)]
            row["backward_overhead_s"] = describe({name: host})[name]["median_s"]
        if name not in (first, "unwrapped") and row["overhead_s"][1] > 0:  # else there is nothing to divide by
            row["overhead_ratio"] = ratio(over[first], over[name])
    return {"ours": first, "contestants": rows}


def _memory(setting: Setting, device: str) -> dict[str, Any]:
    """Bytes of the GPU that steps need, in a process that does nothing else.

    `peak_bytes` is the most that torch has allocated at once; `device_bytes` what this process holds in the end, with
    what NCCL and torch's cache have taken, without CUDA's own context, which is there before the first of them.
    """
    if device == "cpu":
        raise NotHere("there is no GPU whose memory could be watched")
    torch.zeros(1, device=device)
    before = _held()
    with _model(device, 128) as (module, x, group):
        contestant = wrapped({"": setting}, module, x, group, WARM_UP)[0][""]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            contestant.step(x)
            contestant.drop_gradients()
        peak = torch.cuda.max_memory_allocated()
        after, how = _held(), "of this process, by NVML" if before[1] else "growth of what is in use on the GPU"
        if setting.wrapper == "fastreduce":
            contestant.wrapped.reducer.close()
        del contestant
    row = {"peak_bytes": peak, "device_bytes": after[0] - before[0]}
    return {"ours": "", "contestants": {"it": row}, "context_bytes": before[0] if before[1] else None, "counted": how}


def _held() -> tuple[int, bool]:
    """Bytes that this process holds on the GPU, where NVML lists it; else what is in use there, by anybody."""
    torch.cuda.synchronize()
    try:
        pynvml = import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory), True
    except Exception:  # not installed, or not allowed here
        pass
    free, total = torch.cuda.mem_get_info()
    return total - free, False


def _trace(device: str, out: Path) -> dict[str, Any]:
    """One step of the headline under torch's profiler: how much of our work ran beside backward's."""
    settings = _can_run({OURS: HEADLINE[OURS]}, device)
    with _model(device, 4096) as (module, x, group):
        contestant = wrapped(settings, module, x, group, 3 if device == "cpu" else WARM_UP)[0][OURS]
        found = write_trace(partial(contestant.step, x), device, out / "trace.json.gz")
        contestant.wrapped.reducer.close()
        del contestant
    return found


def _switch(device: str) -> dict[str, Any]:
    """Another setting in mid-run: the call, which compiles, the step that lays buckets out, and those after it."""
    # Triton's interpreter, where there is no GPU, has no two threads launch at once.
    mine = HEADLINE[OURS] if device == "cuda" else replace(HEADLINE[OURS], kernels="numba_cpu")
    settings = _can_run({OURS: mine, "torch": Setting("torch")}, device)
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    found, wrong = {}, []

    def timed_call(call: Callable[[], Any]) -> float:
        finish()
        start = time.perf_counter()
        call()
        finish()
        return time.perf_counter() - start

    with _model(device, 128) as (module, x, group):
        contestants, _ = wrapped(settings, module, x, group, 3 if device == "cpu" else WARM_UP)
        contestants["torch"].step(x)
        expected = contestants["torch"].gradients()

        def step(contestant: Contestant) -> float:
            seconds = timed_call(partial(contestant.step, x))
            error = float((contestant.gradients() - expected).norm() / expected.norm())
            if not error < 0.5:
                wrong.append(f"{setting}: gradients differ from torch's by {error:.2g}")
            contestant.drop_gradients()
            return seconds

        for setting in SWITCHED:
            call = timed_call(partial(contestants[OURS].wrapped.set_compression, setting))
            first, *after = [step(contestants[OURS]) for _ in range(3 if device == "cpu" else 12)]
            found[setting] = {"call_s": call, "first_step_s": first, "step_s": statistics.median(after)}
        contestants.pop(OURS).wrapped.reducer.close()
    return {"switches": found, "wrong": "; ".join(wrong)}
