"""Models that FSDP2 has sharded, and histories of their trainings, with books."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastreduce.fsdp
from tests.support import tolerances


def network(seed: int = 0) -> nn.Module:
    """Sizes that no number of ranks divides, one of them 1: of it a rank has nothing."""
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(50, 51), nn.ReLU(), nn.Linear(51, 1))
    return nn.Sequential(nn.Linear(30, 50), nn.ReLU(), inner)


class Quantized(nn.Module):
    """Integers that nothing trains, in front of what is trained beside them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = nn.Parameter(torch.arange(240).view(30, 8) % 7 - 3, requires_grad=False)
        self.left, self.right = nn.Parameter(torch.randn(30, 2)), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.given.to(x.dtype) / 4 + self.left @ self.right)


def shard(model: nn.Module, **options: Any) -> Any:
    """The same, with the outer children and the model itself sharded: two groups in one, and a root without any."""
    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    return fully_shard(model, **options)


def mesh_of(replicas: int) -> DeviceMesh:
    """Of all ranks: so many replicas, and a shard on each of the others."""
    sizes = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def batch(rank: int, step: int = 0) -> Tensor:
    """A rank's inputs of one step."""
    return torch.randn(16, 30, generator=torch.Generator().manual_seed(1000 * step + rank))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, by name, of those that have one; every rank calls it."""
    found: dict[str, Any] = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.full_tensor() for name, grad in found.items() if grad is not None}


# Histories

EACH_WAY = {
    "scattered": {"reduce_scatter": "int8:error_feedback"},
    "scattered, int4": {"reduce_scatter": "int4:error_feedback"},
    "averaged": {"all_reduce": "int8:error_feedback"},
    "both": {"reduce_scatter": "int8:error_feedback", "all_reduce": "int4:error_feedback"},
}
SHAPES = {"a": (6, 50), "b": (1, 40), "c": (7, 20)}


@dataclass(frozen=True)
class Step:
    """One step of a history."""

    magnitude: float = 1.0
    names: str = "abc"  # the parameters in its loss
    micro_batches: int = 1  # only the last is reduced
    clip: bool = False
    ends: str = "step"  # "skip": gradients are thrown away; "keep": the next step's are added to them
    overflows: bool = False  # an infinity on the last rank
    half: bool = False  # gradients are zeros but for the first half of their rows
    to_none: bool = True
    saved: bool = False
    divides_by: float | None = None  # `set_gradient_divide_factor`, from this step on
    moved: str = ""  # when the model is, and back: "before" the backward, or "behind" it


def random_history(seed: int, moves: bool = False, steps: int = 8) -> list[Step]:
    """The same for a seed; `moves`: and the model is moved now and then."""
    draw, draw_move = random.Random(seed), random.Random(f"{seed}")
    return [
        Step(
            magnitude=10 ** draw.uniform(-2, 2),
            names=draw.choice(["abc", "abc", "ac", "bc"]),
            micro_batches=draw.choice([1, 1, 2]),
            clip=draw.random() < 0.4,
            ends=draw.choice(["step", "step", "step", "skip", "keep"]),
            overflows=draw.random() < 0.15,
            half=draw.random() < 0.3,
            to_none=draw.random() < 0.7,
            saved=draw.random() < 0.2,
            divides_by=draw.choice([None, None, 10 ** draw.uniform(-2, 2)]),
            moved=draw_move.choice(["", "before", "behind"]) if moves else "",
        )
        for _ in range(steps)
    ]


class One(nn.Module):
    """A parameter whose gradient is what one says."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, gradient: Tensor) -> Tensor:
        return x + (self.weight * gradient).sum()


