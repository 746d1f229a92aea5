"""The flight record: when each bucket of the last steps was ready, sent, reduced, and what this rank did besides."""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import clocks
from .bucketed import BucketJob
from .buckets import BucketPlan
from .clocks import Clock
from .pipeline import BucketPipeline, Point

STEPS = 64  # that are kept


class Phase(IntEnum):
    """What a rank does, in the order of a step, which begins where the last averages have been stored."""

    AFTER = 0
    OPTIMIZER = 1
    DATA = 2
    FORWARD = 3
    BACKWARD = 4
    WAITING = 5


DOING = {
    Phase.AFTER: "after its last averages, before an optimizer's step",
    Phase.OPTIMIZER: "in an optimizer's step",
    Phase.DATA: "between its optimizer's step and its forward (data loading, logging, evaluation)",
    Phase.FORWARD: "in forward or the loss",
    Phase.BACKWARD: "in backward",
    Phase.WAITING: "waiting for other ranks",
}
_NO_TIMES = array("d", [0.0] * len(Phase))


class Row:
    """One step as it is recorded, in seconds of `clocks.now()`; 0 where something has not been.

    Attributes:
        step: its number; steps are reduced backwards.
        start: when the averages of the step before were stored.
        end: when its own were.
        began: by phase, when it began first.
        seconds: by phase, how long it took in all.
        plan: the buckets.
        ready: by bucket, when it was full.
        points: by bucket, when it passed each `Point`; before `start`: in an earlier step.
    """

    def __init__(self) -> None:
        self.step, self.start, self.end = -1, 0.0, 0.0
        self.began, self.seconds = array("d", _NO_TIMES), array("d", _NO_TIMES)
        self.plan: BucketPlan | None = None
        self.ready, self.points = array("d"), array("d")
        self._not_ready = array("d")

    def lay_out(self, plan: BucketPlan | None) -> None:
        """Take note of buckets."""
        if plan is not self.plan:
            count = 0 if plan is None else len(plan.buckets)
            self.plan, self._not_ready = plan, array("d", [0.0] * count)
            self.ready, self.points = array("d", self._not_ready), array("d", [0.0] * (count * len(Point)))

    def begin(self, step: int, start: float, plan: BucketPlan | None) -> None:
        """Record another step."""
        self.step, self.start, self.end = step, start, 0.0
        self.began[:] = self.seconds[:] = _NO_TIMES
        self.lay_out(plan)
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


class FlightRecorder:
    """Records what one reducer's rank does: a few comparisons and readings of the clock a step, and none a parameter.

    Memory is taken once for a layout of the buckets. All of it may be read from any thread.

    Args:
        rank: of the reducer.
        world_size: of the reducer.
        parameters: what is reduced.
        used: for each parameter, whether its gradient has arrived in this backward.

    Attributes:
        phase: what this rank does.
        since: since when.
        changes: how often that has changed; a rank that stalls changes nothing.
        waits: whether each step waits for its end on devices, so that their points are known.
        on_phase: called with each phase that has ended, when it began and when it ended.
        on_step: called with each step that has ended; what its row holds is overwritten some steps later.
    """

    def __init__(self, rank: int, world_size: int, parameters: Iterable[Tensor], used: Sequence[bool]) -> None:
        self.rank, self.world_size = rank, world_size
        self.parameters, self._used = frozenset(map(id, parameters)), used
        self.on_phase: list[Callable[[Phase, float, float], None]] = []
        self.on_step: list[Callable[[Row], None]] = []
        self.changes, self.waits = 0, False
        self._plan: BucketPlan | None = None
        self._clocks: list[Clock] = []
        self._spare = deque(Row() for _ in range(STEPS))
        self._rows: deque[Row] = deque()
        self.phase, self.since = Phase.DATA, clocks.now()
        self.row = Row()
        self.row.begin(0, self.since, None)
        _notice_optimizers()
        _of_optimizer.clear()
        _alive.add(self)

    # Told by the reducer

    def lay_out(self, plan: BucketPlan, pipelines: Iterable[BucketPipeline]) -> None:
        """Buckets are laid out anew."""
        self._plan, self._clocks = plan, [pipeline.clock for pipeline in pipelines]
        self.row.lay_out(plan)

    def enter(self, phase: Phase) -> None:
        """This rank does something else from now on."""
        at, row = clocks.now(), self.row
        self._change(phase, at)
        if not row.began[phase]:
            row.began[phase] = at

    def _change(self, phase: Phase, at: float) -> None:
        before, since = self.phase, self.since
        self.row.seconds[before] += at - since
        for told in self.on_phase:
            told(before, since, at)
        self.phase, self.since = phase, at
        self.changes += 1

    def ready(self, job: BucketJob) -> None:
        """A bucket is about to be reduced."""
        self.row.ready[job.pipeline.bucket.index] = clocks.now()

    def end_step(self, step: int) -> None:
        """The averages of a step are stored."""
        at, row = clocks.now(), self.row
        self._change(Phase.AFTER, at)
        row.step, row.end = step, at
        for bucket, clock in enumerate(self._clocks):
            row.read(bucket, clock, self.waits)
        for told in self.on_step:
            told(row)
        self._rows.append(row)
        self.row = self._spare.popleft() if self._spare else self._rows.popleft()
        self.row.begin(step + 1, at, self._plan)
        self.row.began[Phase.AFTER] = at

    # Asked

    def last_rows(self, count: int) -> list[Row]:
        """The last steps that have ended, at most so many."""
        return list(self._rows)[-count:]

    def doing(self) -> str:
        """What this rank does, as the end of a sentence that begins with it."""
        phase, row, plan = self.phase, self.row, self._plan
        what = DOING[phase]
        if plan is not None and phase is Phase.BACKWARD:
            slots = [slot for bucket in plan.buckets for slot in bucket.slots]
            arrived = [slot.name for slot in slots if self._used[slot.parameter]]
            what += f", {len(arrived)} of {len(slots)} gradients there"
            what += f", up to {arrived[-1]!r}" if arrived else ""
        elif plan is not None and phase is Phase.WAITING and row.began[Phase.BACKWARD]:
            for bucket, clock in enumerate(self._clocks):
                times = clock.times()
                if times[Point.START] >= row.start and times[Point.END] < times[Point.START]:
                    sent = clocks.now() - max(times[Point.START], times[Point.COMPRESSED])
                    what += f" in bucket {bucket} of {len(plan.buckets)}, sent {sent:.1f} s ago"
                    break
        return f"{what}, for {clocks.now() - self.since:.1f} s, in step {row.step}"

    def flight(self) -> FlightRecord:
        """All that is known."""
        steps = [_step(row) for row in list(self._rows)]
        row = Row()
        row.begin(self.row.step, self.row.start, self._plan)
        row.began[:], row.seconds[:] = self.row.began, self.row.seconds
        row.ready[:] = self.row.ready
        row.seconds[self.phase] += max(0.0, clocks.now() - self.since)
        for bucket, clock in enumerate(self._clocks):
            row.read(bucket, clock)
        return FlightRecord(self.rank, self.world_size, self.doing(), [*steps, _step(row)])


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


