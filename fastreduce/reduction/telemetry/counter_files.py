"""Counters in files: a line of JSON now and then, and a page that a node exporter of Prometheus reads."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import weakref
from pathlib import Path
from typing import Any

from ...environment.exits import Exit, each_at_exit
from ...environment.forks import Owner
from ..arrivals import weakly
from ..streams import is_capturing
from .counters import Counters, to_prometheus
from .flight_record import StepRow
from .flight_recorder import FlightRecorder

logger = logging.getLogger(__name__)

VARIABLE = "FASTREDUCE_COUNTERS"
SECONDS = 10.0  # from one line to the next

_open: weakref.WeakSet[CounterFiles] = weakref.WeakSet()


class CounterFiles:
    """`rank0.jsonl`, to which lines are appended, and `rank0.prom`, which is replaced; `rank0.1.…` of the next wrapper.

    They are written behind the first step, behind the first one that ends `seconds` later, and so on, and at the end.
    A disk that is full ends that, with a line in the log, and not the training.

    Args:
        folder: where.
        rank: of this process.
        counters: what is written.
        recorder: tells when steps end.
        seconds: from one time to the next.
    """

    def __init__(self, folder: Path, rank: int, counters: Counters, recorder: FlightRecorder, seconds: float) -> None:
        name = f"rank{rank}.{counters.number}" if counters.number else f"rank{rank}"
        self._lines, self._page = folder / f"{name}.jsonl", folder / f"{name}.prom"
        self._rank, self._counters, self._seconds = rank, counters, seconds
        self._due, self._owner = 0.0, Owner()
        counters.as_dict()  # from now on it counts
        recorder.on_step.append(weakly(self._on_step))
        _open.add(self)

    def _on_step(self, row: StepRow) -> None:
        if row.end >= self._due and not is_capturing():  # counts on a device would be waited for
            self._due = row.end + self._seconds
            self.write()

    def write(self) -> None:
        """Write what has been counted until now."""
        if not self._owner.is_here:
            return
        counted = self._counters.as_dict()
        part = self._page.with_name(f".{self._page.name}.{os.getpid()}")
        try:
            with self._lines.open("a") as file:
                file.write(json.dumps({"time": time.time(), **_finite(counted)}) + "\n")
            part.write_text(to_prometheus(counted), "utf-8", "replace")
            part.replace(self._page)  # whole, whenever it is read
        except OSError as error:
            logger.warning("rank %d: counters are not written any more: %s", self._rank, error)
            self._due = math.inf

    def close(self) -> None:
        """Write the end, once."""
        if self in _open:
            _open.discard(self)
            if self._due < math.inf:
                self.write()
            self._due = math.inf


def _finite(value: Any) -> Any:
    """The same with None for what JSON has no word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


each_at_exit(Exit.TRACES, CounterFiles.close, _open)
