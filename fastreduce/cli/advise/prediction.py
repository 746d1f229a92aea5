"""The step of every variant of a setting, by the model, with intervals from the scatter of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...run.contestants import Variant
from ...run.probing import COLLECTIVES
from ..compare.script.plan import BASE
from . import model
from .model import Parts, Stages
from .readings import Flight, Floats, Places, Probe, Readings

DRAWS = 100
HOP = 50e-6  # seconds: a network's latency is taken for no less, each way and node


@dataclass(frozen=True)
class Interval:
    """A figure, and where it lies with 95 % as far as the scatter tells."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """A step of a variant, in seconds; and over that of none as the script has it."""

    variant: Variant
    step: Interval
    ratio: Interval
    parts: Parts
    sent: int


@dataclass(frozen=True)
class Link:
    """Where steps are to be projected to: hosts, and Gbit/s of each host's adapter each way."""

    nodes: int
    gbits: float


@dataclass(frozen=True)
class _Case:
    """What the model takes.

    Attributes:
        flights: steps as they would be if nothing went on beside backward.
        drag: what goes on beside it costs it so many seconds a second.
        rests: of each step, what of its seconds the model does not explain.
    """

    flights: list[Flight]
    drag: float
    rests: list[_Rest]


@dataclass(frozen=True)
class _Rest:
    """What of a step under `none` the model does not explain, where communication behind backward takes `exposed`."""

    seconds: float
    exposed: float

    def where(self, exposed: float) -> float:
        """What it is where communication takes so long: the same, or, where the model says too much, its share.

        What the model says too much beyond all of communication is computing's, and the same.
        """
        too_much = min(self.exposed, -self.seconds)
        if too_much <= 0:
            return self.seconds
        return self.seconds + too_much - too_much * exposed / self.exposed


def seconds(readings: Readings) -> dict[str, float]:
    """The predicted step of everything that was measured, by the variant's name."""
    case = _undisturbed(readings)
    return {
        name: _median_step(_steps(readings, case, probe, slice(None), None))[1]
        for name, probe in readings.probes.items()
    }


def predict(readings: Readings, link: Link | None = None, more: Iterable[str] = ()) -> dict[str, Prediction]:
    """By setting, `none` first, and by the names of `more` variants; here, or on other hosts and another link."""
    case = _undisturbed(readings)
    random = np.random.default_rng(0)
    count = len(case.flights)
    probes = {name: readings.probes[name] for name in (*readings.settings, *more)}
    central = {name: _steps(readings, case, probe, slice(None), link) for name, probe in probes.items()}
    drawn: dict[str, list[float]] = {name: [] for name in probes}
    for _ in range(DRAWS):
        some = random.integers(count, size=count)
        for name, probe in probes.items():
            repetitions = random.integers(len(probe.bursts), size=len(probe.bursts))
            drawn_case = _Case([case.flights[i] for i in some], case.drag, [case.rests[i] for i in some])
            drawn[name].append(float(np.median(_steps(readings, drawn_case, probe, repetitions, link))))
    none, none_drawn = _median_step(central[BASE])[1], np.array(drawn[BASE])
    found = {}
    for name, probe in probes.items():
        place, step = _median_step(central[name])
        found[name] = Prediction(
            variant=probe.variant,
            step=_interval(step, np.array(drawn[name])),
            ratio=_interval(step / none, np.array(drawn[name]) / none_drawn),
            parts=_parts(readings, case, probe, place, link),
            sent=probe.sent,
        )
    return found


def _undisturbed(readings: Readings) -> _Case:
    """Steps as they are when nothing is sent beside backward; what is sent beside it under `none` tells the drag."""
    flights = readings.flights
    length = float(np.median([flight.step.computed - flight.step.backward for flight in flights]))
    alone = min(length, float(np.median(readings.alone))) if readings.alone else length
    factor = alone / length if length > 0 else 1.0
    flights = [replace(f, step=f.step.stretched(factor)) for f in flights]
    none = readings.probes[BASE]
    stages, share = none.draw()
    steps = [flight.for_buckets(none.buckets) for flight in flights]
    hidden = float(np.median([model.hidden(step, model.spans(step.ready, stages, share)) for step in steps]))
    drag = min(1.0, (length - alone) / hidden) if hidden > 0 else 0.0
    explained = [model.times(step, stages, share, drag) for step in steps]
    rests = [
        _Rest(flight.seconds - end, end - computed) for flight, (computed, end) in zip(flights, explained, strict=True)
    ]
    return _Case(flights, drag, rests)


def _stages(readings: Readings, probe: Probe, repetitions: Places, link: Link | None) -> tuple[list[Stages], float]:
    if link is None:
        return probe.draw(repetitions)
    none, ranks = readings.probes[BASE], readings.wrapped["local_ranks"]
    each = float(np.median(none.stages.sum(axis=2), axis=0).sum()) / sum(none.elements)
    within = [each * count if ranks > 1 else 0.0 for count in probe.elements]
    here = readings.latency[readings.transport]
    reduce, *swaps = (here[name] / max(1, readings.wrapped["ranks"] - 1) for name in COLLECTIVES)
    latency = tuple((link.nodes - 1) * max(HOP, seen) for seen in (reduce, max(swaps)))
    wires = [
        model.Wire(nbytes, probe.collectives, equal, ranks if equal and swapped else 1)
        for nbytes, equal, swapped in zip(probe.wire, probe.one_level, probe.two_shot, strict=True)
    ]
    return model.projected(
        probe.draw_apart(repetitions), within, wires, ranks, link.nodes, link.gbits, (latency[0], latency[1])
    ), 1.0


def _steps(readings: Readings, case: _Case, probe: Probe, repetitions: Places, link: Link | None) -> list[float]:
    stages, share = _stages(readings, probe, repetitions, link)
    found = []
    for flight, rest in zip(case.flights, case.rests, strict=True):
        computed, end = model.times(flight.for_buckets(probe.buckets), stages, share, case.drag)
        found.append(end + rest.where(end - computed))
    return found


def _parts(readings: Readings, case: _Case, probe: Probe, place: int, link: Link | None) -> Parts:
    stages, share = _stages(readings, probe, slice(None), link)
    parts = model.parts(case.flights[place].for_buckets(probe.buckets), stages, share, case.drag)
    return replace(parts, other=case.rests[place].where(parts.exposed))


def _median_step(steps: Sequence[float]) -> tuple[int, float]:
    """The place of the one that is the median (of two, the smaller), so that its parts add up to it."""
    place = int(np.argsort(steps)[(len(steps) - 1) // 2])
    return place, steps[place]


def _interval(value: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Interval(value, min(value, float(low)), max(value, float(high)))
