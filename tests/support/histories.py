"""Histories of a training: what its optimizer got, and what it would have got without compression."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fastreduce
from fastreduce import Compression, hooks
from fastreduce.reduction import one_call, saved_residuals
from fastreduce.reduction.buckets import BucketPlan
from tests.support import tolerances

SHAPES = ((20, 15), (7,), (13, 10))
SIZES = (300, 7, 130)
NAMES = ("a", "b", "c")


def of_trainings(examples: int) -> settings:
    """So many random histories, the same in every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],  # every example takes a whole training: to shrink one takes minutes
        suppress_health_check=list(HealthCheck),
    )


def quarters(settings: Sequence[str], histories: int) -> list[Any]:
    """For `parametrize`: each setting with the seeds of each quarter of the histories; `make test` has one of each."""
    parts = [range(first, first + histories // 4) for first in range(0, histories, histories // 4)]
    return [
        pytest.param(setting, part, id=f"{setting}-{part.start}", marks=[pytest.mark.long] * (i != j))
        for i, setting in enumerate(settings)
        for j, part in enumerate(parts)
    ]


@dataclass(frozen=True)
class Step:
    """One step of a history."""

    seed: int = 0
    magnitude: float = 1.0
    used: tuple[str, ...] = ("abc",) * 4  # by rank, the parameters that its loss contains
    micro_batches: int = 1  # the last one is synchronised
    clip: str = ""  # "", "ours" or "torch"
    max_norm: float = 1.0
    ends: str = "step"  # "step"; "skip": gradients are thrown away; "keep": they stay for the next step
    overflows: str = ""  # a parameter with an infinity on rank 1
    zero_late: bool = False  # gradients are thrown away between forward and backward
    early: tuple[int, ...] = ()  # ranks that throw them away before the forward all the same
    to_none: bool = True
    switch: str = ""  # a setting that begins with the step
    switched_cap_mb: float | None = None
    saved: bool = False  # a checkpoint ends the step, and training goes on from it
    looks_again: bool = False  # a forward of its own between backward and the optimizer; the setting begins with that
    halved: bool = False  # gradients are multiplied by hand before it
    looks_late: bool = False  # a forward of its own behind clipping
    thaws: str = ""  # parameters that require a gradient from where the setting begins


@dataclass(frozen=True)
class Setup:
    """How a history is trained."""

    way: str = "ddp"  # "ddp"; "hook": torch's class with our hook; "call": all_reduce_gradients
    optimizer: str = "sgd"  # "sgd", "adam", or "fused": Adam that takes the loss scale out itself
    scaled: bool = False
    setting: str = "int8:block=64"
    bucket_cap_mb: float = 1e-6
    views: bool = False
    kept_in: str = ""  # "": FP32; "8bit"; "bf16"
    frozen: str = ""  # parameters that require none when they are wrapped


class Given(nn.Module):
    """A model whose gradients are what one says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(shape)) for shape in SHAPES)

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        terms = ((getattr(self, name).flatten() * gradient).sum() for name, gradient in gradients.items())
        return sum(terms, torch.zeros(()))


def gradient(step: Step, index: int, micro: int, rank: int, name: str) -> Tensor:
    """Of one parameter in one micro-batch: magnitudes differ widely within a block."""
    size = SIZES[NAMES.index(name)]
    key = (((step.seed * 64 + index) * 8 + micro) * 8 + rank) * 4 + NAMES.index(name)
    noise = torch.randn(size, generator=torch.Generator().manual_seed(key))
    found = noise * torch.logspace(-2, 0, size) * step.magnitude
    if step.overflows == name and rank == 1 and micro == 0:
        found[0] = torch.inf
    return found


class Training:
    """One rank's training of a history, with its books."""

    def __init__(self, setup: Setup, rank: int, world_size: int) -> None:
        self.setup, self.rank, self.world_size = setup, rank, world_size
        self.applied = {name: torch.zeros(size, dtype=torch.float64) for name, size in zip(NAMES, SIZES, strict=True)}
        self.wanted = {name: torch.zeros_like(value) for name, value in self.applied.items()}
        self.exact: dict[str, Tensor | None] = dict.fromkeys(NAMES)  # what `.grad` would be, without compression
        self.largest = 0.0
        self.frozen = set(setup.frozen)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3, enabled=setup.scaled)
        self.build()

    def build(self) -> None:
        setup = self.setup
        feedback = f"error_feedback={setup.kept_in or 'true'}"
        spec = setup.setting if setup.setting.startswith(("powersgd", "topk")) else f"{setup.setting},{feedback}"
        self.module = Given()
        for name in self.frozen:
            getattr(self.module, name).requires_grad_(False)
        self.state: Any = None
        self.ddp: Any = self.module
        options: dict[str, Any] = {"bucket_cap_mb": setup.bucket_cap_mb, "gradient_as_bucket_view": setup.views}
        if setup.way == "ddp":
            self.ddp = fastreduce.DistributedDataParallel(self.module, compression=spec, **options)
            self.state = self.ddp.reducer
        elif setup.way == "hook":
            self.ddp = TorchDDP(self.module, find_unused_parameters=True, **options)
            self.state = hooks.CompressState(spec, named_parameters=self.module.named_parameters())
            self.ddp.register_comm_hook(self.state, hooks.compress)
        else:
            self.spec = spec
        kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "fused": torch.optim.Adam}
        more = {"fused": True} if setup.optimizer == "fused" else {}
        self.optimizer = kinds[setup.optimizer](self.module.parameters(), lr=1e-3, **more)
        self.optimizer.register_step_pre_hook(self.record)

    def record(self, *_: Any) -> None:
        """What the optimizer gets, and would have got."""
        found = getattr(self.optimizer, "found_inf", None)
        if found is not None and found:
            return
        scale = getattr(self.optimizer, "grad_scale", None)
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                divisor = 1.0 if scale is None else float(scale)
                exact = self.exact[name]
                assert exact is not None
                self.applied[name] += parameter.grad.flatten().double() / divisor
                self.wanted[name] += exact / divisor
                self.largest = max(self.largest, float(exact.abs().max()) / divisor)

    def multiply(self, factor: float) -> None:
        self.exact = {name: None if exact is None else exact * factor for name, exact in self.exact.items()}

    def zero(self, step: Step) -> None:
        self.optimizer.zero_grad(set_to_none=step.to_none)
        for name, parameter in self.module.named_parameters():
            self.exact[name] = None if parameter.grad is None else torch.zeros(parameter.numel(), dtype=torch.float64)

    def used(self, step: Step, rank: int) -> str:
        return "".join(name for name in step.used[rank] if name not in self.frozen) or "b"  # else it has no backward

    def step(self, index: int, step: Step, zero_first: bool) -> None:
        if not step.looks_again:
            self.switch(step)
        late = step.zero_late and self.rank not in step.early
        if zero_first and not late:
            self.zero(step)
        for micro in range(step.micro_batches):
            self.ddp.require_backward_grad_sync = micro == step.micro_batches - 1
            mine = {n: gradient(step, index, micro, self.rank, n) for n in self.used(step, self.rank)}
            loss = self.ddp(mine)
            if zero_first and late and micro == 0:
                self.zero(step)
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
        self.add_exact(index, step)
        if self.setup.way == "call":
            fastreduce.all_reduce_gradients(self.module.parameters(), self.spec)
        if step.halved:
            self.halve()
        if step.looks_again:
            self.switch(step)
            self.forward_alone(mine)
        bad = any(p.grad is not None and not p.grad.isfinite().all() for p in self.module.parameters())
        for name, parameter in self.module.named_parameters():
            assert (self.exact[name] is None) == (parameter.grad is None), name
        if step.ends == "keep" and not bad:
            return
        if step.ends == "step" and (self.setup.scaled or not bad):
            self.apply(step, mine)
        if bad and step.ends == "keep":  # else the next one begins with that
            self.zero(step)

    def switch(self, step: Step) -> None:
        for name in step.thaws:
            getattr(self.module, name).requires_grad_(True)
        self.frozen -= set(step.thaws)
        if step.switch and self.setup.way == "ddp":
            self.ddp.set_compression(step.switch, bucket_cap_mb=step.switched_cap_mb)

    def add_exact(self, index: int, step: Step) -> None:
        scale = self.scaler.get_scale() if self.setup.scaled else 1.0
        for name in NAMES:
            if any(name in self.used(step, rank) for rank in range(self.world_size)):
                total = torch.zeros(SIZES[NAMES.index(name)], dtype=torch.float64)
                for rank in range(self.world_size):
                    if name in self.used(step, rank):
                        for micro in range(step.micro_batches):
                            total += gradient(step, index, micro, rank, name).double() * scale
                exact = self.exact[name]
                self.exact[name] = total / self.world_size + (0 if exact is None else exact)

    def forward_alone(self, mine: dict[str, Tensor]) -> None:
        """With gradients, and without a backward, which torch's class does not take where it looks for unused ones."""
        if self.setup.way != "hook":
            self.ddp(mine)

    def halve(self) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self.multiply(0.5)

    def apply(self, step: Step, mine: dict[str, Tensor]) -> None:
        if self.setup.scaled:
            scale = self.scaler.get_scale()
            if step.clip:
                self.scaler.unscale_(self.optimizer)
                self.multiply(1 / scale)
            elif self.setup.optimizer != "fused":
                self.multiply(1 / scale)
        if step.clip and any(p.grad is not None for p in self.module.parameters()):
            if step.clip == "ours" and self.setup.way == "ddp":
                norm = self.ddp.clip_grad_norm_(step.max_norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), step.max_norm)
            self.multiply(float((step.max_norm / (norm + 1e-6)).clamp(max=1.0)))
        if step.looks_late:
            self.forward_alone(mine)
        if self.setup.scaled:
            self.scaler.scale(torch.zeros(()))
            if any(p.grad is not None for p in self.module.parameters()):
                self.scaler.step(self.optimizer)
                self.scaler.update()
        else:
            self.optimizer.step()

    def books(self) -> dict[str, Any]:
        """What was applied, what should have been, and what error feedback keeps at the end."""
        return {"applied": self.applied, "wanted": self.wanted, "largest": self.largest, "kept": kept_by(self)}

    def save_and_load(self) -> None:
        """Go on from a checkpoint."""
        states = self.module.state_dict(), self.state.state_dict(), self.optimizer.state_dict()
        self.build()
        for part, state in zip((self.module, self.state, self.optimizer), states, strict=True):
            part.load_state_dict(state)
        self.exact = dict.fromkeys(NAMES)


