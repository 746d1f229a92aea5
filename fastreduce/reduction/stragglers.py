"""Stragglers: which rank the others wait for, while training goes on and every rank looks equally slow.

1. Every `EVERY` steps each rank brings a few numbers to one small all-gather behind that step's reduction: the mean
   seconds of the parts of a step, without those in which it waited, and how sure they are.
2. A rank is late if it has taken longer than the others' median three times in a row, by a twentieth of a step each
   time, and by a tenth and five standard errors in the mean of these times and those before, up to eight. Errors are
   those of means over blocks of ten steps, so that one long pause (a checkpoint, a collection of garbage) tells
   nothing.
3. All ranks find the same, from the same numbers.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..transports import Transport
from . import clocks
from .flight_record import Phase, Row
from .flight_recorder import FlightRecorder

logger = logging.getLogger(__name__)

EVERY = 50  # steps: an all-gather of some 0.2 ms then costs a step of 5 ms less than a thousandth
BLOCK = 10  # steps, whose mean counts as one observation
SHARE = 0.1  # of a step, by which a late rank is later
ERRORS = 5.0  # standard errors, likewise
TIMES, MOST = 3, 8  # comparisons in a row: so many at least, and the last of them that count
LOG_SECONDS = 60.0

PARTS = {
    "compute": (Phase.FORWARD, Phase.BACKWARD),
    "data": (Phase.DATA,),
    "optimizer": (Phase.AFTER, Phase.OPTIMIZER),
}
"""The parts of a step → what is in it; in `no_sync`, what lies between backward and forward counts as compute."""


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        rank: the rank.
        part: where it takes longer, most of all: "compute", "data" or "optimizer".
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
    """

    step: int
    late: list[Straggler]
    seconds: float
    parts: dict[str, list[float]]
    link: float

    def as_dict(self) -> dict[str, Any]:
        """The same as dicts, lists and numbers."""
        return dataclasses.asdict(self)


class Stragglers:
    """Compares ranks now and then, and tells of those that are late.

    Args:
        recorder: of this rank.
    """

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self.last: Comparison | None = None
        self.alarms: list[Callable[[Comparison], object]] = []
        # Of ranks that were behind in the last comparisons: since when, and by how much, with its error and by part.
        self._leads: dict[int, tuple[int, list[tuple[float, float, list[float]]]]] = {}
        self._logged = -math.inf

    def compare(self, step: int, transport: Transport) -> None:
        """Every rank calls it at once, behind the reduction of a step.

        Raises:
            TransportError: if the collective fails.
        """
        rows = torch.zeros(transport.world_size, 3 + len(PARTS), dtype=torch.float64)
        rows[transport.rank] = torch.tensor(_figures(self._recorder.last_rows(EVERY)), dtype=torch.float64)
        transport.all_gather(rows.view(-1)).wait()
        self.last = self._judge(step, rows.tolist())
        if self.last is not None and self.last.late:
            if transport.rank == 0 and clocks.now() - self._logged >= LOG_SECONDS:
                self._logged = clocks.now()
                logger.warning("%s; the others wait for it", "; ".join(map(str, self.last.late)))
            for alarm in self.alarms:
                try:
                    alarm(self.last)
                except Exception:  # a message that could not be sent ends no training
                    logger.exception("%r, which was to be called where a rank is late, raised; training goes on", alarm)

    def _judge(self, step: int, rows: Sequence[Sequence[float]]) -> Comparison | None:
        here = [rank for rank, row in enumerate(rows) if not math.isnan(row[0])]
        if len(here) < 2:
            self._leads.clear()
            return None
        seconds = statistics.median(rows[rank][0] for rank in here)
        told = []
        for rank in range(len(rows)):
            others = [rows[other] for other in here if other != rank]
            late = self._late(step, seconds, rank, rows[rank], others) if rank in here else None
            if late is not None:
                told.append(late)
        parts = {part: [row[3 + i] for row in rows] for i, part in enumerate(PARTS)}
        told.sort(key=lambda straggler: -straggler.seconds)
        return Comparison(step, told, seconds, parts, min(rows[rank][1] for rank in here))

    def _late(
        self, step: int, seconds: float, rank: int, mine: Sequence[float], others: Sequence[Sequence[float]]
    ) -> Straggler | None:
        """What is to be said of a rank, after some comparisons in which it was behind the others, without a break."""
        behind = math.fsum(mine[3:]) - statistics.median(math.fsum(other[3:]) for other in others)
        since, leads = self._leads.pop(rank, (max(0, step + 1 - EVERY), []))
        if behind < SHARE / 2 * seconds:
            return None
        error = math.hypot(mine[2], statistics.median(other[2] for other in others))
        by_part = [mine[3 + i] - statistics.median(other[3 + i] for other in others) for i in range(len(PARTS))]
        leads = [*leads, (behind, error, by_part)][-MOST:]
        self._leads[rank] = since, leads
        mean = math.fsum(lead for lead, _, _ in leads) / len(leads)
        error = math.hypot(*(error for _, error, _ in leads)) / len(leads)
        if len(leads) < TIMES or mean < max(SHARE * seconds, ERRORS * error):
            return None
        totals = [math.fsum(parts[i] for _, _, parts in leads) for i in range(len(PARTS))]
        return Straggler(rank, list(PARTS)[totals.index(max(totals))], mean, mean / seconds, since)


def _figures(rows: Sequence[Row]) -> list[float]:
    """Mean seconds of a step, of waiting in it, the standard error of the rest, and each part; NaN without data."""
    steps = [row for row in rows if row.seconds[Phase.BACKWARD]]
    blocks = [steps[i : i + BLOCK] for i in range(0, len(steps) - BLOCK + 1, BLOCK)]
    if len(blocks) < EVERY // BLOCK - 1:
        return [math.nan] * (3 + len(PARTS))

    def mean(of: Callable[[Row], float], some: Sequence[Row]) -> float:
        return math.fsum(map(of, some)) / len(some)

    counted = [row for block in blocks for row in block]
    own = [mean(lambda row: math.fsum(row.seconds) - row.seconds[Phase.WAITING], block) for block in blocks]
    return [
        mean(lambda row: row.end - row.start, counted),
        mean(lambda row: row.seconds[Phase.WAITING], counted),
        statistics.stdev(own) / math.sqrt(len(own)),
        *(mean(lambda row, of=phases: math.fsum(row.seconds[p] for p in of), counted) for phases in PARTS.values()),  # type: ignore[misc]
    ]
