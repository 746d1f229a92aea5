"""Quality: a whole training for each setting and seed, and what their losses and metrics say."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ....run.contestants import TORCHS
from ...ending import LOGS
from .equivalence import Equivalence, compare
from .plan import AGAIN, BASE, Plan, contestant_of
from .trainings import Line, Training, TrainingError, fill, read_log

Stamp = tuple[int, int, int]

FINAL = 0.1  # the part of a training, at its end, whose mean loss is its result
SMOOTHED_STEPS = 10  # a target is reached by the mean loss of so many steps
BEGUN = 0.25  # the part of what a training gains, by which another one that begins there has begun before
MEASURED_STEPS = 10  # of a training under none, in which gradients are sent through the other settings and back
MEASURED_EVERY = 50  # the same where its length is not known
SAME_SEEDS = (
    "all seeds gave none the same loss: the script sets a seed of its own, so pass it {seed}, or read FASTREDUCE_SEED"
)


@dataclass(frozen=True)
class Outcome:
    """One training: its losses, the mean over all ranks, with the seconds since its first step, and its metric."""

    setting: str
    seed: int
    losses: list[float]
    seconds: list[float]
    metric: float | None = None

    @property
    def final(self) -> float:
        """The mean loss of the last tenth."""
        count = max(1, round(FINAL * len(self.losses)))
        return float(np.mean(self.losses[-count:]))

    def reaches(self, target: float) -> tuple[int, float] | None:
        """The first step, from 1, and its second, at which the mean of the last steps is the target or below."""
        for step in range(SMOOTHED_STEPS, len(self.losses) + 1):
            if np.mean(self.losses[step - SMOOTHED_STEPS : step]) <= target:
                return step, self.seconds[step - 1]
        return None


@dataclass(frozen=True)
class GradientErrors:
    """What settings would have lost of the gradients of one step under none, over all ranks.

    Attributes:
        errors: by setting and group of parameters, squared error over squares (vNMSE).
    """

    seed: int
    step: int
    errors: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Quality:
    """One setting's: final losses beside none's of the same seeds; likewise metrics, where there are any.

    Attributes:
        seeds: those of which both trainings are there.
        note: why there is no test, or "".
        target_steps: medians over the seeds that reach the target, with the seconds.
        reached: how many do.
    """

    setting: str
    seeds: list[int]
    final: float
    loss: Equivalence | None
    metric_mean: float | None = None
    metric: Equivalence | None = None
    note: str = ""
    target_steps: float | None = None
    target_seconds: float | None = None
    reached: int = 0
    outcomes: list[Outcome] = field(default_factory=list, repr=False)


def trainings(plan: Plan) -> list[Training]:
    """Seed by seed, so that what is there can be paired whenever it ends."""
    return [
        Training(
            what=f"the training under {setting} with seed {seed}",
            label=f"{fill('{setting}', plan, setting, seed)}-seed{seed}",
            setting=setting,
            seed=seed,
            first=contestant_of(setting),
            orders={"end": plan.length, **(_shadow(plan) if setting == BASE else {})},
        )
        for seed in plan.seeds
        for setting in plan.settings
    ]


def are_alike(outcomes: Sequence[Outcome]) -> bool:
    """Whether the trainings under `none`, of several seeds, have the same losses."""
    losses = [outcome.losses for outcome in outcomes if outcome.setting == BASE]
    return len(losses) > 1 and all(each == losses[0] for each in losses)


def _shadow(plan: Plan) -> dict[str, object]:
    ours = tuple(setting for setting in plan.settings if setting not in (BASE, AGAIN, *TORCHS))
    every = max(1, plan.length // MEASURED_STEPS) if plan.length else MEASURED_EVERY
    return {"shadow": ours, "shadow_every": every}


def read_errors(training: Training, lines: Sequence[Line]) -> list[GradientErrors]:
    """What settings would have lost of a training's gradients, where that was measured."""
    return [
        GradientErrors(training.seed, line["step"], line["gradient_errors"])
        for line in lines
        if "gradient_errors" in line
    ]


def read_outcome(plan: Plan, training: Training, lines: Sequence[Line], before: Stamp | None = None) -> Outcome:
    """What a training has left; `before` is what `stamp_metric` said when it began.

    Raises:
        TrainingError: if it took no step, or its metric is not where the user says.
    """
    losses = [float(line["loss"]) for line in lines if "loss" in line]
    if not losses:
        raise TrainingError(
            f"{training.what} took no step: no backward through its DistributedDataParallel was seen", 2
        )
    seconds = [float(line["seconds"]) for line in lines if "loss" in line]
    return Outcome(training.setting, training.seed, losses, seconds, _read_metric(plan, training, before))