def _step(row: Row) -> StepFlight:
    def since_start(time: float) -> float | None:
        return time - row.start if time >= row.start and time else None

    buckets = []
    for bucket, ready in enumerate(row.ready):
        times = row.passed(bucket)
        chosen = [times[point] for point in Point if point not in (Point.STARTED, Point.RESUMED)]
        if ready:
            buckets.append(BucketFlight(bucket, since_start(ready), *map(since_start, chosen)))
    return StepFlight(
        row.step,
        row.end - row.start if row.end else None,
        {phase.name.lower(): row.began[phase] - row.start for phase in Phase if row.began[phase]},
        {phase.name.lower(): row.seconds[phase] for phase in Phase if row.seconds[phase]},
        buckets,
    )


# Optimizers

_alive: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()
_of_optimizer: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[weakref.ref[FlightRecorder]]] = (
    weakref.WeakKeyDictionary()
)


def all_recorders() -> list[FlightRecorder]:
    """Those of this process."""
    return sorted(_alive, key=lambda recorder: recorder.since)


def all_flights() -> str:
    """The flight records of this process, as a page."""
    return "\n\n".join(str(recorder.flight()) for recorder in all_recorders())


def answer_debug_server() -> None:
    """Let torch's debug server have them as JSON, at /handler/fastreduce_flight_record, where it has been imported."""
    if "torch.distributed.debug" in sys.modules:
        _register_handler()


@cache
def _register_handler() -> None:
    from torch._C._distributed_c10d import _register_handler as register

    def answer(_: Any, response: Any) -> None:
        text = json.dumps([recorder.flight().as_dict() for recorder in all_recorders()])
        response.set_content(text.encode(), "application/json")
        response.set_status(200)

    register("fastreduce_flight_record", answer)


@cache
def _notice_optimizers() -> None:
    """Let every torch optimizer tell where its steps begin and end; what is compiled does not."""

    def before(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for recorder in _recorders_of(optimizer):
                recorder.enter(Phase.OPTIMIZER)

    def after(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not torch.compiler.is_compiling():
            for recorder in _recorders_of(optimizer):
                recorder.enter(Phase.DATA)

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _recorders_of(optimizer: torch.optim.Optimizer) -> Iterator[FlightRecorder]:
    """Those whose parameters it steps, unless they are in a backward, which may run optimizers."""
    found = _of_optimizer.get(optimizer)
    if found is None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        found = [weakref.ref(each) for each in _alive if not each.parameters.isdisjoint(stepped)]
        _of_optimizer[optimizer] = found
    for reference in found:
        recorder = reference()
        if recorder is not None and recorder.phase in (Phase.AFTER, Phase.OPTIMIZER, Phase.DATA):
            yield recorder
