"""Speed: contestants in turn within one training, or, where they cannot change in one, in trainings that alternate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....run.orders import order
from ..intervals import Estimate, estimate_median
from .plan import BASE, SETTLE_STEPS, WARM_UP_STEPS, Plan, contestant_of
from .trainings import Line, Training, file_name

ROUNDS_APART = 6  # the fewest that have an interval
STEPS_APART = 30


Flight = dict[str, Any]  # of a step: `StepFlight` as a dict


@dataclass(frozen=True)
class Turn:
    """Steps that follow each other under one contestant: of each rank the seconds of each."""

    round: int
    contestant: str
    seconds: list[list[float]]

    @property
    def steps(self) -> list[float]:
        """The slowest rank's seconds, for which all wait."""
        return [max(step) for step in zip(*self.seconds, strict=True)]


@dataclass(frozen=True)
class Speed:
    """One contestant's: the median step in milliseconds, and ratios to none, round by round."""

    contestant: str
    step: float
    quartiles: tuple[float, float]
    ratio: Estimate
    ratio_to_torch: Estimate | None
    rounds: int


def rotation(plan: Plan) -> Training:
    """One training in which contestants take turns."""
    orders = {
        "contestants": tuple(map(contestant_of, plan.contestants)),
        "rounds": plan.rounds,
        "warm_up": WARM_UP_STEPS,
        "settle": SETTLE_STEPS,
        "steps": plan.steps,
        "weights_from": plan.weights_from,
    }
    first = plan.weights_from or BASE
    return Training("the training whose steps are timed", "speed", "speed", plan.seeds[0], first, orders)


def apart(plan: Plan, missing: Iterable[str]) -> list[tuple[int, str, Training]]:
    """Trainings of one contestant each, in rounds: where contestants cannot change within one."""
    names = [name for name in plan.contestants if name not in missing]
    found = []
    for number in range(ROUNDS_APART):
        for name in order(names, number):
            contestant = contestant_of(name)
            orders = {
                "contestants": (contestant,),
                "rounds": 1,
                "warm_up": WARM_UP_STEPS,
                "settle": SETTLE_STEPS,
                "steps": STEPS_APART,
            }
            what = f"the training under {name} whose steps are timed, of round {number + 1},"
            label = f"speed-{file_name(name)}-round{number + 1}"
            found.append((number, name, Training(what, label, name, plan.seeds[0], contestant, orders)))
    return found


def read_rotation(contestants: Sequence[str], lines: Sequence[Line]) -> list[Turn]:
    """The turns of the rounds that are complete."""
    found = [Turn(number, name, line["seconds"]) for number, name, line in _turns(contestants, lines)]
    each = len(set(contestants) - missing(lines).keys())
    return found[: len(found) // each * each]


def read_flights(contestants: Sequence[str], lines: Sequence[Line]) -> dict[str, list[Flight]]:
    """Of each contestant's turns a step as rank 0's flight record has it; of torch's there is none."""
    found: dict[str, list[Flight]] = {}
    for _, name, line in _turns(contestants, lines):
        if line["flight"] is not None:
            found.setdefault(name, []).append(line["flight"])
    return found


def _turns(contestants: Sequence[str], lines: Sequence[Line]) -> Iterator[tuple[int, str, Line]]:
    """The lines about turns, each with its round and its contestant, who may have another name there."""
    gone = missing(lines)
    each = len(set(contestants) - gone.keys())
    for line in lines:
        if "turn" in line:
            number, place = divmod(line["turn"], each)
            yield number, [name for name in order(contestants, number) if name not in gone][place], line


def typical(flights: Sequence[Flight]) -> Flight:
    """The median of them, by their length."""
    return sorted(flights, key=lambda flight: float(flight["seconds"]))[len(flights) // 2]


def missing(lines: Sequence[Line]) -> dict[str, str]:
    """Contestants that torch does not have here, and why."""
    return next((line["missing"] for line in lines if "missing" in line), {})


def why_fixed(lines: Sequence[Line]) -> str:
    """Why contestants cannot change within one training; "" where they can."""
    return next((line["fixed"] for line in lines if "fixed" in line), "")


def steps_needed(plan: Plan, gone: Iterable[str], rounds: int) -> int:
    """How many steps of the script so many rounds take."""
    contestants = len(set(plan.contestants) - set(gone))
    return WARM_UP_STEPS + rounds * contestants * (SETTLE_STEPS + plan.steps)


def say_weights(setting: str, copy_seconds: float) -> str:
    """What --weights-from does to the figures."""
    return (
        f"The optimizer saw the averages of {setting}, whoever was timed. For them each step also copies this "
        f"rank's gradients, which takes about {copy_seconds * 1e3:.2g} ms of it; their reduction is not timed."
    )


def summarise(contestants: Sequence[str], measured: Sequence[Turn]) -> list[Speed]:
    """Figures of each contestant that has taken turns, in the order given."""
    by_name: dict[str, dict[int, list[float]]] = {}
    for turn in measured:
        by_name.setdefault(turn.contestant, {})[turn.round] = turn.steps
    whole = set.intersection(*(set(rounds) for rounds in by_name.values())) if by_name else set()
    medians = {name: {r: float(np.median(rounds[r])) for r in whole} for name, rounds in by_name.items()}
    found = []
    for name in contestants:
        if name not in by_name or not whole or BASE not in by_name:
            continue
        steps = np.concatenate([by_name[name][r] for r in sorted(whole)]) * 1e3
        low, high = np.quantile(steps, (0.25, 0.75))
        found.append(
            Speed(
                contestant=name,
                step=float(np.median(steps)),
                quartiles=(float(low), float(high)),
                ratio=_ratio(medians[name], medians[BASE]),
                ratio_to_torch=_ratio(medians[name], medians["torch"]) if "torch" in medians else None,
                rounds=len(whole),
            )
        )
    return found


def _ratio(ours: dict[int, float], base: dict[int, float]) -> Estimate:
    return estimate_median([ours[r] / base[r] for r in sorted(ours)])