def stamp_metric(plan: Plan, training: Training) -> Stamp | None:
    """The metric file's inode, size and time of change; None where there is none."""
    if plan.metric_file is None:
        return None
    with contextlib.suppress(OSError):
        found = _metric_path(plan, training)[0].stat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _metric_path(plan: Plan, training: Training) -> tuple[Path, str]:
    path, _, key = (plan.metric_file or "").partition(":")  # before {out} is filled in, which may hold a colon too
    path, key = (fill(text, plan, training.setting, training.seed) for text in (path, key))
    return Path(path), key


def _read_metric(plan: Plan, training: Training, before: Stamp | None) -> float | None:
    try:
        if plan.metric_line is not None:
            log = plan.out / LOGS / f"{training.label}.txt"
            found = re.findall(plan.metric_line, read_log(log), re.MULTILINE)
            if not found:
                raise ValueError(f"no line of {log} matches --metric-line {plan.metric_line}")
            return float(found[-1])
        if plan.metric_file is not None:
            path, key = _metric_path(plan, training)
            if before is not None and stamp_metric(plan, training) == before:
                raise ValueError(f"{path} is older than the training")
            text = path.read_text("utf-8")
            return float(json.loads(text)[key] if key else text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = f"{error.strerror}: {error.filename}" if isinstance(error, OSError) else f"{error!r:.200}"
        raise TrainingError(f"{training.what} left no metric: {said}", 2) from None
    return None


def summarise(plan: Plan, outcomes: Sequence[Outcome]) -> list[Quality]:
    """What the trainings so far say of each setting, `none` first.

    Where they have ended early, means and curves are of the seeds that all settings have.
    """
    of = {(outcome.setting, outcome.seed): outcome for outcome in outcomes}
    there = {setting for setting, _ in of}
    shown = [seed for seed in plan.seeds if all((setting, seed) in of for setting in there)] or plan.seeds
    based = [seed for seed in plan.seeds if (BASE, seed) in of]
    fixed = are_alike([of[BASE, seed] for seed in based])
    return [_summarise(plan, setting, of, based, fixed, shown) for setting in plan.settings]


def _summarise(
    plan: Plan,
    setting: str,
    of: dict[tuple[str, int], Outcome],
    based: Sequence[int],
    fixed: bool,
    shown: Sequence[int],
) -> Quality:
    own = [of[setting, seed] for seed in shown if (setting, seed) in of]
    seeds = [seed for seed in based if (setting, seed) in of]
    pairs = [(of[setting, seed], of[BASE, seed]) for seed in seeds]
    loss = metric = None
    note = ""
    if setting != BASE and pairs:
        why_not = _why_no_pairs(plan, pairs, fixed)
        lengths = {len(outcome.losses) for pair in pairs for outcome in pair}
        note = why_not or (f"trainings took {min(lengths)} to {max(lengths)} steps" if len(lengths) > 1 else "")
        if not why_not:
            loss = compare([a.final for a, _ in pairs], [b.final for _, b in pairs], plan.margin)
        if not why_not and plan.has_metric:
            metric = compare(
                [math.nan if a.metric is None else a.metric for a, _ in pairs],
                [math.nan if b.metric is None else b.metric for _, b in pairs],
                plan.margin,
            )
    reached = [found for outcome in own if plan.target is not None and (found := outcome.reaches(plan.target))]
    metrics = [outcome.metric for outcome in own if outcome.metric is not None]
    return Quality(
        setting=setting,
        seeds=seeds,
        final=float(np.mean([outcome.final for outcome in own])) if own else math.nan,
        loss=loss,
        metric_mean=float(np.mean(metrics)) if metrics else None,
        metric=metric,
        note=note,
        target_steps=float(np.median([step for step, _ in reached])) if reached else None,
        target_seconds=float(np.median([seconds for _, seconds in reached])) if reached else None,
        reached=len(reached),
        outcomes=own,
    )


def _why_no_pairs(plan: Plan, pairs: Sequence[tuple[Outcome, Outcome]], fixed: bool) -> str:
    """Why trainings of a setting and of none cannot be held against each other; "" where they can."""
    if fixed and any(ours.losses != base.losses for ours, base in pairs):
        return SAME_SEEDS
    for ours, base in pairs:
        first = ours.losses[0], base.losses[0]
        largest = max((abs(loss) for loss in [*ours.losses, *base.losses] if math.isfinite(loss)), default=0.0)
        apart = max(plan.margin * largest, BEGUN * abs(base.losses[0] - base.final))
        if abs(first[0] - first[1]) > apart:
            return (
                f"with seed {ours.seed} it begins at {first[0]:.4g} and none at {first[1]:.4g}, though nothing has "
                "been reduced by then: the script goes on from what another training has left (let it write to "
                "'{out}/{setting}-{seed}', which stands for a folder of its own), or draws at random what no seed tells"
            )
        lengths = len(ours.losses), len(base.losses)
        if min(lengths) < (1 - FINAL / 2) * max(lengths):
            return (
                f"with seed {ours.seed} it took {lengths[0]} steps, and none {lengths[1]}: --train STEPS gives all the "
                "same"
            )
    return ""
