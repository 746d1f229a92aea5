"""GradientReducer: hooks, order and finalisation of the reduction that happens inside backward."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..compression import Compression
from ..environment.exits import Exit, at_exit
from ..errors import ReducerError, SettingError, TransportError
from ..policy import Policy
from ..transports import Transport
from ..transports.messages import checked, numbers, of_types
from . import saved_residuals
from .agreement import check_agreement
from .arrivals import Arrivals, weakly
from .bucketed import BUCKET_BYTES, FIRST_BUCKET_BYTES, Averaging, BucketedGradients, BucketJob
from .buckets import BucketPlan, shortest
from .counter_files import SECONDS, CounterFiles
from .counters import Counters, to_prometheus
from .events import Events
from .flight_record import FlightRecord, Phase
from .flight_recorder import FlightRecorder
from .nonfinite import NonFiniteSteps
from .pipeline import BucketPipeline, Seconds
from .schedule import Schedule, Setting
from .sparse import SparseGradients
from .stragglers import EVERY, Comparison, Stragglers
from .streams import Finish, Pending, Stream
from .trace import Trace
from .whereabouts import Whereabouts, explain, forget, watch


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

    Attributes:
        buckets: the gradients, laid out.
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
    ) -> None:
        self.schedule = Schedule.of(compression)
        self._caps = shortest(bucket_caps)
        self._moved = False
        self._due: float = self.schedule.step
        self._sparse = SparseGradients({i: parameters[i] for i in sorted(sparse)}, transport)
        self.buckets = BucketedGradients(
            parameters,
            names,
            transport,
            self.schedule.setting,
            bucket_caps=self._caps,
            as_views=gradient_as_bucket_view,
            dtype=dtype,
            leave_out=self._sparse.parameters,
        )
        self.buckets.warm_up(self.schedule.settings)
        self.overlaps = overlaps
        self._nonfinite = NonFiniteSteps()
        self.events = Events()
        self.active_ranks: Callable[[], int] | None = None
        self._place: Whereabouts | None = None
        self.trace: Trace | None = None
        self._launching = threading.Lock()  # each device's hooks run on a thread of their own
        self.reductions = 0
        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False
        # Parameters that no rank used in the last reduction: the same set on every rank.
        self._left_over: set[int] = set()
        self._arrivals = Arrivals(parameters, self._launch_full_buckets, self._report)
        self.recorder = FlightRecorder(transport.rank, transport.world_size, parameters, self._arrivals.used)
        self._stragglers = Stragglers(self.recorder)
        self._counters = Counters(self.recorder, self._stragglers, self._nonfinite)
        self._counter_files: CounterFiles | None = None
        self.events.launching.append(self.recorder.ready)
        self._lay_out(self.buckets.first_groups())
        self._own()

    def _own(self) -> None:
        """Let streams and transport end with the reducer: by `close`, when nobody holds it any more, or at exit."""
        self._close = weakref.finalize(self, shut_down, self.buckets.streams, self.transport)
        self._close.atexit = False
        _alive.add(self)

    def close(self) -> None:
        """Remove the hooks, end communication threads and close the transport."""
        self.remove_hooks()
        forget(self.recorder)
        self._close()
        if self.trace is not None:
            self.trace.close()
        if self._counter_files is not None:
            self._counter_files.close()

    def remove_hooks(self) -> None:
        """Take the hooks off the parameters: gradients stay local from now on."""
        self._arrivals.remove()

    def replace_hooks(self) -> None:
        """Put the hooks on the nodes that the parameters have now: a changed dtype makes new ones."""
        self._arrivals.remove()
        self._arrivals.attach()

    # What it is about

    @property
    def transport(self) -> Transport:
        """What moves wires."""
        return self.buckets.transport

    @property
    def compression(self) -> Compression | Policy:
        """The setting of the next step."""
        return self.schedule.setting

    @property
    def step(self) -> int:
        """How many backwards have been reduced, those before a checkpoint included."""
        return self.schedule.step

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
        return self._arrivals.used

    @property
    def arrival_order(self) -> list[int]:
        """The parameters in the order in which their gradients arrived in the first backward."""
        return self._arrivals.last_seen()

    @property
    def has_begun(self) -> bool:
        """Whether a backward has been reduced."""
        return self._reduced_once

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun that has not come to its end."""
        return self._in_backward

    @property
    def seconds(self) -> Seconds:
        """Time that the last reduction spent in each stage, summed over the buckets."""
        return self.buckets.seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return self.buckets.sent_bytes

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
        return self._counters.as_dict()

    def prometheus(self) -> str:
        """The counters in Prometheus' text format, for a node exporter's textfile collector or an HTTP server."""
        return to_prometheus(self._counters.as_dict())

    def note_errors(self, errors: Mapping[str, Mapping[str, float]]) -> None:
        """Let the counters tell what settings would lose, by setting and group of parameters."""
        self._counters.errors = {**self._counters.errors, **errors}

    def write_counters(self, folder: Path, rank: int, seconds: float = SECONDS) -> None:
        """Write the counters into a folder every so often: a line in `rank0.jsonl`, and `rank0.prom` anew.

        As FASTREDUCE_COUNTERS does: behind the first step, then every `seconds`, and when the reducer ends. `rank` is
        that under which this process is shown.
        """
        self._counter_files = CounterFiles(folder, rank, self._counters, self.recorder, seconds)
        weakref.finalize(self, self._counter_files.close).atexit = False

    @property
    def nonfinite_steps(self) -> int:
        """Steps so far in which an average was NaN or infinite, as far as compression shows it; waits for GPUs."""
        return self._nonfinite.total

    def keep_statistics(self) -> None:
        """Let decompression count non-finite elements and sum squares from now on; its kernels are compiled here."""
        self.buckets.keep_statistics()

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what error feedback keeps by `factor`: new loss scale / old loss scale.

        Residuals are in units of scaled gradients. A GradScaler's scale is followed without it, from the step on that
        takes it out; call it, between a step and the next forward, where a loss is scaled by hand.
        """
        for feedback in self.buckets.feedbacks:
            feedback.rescale(factor)

    def stragglers(self) -> Comparison | None:
        """How long each rank takes for its parts of a step, and who is late; None before the first comparison.

        Ranks are compared every 50 steps, where there are several, on CPUs. Who is late is also a warning in the log of
        rank 0, once a minute at most.
        """
        return self._stragglers.last

    def on_straggler(self, alarm: Callable[[Comparison], object]) -> None:
        """Call `alarm` on this rank after each comparison in which a rank is late, on the thread of backward.

        What it raises is logged, with its traceback.
        """
        self._stragglers.alarms.append(alarm)

    @property
    def _compares(self) -> bool:
        """On a GPU the host's marks tell what was enqueued when, not how long it took."""
        return self.transport.world_size > 1 and all(spec.device.type == "cpu" for spec in self.buckets.specs)

    def tell_at(self, place: Whereabouts) -> None:
        """Let ranks tell each other at `place` where they are when one of them stalls, and name it in errors."""
        self._place = place
        watch(self.recorder, place)

    def trace_to(self, folder: Path, rank: int) -> None:
        """Write a trace of every step into a folder from the next reduction on; on every rank, before it."""
        self.trace = Trace(folder, self.recorder, rank)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Errors of collectives say what this rank did, and what the missing ones do."""
        try:
            yield
        except TransportError as error:
            raise explain(error, self.recorder, self._place) from error

    # Buckets

    def _lay_out(self, groups: Iterable[Sequence[int]]) -> None:
        self.buckets.lay_out(groups)
        self._laid_out()

    def _laid_out(self) -> None:
        self._arrivals.lay_out(self.plan)
        self.recorder.lay_out(self.plan, self.pipelines)
        self._forget_backward()

    def average_with(self, averaging: Averaging) -> None:
        """Let another average the buckets from now on."""
        self.buckets.average_with(averaging)
        self._laid_out()

    def reset(self) -> None:
        """Forget what is under way and what was learned, as if no backward had been: other ranks will take part.

        Nothing is made up for, so that it works after a peer has died.
        """
        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False
        self._left_over, self.active_ranks = set(), None
        self._arrivals.forget_used()
        self._arrivals.fires[:] = [1] * len(self._arrivals.fires)
        self._forget_backward()

    def move_to(self, make: Callable[[], Transport]) -> None:
        """Reduce over the ranks of another transport from now on, which is made when the old one has been closed.

        Buckets are laid out as at construction, so that ranks with another past agree. Residuals move along. Before the
        next forward ranks compare what settings are to come; the step is that of the rank that has come furthest.
        """
        self._close()
        transport = make()
        self.recorder.rank, self.recorder.world_size = transport.rank, transport.world_size
        self.reductions = 0  # on all ranks alike, which may have come unequally far
        if self.trace is not None:
            self.trace.due = 0
        self.buckets.move_to(transport)
        self._sparse.transport = transport
        self._laid_out()
        self._own()
        self._moved, self._due = True, 0

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
        error: Exception | None = None
        changed = None
        if torch._C._current_graph_task_id() == -1:
            self.drop_broken_backward()  # which other ranks are in still
        try:
            if self._in_backward:
                raise SettingError(f"set_compression({setting!r}) in a backward: call it between two steps")
            changed = self.schedule.with_setting(self.step if at is None else at, setting, bucket_bytes)
        except Exception as found:  # whatever it is, other ranks must not wait
            error = found
        self._adopt(changed, error)

    def _adopt(self, schedule: Schedule | None, error: Exception | None = None) -> None:
        """Go on with a schedule on which all ranks agree."""
        told = {"the number of steps reduced": str(self.step)}
        try:
            if schedule is not None:
                told |= schedule.description(self.buckets.gradients.names, self.buckets.gradients.parameters)
        except Exception as found:
            error = found
        try:
            check_agreement(self.transport, told, error)
        except TransportError as found:
            raise TransportError(
                f"{found} Settings are compared where set_compression is called, which every rank does between the "
                f"same two steps: this one has reduced {self.step}"
            ) from found
        assert schedule is not None
        self.buckets.warm_up(schedule.settings)
        self.schedule, self._due = schedule, schedule.step

    def switch_if_due(self) -> bool:
        """Before a forward: let the setting of the next step be in force; returns whether it was not.

        It takes effect on all ranks at one step, because they have agreed on it before.
        """
        schedule = self.schedule
        if schedule.step < self._due:
            return False
        if self._moved:  # ranks may have come unequally far
            steps = checked(self.transport.exchange(schedule.step), lambda value: of_types([value], int), "step")
            schedule.step, self._moved = max(step for (step,) in steps), False
            self._adopt(schedule)
        if schedule.must_compare:
            error = None
            try:
                schedule.ask()
            except SettingError as found:
                error = found
            self._adopt(schedule, error)
        self._due = schedule.due
        caps = self._caps if schedule.bucket_bytes is None else (schedule.bucket_bytes,)
        if (self.buckets.assign(schedule.setting), caps) == (self.buckets.settings, self.buckets.caps):
            self.buckets.compression = schedule.setting
            return False
        self.buckets.switch(schedule.setting, caps)
        self._laid_out()
        if self._armed:
            self._arrivals.report()
        return True

    def rebuild_buckets(self) -> bool:
        """After the first reduced backward, once: lay buckets out in the order that rank 0 observed.

        What only other ranks saw comes next; what has never fired goes last, in buckets of its own, so
        that no bucket waits for it. Residuals move along. Every rank must call it at the same point.

        Returns:
            Whether buckets were rebuilt.
        """
        if self._rebuilt or not self._reduced_once:
            return False
        count = len(self.buckets.specs)
        with self._explaining():
            told = self.transport.exchange(self.arrival_order)
        observed = checked(told, lambda value: numbers(value, 0, count), "order of its parameters")
        self.buckets.regroup(dict.fromkeys(itertools.chain(*observed)))
        self._laid_out()
        self._rebuilt = True
        return True

    # One backward

    def look(self) -> None:
        """Before gradients accumulate: let error feedback see what has become of the last averages."""
        for feedback in self.buckets.feedbacks:
            feedback.look()

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind."""
        self.drop_broken_backward()
        self._forget_backward()
        self._armed, self._left_over = True, set()
        self.buckets.at_step(self.schedule.step)
        # Until the backward is known to have begun, and all through the first one, every hook reports.
        self._arrivals.report()

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end.

        The collectives that this rank still owes are made up for, so that ranks which raised elsewhere,
        or not at all, stay in step; the latter find NaN in their gradients.
        """
        if not self._in_backward:
            return
        with suppress(TransportError):
            for _, pending in self._launches:
                pending.result()
            if self._armed:
                self._count()  # as on the ranks that reduce it
                for pipeline in self.pipelines[self._next :]:
                    pipeline.run_broken()
                self._sparse.take_part(self._divisor(), broken=True)
                self._meet(counted=True)
        self._armed = self._in_backward = False
        self._forget_backward()
        for dropped in self.events.dropped:
            dropped()

    def _forget_backward(self) -> None:
        self._launches: list[tuple[BucketJob, Pending]] = []
        self._next = 0  # the first bucket that has not been launched
        self._arrivals.stop()
        if not self._reduced_once:
            self._arrivals.order.clear()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Hook a forward's outputs, so that the end of the outermost backward through them is known."""
        if self._armed:
            enter = weakly(self._enter_backward)
            for output in outputs:
                if output.grad_fn is not None:
                    output.register_hook(enter)

    def _enter_backward(self, _: object = None) -> None:
        if (self._armed or self._left_over) and not self._in_backward:
            self._in_backward = True
            self.recorder.enter(Phase.BACKWARD)
            self.look()
            if self._armed and self._reduced_once:
                self._arrivals.count()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(weakly(self._end_backward))

    def _report(self, i: int) -> None:
        if not self._in_backward:  # no output hook has run
            self._enter_backward()
            self._arrivals.again(i)
        elif not self._reduced_once:
            self._arrivals.order.append(i)
        elif (bucket := self._arrivals.bucket_of[i]) < self._next:
            raise ReducerError(
                f"rank {self.transport.rank}: parameter {self.buckets.specs[i].name!r} received a gradient after "
                f"its bucket {bucket} had been sent. In the first backward it received {self._arrivals.fires[i]} "
                "gradient(s), now more: run the forward that uses it most often first, or checkpoint with "
                "use_reentrant=False"
            )

    def _launch_full_buckets(self) -> None:
        # The last bucket is full when backward ends: it is run there, without a change of threads.
        last = len(self.pipelines) - 1 if self.overlaps else 0
        with self._launching:
            while (index := self._next) < last and not self._arrivals.waiting[index]:
                if not self.buckets.alone(index):
                    job = self._collect(index)
                    self._launches.append((job, job.launch()))
                self._next += 1

    def _collect(self, index: int) -> BucketJob:
        job = self.buckets.collect(index, self._arrivals.used)
        for launching in self.events.launching:
            launching(job)
        return job

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        if not self._armed:
            self._reduce_left_over()
        elif self._arrivals.counted_any if self._reduced_once else self._arrivals.order:
            self._armed = False
            with self._explaining():
                self._reduce_all()
        else:  # autograd.grad: nothing was accumulated, so the forward stays armed
            self.buckets.gradients.check_unmoved(range(len(self.buckets.specs)))
            self._arrivals.report()
        for ended in self.events.ended:
            ended()

    def _reduce_all(self) -> None:
        self.recorder.enter(Phase.WAITING)
        for computed in self.events.computed:
            computed()
        try:
            for _, pending in self._launches[-1:]:
                pending.begun()  # streams leave starting collectives to this thread
            under_way: list[tuple[BucketJob, Finish]] = [(job, pending.result) for job, pending in self._launches]
            alone = [index for index in range(self._next) if self.buckets.alone(index)]
            self._left_over |= self._average([*alone, *range(self._next, len(self.pipelines))], under_way)
            self._left_over |= self._sparse.settle(self._arrivals.used, self._divisor())
            self._meet()
            self.buckets.agree_that_finite()
            self._nonfinite.count(self.pipelines, self.transport.rank)
        except TransportError:
            for _, pending in self._launches:
                pending.result()  # the first bucket that failed tells more than the last
            raise
        finally:
            for _, pending in self._launches:
                pending.cancel()
            self._count()
            self._arrivals.forget_used()
            if not self._reduced_once:
                self._reduced_once = True
                self._arrivals.learn_fires()
            self._forget_backward()

        for stored in self.events.stored:
            stored()
        self.recorder.end_step(self.step - 1)

    def _average(self, indices: Iterable[int], under_way: Iterable[tuple[BucketJob, Finish]] = ()) -> set[int]:
        """Reduce buckets and what is under way, and store it; returns the parameters that no rank used."""
        left, reduced = set(), list(under_way)
        for index in indices:
            if self.buckets.alone(index):
                left |= self.buckets.unused(index, self._arrivals.used)
            else:
                job = self._collect(index)
                reduced.append((job, job.begin()))
        for _, finish in reduced:
            finish()
        for arrived in self.events.arrived:
            arrived()
        divisor = self._divisor()
        for job, _ in reduced:
            left |= self.buckets.settle(job, divisor)
        return left

    def _reduce_left_over(self) -> None:
        """Reduce what another backward through the same forward brought: losses over disjoint parts of a model.

        What no rank used in the first backward is the same set on all ranks, so all run the same buckets.
        """
        used = self._arrivals.used
        fired = {i for i in self._left_over if used[i]}
        if not fired:
            return
        names = [spec.name for spec in self.buckets.specs]
        twice = [name for i, name in enumerate(names) if used[i] and i not in fired]
        if twice:
            raise ReducerError(
                f"rank {self.transport.rank}: a second backward through one forward brought first gradients for "
                f"{names[min(fired)]!r} and further ones for {twice[0]!r}, which was averaged already. "
                "Sum the losses and call backward once"
            )
        in_buckets = self._left_over.intersection(self.buckets.indices)
        self._average(sorted({self._arrivals.bucket_of[i] for i in in_buckets}))
        self._sparse.settle(used, self._divisor(), self._left_over)
        self._left_over -= fired
        self._arrivals.forget_used()

    def take_part(self) -> None:
        """Bring zeros to the reduction of one backward on the other ranks, which apply the averages."""
        self.recorder.enter(Phase.WAITING)
        self._arrivals.forget_used()
        self.buckets.at_step(self.schedule.step)
        self.buckets.take_part()
        for arrived in self.events.arrived:
            arrived()
        self.buckets.agree_that_finite()
        self._sparse.take_part(self._divisor())
        self._meet()
        self._count()
        self._reduced_once = True
        self._forget_backward()
        self.recorder.end_step(self.step - 1)

    def _count(self) -> None:
        """One more reduction."""
        self.schedule.step += 1
        self.reductions += 1

    def _meet(self, counted: bool = False) -> None:
        """At the end of a reduction, the same one on all ranks: compare what each did, if that is due."""
        reduction = self.reductions - counted
        if reduction % EVERY == EVERY - 1 and self._compares:
            self._stragglers.compare(self.step - counted, self.transport)
        if self.trace is not None and reduction >= self.trace.due and not self._is_captured:
            self.trace.align(reduction, self.transport, self.wire_device)
        for met in self.events.met:
            met(reduction, self.step - counted)

    @property
    def _is_captured(self) -> bool:
        """Whether this step is captured in a CUDA graph: then no host may wait."""
        return self.wire_device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def wire_device(self) -> torch.device:
        """Where tensors are that the transport moves."""
        return self.buckets.specs[0].device if self.transport.enqueues else torch.device("cpu")

    def _divisor(self) -> int:
        return self.transport.world_size if self.active_ranks is None else self.active_ranks()

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the layout of the buckets; each rank saves its own."""
        state = saved_residuals.save(self.plan, self.pipelines, self.transport.rank, str(self.buckets.compression))
        names = [spec.name for spec in self.buckets.specs]
        progress = {
            "schedule": self.schedule.state(),
            "settings": {name: str(each) for name, each in zip(names, self.buckets.settings, strict=True)},
            "caps": list(self.buckets.caps),
            "orders": [[names[i] for i in order] for order in self.buckets.orders],
            "reduced_once": self._reduced_once,
            "rebuilt": self._rebuilt,
            "statistics": self.buckets.keeps_statistics,
        }
        return {**state, **progress, "order": self._arrivals.order.copy(), "fires": self._arrivals.fires.copy()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        At the same world size training resumes bit for bit. At another, each rank gets the mean of the
        old ranks' residuals. Every rank calls it.

        The schedule goes on where the state stopped, with what `set_compression` had set. A reducer that was
        constructed with another setting than the one that saved goes on under its own, from the state's step on; what
        is kept then moves along by the law of `set_compression`.

        Raises:
            SettingError: if the states are of different compressions, or of other parameters, or ranks are missing, or
                a callable that was set is not there.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        compression = str(states[0]["compression"] if states else self.buckets.compression)
        chosen = saved_residuals.pick(states, self.transport.rank, self.transport.world_size, compression)
        saved_residuals.check_parameters(chosen, [self.buckets.specs[i] for i in self.buckets.indices])
        older = {"given": compression, "step": 0, "stretches": [[0, compression, None]]}
        schedule = self.schedule.resumed(chosen.get("schedule", older))
        by_name = {name: Compression.parse(spec) for name, spec in chosen.get("settings", {}).items()}
        saved = Policy(chooser=lambda name, _: by_name[name]) if by_name else Compression.parse(compression)
        if self.buckets.assign(saved) != self.buckets.settings:
            self.buckets.use(saved)
        self.schedule, self._due = schedule, schedule.step
        self._reduced_once, self._rebuilt = chosen["reduced_once"], chosen["rebuilt"]
        self._arrivals.order[:], self._arrivals.fires[:] = chosen["order"], chosen["fires"]
        index_of = {spec.name: i for i, spec in enumerate(self.buckets.specs)}
        self.buckets.caps = tuple(chosen.get("caps", self.buckets.caps))
        orders = chosen.get("orders", [[name for bucket in chosen["buckets"] for name in bucket]])
        self.buckets.orders = [[index_of[name] for name in order] for order in orders]
        self._lay_out([[index_of[name] for name in bucket] for bucket in chosen["buckets"]])
        chosen = saved_residuals.fold_moved(chosen, self.pipelines)
        saved_residuals.restore(saved_residuals.kept_in(chosen), self.pipelines)
        for pipeline, kept in zip(self.pipelines, chosen["shard_residuals"], strict=False):
            if pipeline.feedback is not None and len(kept):
                pipeline.feedback.shard_residual.copy_(kept)
        if chosen.get("statistics"):
            self.keep_statistics()


def shut_down(streams: Mapping[torch.device, Stream], transport: Transport) -> None:
    """End what a reducer holds outside itself."""
    if not all(stream.idle for stream in streams.values()):  # a peer does not come: nobody will miss what is under way
        transport.abort()
    for stream in streams.values():
        stream.close()
    transport.close()


_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _close_all() -> None:
    for reducer in list(_alive):
        reducer._close()


at_exit(Exit.REDUCERS, _close_all)
