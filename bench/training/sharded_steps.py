"""What ranks do in the benchmarks of sharded models: train under several reductions in turn, and time each.

On each rank of two nodes it is run as `sharded_steps.py SIZES OUT`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fastreduce.fsdp
from fastreduce.fsdp import ShardedModel

from ..paired import turns
from .steps import set_up_process, too_far
from .timed_models import Gpt2

WARM_UP = 2  # steps
TOKENS = 32


class CastAllToAll:
    """A reduce-scatter in plain torch, as people write it by hand: cast to 16 bits, all-to-all, sum in FP32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        wire = input_tensor.to(self._dtype)
        received = torch.empty_like(wire)
        dist.all_to_all_single(received, wire, group=group)
        torch.sum(received.view(group.size(), -1), 0, dtype=torch.float32, out=output_tensor)
        output_tensor /= group.size()


class Torchs:
    """Torch's own, where it is called by hand as the others are."""

    allocate = CastAllToAll.allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


class Timed:
    """A reduce-scatter whose seconds are counted, from when all ranks call it."""

    def __init__(self, reduce_scatter: Any) -> None:
        self._reduce_scatter, self.allocate, self.seconds = reduce_scatter, reduce_scatter.allocate, 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        dist.barrier()
        start = time.perf_counter()
        self._reduce_scatter(*args, **kwargs)
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Reduction:
    """How a contestant reduces sharded gradients: by default as torch does."""

    compress: str | None = None  # the setting of what is scattered
    all_gather: str | None = None  # the setting of parameters
    replicate: str | None = None  # the setting of what replicas exchange
    transport: str | None = None  # None: it chooses
    by_hand: Callable[[], Any] | None = None  # in place of torch's reduce-scatter


ON_ONE_HOST = {
    **{name: Reduction(name) for name in ("fp16", "bf16", "int8")},
    **{f"{name} over gloo": Reduction(name, transport="gloo") for name in ("fp16", "bf16", "int8")},
    "torch": Reduction(by_hand=Torchs),
    "torch, cast to fp16": Reduction(by_hand=partial(CastAllToAll, torch.float16)),
    "torch, cast to bf16": Reduction(by_hand=partial(CastAllToAll, torch.bfloat16)),
}
SHARDED = {
    **{name: Reduction(name) for name in ("none", "fp16", "int8", "int4")},
    **{f"int8, parameters {name}": Reduction("int8", all_gather=name) for name in ("bf16", "int8")},
    "torch": Reduction(),
    "torch, cast to fp16": Reduction(by_hand=partial(CastAllToAll, torch.float16)),
}
HYBRID = {
    **{name: Reduction("none", replicate=name) for name in ("none", "fp16", "int8", "int4")},
    "torch": Reduction(),
}
# Relative to the norm of the gradients that torch's own reduction ends with, whose order of summation may be another.
TOLERANCES = {"none": 2.0**-20, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2.0**-5, "int4": 2.0**-2}
ROUNDED = {None: 1, "bf16": 4, "int8": 8}  # times as much, where parameters are rounded too


def bounds(settings: dict[str, Reduction]) -> dict[str, float]:
    """By contestant, for ours."""
    return {
        name: TOLERANCES[each.replicate or each.compress] * ROUNDED[each.all_gather]
        for name, each in settings.items()
        if each.compress is not None
    }


class Contestant:
    """A transformer of 25 million parameters at a width of 512, sharded block by block, under one reduction."""

    def __init__(self, reduction: Reduction, width: int, replicas: int, timed: bool) -> None:
        torch.manual_seed(0)
        self.model = model = Gpt2(width, 8, 100, 128)
        mesh = init_device_mesh(
            "cpu", (replicas, dist.get_world_size() // replicas), mesh_dim_names=("replicate", "shard")
        )
        native = replicas > 1 and reduction.compress is None
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh if native else mesh["shard"])
        self.timed: list[Timed] = []
        ours: ShardedModel | None = None
        if reduction.compress is not None:
            ours = fastreduce.fsdp.compress(
                model, reduction.compress, all_gather=reduction.all_gather, transport=reduction.transport
            )
        if reduction.replicate is not None:
            fastreduce.fsdp.replicate(model, mesh["replicate"], reduction.replicate, transport=reduction.transport)
        if ours is not None and timed:
            for group, scatter in zip(ours._groups, ours._scatters, strict=True):
                group.reduce_with(self._time(scatter))
        if reduction.by_hand is not None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    scatter = reduction.by_hand()
                    module.set_custom_reduce_scatter(self._time(scatter) if timed else scatter)

    def _time(self, reduce_scatter: Any) -> Timed:
        self.timed.append(Timed(reduce_scatter))
        return self.timed[-1]

    def step(self, tokens: Tensor) -> float:
        """Forward and backward; no optimizer. Seconds of the reduce-scatters where they are timed, else of all."""
        self.model.zero_grad()
        for each in self.timed:
            each.seconds = 0.0
        start = time.perf_counter()
        self.model(tokens).backward()
        return sum(each.seconds for each in self.timed) if self.timed else time.perf_counter() - start

    def gradients(self) -> Tensor:
        """This rank's parts of them."""
        grads: list[Any] = [parameter.grad for parameter in self.model.parameters()]
        return torch.cat([grad.to_local().flatten() for grad in grads])


def measure(
    rank: int, world_size: int, settings: dict[str, Reduction], width: int, rounds: int, replicas: int, timed: bool
) -> dict[str, Any]:
    """Seconds by contestant, alternating: of the reduce-scatters of a step where they are `timed`, else of a step.

    First, gradients are held against torch's.
    """
    set_up_process()
    torch.manual_seed(1 + rank)
    tokens = torch.randint(100, (1, TOKENS // 4 if timed else TOKENS))
    contestants = {name: Contestant(each, width, replicas, timed) for name, each in settings.items()}
    for contestant in contestants.values():
        for _ in range(WARM_UP):
            contestant.step(tokens)
    expected = contestants["torch"].gradients()
    errors = {name: float((each.gradients() - expected).norm() / expected.norm()) for name, each in contestants.items()}
    assert not (said := too_far(errors, bounds(settings))), said
    times: dict[str, list[float]] = {name: [] for name in settings}
    gc.collect()
    gc.disable()
    for name in turns(contestants, rounds):
        dist.barrier()
        times[name].append(contestants[name].step(tokens))
        contestants[name].model.zero_grad()
    gc.enable()
    dist.barrier()
    return {"times": times}


def main() -> None:
    """Measure steps on a rank of two nodes, of one rank each or of several, and write this rank's results."""
    width, rounds = (int(word) for word in sys.argv[1:3])
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings, replicas = (SHARDED, 1) if world_size == 2 else (HYBRID, 2)
    results = measure(rank, world_size, settings, width, rounds, replicas, timed=False)
    Path(sys.argv[3], f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
