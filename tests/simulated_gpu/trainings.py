"""Training on simulated GPUs and on CPUs, one group of cases after another: what each rank of the tests does.

`python -m tests.simulated_gpu.trainings GROUP` prints, as the last line, what was found wrong by case, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

from fastreduce import DistributedDataParallel, all_reduce_gradients
from fastreduce.kernels import reference
from fastreduce.ops import backends
from fastreduce.transports import Transport
from tests.support.tolerances import CLIPPING

from .captures import CAPTURES
from .host_transports import LateOverHost, OverHost
from .situations import SITUATIONS, Situation

SETTINGS = (
    "none",
    "none:accumulate=fp32",
    "fp16",
    "bf16",
    "bf16:accumulate=wire",
    "fp8",
    "int8",
    "int8:error_feedback",
    "int4:error_feedback",
    "int8:error_feedback=8bit",
    "int8:rounding=stochastic",
    "powersgd:rank=2",
    "topk:ratio=0.1",
    "*.bias: fp16; *: int4:error_feedback",
)
STEPS = 5
NOT_FINITE = 2  # the step at which rank 0 has infinite inputs, under a GradScaler
NEVER, ALWAYS = 1e9, 0.5  # norms that no gradients and all gradients exceed


@dataclass(frozen=True)
class Norm:
    """A norm of gradients, which a GPU sums in another order."""

    value: Tensor


@dataclass(frozen=True)
class Case:
    """How to train."""

    compression: str = "none"
    views: bool = False
    static: bool = False
    unused: bool = False
    keep_zeros: bool = False  # zero_grad(set_to_none=False)
    scaler: bool = False
    clip: str = ""  # "torch" or "ours"
    max_norm: float = ALWAYS
    backwards: int = 1  # a step
    steps: int = STEPS
    hook: Callable[..., Any] | None = None
    before_step: Callable[[DistributedDataParallel, int], None] | None = None
    join: bool = False
    low: torch.dtype | None = None  # of mixed_precision=
    two_gpus: bool = False  # half of the model is on another one
    transport: Callable[[], Transport] | None = None  # of CUDA tensors, in NCCL's place
    is_call: bool = False  # of all_reduce_gradients, once, without a wrapper
    situation: Situation | None = None  # in place of a training


class Model(nn.Module):
    """Two buckets, buffers, a layer that may be left out, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(40, 50), nn.BatchNorm1d(50)
        self.second, self.left_out, self.last = nn.Linear(50, 64), nn.Linear(64, 64), nn.Linear(64, 2)
        self.own = nn.Parameter(torch.randn(3, 64))

    def forward(self, x: Tensor, use: bool = True) -> Tensor:
        h = self.second(torch.relu(self.norm(self.first(x)))).to(self.own.device)
        if use:
            h = torch.tanh(self.left_out(h))
        return self.last(h).sum() + (self.own @ h.t()).square().mean()

    def split(self, other: torch.device) -> None:
        """Put its second half on another device."""
        for part in (self.left_out, self.last):
            part.to(other)
        self.own.data = self.own.data.to(other)


