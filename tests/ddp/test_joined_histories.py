"""Error feedback in random histories of joins: what has been applied in the end is what `none` applies."""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from fastreduce import DistributedDataParallel, note_applied
from tests.support import tolerances
from tests.support.histories import quarters
from tests.support.models import Given
from tests.support.ranks import OVER_HOSTS, RankPool

SHAPES = {"a": (20, 15), "b": (7,), "c": (13, 10), "d": (3,)}
EVERY = "".join(SHAPES)
SETTINGS = ["int8:block=16,error_feedback", "int4:error_feedback", "topk:ratio=0.3,min_numel=1"]
BY = ["optimizer", "optimizer", "optimizer and word", "word"]
ZEROS = 14
HISTORIES = 12


@dataclass(frozen=True)
class Step:
    """`used`: by rank and backward, which parameters. `ends`: with an optimizer's step, skipped, or accumulated on."""

    used: list[list[str]]
    ends: str


@dataclass(frozen=True)
class Phase:
    """Some steps, for the first `inputs` of which each rank has some."""

    joins: bool
    divides: bool
    inputs: list[int]
    steps: list[Step]
    switch: tuple[str, float] | None
    saves: bool  # behind it, and goes on from that


@dataclass(frozen=True)
class History:
    """What all ranks do."""

    seed: int
    views: bool
    to_none: bool
    cap: float
    by: str  # what applies averages: an optimizer that is seen, which says so itself, too, or who says so
    phases: list[Phase] = field(default_factory=list)
    thaws: dict[str, int] = field(default_factory=dict)  # by parameter, the phase from which on it is trained


def _history(seed: int, world_size: int, thaws: bool) -> History:
    draw = random.Random(seed)

    def step(last: bool) -> Step:
        partly, count = draw.random() < 0.5, draw.choice([1, 1, 2])
        used = [
            ["".join(name for name in EVERY if not partly or draw.random() < 0.7) or "a" for _ in range(count)]
            for _ in range(world_size)
        ]
        return Step(used, draw.choice(["step", "step", "skip"] + ["on"] * (2 * (not last))))

    history = History(seed, draw.random() < 0.3, draw.random() < 0.6, draw.choice([1e-6, 1e-3, 25.0]), draw.choice(BY))
    for _ in range(draw.randint(2, 4)):
        steps = draw.randint(1, 5)
        joins = draw.random() < 0.8
        inputs = [draw.randint(0, steps) if joins else steps for _ in range(world_size)]
        inputs[draw.randrange(world_size)] = steps
        switch = (draw.choice([*SETTINGS, "none"]), draw.choice([1e-3, 25.0])) if draw.random() < 0.4 else None
        each = [step(last=i == steps - 1) for i in range(steps)]
        history.phases.append(Phase(joins, draw.random() < 0.5, inputs, each, switch, draw.random() < 0.3))
    for name in draw.sample(EVERY[1:], 2) if thaws else ():
        history.thaws[name] = draw.randint(0, len(history.phases))
    return history


def _applied(rank: int, world_size: int, history: History, setting: str, switches: bool) -> list[Tensor]:
    model = Given(SHAPES)
    for name in history.thaws:
        model.values[name].requires_grad_(False)
    ddp = DistributedDataParallel(
        model,
        compression=setting,
        bucket_cap_mb=history.cap,
        gradient_as_bucket_view=history.views,
        find_unused_parameters=True,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    draw = torch.Generator().manual_seed(1000 * history.seed + rank)

    def gradients(names: str) -> dict[str, Tensor]:
        trained = [name for name in names if model.values[name].requires_grad]
        return {name: torch.randn(SHAPES[name], generator=draw) for name in trained or "a"}

    def apply() -> None:
        if history.by == "word":
            with torch.no_grad():
                for parameter in ddp.parameters():
                    if parameter.grad is not None:
                        parameter -= parameter.grad
        else:
            optimizer.step()
        if history.by != "optimizer":
            note_applied(ddp.parameters())

    def skip() -> None:
        if history.by == "word":
            note_applied(ddp.parameters(), 0.0)

    def take(used: list[str]) -> None:
        for at, names in enumerate(used):
            with contextlib.nullcontext() if at == len(used) - 1 else ddp.no_sync():
                ddp(gradients(names)).backward()

    take([EVERY])
    apply()
    for at, phase in enumerate(history.phases):
        for name in (name for name, thawed in history.thaws.items() if thawed == at):
            model.values[name].requires_grad_(True)
        if phase.switch and switches:
            ddp.set_compression(phase.switch[0], bucket_cap_mb=phase.switch[1])
        optimizer.zero_grad(set_to_none=history.to_none)
        joining = ddp.join(divide_by_initial_world_size=phase.divides) if phase.joins else contextlib.nullcontext()
        with joining:
            for step in phase.steps[: phase.inputs[rank]]:
                take(step.used[rank])
                if step.ends == "step":
                    apply()
                if step.ends == "skip":
                    skip()
                if step.ends != "on":
                    optimizer.zero_grad(set_to_none=history.to_none)
        if phase.saves:
            optimizer.zero_grad()
            ddp.reducer.load_state_dict(ddp.reducer.state_dict())
    for _ in range(ZEROS):
        optimizer.zero_grad()
        ddp({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
        apply()
    return [parameter.detach() for parameter in ddp.parameters()]


def _differences(rank: int, world_size: int, setting: str, seeds: range, thaws: bool) -> dict[int, float]:
    """By history, how far the parameters of this rank are from those under `none`."""
    found = {}
    for seed in seeds:
        history = _history(seed, world_size, thaws)
        exact = _applied(rank, world_size, history, "none", switches=False)
        applied = _applied(rank, world_size, history, setting, switches=True)
        found[seed] = max(float((one - other).abs().max()) for one, other in zip(applied, exact, strict=True))
    return found


def _check(pool: RankPool, setting: str, seeds: range, thaws: bool = False) -> None:
    for found in pool.run(_differences, setting, seeds, thaws, timeout=200):
        far = {seed: difference for seed, difference in found.items() if difference > tolerances.IN_CHANGING_LISTS}
        assert not far


@OVER_HOSTS
@pytest.mark.parametrize(("setting", "seeds"), quarters(SETTINGS, HISTORIES))
def test_nothing_is_lost_nor_applied_twice(ranks: RankPool, setting: str, seeds: range):
    _check(ranks, setting, seeds)


@pytest.mark.long
@OVER_HOSTS
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_lost_nor_applied_twice_in_many(ranks: RankPool, setting: str):
    for first in range(HISTORIES, 4 * HISTORIES, HISTORIES):
        _check(ranks, setting, range(first, first + HISTORIES))


@pytest.mark.long
@OVER_HOSTS
@pytest.mark.parametrize("setting", SETTINGS)
def test_nor_where_parameters_are_thawed_between_joins(ranks: RankPool, setting: str):
    _check(ranks, setting, range(HISTORIES), thaws=True)


def test_nor_where_a_join_begins_with_it_behind_another(ranks3: RankPool):
    _check(ranks3, SETTINGS[0], range(1), thaws=True)


@pytest.mark.long
@OVER_HOSTS
@pytest.mark.parametrize("setting", SETTINGS)
def test_nor_in_many(ranks: RankPool, setting: str):
    for first in range(HISTORIES, 4 * HISTORIES, HISTORIES):
        _check(ranks, setting, range(first, first + HISTORIES), thaws=True)
