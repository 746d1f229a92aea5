"""What the ranks have written of a training, as the model takes it: steps, stages under each setting, the link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...run.contestants import AFTER_BACKWARD
from ...run.probing import COLLECTIVES
from ..compare.script.plan import BASE
from ..compare.script.trainings import Line
from .model import Stages, Step, fit_share

Floats = NDArray[np.float64]
BEFORE_BACKWARD = ("after", "optimizer", "data", "forward")
Buckets = list[list[int]]
Places = NDArray[np.int64] | slice


@dataclass(frozen=True)
class Probe:
    """Stages of a setting's buckets.

    Attributes:
        setting: the setting.
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

    setting: str
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
        step: as far as ranks compute.
        buckets: of each the indices of its parameters.
        computed: by rank, when its backward has ended.
        seconds: all of it.
    """

    step: Step
    buckets: Buckets
    computed: list[float]
    seconds: float

    def for_buckets(self, buckets: Buckets) -> Step:
        """The same step with other buckets: each is full when those of its parameters were, the last at the end."""
        when = {p: time for bucket, time in zip(self.buckets, self.step.ready, strict=True) for p in bucket}
        ready = [max(when.get(p, self.step.computed) for p in bucket) for bucket in buckets]
        return Step(self.step.backward, (*ready[:-1], self.step.computed), self.step.computed, self.step.compute)


@dataclass(frozen=True)
class Readings:
    """A training.

    Attributes:
        wrapped: what was trained, on how many ranks, over which transport.
        latency: by collective, the seconds of a small one.
        probes: by setting.
        flights: steps under `none`.
        alone: by step, the seconds of backward where nothing is sent before its end.
    """

    wrapped: Line
    latency: dict[str, float]
    probes: dict[str, Probe]
    flights: list[Flight]
    alone: list[float]


def read(lines: Sequence[Line]) -> Readings:
    """What one training's lines say; without flights where it has ended before its steps were timed."""
    link: list[dict[str, list[float]]] = next((line["link"] for line in lines if "link" in line), [])
    latency = {name: float(np.median([min(seen) for seen in _by_call(link, name)])) for name in COLLECTIVES if link}
    probes = [_probe(line) for line in lines if "probe" in line]
    turns = [line for line in lines if "flights" in line]
    flights = [f for turn in turns if turn["contestant"] == BASE for f in _flights(turn["flights"])]
    quiet = [f for turn in turns if turn["contestant"] == AFTER_BACKWARD for f in _flights(turn["flights"])]
    return Readings(
        next((line for line in lines if "wrapped" in line), {}),
        latency,
        {probe.setting: probe for probe in probes},
        flights,
        [flight.step.computed - flight.step.backward for flight in quiet],
    )


def _by_call(link: Sequence[Mapping[str, Sequence[float]]], name: str) -> list[tuple[float, ...]]:
    """Of each call the seconds of the ranks, the least of which is that of the last one to come."""
    return list(zip(*(rank[name] for rank in link), strict=True))


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
        setting=line["probe"],
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


def _flight(ranks: Sequence[Mapping[str, Any]]) -> Flight:
    backward = [sum(rank["phases"][phase] for phase in BEFORE_BACKWARD) for rank in ranks]
    computed = [before + rank["phases"]["backward"] for before, rank in zip(backward, ranks, strict=True)]
    end = max(computed)
    ready = [min(end, max(times)) for times in zip(*(rank["ready"] for rank in ranks), strict=True)]
    step = Step(backward[computed.index(end)], (*ready[:-1], end), end, float(np.mean(computed)))
    seconds = float(np.mean([sum(rank["phases"].values()) for rank in ranks]))
    return Flight(step, ranks[0]["buckets"], computed, seconds)
