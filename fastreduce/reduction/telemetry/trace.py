"""Traces: the flight record of every step, as JSON that Perfetto and chrome://tracing open.

A rank writes while it trains, so that one that is killed leaves what it has done. All times are rank 0's, counted from
the moment that files of torch.profiler count from, too.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ...environment.exits import Exit, each_at_exit
from ...environment.forks import Owner
from ...errors import listed
from ...transports import Transport
from ...transports.messages import checked, of_types
from .. import clocks
from ..buckets import BucketPlan
from ..clocks import Point
from .clock_offsets import Offset, closer, measure
from .flight_record import Phase, StepRow, stages_of
from .flight_recorder import FlightRecorder
from .trace_files import END, is_complete, merge

logger = logging.getLogger(__name__)

VARIABLE = "FASTREDUCE_TRACE"
FIRST_ROUNDS, ROUNDS = 200, 64  # of a comparison of clocks: 64 take some 10 ms
APART = 10.0  # seconds from one to the next, about: in which clocks of two machines drift apart by some 10 µs
STEPS_APART = 20  # at least
MOST_PHASES = 1000  # that are kept from one step to the next
TRIMESTER = 7_889_238  # seconds; torch.profiler counts from the last whole number of them since 1970
NAMES = {Phase.WAITING: "wait for averages", Phase.AFTER: "after averages"}  # else the phase's own
TRACKS = 1000  # of one wrapper
GRID = 8  # parts of a microsecond: as decimals and as doubles exact, so that a slice ends where the next begins

_made: Counter[str] = Counter()  # traces of this process, by folder
_runs: dict[str, str] = {}
_open: weakref.WeakSet[Trace] = weakref.WeakSet()


class Trace:
    """One rank's file, `rank0.json`, or `rank0.1.json` for the second wrapper of its process, and so on.

    It begins with the first `align`. A disk that is full ends it, with a line in the log, and not the training.

    Args:
        folder: where.
        recorder: what is traced; it does not live longer for that.
        rank: under which this process is shown.

    Attributes:
        offset: this rank's clock against rank 0's.
        due: the step in which clocks are compared next.
    """

    def __init__(self, folder: Path, recorder: FlightRecorder, rank: int) -> None:
        self._folder, self._rank, self._ranks = folder, rank, recorder.world_size
        self.offset = Offset(0.0, 0.0, 0.0)
        self._begun, self._unix = False, 0.0
        self._aligned = self.due = 0
        self._phases: list[tuple[Phase, float, float]] = []
        self._plan: BucketPlan | None = None
        self._about: list[str] = []
        self._file: BinaryIO | None = None
        self._owner = Owner()
        self._until = 0.0  # where the last phase has ended, in the file
        self._step = 0  # the one to come
        recorder.waits = True
        recorder.on_phase.append(self._note_phase)
        recorder.on_step.append(self._note_step)
        weakref.finalize(recorder, self.close).atexit = False
        _open.add(self)

    def align(self, step: int, transport: Transport, device: torch.device) -> None:
        """Compare clocks, which drift; every rank calls it in step `due`, with a device for tensors that are moved.

        Raises:
            TransportError: if the ranks do not all come.
        """
        if self._begun:
            before = self.offset.at
            self.offset = closer(self.offset, measure(transport, device, ROUNDS))
            # All ranks find the same step, because they have the same two readings of one clock.
            steps = (step - self._aligned) * APART / max(self.offset.at - before, 1e-3)
            self._aligned, self.due = step, step + max(STEPS_APART, int(min(steps, 1e6)))
        else:
            base = time.time_ns() // 10**9 // TRIMESTER * TRIMESTER
            # When this rank's clock showed 0. What comes between two looks makes it earlier: the latest is right.
            unix = max((time.time_ns() - base * 10**9) / 1e9 - clocks.now() for _ in range(10))
            told = transport.exchange([base, unix, f"{time.time_ns():x}-{os.getpid()}"])
            base, self._unix, run = checked(told, lambda value: of_types(value, int, float, str), "start of a trace")[0]
            self.offset = measure(transport, device, FIRST_ROUNDS)
            self._aligned, self.due = step, step + STEPS_APART
            self._begun = True
            self._begin(base, run)
        self._write([self._clock_event()])

    def _begin(self, base: int, run: str) -> None:
        key = str(self._folder)
        number = _made[key]
        _made[key] += 1
        self._track = number * TRACKS + 1
        self._label = f"wrapper {number}: " if number else ""
        self.path = self._folder / (f"rank{self._rank}.{number}.json" if number else f"rank{self._rank}.json")
        about = {"run": _runs.setdefault(key, run), "rank": self._rank, "ranks": self._ranks}
        head = {"displayTimeUnit": "ms", "baseTimeNanoseconds": base * 10**9, "fastreduce": about}
        process = f"rank {self._rank} ({socket.gethostname()}, process {os.getpid()})"
        try:
            self.path.unlink(missing_ok=True)  # another job may still write there
            self._file = self.path.open("wb", buffering=0)  # a rank that is killed, or forks, has nothing in memory
            first = self._named("process_name", 0, process)
            self._file.write(f'{json.dumps(head)[:-1]}, "traceEvents": [\n{first}'.encode())
        except OSError as error:
            self._give_up(error)
        order = self._meta("process_sort_index", 0, {"sort_index": self._rank})
        self._write([order, self._named("thread_name", self._track, f"{self._label}step")])

    def _note_phase(self, phase: Phase, start: float, end: float) -> None:
        self._phases.append((phase, start, end))
        if len(self._phases) == MOST_PHASES:  # of steps that nobody reduces
            if self._file is None:  # nor has anybody yet
                del self._phases[: MOST_PHASES // 2]
            else:
                self._write(self._take_phases())

    def _take_phases(self) -> list[str]:
        """Those that are not in the file, as parts of the step to come."""
        shift, events = self._shift, list[str]()
        tail = f'"pid":{self._rank},"tid":{self._track},"args":{{"step":{self._step}}}}}'
        for phase, start, end in self._phases:
            name = NAMES.get(phase) or phase.name.lower()
            at = max(_microseconds(start + shift), self._until)  # clocks may have been set back
            self._until = max(at, _microseconds(end + shift))
            events.append(_slice(name, at, self._until, tail))
        self._phases.clear()
        return events

    def _note_step(self, row: StepRow) -> None:
        self._step = row.step
        if self._file is None:
            self._phases.clear()
            return
        events: list[str] = []
        if row.plan is not self._plan and row.plan is not None:
            self._take_plan(row.plan, events)
        shift, track, rank, step = self._shift, self._track, self._rank, row.step
        events += self._take_phases()
        self._step += 1
        for bucket, ready in enumerate(row.ready):
            times = row.passed(bucket)
            if not ready or not times[Point.END]:
                continue
            tail = f'"pid":{rank},"tid":{track + 1 + bucket},"args":{{"step":{step},{self._about[bucket]}}}}}'
            if ready <= times[Point.START]:  # else it was enqueued on a device, which came to it before
                at, until = _microseconds(ready + shift), _microseconds(times[Point.START] + shift)
                events.append(_slice("ready", at, until, tail))
            for name, first, last in stages_of(times):
                at, until = _microseconds(times[first] + shift), _microseconds(times[last] + shift)
                events.append(_slice(name, at, until, tail))
        self._write(events)

    def _take_plan(self, plan: BucketPlan, events: list[str]) -> None:
        self._plan, self._about = plan, []
        for bucket in plan.buckets:
            held = listed([slot.name for slot in bucket.slots], 3)
            self._about.append(f'"bytes":{bucket.nbytes},"holds":{json.dumps(held)}')
            events.append(
                self._named("thread_name", self._track + 1 + bucket.index, f"{self._label}bucket {bucket.index}")
            )

    @property
    def _shift(self) -> float:
        """What is added to this rank's clock."""
        return self._unix - self.offset.seconds

    def _clock_event(self) -> str:
        """An instant that tells how well the clock is known."""
        told = {"ahead_of_rank_0_us": 1e6 * self.offset.seconds, "known_to_us": 1e6 * self.offset.bound}
        at = 1e6 * (clocks.now() + self._shift)
        place = {"ph": "i", "name": "clocks compared", "ts": round(at, 3), "s": "t"}
        return json.dumps({**place, "pid": self._rank, "tid": self._track, "args": told})

    def _meta(self, kind: str, track: int, args: dict[str, Any]) -> str:
        return json.dumps({"ph": "M", "name": kind, "pid": self._rank, "tid": track, "args": args})

    def _named(self, kind: str, track: int, name: str) -> str:
        return self._meta(kind, track, {"name": name})

    def _write(self, events: list[str]) -> None:
        """Each line but the first begins with the comma that separates it from the one before."""
        if self._file is not None and events and self._owner.is_here:
            try:
                data = "".join([f",\n{event}" for event in events]).encode()
                if self._file.write(data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("rank %d: the trace in %s ends here: %s", self._rank, self.path, error)
        self._file = None

    def close(self) -> None:
        """Complete the file; the rank that is last merges all. A fork of the process does nothing."""
        file, self._file = self._file, None
        if file is None or not self._owner.is_here:
            return
        try:
            with file:
                file.write(END.encode())
        except OSError as error:
            self._give_up(error)
            return
        try:
            paths = [self._folder / f"rank{rank}.json" for rank in range(self._ranks)]
            if all(map(is_complete, paths)):
                merge(self._folder)
        except (OSError, ValueError) as error:  # also where another program's files lie there
            logger.warning("rank %d: the traces in %s are not merged: %s", self._rank, self._folder, error)


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds * GRID) / GRID


def _slice(name: str, start: float, end: float, tail: str) -> str:
    return f'{{"ph":"X","name":"{name}","ts":{start:.3f},"dur":{end - start:.3f},{tail}'


each_at_exit(Exit.TRACES, Trace.close, _open)