def train(rank: int, world_size: int, setup: Setup, history: list[Step]) -> dict[str, Any]:
    """One rank's books, and what its error feedback keeps at the end."""
    training = Training(setup, rank, world_size)
    # Before an optimizer's first step nobody can tell that there is one, and that it leaves a step out.
    training.step(len(history), Step(), True)
    zero_first = True
    for index, step in enumerate(history):
        training.step(index, step, zero_first)
        zero_first = step.ends != "keep"
        if step.saved and zero_first and training.state is not None:
            training.save_and_load()
            training.step(len(history) + 1 + index, Step(), True)
    training.optimizer.zero_grad()
    return training.books()


def kept_by(training: Training) -> dict[str, Any]:
    """What error feedback keeps, times its units: in units of what was applied."""
    if training.state is not None:
        return training.state.state_dict()
    parameters = list(training.module.parameters())
    found = [each.find(parameters) for kept in one_call._alive for each in kept.owners.values()]
    (pipelines,) = (reduction.pipelines for reduction in found if reduction is not None)
    plan = BucketPlan(tuple(p.bucket for p in pipelines), training.world_size)
    state = saved_residuals.save(plan, pipelines, training.rank, training.world_size, training.spec)
    rename = {f"tensor {i}": name for i, name in enumerate(NAMES)}
    return {
        **state,
        "buckets": [[rename[n] for n in names] for names in state["buckets"]],
        "residuals": {rename[n]: v for n, v in state["residuals"].items()},
        "units": {rename[n]: v for n, v in state["units"].items()},
    }


