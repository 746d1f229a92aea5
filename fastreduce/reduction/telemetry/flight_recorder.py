"""Records what a reducer's rank does, step by step, for flight records, traces and the search for stragglers."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...environment.once import once
from .. import clocks
from ..bucketed import BucketJob
from ..buckets import BucketPlan
from ..clocks import Clock, Point
from ..pipeline import BucketPipeline
from .flight_record import FlightRecord, Phase, StepRow, step_of
from .lost_time import collected, notice_collections, queued

STEPS = 64  # that are kept
DOING = {
    Phase.AFTER: "after its last averages, before an optimizer's step",
    Phase.OPTIMIZER: "in an optimizer's step",
    Phase.DATA: "between its optimizer's step and its forward (data loading, logging, evaluation)",
    Phase.FORWARD: "in forward, the loss or a backward of its own (no_sync)",
    Phase.BACKWARD: "in backward",
    Phase.WAITING: "waiting for other ranks",
}


class Counts(NamedTuple):
    """What a rank has done so far, which others do as often.

    Attributes:
        averages: steps reduced to which it brought gradients.
        forwards: those whose backwards are to be reduced.
        unreduced: those whose backwards are not (`no_sync`).
        optimizer_steps: those of torch's optimizers of the parameters, where they are not compiled.
    """

    averages: int
    forwards: int
    unreduced: int
    optimizer_steps: int


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
        thread: the native id of the thread on which that began.
        since: since when.
        changes: how often that has changed; a rank that stalls changes nothing.
        counts: what it has done so far.
        counts_before: the same, up to the last averages.
        missing: ranks that were found to wait in another call, while this one waits for averages.
        wrapper: what ranks know the wrapper by, the same on all that have it, and only there; "" for none.
        waits: whether each step waits for its end on devices, so that their points are known.
        on_phase: called with each phase that has ended, when it began and when it ended.
        on_step: called with each step that has ended; what its row holds is overwritten some steps later.
    """

    def __init__(self, rank: int, world_size: int, parameters: Iterable[Tensor], used: Sequence[bool]) -> None:
        self.rank, self.world_size = rank, world_size
        self.parameters, self._used = frozenset(map(id, parameters)), used
        self.on_phase: list[Callable[[Phase, float, float], None]] = []
        self.on_step: list[Callable[[StepRow], None]] = []
        self.changes, self.waits = 0, False
        self.missing: tuple[int, ...] = ()
        self.wrapper = ""
        self.counts = self.counts_before = Counts(0, 0, 0, 0)
        self._plan: BucketPlan | None = None
        self._clocks: list[Clock] = []
        self._sent: list[dict[str, int]] = []
        self._lock = threading.RLock()  # rows are written anew, and others read them
        self._spare = deque(StepRow() for _ in range(STEPS))
        self._rows: deque[StepRow] = deque()
        self.phase, self.since = Phase.DATA, clocks.now()
        self.row = StepRow()
        self.row.begin(0, self.since, None)
        self.thread, self._queued = queued()
        self._collected = collected()
        notice_collections()
        _notice_optimizers()
        _of_optimizer.clear()
        with _changing_alive:
            _alive.add(self)

    # Told by the reducer

    def lay_out(self, plan: BucketPlan, pipelines: Iterable[BucketPipeline]) -> None:
        """Buckets are laid out anew."""
        made = list(pipelines)
        with self._lock:
            self._plan, self._clocks = plan, [pipeline.clock for pipeline in made]
            self._sent = [pipeline.wires.sent_by_stage for pipeline in made]
            self.row.lay_out(plan, self._sent)

    def enter(self, phase: Phase) -> None:
        """This rank does something else from now on."""
        at, row = clocks.now(), self.row
        self._change(phase, at)
        if not row.began[phase]:
            row.began[phase] = at
        if phase is Phase.OPTIMIZER:
            self._count(optimizer_steps=1)

    def enter_forward(self, reduced: bool) -> None:
        """A forward begins, whose backward is to be reduced or not."""
        self.enter(Phase.FORWARD)
        self._count(forwards=int(reduced), unreduced=int(not reduced))

    def _count(self, averages: int = 0, forwards: int = 0, unreduced: int = 0, optimizer_steps: int = 0) -> None:
        a, f, u, o = self.counts
        self.counts = Counts(a + averages, f + forwards, u + unreduced, o + optimizer_steps)

    def _change(self, phase: Phase, at: float) -> None:
        before, since, row = self.phase, self.since, self.row
        row.seconds[before] += at - since
        (thread, waited), garbage = queued(), collected()
        if thread == self.thread:
            row.queued[before] += max(0.0, waited - self._queued)
        row.collected[before] += garbage - self._collected
        self.thread, self._queued, self._collected = thread, waited, garbage
        for told in self.on_phase:
            told(before, since, at)
        self.phase, self.since = phase, at
        self.changes += 1

    def ready(self, job: BucketJob) -> None:
        """A bucket is about to be reduced."""
        self.row.ready[job.pipeline.bucket.index] = clocks.now()

    def end_step(self, step: int) -> None:
        """The averages of a step are stored."""
        row = self.row
        for bucket, clock in enumerate(self._clocks):
            row.read(bucket, clock, self.waits)
        at = clocks.now()  # behind the reading: where that waits for a device, averages are there when it ends
        self._change(Phase.AFTER, at)
        row.step, row.end = step, at
        self._count(averages=int(row.seconds[Phase.BACKWARD] > 0))
        self.counts_before = self.counts
        self._rows.append(row)
        for told in self.on_step:
            told(row)
        with self._lock:
            row = self._spare.popleft() if self._spare else self._rows.popleft()
            row.begin(step + 1, at, self._plan, self._sent)
            row.began[Phase.AFTER] = at
            self.row = row

    def restart(self) -> None:
        """Leave out of this step what has been since the last averages."""
        self.since = clocks.now()
        self.row.begin(self.row.step, self.since, self._plan, self._sent)
        self.row.began[Phase.AFTER] = self.since

    # Asked

    @property
    def on_this_thread(self) -> bool:
        """Whether it is the thread on which this rank has last begun to do something else."""
        return queued()[0] == self.thread

    @property
    def awaits(self) -> bool:
        """Whether this rank has begun the backward of its step, and waits for the averages."""
        return self.phase is Phase.WAITING and self.row.began[Phase.BACKWARD] > 0

    @property
    def is_to_begin(self) -> bool:
        """Whether the backward of its step is still to come."""
        return self.phase < Phase.BACKWARD and not self.row.began[Phase.BACKWARD]

    def last_rows(self, count: int) -> list[StepRow]:
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
        with self._lock:
            steps = [step_of(row) for row in list(self._rows) if row is not self.row]
            row = StepRow()
            row.begin(self.row.step, self.row.start, self._plan)
            row.began[:], row.seconds[:] = self.row.began, self.row.seconds
            row.ready[:] = self.row.ready
            row.seconds[self.phase] += max(0.0, clocks.now() - self.since)
            for bucket, clock in enumerate(self._clocks):
                row.read(bucket, clock)
        return FlightRecord(self.rank, self.world_size, self.doing(), [*steps, step_of(row)])


