"""`hooks.compress` under error feedback on torch's class, in random histories: all is applied that `none` applies."""

from __future__ import annotations

import contextlib
import random
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from fastreduce.hooks import CompressState, compress
from tests.support import tolerances
from tests.support.histories import quarters
from tests.support.models import Given
from tests.support.ranks import RankPool

SHAPES = {"a": (20, 15), "b": (7,), "c": (13, 10), "d": (3,)}
EVERY = "".join(SHAPES)
SETTINGS = ["int8:block=16,error_feedback", "int4:error_feedback", "topk:ratio=0.3,min_numel=1"]
GOES_ON = ["", "", "where it is", "in another", "behind steps"]
ZEROS = 20
HISTORIES = 12


@dataclass(frozen=True)
class Step:
    """Some backwards, of which the last reduces.

    `used`: by rank and backward, which parameters. `drops`: between them gradients are thrown away. `ends`: with an
    optimizer's step, skipped, or accumulated on. `multiplied`: behind them gradients are, by name.
    """

    used: list[list[str]]
    drops: bool
    ends: str
    multiplied: dict[str, float]


@dataclass(frozen=True)
class Phase:
    """Some steps, for the first `inputs` of which each rank has some, behind a state that was saved and loaded."""

    goes_on: str
    joins: bool
    divides: bool
    inputs: list[int]
    steps: list[Step]


@dataclass(frozen=True)
class History:
    """What all ranks do."""

    seed: int
    views: bool
    to_none: bool
    partly: bool  # some parameters are left out
    cap: float
    phases: list[Phase] = field(default_factory=list)


def _history(seed: int, world_size: int) -> History:
    draw = random.Random(seed)
    views, to_none, partly = draw.random() < 0.5, draw.random() < 0.6, draw.random() < 0.5
    history = History(seed, views, to_none, partly, draw.choice([1e-6, 1e-3, 25.0]))
    joined = draw.random() < 0.6
    drops = not (partly and to_none)  # torch raises there, of a gradient that is gone

    def step(last: bool, joins: bool) -> Step:
        count = draw.choice([1, 1, 2])
        used = [
            ["".join(name for name in EVERY if not partly or draw.random() < 0.7) or "a" for _ in range(count)]
            for _ in range(world_size)
        ]
        ends = draw.choice(["step", "step", "skip"] + ["on"] * (2 * (not last)))
        if joins:  # nobody tells a rank that has joined what becomes of averages, nor what others multiply by
            ends = "step"
        by = {} if joined or draw.random() < 0.6 else {name: draw.choice([0.25, 0.5, 2.0]) for name in EVERY}
        return Step(used, drops and draw.random() < 0.3, ends, by)

    for _ in range(draw.randint(2, 4)):
        steps = draw.randint(1, 5)
        joins = joined and draw.random() < 0.6
        inputs = [draw.randint(0, steps) if joins else steps for _ in range(world_size)]
        inputs[draw.randrange(world_size)] = steps
        each = [step(i == steps - 1, joins) for i in range(steps)]
        history.phases.append(Phase(draw.choice(GOES_ON), joins, draw.random() < 0.5, inputs, each))
    return history


class Training:
    """Torch's class with the hook; gradients and weights follow from the history alone."""

    def __init__(self, rank: int, history: History, setting: str) -> None:
        self.rank, self.history, self.setting = rank, history, setting
        self.draw = torch.Generator().manual_seed(1000 * history.seed + rank)
        self.make()

    def make(self) -> None:
        history = self.history
        self.model = Given(SHAPES)
        self.ddp = TorchDDP(
            self.model,
            bucket_cap_mb=history.cap,  # type: ignore[arg-type]  # torch takes parts of one
            gradient_as_bucket_view=history.views,
            find_unused_parameters=history.partly,
        )
        self.state = CompressState(self.setting, named_parameters=self.model.named_parameters())
        self.ddp.register_comm_hook(self.state, compress)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def zero(self) -> None:
        self.optimizer.zero_grad(set_to_none=self.history.to_none)

    def take(self, used: list[str], drops: bool = False) -> None:
        for at, names in enumerate(used):
            if at and drops:
                self.zero()
            with contextlib.nullcontext() if at == len(used) - 1 else self.ddp.no_sync():
                self.ddp({name: torch.randn(SHAPES[name], generator=self.draw) for name in names}).backward()

    def step(self, step: Step) -> None:
        self.take(step.used[self.rank], step.drops)
        for name, parameter in self.model.values.items():
            if parameter.grad is not None and name in step.multiplied:
                parameter.grad.mul_(step.multiplied[name])
        if step.ends == "step":
            self.optimizer.step()
        if step.ends != "on":
            self.zero()

    def go_on(self, how: str) -> None:
        """From what is saved here."""
        self.optimizer.zero_grad()
        state = self.state.state_dict()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        if how == "behind steps":
            for _ in range(2):
                self.take([EVERY])
                self.optimizer.step()
                self.optimizer.zero_grad()
        if how == "in another":
            self.make()
            self.optimizer.step()  # so that it is known to be there
        self.state.load_state_dict(state)
        self.model.load_state_dict(weights)

    def run(self) -> list[Tensor]:
        """The weights in the end."""
        self.take([EVERY])
        self.optimizer.step()
        for phase in self.history.phases:
            self.zero()
            if phase.goes_on:
                self.go_on(phase.goes_on)
            ends = self.ddp.join(divide_by_initial_world_size=phase.divides)
            with ends if phase.joins else contextlib.nullcontext():
                for step in phase.steps[: phase.inputs[self.rank]]:
                    self.step(step)
        for _ in range(ZEROS):
            self.optimizer.zero_grad()
            self.ddp({name: torch.zeros(shape) for name, shape in SHAPES.items()}).backward()
            self.optimizer.step()
        return [parameter.detach() for parameter in self.model.parameters()]


