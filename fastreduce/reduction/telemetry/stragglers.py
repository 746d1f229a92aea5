"""Stragglers: which rank the others wait for, while training goes on and every rank looks equally slow.

1. Every `EVERY` steps each rank brings a few numbers to one small all-gather behind that step's reduction: the mean
   seconds of the parts of a step, without those in which it waited, and how sure they are.
2. A rank is late if in the last comparisons, three or more, it has taken longer than the others' median: by a
   twentieth of a step and five standard errors in the mean. Errors are those of means over blocks of ten steps, or of
   the leads themselves where those are larger, so that one long pause (a checkpoint) tells nothing.
3. Time in which a rank's thread waited for a core is left out first, and counted in a second look: on a machine that
   does much else it is most of the noise, and a part of its own.
4. The link has become slow where the quickest steps of all ranks wait longer than they did, and was interrupted where
   all ranks waited long in one step.
5. All ranks find the same, from the same numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...transports import Transport
from ...transports.base import gather_rows
from .. import clocks
from .evenness import DID, Did, Evenness
from .flight_record import Phase, StepRow
from .flight_recorder import FlightRecorder

logger = logging.getLogger(__name__)

EVERY = 50  # steps: an all-gather of some 0.2 ms then costs a step of 5 ms less than a thousandth
BLOCK = 10  # steps, whose mean counts as one observation
SHARE = 0.05  # of a step, by which a late rank is later
LEAST_SECONDS = 0.001  # likewise: a step of two milliseconds has neighbours that take a tenth of it now and then
ERRORS = 5.0  # standard errors, likewise
TIMES, MOST = 3, 8  # comparisons: so many at least, and the last of them that count
LOG_SECONDS = 60.0
SLOWER, SLOWER_SHARE = 3.0, 0.2  # a link that has become slow: times as long as before, and of a step
PAUSE_SECONDS, PAUSE_STEPS = 1.0, 20.0  # of waiting in one step, by all ranks: an interruption

PARTS = {
    "compute": (Phase.FORWARD, Phase.BACKWARD),
    "data": (Phase.DATA,),
    "optimizer": (Phase.AFTER, Phase.OPTIMIZER),
}
"""The parts of a step → what is in it; in `no_sync`, what lies between backward and forward counts as compute."""
OWN = tuple(phase for phase in Phase if phase is not Phase.WAITING)
WORK = (*PARTS, "gc")
ALL = (*WORK, "cpu")


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: the rank.
        part: where it takes longer, most of all: "compute", "data", "optimizer", "gc" (collections of garbage) or "cpu"
            (waiting for a core that other processes have).
        seconds: by how much it is late in each step.
        share: the same, as a share of a step.
        since: the step in which that began, about.
    """

    rank: int
    part: str
    seconds: float
    share: float
    since: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is late by {1e3 * self.seconds:.1f} ms a step ({self.share:.0%} of it), mostly in "
            f"{self.part}, since about step {self.since}"
        )