def train(case: Case, device: torch.device) -> list[Norm | Tensor]:
    """Norms, and parameters after each step."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model, on_gpu = Model().to(device), device.type == "cuda"
    if case.two_gpus and on_gpu:
        model.split(torch.device("cuda", dist.get_world_size() + rank))
    ddp = DistributedDataParallel(
        model,
        bucket_cap_mb=0.01,
        compression=case.compression,
        find_unused_parameters=case.unused,
        gradient_as_bucket_view=case.views,
        static_graph=case.static,
        mixed_precision=_MixedPrecision(param_dtype=case.low, buffer_dtype=case.low) if case.low else None,
        transport=case.transport() if case.transport and on_gpu else None,
    )
    if case.hook is not None:
        ddp.register_comm_hook(None, case.hook)
    optimizer = torch.optim.AdamW(ddp.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=2, enabled=case.scaler)
    inputs = torch.Generator().manual_seed(rank)
    seen: list[Norm | Tensor] = []
    with ddp.join() if case.join else contextlib.nullcontext():
        for step in range(case.steps + (2 * rank if case.join else 0)):
            if case.before_step:
                case.before_step(ddp, step)
            optimizer.zero_grad(set_to_none=not case.keep_zeros)
            for backward in range(case.backwards):
                x = torch.randn(8, 40, generator=inputs).to(device)
                if case.scaler and step == NOT_FINITE and rank == 0:
                    x = x * float("inf")
                is_last = backward == case.backwards - 1
                with contextlib.nullcontext() if is_last else ddp.no_sync():
                    scaler.scale(ddp(x, not case.unused or (step + rank) % 3 != 0)).backward()
            assert not on_gpu or torch.cuda.current_device() == device.index
            if case.clip:
                scaler.unscale_(optimizer)
            if case.clip == "torch":
                nn.utils.clip_grad_norm_(ddp.parameters(), case.max_norm)
            elif case.clip == "ours":
                seen.append(Norm(ddp.clip_grad_norm_(case.max_norm).detach().cpu().clone()))
            scaler.step(optimizer)
            scaler.update()
            seen += [parameter.detach().cpu().clone() for parameter in model.parameters()]
    return seen


def average_by_call(setting: str, device: torch.device) -> list[Tensor]:
    """Gradients that one call has averaged."""
    torch.manual_seed(0)
    model = Model().to(device)
    model(torch.ones(8, 40, device=device) * (dist.get_rank() + 1)).backward()
    all_reduce_gradients(model.parameters(), compression=setting)
    return [parameter.grad.cpu().clone() for parameter in model.parameters()]


def _switch(ddp: DistributedDataParallel, step: int) -> None:
    settings = {1: "fp16", 2: "int8:error_feedback", 3: "powersgd:rank=2", 4: "none"}
    if step in settings:
        ddp.set_compression(settings[step])


def _save_and_load(ddp: DistributedDataParallel, step: int) -> None:
    if step in (2, 4):
        ddp.reducer.load_state_dict(ddp.reducer.state_dict())


def _rescale(ddp: DistributedDataParallel, step: int) -> None:
    if step in (2, 4):
        ddp.reducer.rescale_residuals(0.5)


PLAIN = {setting: Case(setting) for setting in SETTINGS}
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "options": {
        "views": {"views": True},
        "static graph": {"static": True},
        "unused": {"unused": True},
        "unused, views, zeros": {"unused": True, "views": True, "keep_zeros": True},
        "accumulation": {"backwards": 3},
    },
    "clipping": {
        "by torch": {"clip": "torch"},
        "by torch, views, accumulation": {"clip": "torch", "views": True, "backwards": 2},
        # Later steps would differ by what their norms differ by: either nothing is clipped, or there is one step.
        "by ours, nothing": {"clip": "ours", "max_norm": NEVER},
        "by ours, nothing, views": {"clip": "ours", "max_norm": NEVER, "views": True},
        "by ours": {"clip": "ours", "steps": 1},
        "by ours, views": {"clip": "ours", "steps": 1, "views": True},
    },
    "scaler": {
        "alone": {"scaler": True},
        "clipping by torch": {"scaler": True, "clip": "torch"},
        "clipping by ours, nothing": {"scaler": True, "clip": "ours", "max_norm": NEVER},
    },
}
DEVICES: dict[str, dict[str, dict[str, Any]]] = {
    "two gpus": {
        "two GPUs": {"two_gpus": True},
        "two GPUs, views, accumulation": {"two_gpus": True, "views": True, "backwards": 2},
        "two GPUs, unused": {"two_gpus": True, "unused": True},
        "two GPUs, scaler, clipping by ours, nothing": {
            "two_gpus": True,
            "scaler": True,
            "clip": "ours",
            "max_norm": NEVER,
        },
        "two GPUs, over the host": {"two_gpus": True, "transport": OverHost},
        "two GPUs, over the host, late": {"two_gpus": True, "transport": LateOverHost},
    },
    "mixed precision": {
        "bf16": {"low": torch.bfloat16},
        "bf16, accumulation": {"low": torch.bfloat16, "backwards": 2},
        "bf16, unused": {"low": torch.bfloat16, "unused": True},
    },
    "over the host": {
        "over the host": {"transport": OverHost},
        "over the host, late": {"transport": LateOverHost},
        "over the host, late, views, unused": {"transport": LateOverHost, "views": True, "unused": True},
    },
}
FEW = ("none", "fp16", "int8:error_feedback", "powersgd:rank=2", "topk:ratio=0.1")
FEEDBACK = Case("int4:error_feedback", before_step=_switch, steps=7)
GROUPS: dict[str, dict[str, Case]] = {
    "short": {"int8:error_feedback": Case("int8:error_feedback")},
    "settings": PLAIN,
    **{
        group: {
            f"{setting}, {name}": replace(case, **more)
            for setting, case in PLAIN.items()
            for name, more in options.items()
        }
        for group, options in OPTIONS.items()
    },
    **{
        group: {
            f"{setting}, {name}": replace(PLAIN[setting], **more) for setting in FEW for name, more in options.items()
        }
        for group, options in DEVICES.items()
    },
    "changes": {
        "switched": FEEDBACK,
        "switched, clipping by ours, nothing": replace(FEEDBACK, clip="ours", max_norm=NEVER),
        "switched, views": replace(FEEDBACK, views=True),
        "state": Case("int8:error_feedback", before_step=_save_and_load),
        "residuals rescaled": Case("int8:error_feedback", before_step=_rescale),
        "hook": Case(hook=default_hooks.allreduce_hook),
        "hook, two GPUs": Case(hook=default_hooks.allreduce_hook, two_gpus=True, unused=True),
        "fp16 hook": Case(hook=default_hooks.fp16_compress_hook),
        "bf16 wrapper": Case(hook=default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "uneven inputs": Case(join=True),
        "uneven inputs, feedback": Case("int8:error_feedback", join=True),
    },
    "calls": {setting: Case(setting, is_call=True) for setting in SETTINGS if "*" not in setting},  # no names
    "captures": {name: Case(situation=situation) for name, situation in CAPTURES.items()},
    "situations": {name: Case(situation=situation) for name, situation in SITUATIONS.items()},
}


def _differs(here: Norm | Tensor, there: Norm | Tensor) -> str:
    if isinstance(here, Norm):
        assert isinstance(there, Norm)
        tolerance = CLIPPING[here.value.dtype]
        is_close = torch.allclose(here.value, there.value, rtol=tolerance, atol=0, equal_nan=True)
        return "" if is_close else f"norm {here.value.item()}, on CPUs {there.value.item()}"
    assert isinstance(there, Tensor)
    if torch.allclose(here, there, rtol=0, atol=0, equal_nan=True):
        return ""
    return f"off by {(here - there).abs().max().item()}"


def _run(case: Case, device: torch.device) -> list[str]:
    """What is wrong with it."""
    from . import torch_cuda  # only where there is a simulated device

    torch_cuda.races()

    def on(where: torch.device) -> list[Norm | Tensor]:
        if case.situation is not None:
            return [*case.situation(where)]
        return [*average_by_call(case.compression, where)] if case.is_call else train(case, where)

    here = on(device)
    torch.cuda.synchronize()
    races = [f"race: {race}" for race in torch_cuda.races()]
    there = on(torch.device("cpu"))
    clipped = case.clip == "ours" and case.max_norm == ALWAYS
    pairs = [pair for pair in zip(here, there, strict=True) if not clipped or isinstance(pair[0], Norm)]
    different = [text for one, other in pairs if (text := _differs(one, other))]
    return races + [f"not the same on CPUs: {different}"] * bool(different)


def let_kernels_wait() -> None:
    """The reference's kernels stand for a GPU's; those of torch's operations alone are the same there."""
    from . import torch_cuda

    backend = backends.load("reference")
    for name, operation in vars(backend).items():
        if getattr(operation, "__module__", "") == reference.__name__:
            object.__setattr__(backend, name, torch_cuda.as_kernel(operation))


def main(group: str) -> None:
    """One group of cases, on a rank that the environment tells."""
    torch.set_num_threads(1)
    logging.getLogger("fastreduce").setLevel(logging.ERROR)  # gradients are not finite on purpose
    device = torch.device("cuda", int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    let_kernels_wait()
    wrong: dict[str, list[str]] = {}
    for name, case in GROUPS[group].items():
        try:
            wrong[name] = _run(case, device)
        except Exception:
            wrong[name] = [traceback.format_exc()]
            break  # other ranks may wait for this one
    print(json.dumps(wrong), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