# Optimizers

_alive: weakref.WeakSet[FlightRecorder] = weakref.WeakSet()
_changing_alive = threading.RLock()  # a wrapper may be made on any thread
# By the id of an optimizer, whose class may have no hash.
_of_optimizer: dict[int, tuple[weakref.ref[torch.optim.Optimizer], list[weakref.ref[FlightRecorder]]]] = {}


def all_recorders() -> list[FlightRecorder]:
    """Those of this process; the one last whose rank has done something last."""
    return sorted(_all(), key=lambda recorder: recorder.since)


def _all() -> list[FlightRecorder]:
    with _changing_alive:
        return list(_alive)


def all_flights() -> str:
    """The flight records of this process, as a page."""
    return "\n\n".join(str(recorder.flight()) for recorder in all_recorders())


def answer_debug_server() -> None:
    """Let torch's debug server have them as JSON, at /handler/fastreduce_flight_record, where it has been imported."""
    if "torch.distributed.debug" in sys.modules:
        _register_handler()


@once
def _register_handler() -> None:
    try:
        from torch._C._distributed_c10d import _register_handler as register
    except ImportError:  # another version's
        return

    def answer(_: Any, response: Any) -> None:
        text = json.dumps([recorder.flight().as_dict() for recorder in all_recorders()])
        response.set_content(text.encode(), "application/json")
        response.set_status(200)

    register("fastreduce_flight_record", answer)
    # torch lets go of it when C++'s statics go, after Python: for the process to survive that, it must not be the last.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(answer))


@once
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
    known, found = _of_optimizer.get(id(optimizer), (None, []))
    if known is None or known() is not optimizer:
        stepped = {id(p) for group in getattr(optimizer, "param_groups", ()) for p in group["params"]}
        found = [weakref.ref(each) for each in _all() if not each.parameters.isdisjoint(stepped)]
        key = id(optimizer)
        _of_optimizer[key] = weakref.ref(optimizer, lambda _: _of_optimizer.pop(key, None)), found
    for reference in found:
        recorder = reference()
        if recorder is not None and recorder.phase in (Phase.AFTER, Phase.OPTIMIZER, Phase.DATA):
            yield recorder
