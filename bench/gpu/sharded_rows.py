"""FSDP2's reduce-scatter on one GPU: ours as FSDP calls it, beside NCCL's. FSDP itself calls none on one rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce.ops.backends import ENVIRONMENT_VARIABLE

from ..training.timed_models import Gpt2Block
from .kernel_rows import described
from .step_rows import group_of_one
from .two_clocks import Work, timed
from .worker_cases import Case

# How far a sum of one rank may be from what was given, in its norm: the largest error of an element, or more.
SETTINGS = {"fp16": 2.0**-10, "none:accumulate=fp32": 0.0, "int8": 2.0**-5, "fp8": 2.0**-4, "int4": 2.0**-2}
SECONDS = 0.6


def cases(rehearsal: bool) -> list[Case]:
    """One, of a GPT-2 block."""
    return [Case("fsdp reduce-scatter", 20, partial(_reduce_scatter, "cpu" if rehearsal else "cuda"))]


def _scatters(group: dist.ProcessGroup, device: str, width: int) -> Iterator[tuple[str, Any]]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import fastreduce.fsdp  # a torch that it does not know fails this case alone

    for setting in SETTINGS:
        block = Gpt2Block(width).to(device)
        fully_shard(block, mesh=DeviceMesh.from_group(group, device))
        (scatter,) = fastreduce.fsdp.compress(block, setting)._scatters
        scatter._group.present = list(range(len(scatter._group.members)))
        yield setting, scatter


def _reduce_scatter(device: str) -> dict[str, Any]:
    with (
        group_of_one(device) as group,
        patch.dict(os.environ, {ENVIRONMENT_VARIABLE: "numba_cpu" if device == "cpu" else "triton"}),
    ):
        scatters = dict(_scatters(group, device, 64 if device == "cpu" else 768))
        numel = sum(member.piece for member in next(iter(scatters.values()))._group.members)
        given, summed = torch.randn(numel, device=device), torch.zeros(numel, device=device)
        sent = given.clone()  # what FSDP has no use for afterwards, and ours writes over

        def ours(scatter: Any) -> Tensor:
            scatter._turns.use_here(summed.device)
            scatter._reduce(summed, sent, 1.0, scatter._group.present)  # called by FSDP, one rank compresses nothing
            return summed

        calls: dict[str, Callable[[], Any]] = {name: partial(ours, each) for name, each in scatters.items()}
        calls["NCCL"] = partial(dist.reduce_scatter_tensor, summed, sent, group=group)
        calls["a copy"] = partial(summed.copy_, sent)
        wrong = []
        for name, most in SETTINGS.items():
            sent.copy_(given)
            error = float((calls[name]() - given).norm() / given.norm())
            if not error <= most or (error == 0) != (most == 0):  # what has lost nothing was not compressed
                wrong.append(f"{name}: off by {error:.2g}")
        clocks = timed({name: Work(call, partial(sent.copy_, given)) for name, call in calls.items()}, device, SECONDS)
        for scatter in scatters.values():
            scatter._transport.close()
    return {"ours": "fp16", "contestants": described(clocks, {}), "elements": numel, "wrong": "; ".join(wrong)}
