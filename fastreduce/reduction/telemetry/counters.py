"""Counters: what a wrapper's reductions have sent, taken and lost so far, as a dict and in Prometheus' text format.

They are made of the flight record: until somebody asks nothing is counted, and the first one who does finds the steps
that the record still has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Mapping
from typing import Any

from ..arrivals import weakly
from ..clocks import Point
from .flight_record import ONE_STAGE, TWO_STAGES, Phase, StepRow, stages_of
from .flight_recorder import STEPS, FlightRecorder
from .nonfinite import NonFiniteSteps
from .stragglers import Stragglers

STAGES = tuple(dict.fromkeys(name for name, *_ in (*TWO_STAGES, *ONE_STAGE)))
WIRES = tuple(name for name in STAGES if name.startswith("wire"))

_numbers = itertools.count()


class Counters:
    """Adds up the steps of one reducer, from the first question on.

    Args:
        recorder: of the reducer, whose steps are counted.
        stragglers: knows who is late.
        nonfinite: counts steps with averages that are not finite.

    Attributes:
        number: of the wrapper in its process, from 0.
        errors: what settings would lose, by setting and group of parameters, as far as somebody measures it.
    """

    def __init__(self, recorder: FlightRecorder, stragglers: Stragglers, nonfinite: NonFiniteSteps) -> None:
        self._recorder, self._stragglers, self._nonfinite = recorder, stragglers, nonfinite
        self.number = next(_numbers)
        self.errors: Mapping[str, Mapping[str, float]] = {}
        self._lock = threading.RLock()  # steps end on the thread of backward; any thread may ask, and a signal handler
        self._begun, self._until = False, 0.0
        self._first = self._last = -1
        self._reductions = 0
        self._phases = dict.fromkeys((phase.name.lower() for phase in Phase), 0.0)
        self._stages = dict.fromkeys(STAGES, 0.0)
        self._sent = dict.fromkeys(WIRES, 0)

    def as_dict(self) -> dict[str, Any]:
        """Dicts, lists, numbers and texts, such as JSON has; waits for devices to have counted what is not finite."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self._recorder.on_step.append(weakly(self._note))
                for row in self._recorder.last_rows(STEPS):
                    self._add(row)
            counted = {
                "since": self._first,
                "step": self._last,
                "reductions": self._reductions,
                "sent_bytes": dict(self._sent),
                "phase_seconds": dict(self._phases),
                "stage_seconds": dict(self._stages),
            }
        compared = self._stragglers.last
        return {
            "rank": self._recorder.rank,
            "world_size": self._recorder.world_size,
            "wrapper": self.number,
            **counted,
            "nonfinite_steps": self._nonfinite.total,
            "relative_errors": {setting: dict(groups) for setting, groups in self.errors.items()},
            "late": [] if compared is None else [dataclasses.asdict(late) for late in compared.late],
        }

    def _note(self, row: StepRow) -> None:
        with self._lock:
            self._add(row)

    def _add(self, row: StepRow) -> None:
        if row.end <= self._until:  # counted already, or written anew at this moment
            return
        self._until, self._last = row.end, row.step
        self._first = row.step if self._first < 0 else self._first
        self._reductions += 1
        for name, seconds in zip(self._phases, row.seconds, strict=True):
            self._phases[name] += seconds
        for bucket, ready in enumerate(row.ready):
            times = row.passed(bucket)
            if ready or times[Point.END]:  # on a rank that has joined buckets are reduced without being ready
                for name, count in row.sent[bucket].items():
                    self._sent[name] += count
            if times[Point.END]:
                for name, start, end in stages_of(times):
                    self._stages[name] += times[end] - times[start]


COUNTED = (  # what `as_dict` calls it, the label that tells its numbers apart if it has several, and what it is
    ("reductions", "", "Backwards whose gradients were averaged."),
    ("sent_bytes", "stage", "Bytes that this rank has sent, by stage on the wire."),
    ("phase_seconds", "phase", "Seconds of steps, by what this rank did; waiting is what backward did not hide."),
    ("stage_seconds", "stage", "Seconds of reductions by stage, summed over buckets, largely beside backward."),
    ("nonfinite_steps", "", "Steps with an average that was NaN or infinite."),
)


def to_prometheus(counted: Mapping[str, Any]) -> str:
    """What `Counters.as_dict` returned, in the text format 0.0.4 of Prometheus, each sample with rank and wrapper."""
    families: list[tuple[str, str, str, list[tuple[dict[str, object], float]]]] = []
    for key, label, about in COUNTED:
        numbers = [({label: each}, number) for each, number in counted[key].items()] if label else [({}, counted[key])]
        families.append((f"{key}_total", "counter", about, numbers))
    late = [({"late_rank": late["rank"], "part": late["part"]}, late["seconds"]) for late in counted["late"]]
    errors = [
        ({"setting": setting, "group": group}, error)
        for setting, groups in counted["relative_errors"].items()
        for group, error in groups.items()
    ]
    families += [
        ("late_seconds", "gauge", "Seconds of a step for which the others wait for a rank that is late.", late),
        ("relative_error", "gauge", "What a setting would lose of gradients: squared error over squares.", errors),
    ]
    own = {"rank": counted["rank"], "wrapper": counted["wrapper"]}
    lines = []
    for name, kind, about, samples in families:
        lines += [f"# HELP fastreduce_{name} {about}", f"# TYPE fastreduce_{name} {kind}"]
        lines += [f"fastreduce_{name}{{{_labels({**own, **labels})}}} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, object]) -> str:
    return ",".join(f'{name}="{_escape(str(value))}"' for name, value in labels.items())


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return repr(value)
