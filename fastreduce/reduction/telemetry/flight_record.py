"""The flight record: when each bucket of the last steps was ready, sent, reduced, and what this rank did besides."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ..buckets import BucketPlan
from ..clocks import Clock, Point


class Phase(IntEnum):
    """What a rank does, in the order of a step, which begins where the last averages have been stored."""

    AFTER = 0
    OPTIMIZER = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    WAITING = 5


_NO_TIMES = array("d", [0.0] * len(Phase))

# A bucket's way, from one point to the next: both stages on the wire, or one.
TWO_STAGES = (
    ("compress", Point.START, Point.COMPRESSED),
    ("wire stage 1", Point.COMPRESSED, Point.EXCHANGED),
    ("sum", Point.EXCHANGED, Point.SUMMED),
    ("wire stage 2", Point.SUMMED, Point.REDUCED),
    ("decompress", Point.REDUCED, Point.END),
)
ONE_STAGE = (TWO_STAGES[0], ("wire", Point.COMPRESSED, Point.REDUCED), TWO_STAGES[-1])
# Where parts of a job begin and end: not told.
_OF_PARTS = (Point.STARTED, Point.SUMMING, Point.GATHERING, Point.RESUMED)


def stages_of(times: Sequence[float]) -> tuple[tuple[str, Point, Point], ...]:
    """The stages that a bucket has passed, each with its first and its last point; `times` as of `StepRow.passed`."""
    return TWO_STAGES if times[Point.EXCHANGED] else ONE_STAGE


class StepRow:
    """One step as it is recorded, in seconds of `clocks.now()`; 0 where something has not been.

    Attributes:
        step: its number; steps are reduced backwards.
        start: when the averages of the step before were stored.
        end: when its own were.
        began: by phase, when it began first.
        seconds: by phase, how long it took in all.
        queued: by phase, how much of that its thread waited for a processor core.
        collected: by phase, how much of it a core spent on collecting garbage.
        plan: the buckets.
        sent: by bucket, the bytes that this rank sends of it, by stage on the wire.
        ready: by bucket, when it was full.
        points: by bucket, when it passed each `Point`; before `start`: in an earlier step.
    """

    def __init__(self) -> None:
        self.step, self.start, self.end = -1, 0.0, 0.0
        self.began, self.seconds = array("d", _NO_TIMES), array("d", _NO_TIMES)
        self.queued, self.collected = array("d", _NO_TIMES), array("d", _NO_TIMES)
        self.plan: BucketPlan | None = None
        self.sent: Sequence[Mapping[str, int]] = ()
        self.ready, self.points = array("d"), array("d")
        self._not_ready = array("d")

    def lay_out(self, plan: BucketPlan | None, sent: Sequence[Mapping[str, int]]) -> None:
        """Take note of buckets."""
        if plan is not self.plan:
            count = 0 if plan is None else len(plan.buckets)
            self.plan, self.sent, self._not_ready = plan, sent, array("d", [0.0] * count)
            self.ready, self.points = array("d", self._not_ready), array("d", [0.0] * (count * len(Point)))

    def begin(self, step: int, start: float, plan: BucketPlan | None, sent: Sequence[Mapping[str, int]] = ()) -> None:
        """Record another step."""
        self.step, self.start, self.end = step, start, 0.0
        self.began[:] = self.seconds[:] = self.queued[:] = self.collected[:] = _NO_TIMES
        self.lay_out(plan, sent)
        self.ready[:] = self._not_ready

    def read(self, bucket: int, clock: Clock, wait: bool = False) -> None:
        """Take a bucket's points as they are now."""
        count = len(Point)
        self.points[bucket * count : (bucket + 1) * count] = clock.times(wait)

    def passed(self, bucket: int) -> list[float]:
        """When a bucket passed each `Point` in this step; 0 where it has not."""
        count = len(Point)
        times = self.points[bucket * count : (bucket + 1) * count]
        first = times[Point.START]
        return [time if time >= first >= self.start and time else 0.0 for time in times]


# What is told of it


@dataclass(frozen=True)
class BucketFlight:
    """One bucket in one step: seconds from the beginning of the step, None where it has not come so far.

    Attributes:
        bucket: its place.
        ready: it was full.
        compress: its compression began.
        compressed: it was compressed, and sent.
        exchanged: the first collective of a two-shot had ended.
        summed: this rank's shard was summed, and sent.
        reduced: the last collective had ended.
        decompressed: its averages were there.
    """

    bucket: int
    ready: float | None
    compress: float | None
    compressed: float | None
    exchanged: float | None
    summed: float | None
    reduced: float | None
    decompressed: float | None


@dataclass(frozen=True)
class StepFlight:
    """One step, from where the averages of the one before were stored; seconds.

    Attributes:
        step: its number.
        seconds: from its beginning to its end; None of the one that goes on.
        began: by phase, when it began first, from the beginning of the step.
        took: by phase, how long it took in all.
        buckets: those that have been ready.
    """

    step: int
    seconds: float | None
    began: dict[str, float]
    took: dict[str, float]
    buckets: list[BucketFlight]

    def __str__(self) -> str:
        length = "goes on" if self.seconds is None else f"{1e3 * self.seconds:.2f} ms"
        parts = ", ".join(f"{name} {1e3 * took:.2f}" for name, took in self.took.items())
        lines = [f"step {self.step}: {length}: {parts}"]
        for bucket in self.buckets:
            times = dataclasses.asdict(bucket)
            del times["bucket"]
            told = ", ".join(f"{name} {1e3 * time:.2f}" for name, time in times.items() if time is not None)
            lines.append(f"  bucket {bucket.bucket}: {told}")
        return "\n".join(lines)


@dataclass(frozen=True)
class FlightRecord:
    """What one rank has recorded of its last steps; `str` of it is a page, in milliseconds.

    Attributes:
        rank: the rank.
        world_size: how many there are.
        doing: what it does now.
        steps: the last ones, the last of which goes on.
    """

    rank: int
    world_size: int
    doing: str
    steps: list[StepFlight]

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers, such as JSON has."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = f"rank {self.rank} of {self.world_size} is {self.doing}"
        return "\n".join(
            [head, "milliseconds, those of a bucket from the beginning of the step:", *map(str, self.steps)]
        )


def step_of(row: StepRow) -> StepFlight:
    """A row as it is told."""

    def since_start(time: float) -> float | None:
        return time - row.start if time >= row.start and time else None

    buckets = []
    for bucket, ready in enumerate(row.ready):
        times = row.passed(bucket)
        chosen = [times[point] for point in Point if point not in _OF_PARTS]
        if ready:
            buckets.append(BucketFlight(bucket, since_start(ready), *map(since_start, chosen)))
    return StepFlight(
        row.step,
        row.end - row.start if row.end else None,
        {phase.name.lower(): row.began[phase] - row.start for phase in Phase if row.began[phase]},
        {phase.name.lower(): row.seconds[phase] for phase in Phase if row.seconds[phase]},
        buckets,
    )