class Unwritten(Training):
    """Memory to which torch has written nothing yet, where it looks who used which parameter, is zeros."""

    def make(self) -> None:
        super().make()
        self.ddp.reducer._get_local_used_map().zero_()
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.optimizer.register_step_pre_hook(self._keep)

    def _keep(self, *_: object) -> None:
        self.kept += [(p.grad, p.grad.clone()) for p in self.model.parameters() if p.grad is not None]


def _difference_behind_unwritten(rank: int, world_size: int, views: bool, to_none: bool) -> float:
    """Rank 1 joins before its first backward, with residuals of what rank 0 does not use."""
    step = Step([["bd"], []], drops=False, ends="step", multiplied={})
    phase = Phase("in another", joins=True, divides=False, inputs=[1, 0], steps=[step])
    history = History(0, views, to_none, partly=True, cap=25.0, phases=[phase])
    with warnings.catch_warnings():  # as in `_differences`
        warnings.simplefilter("ignore")
        trainings = [Unwritten(rank, history, spec) for spec in ("none", "int4:error_feedback")]
        exact, applied = (training.run() for training in trainings)
    if to_none and not views:
        assert all(torch.equal(*each) for training in trainings for each in training.kept), "a user may keep gradients"
    return max(float((one - other).abs().max()) for one, other in zip(applied, exact, strict=True))


@pytest.mark.parametrize(
    ("views", "to_none"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.long),
        pytest.param(False, True, marks=pytest.mark.long),
        (False, False),
    ],
)
def test_what_torch_takes_to_be_unused_is_applied_where_a_rank_has_joined_first(
    ranks2: RankPool, views: bool, to_none: bool
):
    assert max(ranks2.run(_difference_behind_unwritten, views, to_none)) < tolerances.IN_CHANGING_LISTS


def _difference_behind_new_buckets(rank: int, world_size: int) -> float:
    """Averages are accumulated on when torch lays its buckets out anew, with copies of them in its new views."""
    steps = [Step([["dcba"]] * world_size, drops=False, ends=ends, multiplied={}) for ends in ("on", "step")]
    phase = Phase("in another", joins=False, divides=False, inputs=[len(steps)] * world_size, steps=steps)
    history = History(0, views=True, to_none=True, partly=False, cap=1e-3, phases=[phase])
    exact, applied = (Training(rank, history, spec).run() for spec in ("none", "int4:error_feedback"))
    return max(float((one - other).abs().max()) for one, other in zip(applied, exact, strict=True))


def test_averages_that_torch_copies_into_new_views_are_still_there(ranks2: RankPool):
    assert max(ranks2.run(_difference_behind_new_buckets)) < tolerances.IN_CHANGING_LISTS


def _differences(rank: int, world_size: int, setting: str, seeds: range) -> dict[int, float]:
    """By history, how far the parameters of this rank are from those under `none`."""
    found = {}
    for seed in seeds:
        history = _history(seed, world_size)
        with warnings.catch_warnings():  # torch's, of parameters that are used, and of steps before one
            warnings.simplefilter("ignore")
            exact, applied = (Training(rank, history, spec).run() for spec in ("none", setting))
        found[seed] = max(float((one - other).abs().max()) for one, other in zip(applied, exact, strict=True))
    return found


def _check(pool: RankPool, setting: str, seeds: range) -> None:
    for found in pool.run(_differences, setting, seeds, timeout=200):
        assert not {seed: far for seed, far in found.items() if far > tolerances.IN_CHANGING_LISTS}


@pytest.mark.parametrize(("setting", "seeds"), quarters(SETTINGS, HISTORIES))
def test_nothing_is_lost_nor_applied_twice(ranks2: RankPool, setting: str, seeds: range):
    _check(ranks2, setting, seeds)


@pytest.mark.long
@pytest.mark.parametrize("setting", SETTINGS)
def test_nothing_is_lost_nor_applied_twice_in_many(ranks3: RankPool, setting: str):
    for first in range(HISTORIES, 5 * HISTORIES, HISTORIES):
        _check(ranks3, setting, range(first, first + HISTORIES))
