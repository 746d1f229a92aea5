"""Telemetry: what is noted of one reducer's steps, and who is told: counters, a trace, late ranks and missing ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...errors import TransportError
from ...transports import Transport
from ..arrivals import weakly
from ..bucketed import BucketedGradients
from ..streams import is_capturing
from .counter_files import CounterFiles
from .counters import Counters
from .flight_recorder import FlightRecorder
from .nonfinite import NonFiniteSteps
from .stragglers import EVERY, Stragglers
from .trace import Trace
from .watch import forget, in_other_call, watch
from .whereabouts import Whereabouts, explain


class Telemetry:
    """Notes what a reducer's rank does, and tells those who want to know.

    Args:
        buckets: those of the reducer.
        used: for each parameter, whether its gradient has arrived in this backward.

    Attributes:
        recorder: what notes when each bucket was where, and what this rank does.
        nonfinite: counts steps with averages that are not finite.
        stragglers: compares ranks.
        counters: adds steps up.
        files: where counters are written; None without any.
        trace: where every step is written; None without one.
    """

    def __init__(self, buckets: BucketedGradients, used: Sequence[bool]) -> None:
        transport, self._buckets = buckets.transport, buckets
        self.recorder = FlightRecorder(transport.rank, transport.world_size, buckets.gradients.parameters, used)
        self.nonfinite = NonFiniteSteps()
        names, parameters = buckets.gradients.names, buckets.gradients.parameters
        self.stragglers = Stragglers(self.recorder, names, parameters)
        self.counters = Counters(self.recorder, self.stragglers, self.nonfinite)
        self.files: CounterFiles | None = None
        self.trace: Trace | None = None
        self._place: Whereabouts | None = None

    def write_counters(self, folder: Path, rank: int, seconds: float) -> None:
        """Write the counters into a folder from now on, until this ends."""
        self.files = CounterFiles(folder, rank, self.counters, self.recorder, seconds)
        weakref.finalize(self, self.files.close).atexit = False

    def tell_at(self, place: Whereabouts) -> None:
        """Tell at `place` where this rank is once it stalls, and ask there for those that are missing."""
        self._place = place
        watch(self.recorder, place, weakly(self._give_up))

    def _give_up(self) -> None:
        self._buckets.transport.abort()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Errors of collectives say what this rank did, and what the missing ones do."""
        try:
            yield
        except TransportError as error:
            raise explain(error, self.recorder, self._place) from error

    def await_all(self, meeting: str, why: str) -> None:
        """Return when every rank has called it, where this one has a place to meet them.

        Raises:
            TransportError: saying `why`, and who has not come within the group's timeout. Others that wait for this
                rank's averages meanwhile raise at once.
        """
        if self._place is not None:
            with in_other_call([self.recorder]):
                self._place.meet(meeting, self.recorder.rank, self.recorder.world_size, why)

    def meet(self, reduction: int, step: int) -> None:
        """At the end of a reduction, the same one on all ranks: compare what each did, if that is due."""
        if reduction % EVERY == EVERY - 1 and self._compares:
            self.stragglers.compare(step, self._buckets.transport)
        if self.trace is not None and reduction >= self.trace.due and not self._is_captured:
            self.trace.align(reduction, self._buckets.transport, self._buckets.wire_device)

    @property
    def _compares(self) -> bool:
        """On a GPU the host's marks tell what was enqueued when, not how long it took."""
        on_cpus = all(spec.device.type == "cpu" for spec in self._buckets.specs)
        return self._buckets.transport.world_size > 1 and on_cpus

    @property
    def _is_captured(self) -> bool:
        """Whether this step is captured in a CUDA graph: then no host may wait."""
        return self._buckets.wire_device.type == "cuda" and is_capturing()

    def leave(self) -> None:
        """Tell the other ranks nothing more."""
        self._place = None
        forget(self.recorder)

    def move_to(self, transport: Transport) -> None:
        """The ranks of another transport take part from now on, whose clocks are compared with the next reduction."""
        self.recorder.rank, self.recorder.world_size = transport.rank, transport.world_size
        if self.trace is not None:
            self.trace.due = 0

    def close(self) -> None:
        """Complete the files."""
        if self.trace is not None:
            self.trace.close()
        if self.files is not None:
            self.files.close()