@dataclass(frozen=True)
class Comparison:
    """All ranks, side by side, over the last steps that were compared.

    Attributes:
        step: the step behind which they were.
        late: ranks that are late, the latest first.
        seconds: of a step.
        parts: by part, the mean seconds of each rank in a step, in rank order; NaN where it had no data (`join`).
        link: seconds of a step in which no rank does anything but wait, for the link and for what remains to be summed.
        notes: what else is wrong, as sentences: ranks that differ in what they do (forwards in `no_sync`, optimizer
            steps, frozen parameters), and a link that has become slow or was interrupted.
    """

    step: int
    late: list[Straggler]
    seconds: float
    parts: dict[str, list[float]]
    link: float
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers."""
        return dataclasses.asdict(self)


class _Figures(NamedTuple):
    """What one rank brings of its last steps, in seconds of a step; all NaN where it had no data."""

    seconds: float
    waiting: float
    error: float  # the standard error of what it does itself
    work_error: float  # the same without what it waits for a core
    quick_wait: float  # what it waits in the quickest tenth of the steps
    longest_wait: float  # in one step
    longest_in: float  # that step
    compute: float
    data: float
    optimizer: float
    gc: float
    cpu: float

    def sum(self, parts: Sequence[str]) -> float:
        return math.fsum(getattr(self, part) for part in parts)


class Stragglers:
    """Compares ranks now and then, and tells of those that are late.

    Args:
        recorder: of this rank.
        names: of the parameters that are averaged.
        parameters: these.
    """

    def __init__(
        self, recorder: FlightRecorder, names: Sequence[str] = (), parameters: Sequence[torch.Tensor] = ()
    ) -> None:
        self._recorder = recorder
        self._evenness = Evenness(recorder, names, parameters)
        self.last: Comparison | None = None
        self.alarms: list[Callable[[Comparison], object]] = []
        self._here: list[int] = []  # who had data
        self._compared: deque[tuple[int, list[_Figures]]] = deque(maxlen=MOST)  # the step, and what those brought
        self._logged = -math.inf
        self._unsaid: list[str] = []

    def compare(self, step: int, transport: Transport) -> None:
        """Every rank calls it at once, behind the reduction of a step.

        Raises:
            TransportError: if the collective fails.
        """
        mine = [*_figures(self._recorder.last_rows(EVERY)), *self._evenness.did()]
        told = gather_rows(transport, torch.tensor(mine, dtype=torch.float64, device="cpu")).tolist()
        self.last = self._judge(step, [row[:-DID] for row in told])
        differ = self._evenness.compare([Did(*map(int, row[-DID:])) for row in told], transport)
        if self.last is None:
            return
        self.last.notes.extend(differ)
        self._log(self.last, transport.rank)
        for alarm in self.alarms if self.last.late else ():
            try:
                alarm(self.last)
            except Exception:  # a message that could not be sent ends no training
                logger.exception("%r, which was to be called where a rank is late, raised; training goes on", alarm)

    def _log(self, found: Comparison, rank: int) -> None:
        """A line of what is wrong, at most once a minute; notes are kept until then."""
        self._unsaid += [note for note in found.notes if note not in self._unsaid]
        late = "; ".join(map(str, found.late))
        said = [*([f"{late}; the others wait for it"] if late else []), *self._unsaid]
        if said and clocks.now() - self._logged >= LOG_SECONDS:
            self._logged = clocks.now()
            self._unsaid.clear()
            if rank == 0:
                logger.warning("%s", "; ".join(said))

    def _judge(self, step: int, rows: Sequence[Sequence[float]]) -> Comparison | None:
        figures = [_Figures(*row) for row in rows]
        here = [rank for rank, each in enumerate(figures) if not math.isnan(each.seconds)]
        if len(here) < 2 or here != self._here:
            self._compared.clear()
        self._here = here
        if len(here) < 2:
            return None
        self._compared.append((step, [figures[rank] for rank in here]))
        seconds = statistics.median(figures[rank].seconds for rank in here)
        late = [found for place in range(len(here)) if (found := self._late(seconds, place)) is not None]
        late.sort(key=lambda straggler: -straggler.seconds)
        parts = {part: [getattr(each, part) for each in figures] for part in ALL}
        return Comparison(step, late, seconds, parts, min(figures[r].waiting for r in here), self._about_link(seconds))

    def _late(self, seconds: float, place: int) -> Straggler | None:
        """What is to be said of a rank, from the last comparisons, the longest row of them that tells."""
        for parts, error_of in ((WORK, "work_error"), (ALL, "error")):
            leads, errors, by_part = [], [], []
            for _, figures in self._compared:
                mine, others = figures[place], [each for i, each in enumerate(figures) if i != place]
                leads.append(mine.sum(parts) - statistics.median(each.sum(parts) for each in others))
                noise = statistics.median(getattr(each, error_of) for each in others)
                errors.append(math.hypot(getattr(mine, error_of), noise))
                by_part.append([getattr(mine, p) - statistics.median(getattr(o, p) for o in others) for p in parts])
            for first in range(len(leads) - TIMES + 1):
                count = len(leads) - first
                mean = math.fsum(leads[first:]) / count
                between = statistics.stdev(leads[first:]) / math.sqrt(count)
                error = max(math.hypot(*errors[first:]) / count, between)
                begins = min(leads[first], leads[-1]) >= SHARE / 2 * seconds
                if begins and mean >= max(SHARE * seconds, LEAST_SECONDS, ERRORS * error):
                    totals = [math.fsum(each) for each in zip(*by_part[first:], strict=True)]
                    part, since = parts[totals.index(max(totals))], max(0, self._compared[first][0] + 1 - EVERY)
                    return Straggler(self._here[place], part, mean, mean / seconds, since)
        return None

    def _about_link(self, seconds: float) -> list[str]:
        """Whether all ranks wait for the link, and did not before."""
        notes = []
        _, figures = self._compared[-1]
        longest = min(each.longest_wait for each in figures)
        if len({each.longest_in for each in figures}) == 1 and longest > max(PAUSE_SECONDS, PAUSE_STEPS * seconds):
            notes.append(
                f"all ranks waited {longest:.1f} s for their averages in step {figures[0].longest_in:.0f}: the link "
                "was interrupted, or the machines stood still"
            )
        waits = [min(each.quick_wait for each in figures) for _, figures in self._compared]
        before, after = waits[:-TIMES], waits[-TIMES:]
        if len(before) >= TIMES and min(after) > SLOWER * max(before) and min(after) > SLOWER_SHARE * seconds:
            since = max(0, self._compared[-TIMES][0] + 1 - EVERY)
            notes.append(
                f"the link has become slow: since about step {since} all ranks wait {1e3 * min(after):.1f} ms a step "
                f"({min(after) / seconds:.0%} of it) for their averages, before that up to {1e3 * max(before):.1f} ms"
            )
        return notes


def _figures(rows: Sequence[StepRow]) -> _Figures:
    """What a rank brings of these steps."""
    steps = [row for row in rows if row.seconds[Phase.BACKWARD]]
    blocks = [steps[i : i + BLOCK] for i in range(0, len(steps) - BLOCK + 1, BLOCK)]
    if len(blocks) < EVERY // BLOCK - 1:
        return _Figures(*[math.nan] * len(_Figures._fields))
    counted = [row for block in blocks for row in block]
    waits = sorted(row.seconds[Phase.WAITING] for row in counted)
    longest = max(counted, key=lambda row: row.seconds[Phase.WAITING])
    queued = [math.fsum(row.queued[phase] for phase in OWN) for row in counted]
    all_own = [math.fsum(row.seconds[phase] for phase in OWN) for row in counted]
    work = [a - b for a, b in zip(all_own, queued, strict=True)]
    compute, data, optimizer = (
        _mean([math.fsum(row.seconds[p] - row.queued[p] - row.collected[p] for p in phases) for row in counted])
        for phases in PARTS.values()
    )
    return _Figures(
        _mean([row.end - row.start for row in counted]),
        _mean(waits),
        _error(all_own),
        _error(work),
        waits[len(waits) // 10],
        longest.seconds[Phase.WAITING],
        longest.step,
        compute,
        data,
        optimizer,
        _mean([math.fsum(row.collected[phase] for phase in OWN) for row in counted]),
        _mean(queued),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    """The standard error of a mean over blocks."""
    means = [_mean(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
    return statistics.stdev(means) / math.sqrt(len(means))