class Given(nn.Module):
    """A model whose gradients are what one says."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: One(shape) for name, shape in SHAPES.items()})

    def forward(self, x: Tensor, given: dict[str, Tensor]) -> Tensor:
        for name, gradient in given.items():
            x = self.parts[name](x, gradient)
        return x


def given(seed: int, rank: int, name: str, step: Step) -> Tensor:
    """Of one parameter in one micro-batch: magnitudes differ widely within a block."""
    shape = SHAPES[name]
    size = shape[0] * shape[1]
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed * 64 + rank * 4 + ord(name) - 97))
    found = (noise * torch.logspace(-2, 0, size) * step.magnitude).view(shape)
    if step.half:
        found[(shape[0] + 1) // 2 :] = 0
    return found


class Training:
    """One rank's training of a history, with books of what was applied, and would have been without compression."""

    def __init__(self, rank: int, world_size: int, scaled: bool, settings: Mapping[str, str]) -> None:
        self.rank, self.world_size = rank, world_size
        self.model: Any = Given()
        mesh = mesh_of(2 if "all_reduce" in settings else 1)
        for part in self.model.parts.values():
            fully_shard(part, mesh=mesh["shard"])
        fully_shard(self.model, mesh=mesh["shard"])
        self.kinds = list(settings)
        if "all_reduce" in settings:
            self.reduction = fastreduce.fsdp.replicate(self.model, mesh["replicate"], settings["all_reduce"])
        if "reduce_scatter" in settings:
            self.reduction = fastreduce.fsdp.compress(self.model, settings["reduce_scatter"])
        else:  # torch's own over gloo sums, and divides behind the all-reduce
            for part in self.model.parts.values():
                part.set_force_sum_reduction_for_comms(True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled=scaled)
        zeros = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.wanted, self.applied = dict(zeros), dict(zeros)
        self.exact: dict[str, Tensor] = {}
        self.share = 1.0  # of a gradient in the average, times the number of ranks
        self.largest = 0.0
        self.optimizer.register_step_pre_hook(self._record)

    def _record(self, *_: Any) -> None:
        for name, exact in self.exact.items():
            self.applied[name] = self.applied[name] + gradients(self.model.parts[name])["weight"].double()
            self.wanted[name] = self.wanted[name] + exact
            self.largest = max(self.largest, float(exact.abs().max()))

    def step(self, index: int, step: Step) -> None:
        """One step; every rank calls it."""
        scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        if step.divides_by is not None:
            for part in self.model.parts.values():
                part.set_gradient_divide_factor(step.divides_by)
            self.share = self.world_size / step.divides_by
        if step.moved == "before":
            self.model.double().float()
        for micro in range(step.micro_batches):
            self.model.set_requires_gradient_sync(micro == step.micro_batches - 1)
            mine: dict[str, Tensor] = {}
            for name in step.names:
                all_ranks = [given(16 * index + micro, r, name, step) for r in range(self.world_size)]
                mean = torch.stack(all_ranks).double().mean(0) * scale
                self.exact[name] = self.exact[name] + mean if name in self.exact else mean
                mine[name] = all_ranks[self.rank] / self.share
            if step.overflows and micro == 0 and self.rank == self.world_size - 1:
                mine[step.names[-1]][0, -1] = torch.inf
            self.scaler.scale(self.model(torch.zeros((), requires_grad=True), mine)).backward()
        if step.moved == "behind":
            self.model.double().float()
        if step.ends == "keep" and not step.overflows:
            return
        if step.ends == "step" and (self.scaler.is_enabled() or not step.overflows):
            self._apply(step, scale)
        self.optimizer.zero_grad(set_to_none=step.to_none)
        self.exact = {} if step.to_none else {n: torch.zeros_like(e) for n, e in self.exact.items()}

    def _apply(self, step: Step, scale: float) -> None:
        factor = 1.0 / scale
        self.scaler.unscale_(self.optimizer)
        if step.clip:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            factor *= float((0.5 / (norm.full_tensor() + 1e-6)).clamp(max=1.0))  # type: ignore[attr-defined]
        self.exact = {name: exact * factor for name, exact in self.exact.items()}
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def worst(self) -> float:
        """By how much the law is missed, of what roundings may do: at most 1."""
        state, found = self.reduction.state_dict(), 0.0
        for name in SHAPES:
            path = f"parts.{name}.weight"
            short = self.wanted[name] - self.applied[name]
            debt = torch.zeros_like(short)
            for kept in (state[kind] for kind in self.kinds):
                debt += kept[path].full_tensor().double()
            bound = tolerances.APPLIED * max(self.largest, float(short.abs().max()), 1e-30)
            found = max(found, float((short - debt).abs().max()) / bound)
        return found


def run_history(rank: int, world_size: int, seed: int, settings: Mapping[str, str], moves: bool = False) -> float:
    """By how much a random history misses the law, with settings of `compress` ("reduce_scatter") and `replicate`."""
    return run_steps(rank, world_size, [Step(), *random_history(seed, moves)], settings, bool(seed % 2))


def run_steps(rank: int, world_size: int, history: list[Step], settings: Mapping[str, str], scaled: bool) -> float:
    """The same of a history that is given; `scaled`: with a GradScaler."""
    training = Training(rank, world_size, scaled, settings)
    for index, step in enumerate(history):
        training.step(index, step)
        if step.saved:
            training.reduction.state_dict()
    training.optimizer.zero_grad()
    return training.worst()
