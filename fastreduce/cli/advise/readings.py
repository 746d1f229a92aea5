"""What the ranks have written of a training, as the model takes it: steps, stages under each setting, the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...run.contestants import AFTER_BACKWARD, Variant
from ...run.probing import COLLECTIVES
from ..compare.script.plan import BASE
from ..compare.script.trainings import Line
from .model import Rank, Stages, Step, fit_share

Floats = NDArray[np.float64]
BEFORE_BACKWARD = ("after", "optimizer", "data", "forward")
Buckets = list[list[int]]
Places = NDArray[np.int64] | slice


@dataclass(frozen=True)
class Probe:
    """Stages of a variant's buckets.

    Attributes:
        variant: the setting, and what is not as the script has it.
        buckets: of each the indices of its parameters.
        elements: of each.
        wire: of each the bytes of its wire.
        one_level: of each whether all ranks of several hosts would reduce it as equals.
        two_shot: of each whether it is reduced by an all-to-all and an all-gather.
        sent: bytes that a rank sends in a step.
        stages: `[repetitions, buckets, 5]`, seconds, as `Stages` has them, of the rank that counts.
        apart: the same over whole wires, where shared memory spares them.
        bursts: by repetition, the seconds of all buckets at once.
    """

    variant: Variant
    buckets: Buckets
    elements: list[int]
    wire: list[int]
    one_level: list[bool]
    two_shot: list[bool]
    sent: int
    stages: Floats
    apart: Floats
    bursts: Floats

    @property
    def collectives(self) -> int:
        """Of a bucket: 2 in a two-shot."""
        return 2 if self.apart[:, :, 1].any() else 1

    def draw(self, repetitions: Places = slice(None)) -> tuple[list[Stages], float]:
        """The medians of some repetitions, and the share that their bursts tell."""
        stages = _medians(self.stages[repetitions])
        return stages, fit_share(stages, float(np.median(self.bursts[repetitions])))

    def draw_apart(self, repetitions: Places) -> list[Stages]:
        """The same of stages over whole wires, without a share."""
        return _medians(self.apart[repetitions])


def _medians(stages: Floats) -> list[Stages]:
    return [Stages(*map(float, row)) for row in np.median(stages, axis=0)]


@dataclass(frozen=True)
class Flight:
    """One step of all ranks under `none`.

    Attributes:
        step: as far as ranks compute, with a bucket for each parameter: when its gradient has come on the last rank.
        computed: by rank, when its backward has ended.
        seconds: all of it.
    """

    step: Step
    computed: list[float]
    seconds: float

    def for_buckets(self, buckets: Buckets) -> Step:
        """The same step with these buckets: each is full when the last gradient has come, the last one at the end."""
        ready = [max(self.step.ready[p] for p in bucket) for bucket in buckets]
        return Step((*ready[:-1], self.step.computed), self.step.ranks)


@dataclass(frozen=True)
class Readings:
    """A training.

    Attributes:
        wrapped: what was trained, on how many ranks, over which transport.
        latency: by transport and collective, the seconds of a small one.
        probes: by the name of a variant; of those that are settings alone, as the script has it, `none` is the first.
        unusable: by transport, why these ranks cannot use it.
        flights: steps under `none`.
        alone: by step, the seconds of backward where nothing is sent before its end.
    """

    wrapped: Line
    latency: dict[str, dict[str, float]]
    probes: dict[str, Probe]
    unusable: dict[str, str]
    flights: list[Flight]
    alone: list[float]

    @property
    def transport(self) -> str:
        """The one in use."""
        return str(self.wrapped["transport"])

    @property
    def settings(self) -> list[str]:
        """Those that were measured, as the script has it."""
        return [name for name, probe in self.probes.items() if not probe.variant.options]


def read(lines: Sequence[Line]) -> Readings:
    """What one training's lines say; without flights where it has ended before its steps were timed."""
    latency = {line["transport"]: _latency(line["link"]) for line in lines if "link" in line}
    probes = [_probe(line) for line in lines if "probe" in line]
    turns = [line for line in lines if "flights" in line]
    flights = [f for turn in turns if turn["contestant"] == BASE for f in _flights(turn["flights"])]
    quiet = [f for turn in turns if turn["contestant"] == AFTER_BACKWARD for f in _flights(turn["flights"])]
    return Readings(
        next((line for line in lines if "wrapped" in line), {}),
        latency,
        {str(probe.variant): probe for probe in probes},
        next((line["unusable"] for line in lines if "unusable" in line), {}),
        flights,
        [flight.step.computed - flight.step.backward for flight in quiet],
    )


def _latency(link: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """By collective the median call, each of which takes what it takes the rank that comes last."""
    calls = {name: zip(*(rank[name] for rank in link), strict=True) for name in COLLECTIVES}
    return {name: float(np.median([min(seen) for seen in found])) for name, found in calls.items()}


def _slowest(by_rank: Any) -> Floats:
    """The slowest rank's kernels, for which all wait; and transfers as the rank sees them that comes last."""
    seen = np.array(by_rank)  # [ranks, repetitions, buckets, 5]
    stages: Floats = seen.max(axis=0)
    for transfer in (1, 3):
        stages[:, :, transfer] = seen[:, :, :, transfer].min(axis=0)
    return stages


def _probe(line: Line) -> Probe:
    buckets = line["buckets"]
    return Probe(
        variant=Variant.of(line["probe"]),
        buckets=[bucket["parameters"] for bucket in buckets],
        elements=[bucket["elements"] for bucket in buckets],
        wire=[bucket["wire_bytes"] for bucket in buckets],
        one_level=[bucket["one_level"] for bucket in buckets],
        two_shot=[bucket["two_shot"] for bucket in buckets],
        sent=sum(bucket["sent_bytes"] for bucket in buckets),
        stages=_slowest(line["stages"]),
        apart=_slowest(line["apart"]),
        bursts=np.array(line["bursts"]).max(axis=0),
    )


def _flights(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[Flight]:
    return [_flight(ranks) for ranks in zip(*by_rank, strict=True)]


def _last(backward: Sequence[float], arrived: Sequence[float | None], end: float) -> float:
    """When a gradient has come on all ranks, whose backwards begin then; on one where it does not, at the end."""
    times = [end if time is None else before + time for before, time in zip(backward, arrived, strict=True)]
    return min(end, max(times))


def _flight(ranks: Sequence[Mapping[str, Any]]) -> Flight:
    backward = [sum(rank["phases"][phase] for phase in BEFORE_BACKWARD) for rank in ranks]
    computed = [before + rank["phases"]["backward"] for before, rank in zip(backward, ranks, strict=True)]
    end = max(computed)
    arrived = zip(*(rank["arrived"] for rank in ranks), strict=True)
    ready = [_last(backward, times, end) for times in arrived]
    step = Step(tuple(ready), tuple(map(Rank, backward, computed)))
    seconds = float(np.mean([sum(rank["phases"].values()) for rank in ranks]))
    return Flight(step, computed, seconds)