def debt(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """By parameter: the mean of first-stage residuals over the ranks, and the second-stage ones, in units applied."""
    of_shards = saved_residuals.of_shards(states, saved_residuals.alignments(states[0]))
    found = {}
    for name in {name for state in states for name in state["residuals"]}:
        nothing = torch.zeros(SIZES[NAMES.index(name)])  # a rank may have nothing left where error feedback is over
        mean = torch.stack([state["residuals"].get(name, nothing).double() for state in states]).mean(0)
        if name in of_shards:
            mean += of_shards[name].double()
        found[name] = mean * next((s["units"][name] for s in states if name in s["units"]), 1.0)
    return found


def check_law(setup: Setup, results: list[dict[str, Any]]) -> None:
    kept = debt([result["kept"] for result in results])
    low_rank, form = setup.setting.startswith("powersgd"), Compression.parse(setup.setting).format
    for name in NAMES:
        short = results[0]["wanted"][name] - results[0]["applied"][name]
        # What a rank's rounding may do, in all steps together: of the largest gradient that was applied.
        share = tolerances.APPLIED_LOW_RANK if low_rank else tolerances.APPLIED
        if setup.kept_in:
            share = tolerances.APPLIED_KEPT_IN[setup.kept_in] * tolerances.LARGEST_RESIDUAL[form]
        bound = share * max(results[0]["largest"], float(short.abs().max()))
        worst = float((short - kept.get(name, torch.zeros(()))).abs().max())
        assert worst <= bound, f"{name}: applied and exact gradients differ by {worst:.3g} more than what is kept"
