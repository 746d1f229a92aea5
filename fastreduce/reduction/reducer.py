"""GradientReducer: averages gradients inside backward; what it is made of, and its life between two backwards."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compression import Compression
from ..environment.exits import Exit, each_at_exit
from ..errors import SettingError, brief
from ..policy import NONE_FROZEN, Policy
from ..transports import Transport
from ..transports.messages import checked, numbers
from . import saved_state
from .agreed_schedule import AgreedSchedule
from .averaging import Averaging
from .backward import Backward
from .bucketed import BUCKET_BYTES, FIRST_BUCKET_BYTES, BucketedGradients
from .buckets import BucketPlan, shortest
from .clocks import Seconds
from .events import Events
from .pipeline import BucketPipeline
from .residuals.factors import finite_number
from .schedule import Schedule, Setting
from .sparse import SparseGradients
from .streams import Stream
from .telemetry.counter_files import SECONDS
from .telemetry.counters import to_prometheus
from .telemetry.flight_record import FlightRecord
from .telemetry.stragglers import Comparison
from .telemetry.trace import Trace
from .telemetry.whereabouts import Whereabouts


class GradientReducer:
    """Averages the gradients of `parameters` over the ranks of `transport` during backward.

    1. `arm`, after a forward that is to be synchronised, makes the next backward reduce.
    2. A hook on each parameter's AccumulateGrad node counts its bucket down; full buckets are launched
       in index order, the same order on every rank.
    3. A callback at the end of that backward launches what is left, waits for everything, and stores
       averages where any rank used a parameter.
    4. `rebuild_buckets`, before the next forward, lays the buckets out in the order in which rank 0 saw
       gradients arrive. In the first backward nothing is launched before its end: it also counts how
       often each hook fires, which re-entrant checkpointing can make more than once.

    Args:
        parameters: floating-point or complex leaves that require gradients.
        names: their names, which key saved residuals and appear in errors.
        transport: what moves wires; `close` closes it.
        compression: the setting, or a schedule.
        bucket_caps: bytes of the first, second, … bucket; the last holds for all that follow.
        gradient_as_bucket_view: whether `.grad` become views of the buckets.
        dtype: what gradients are averaged in; None means each in the dtype of its parameter.
        sparse: indices of parameters whose gradients are sparse; they travel in no bucket, uncompressed,
            when backward ends.
        overlaps: whether full buckets are launched during backward, or all when it has ended.
        rebuilds: whether `rebuild_buckets` ever does; else buckets keep the order in which they were made.
        frozen: other parameters, by name, that may be added later: a policy may have keys for them.

    Attributes:
        buckets: the gradients, laid out.
        backward: the backward under way, or the next one.
        schedule: the setting of each step.
        events: what is called at the moments of a backward.
        recorder: what notes when each bucket was where, and what this rank does.
        trace: where every step is written; None without one.
        reductions: how many there have been that these ranks share; `step` may be restored on some of them only.
        overlaps: as given; it may change between two steps, on all ranks alike.
        active_ranks: tells how many ranks bring gradients, which sums are divided by; None means that all do.

    Raises:
        TensorError: if a parameter's dtype is not supported.
        BackendUnavailableError: if the kernels cannot run on the parameters' device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        transport: Transport,
        compression: Compression | Policy | Schedule,
        *,
        bucket_caps: Sequence[int] = (FIRST_BUCKET_BYTES, BUCKET_BYTES),
        gradient_as_bucket_view: bool = False,
        dtype: torch.dtype | None = None,
        sparse: Iterable[int] = (),
        overlaps: bool = True,
        rebuilds: bool = True,
        frozen: Mapping[str, Tensor] = NONE_FROZEN,
    ) -> None:
        schedule = Schedule.of(compression)
        self._sparse = SparseGradients({i: parameters[i] for i in sorted(sparse)}, transport)
        self.buckets = BucketedGradients(
            parameters,
            names,
            transport,
            schedule.setting,
            bucket_caps=bucket_caps,
            as_views=gradient_as_bucket_view,
            dtype=dtype,
            leave_out=self._sparse.parameters,
            frozen=frozen,
        )
        self._agreed = AgreedSchedule(schedule, self.buckets)
        self.events = Events()
        self.backward = Backward(self.buckets, self._sparse, self._agreed, self.events, overlaps)
        self._telemetry = self.backward.telemetry
        self.recorder = self._telemetry.recorder
        self._rebuilds, self._rebuilt = rebuilds, not rebuilds
        self._reductions_before = 0  # of these gradients in these buckets
        self.lay_out()
        self._find_siblings(parameters)
        self._own()

    def _find_siblings(self, parameters: Sequence[Tensor]) -> None:
        """Let reducers that average some of the same gradients know each other: both would write to them."""
        mine = set(map(id, parameters))
        for other in list(_alive):
            if other is not self and not mine.isdisjoint(map(id, other.buckets.gradients.parameters)):
                self.backward.siblings.add(other.backward)
                other.backward.siblings.add(self.backward)

    def _own(self) -> None:
        """Let streams and transport end with the reducer: by `close`, when nobody holds it any more, or at exit."""
        self._close = weakref.finalize(self, shut_down, self.buckets.streams.by_device, self.transport)
        self._close.atexit = False
        _alive.add(self)

    def close(self) -> None:
        """Remove the hooks, end communication threads and close the transport."""
        self.remove_hooks()
        self._telemetry.leave()
        self._close()
        self._telemetry.close()

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters: gradients stay local from now on."""
        self.backward.arrivals.remove()

    def replace_hooks(self) -> None:
        """Put the hooks on the nodes that the parameters have now: a changed dtype makes new ones."""
        self.backward.arrivals.attach()

    # What it is about

    @property
    def transport(self) -> Transport:
        """What moves wires."""
        return self.buckets.transport

    @property
    def schedule(self) -> Schedule:
        """The setting of each step."""
        return self._agreed.schedule

    @property
    def compression(self) -> Compression | Policy:
        """The setting of the next step."""
        return self._agreed.schedule.setting

    @property
    def step(self) -> int:
        """How many backwards have been reduced, those before a checkpoint included."""
        return self._agreed.schedule.step

    @property
    def plan(self) -> BucketPlan:
        """The layout of the buckets."""
        return self.buckets.plan

    @property
    def pipelines(self) -> list[BucketPipeline]:
        """What averages each bucket."""
        return self.buckets.pipelines

    @property
    def used(self) -> Sequence[bool]:
        """For each parameter, whether a gradient has arrived in this backward on this rank."""
        return self.backward.arrivals.used

    @property
    def arrival_order(self) -> list[int]:
        """The parameters in the order in which their gradients arrived in the first backward."""
        return self.backward.arrivals.last_seen()

    @property
    def seconds(self) -> Seconds:
        """Time that the last reduction spent in each stage, summed over the buckets."""
        return self.buckets.seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return self.buckets.sent_bytes

    @property
    def reductions(self) -> int:
        """How many there have been that these ranks share."""
        return self.backward.reductions

    @property
    def overlaps(self) -> bool:
        """Whether full buckets are launched during backward."""
        return self.backward.overlaps

    @overlaps.setter
    def overlaps(self, overlaps: bool) -> None:
        self.backward.overlaps = overlaps

    @property
    def bucket_caps(self) -> Sequence[int]:
        """Bytes of the first, second, … bucket where `set_compression` names no size.

        As given; others come into force with the next `set_compression`, on all ranks alike.
        """
        return self._agreed.caps

    @bucket_caps.setter
    def bucket_caps(self, caps: Sequence[int]) -> None:
        self._agreed.caps = shortest(caps)

    @property
    def active_ranks(self) -> Callable[[], int] | None:
        """Tells how many ranks bring gradients."""
        return self.backward.active_ranks

    @active_ranks.setter
    def active_ranks(self, count: Callable[[], int] | None) -> None:
        self.backward.active_ranks = count

    @property
    def trace(self) -> Trace | None:
        """Where every step is written."""
        return self._telemetry.trace

    # What is told of it

    def flight_record(self) -> FlightRecord:
        """What this rank does, and when each bucket of the last 64 steps was ready, sent and reduced; from any thread.

        On a GPU buckets are ready when the host has enqueued them, and what follows is known of traced steps only.
        """
        return self.recorder.flight()

    def counters(self) -> dict[str, Any]:
        """What reductions have sent, taken and lost so far, as JSON has it; from any thread.

        Counting begins with the first call, which finds the last 64 steps; before it a step pays nothing.

        - `since`, `step`, `reductions`: the first step that is counted, the last one, how many.
        - `sent_bytes`: by this rank, by stage on the wire.
        - `phase_seconds`: of steps, by what this rank did; `waiting` is what backward did not hide. They add up to the
          steps.
        - `stage_seconds`: compress, wire, sum, decompress, summed over buckets, largely beside backward. On a GPU they
          are known of traced steps only.
        - `nonfinite_steps`: since construction.
        - `late`: who the others wait for, as `stragglers()` has it.
        - `relative_errors`: by setting and group of parameters, what a `Shadow` has measured last.
        """
        return self._telemetry.counters.as_dict()

    def prometheus(self) -> str:
        """The counters in Prometheus' text format, for a node exporter's textfile collector or an HTTP server."""
        return to_prometheus(self._telemetry.counters.as_dict())

    def note_errors(self, errors: Mapping[str, Mapping[str, float]]) -> None:
        """Let the counters tell what settings would lose, by setting and group of parameters."""
        counters = self._telemetry.counters
        counters.errors = {**counters.errors, **errors}

    def write_counters(self, folder: Path, rank: int, seconds: float = SECONDS) -> None:
        """Write the counters into a folder every so often: a line in `rank0.jsonl`, and `rank0.prom` anew.

        As FASTREDUCE_COUNTERS does: behind the first step, then every `seconds`, and when the reducer ends. `rank` is
        that under which this process is shown.
        """
        self._telemetry.write_counters(folder, rank, seconds)

    @property
    def nonfinite_steps(self) -> int:
        """Steps so far in which an average was NaN or infinite, as far as compression shows it; waits for GPUs."""
        return self._telemetry.nonfinite.total

    def stragglers(self) -> Comparison | None:
        """How long each rank takes for its parts of a step, and who is late; None before the first comparison.

        Ranks are compared every 50 steps, where there are several, on CPUs. Who is late is also a warning in the log of
        rank 0, once a minute at most.
        """
        return self._telemetry.stragglers.last

    def on_straggler(self, alarm: Callable[[Comparison], object]) -> None:
        """Call `alarm` on this rank after each comparison in which a rank is late, on the thread of backward.

        What it raises is logged, with its traceback.
        """
        self._telemetry.stragglers.alarms.append(alarm)

    def tell_at(self, place: Whereabouts) -> None:
        """Let ranks tell each other at `place` where they are when one of them stalls, and name it in errors."""
        self._telemetry.tell_at(place)

    def trace_to(self, folder: Path, rank: int) -> None:
        """Write a trace of every step into a folder from the next reduction on; on every rank, before it."""
        self._telemetry.trace = Trace(folder, self.recorder, rank)

    # Buckets

    def keep_statistics(self) -> None:
        """Let decompression count non-finite elements and sum squares from now on; its kernels are compiled here."""
        self.buckets.keep_statistics()

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what error feedback keeps by `factor`: new loss scale / old loss scale.

        Residuals are in units of scaled gradients. A GradScaler's scale is followed without it, from the step on that
        takes it out; call it, between a step and the next forward, where a loss is scaled by hand. A scale that is then
        divided out of gradients in place looks like clipping: `note_applied` after each step tells that it is none.

        Raises:
            SettingError: called in a backward, whose buckets may be under way, or if `factor` is no finite number above
                0, or FP32 does not hold what is kept on this rank times it. Residuals stay as they are.
        """
        number = finite_number(factor)
        if number is None or number <= 0:
            raise SettingError(f"rescale_residuals: factor={brief(factor)}; allowed: a finite number above 0")
        if self.backward.has_raised:
            self.drop_broken_backward()
        if self.backward.running:
            raise SettingError("rescale_residuals in a backward: call it between a step and the next forward")
        for pipeline in self.buckets.pipelines:
            least, most = (0.0, math.inf) if pipeline.kept is None else pipeline.kept.factors_that_fit()
            if not least <= number <= most:
                raise SettingError(
                    f"rescale_residuals: factor={brief(factor)}; allowed: a finite number above 0, here from "
                    f"{least:.2g} to {most:.2g}, so that FP32 holds what rank {self.transport.rank} keeps, times it. "
                    f"{pipeline.about}"
                )
        for feedback in self.buckets.feedbacks:
            feedback.rescale(number)

    def average_with(self, averaging: Averaging) -> None:
        """Let another average the buckets from now on."""
        self.make_up_for_raised()
        self.buckets.average_with(averaging)
        self.backward.lay_out()

    def reset(self) -> None:
        """Forget what is under way and what was learned, as if no backward had been: other ranks will take part.

        Nothing is made up for, so that it works after a peer has died.
        """
        self._rebuilt = not self._rebuilds
        self.backward.reset()

    def add(self, parameters: Sequence[Tensor], names: Sequence[str], sparse: Iterable[int] = ()) -> None:
        """Average the gradients of these, too, from the next forward on; every rank calls it before that.

        Buckets are laid out anew, and residuals move along. As after construction nothing overlaps the next backward,
        whose order buckets then follow.

        Args:
            parameters: others than those that are averaged already.
            names: theirs.
            sparse: positions of those whose gradients are sparse.

        Raises:
            TensorError: if a parameter's dtype is not supported. Nothing has changed then, nor below.
            SettingError: if a policy does not fit them, or a communication hook averages.
            MismatchError: on every rank, if ranks differ in them, or one of them has such an error.
            TransportError: within the group's timeout, if a rank does not call it.
            ReducerError: if buckets could not be laid out before.
        """
        self.switch_if_due()  # the setting in force till now may know nothing of them
        self.buckets.check_laid_out()
        buckets, sparse = self.buckets, set(sparse)
        with self._telemetry.explaining():
            added = self._agreed.agree_to_add(parameters, names, sparse)
        first = len(buckets.specs)
        self._sparse.parameters |= {first + i: parameters[i] for i in sorted(sparse)}
        self.look()
        buckets.add(added, sparse)
        buckets.warm_up(self.schedule.settings)
        self.backward.add(parameters)
        self._rebuilt, self._reductions_before = not self._rebuilds, self.reductions
        self._find_siblings(parameters)

    def lay_out(self) -> None:
        """Lay buckets out as at construction; what is kept of their gradients is dropped."""
        self.buckets.lay_out(self.buckets.first_groups())
        self.backward.lay_out()

    def move_to(self, make: Callable[[], Transport], compared: bool = False) -> None:
        """Reduce over the ranks of another transport from now on, which is made when the old one has been closed.

        Buckets are laid out as at construction, so that ranks with another past agree. Residuals move along. Unless
        they have `compared` it, before the next forward ranks compare what settings are to come; the step is that of
        the rank that has come furthest.
        """
        self._telemetry.leave()
        self._close()
        transport = make()
        self._telemetry.move_to(transport)
        self.backward.reductions = self._reductions_before = 0  # on all ranks, which may have come unequally far
        self.buckets.move_to(transport)
        self._sparse.transport = transport
        self.backward.lay_out()
        self._own()
        self._agreed.move(compared)

    # Settings

    def set_compression(self, setting: Setting, at: int | None = None, bucket_bytes: float | None = None) -> None:
        """Reduce under another setting from step `at` on (None: the next); every rank calls it between two steps.

        Steps are reduced backwards, counted from 0 (`step`). The setting takes the place of what was to come from that
        step on; the switch is made before its forward. What follows then has the bits of a checkpoint of that moment
        that is resumed under the new setting.

        The law of residuals, with Q of `ErrorFeedback`: between two settings with error feedback they are carried over,
        those of averages as part of the first stage. Under a setting without, Q is added to the next gradient, rounded
        with it, and kept until it has been applied: what a clipping or a skipped step leaves of it is added to the one
        after. So, whatever was switched when, the sum of what was applied differs from the exact one by what is kept
        (and by what settings without error feedback lose of their own steps): nothing is dropped.

        Args:
            setting: as at construction.
            at: the step.
            bucket_bytes: the size of buckets from there on; None leaves it as it is.

        Raises:
            SettingError: if it is no setting or no size, or the step has been already; called in a backward.
            MismatchError: on every rank, if ranks differ in the setting, the step, or in how many steps they have
                reduced. Nothing has changed then.
            TransportError: within the group's timeout, if a rank does not call it.
        """
        if self.backward.has_raised:
            self.drop_broken_backward()  # which other ranks are in still
        self._agreed.change(setting, at, bucket_bytes, self.backward.running)

    def switch_if_due(self) -> bool:
        """Before a forward: let the setting of the next step be in force; returns whether it was not.

        It takes effect on all ranks at one step, because they have agreed on it before.
        """
        switched = self._agreed.switch_if_due()
        if switched:
            self.backward.lay_out()
        return switched

    def rebuild_buckets(self) -> bool:
        """After the first reduced backward, once: lay buckets out in the order that rank 0 observed.

        What only other ranks saw comes next; what has never fired goes last, in buckets of its own, so
        that no bucket waits for it. Residuals move along. Every rank must call it at the same point.

        Returns:
            Whether buckets were rebuilt.
        """
        # On this rank the first one may have raised.
        if self._rebuilt or not (self.backward.reduced_once or self.backward.reductions > self._reductions_before):
            return False
        count = len(self.buckets.specs)
        with self._telemetry.explaining():
            told = self.transport.exchange(self.arrival_order)
        observed = checked(told, lambda value: numbers(value, count), "order of its parameters")
        order = dict.fromkeys(itertools.chain(*observed))
        if not order:  # it did on all
            return False
        self.buckets.regroup(order)
        self.backward.lay_out()
        self._rebuilt = True
        return True

    # One backward

    def look(self) -> None:
        """Before a forward: let error feedback see what has become of the last averages."""
        self.buckets.look(others_follow=False)

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind."""
        self.backward.arm()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Hook a forward's outputs, so that the end of the outermost backward through them is known.

        Also of a forward that is not armed: what its backward adds to averages that are in `.grad` still could be taken
        for a multiple of them.
        """
        self.backward.watch(outputs)

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end.

        The collectives that this rank still owes are made up for, so that ranks which raised elsewhere,
        or not at all, stay in step; the latter find NaN in their gradients.

        Raises:
            ReducerError: if a backward is under way, or awaits `Backward.finish`.
        """
        self.backward.drop_broken()

    def make_up_for_raised(self) -> None:
        """Before what tells or changes where this rank is: other ranks count the step of a backward that raised here.

        Not where ranks may be lost: such a backward is no step of anybody's there.
        """
        if self.backward.has_raised and self.backward.recover is None:
            self.drop_broken_backward()

    def take_part(self) -> None:
        """Bring zeros to the reduction of one backward on the other ranks, which apply the averages."""
        self.backward.take_part()

    def restore_precision(self) -> None:
        """Put parameters back that a forward has in a lower precision; here none has."""

    # State

    def check_member(self) -> None:
        """Raise if the other ranks have gone on without this one; these here wait for it."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the layout of the buckets; each rank saves its own.

        Behind a backward that raised on this rank, what the other ranks wait for is made up for first; where they do
        not come to it, that takes the transport's timeout.

        Raises:
            ReducerError: if buckets could not be laid out: they may lie otherwise than those of other ranks.
        """
        self.buckets.check_laid_out()
        self.make_up_for_raised()
        progress = {"schedule": self.schedule.state(), "rebuilt": self._rebuilt}
        return {**saved_state.save(self.buckets), **progress, **self.backward.state()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        At the same world size training resumes bit for bit. At another, each rank gets the mean of the
        old ranks' residuals. Every rank calls it. Another size of buckets than the saved one comes into force with the
        next forward, as with `set_compression`: under error feedback with other bits than those of a training that
        nothing interrupts, since what is kept of averages becomes part of the first stage.

        The schedule goes on where the state stopped, with what `set_compression` had set. A reducer that was
        constructed with another setting than the one that saved goes on under its own, from the state's step on; what
        is kept then moves along by the law of `set_compression`.

        Raises:
            SettingError: if the states are of different compressions, or of other parameters, or ranks are missing, or
                a callable that `set_compression` set is not there. Nothing has changed then.
            ReducerError: if the last backward awaits its averages (`Backward.finish`).
        """
        self.backward.check_finished()
        self.make_up_for_raised()
        self.buckets.streams.join()
        chosen = saved_state.pick([state] if isinstance(state, Mapping) else list(state), self.buckets)
        schedule = self.schedule_of(chosen)
        saved_state.restore(chosen, self.buckets)
        self._agreed.resume(schedule)
        self.backward.load(chosen)
        self._rebuilt = chosen["rebuilt"] or not self._rebuilds
        self.backward.lay_out()

    def schedule_of(self, state: Mapping[str, Any]) -> Schedule:
        """The schedule that goes on where a state's stopped.

        Raises:
            SettingError: as `load_state_dict`, of what was set.
        """
        older = {"given": state["compression"], "step": 0, "stretches": [[0, state["compression"], None]]}
        return self.schedule.resumed(state.get("schedule", older))


def shut_down(streams: Mapping[torch.device, Stream], transport: Transport) -> None:
    """End what a reducer holds outside itself."""
    if not all(stream.idle for stream in streams.values()):  # a peer does not come: nobody will miss what is under way
        transport.abort()
    try:
        for stream in streams.values():
            stream.close()
    finally:
        transport.close()


_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()
each_at_exit(Exit.REDUCERS, lambda reducer: reducer._close(), _alive)
