"""GradientReducer: hooks, order and finalisation of the reduction that happens inside backward."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import residuals
from .arrivals import Arrivals, weakly
from .buckets import BucketPlan, build_plan, group_by_size
from .compression import Compression
from .errors import ReducerError, TransportError
from .gradients import Collected, Gradients
from .pipeline import BucketPipeline, Pending, Seconds, warm_up
from .sparse import SparseGradients
from .streams import ThreadStream
from .transports import Transport

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass
class Job:
    """One bucket's reduction in one backward."""

    pipeline: BucketPipeline
    found: Collected

    def launch(self, stream: ThreadStream) -> Pending:
        """Run it on `stream`."""
        return self.pipeline.launch(stream, self.found.sources, self.found.targets, self.found.unused)

    def begin(self) -> Callable[[], None]:
        """Begin it here; returns what finishes it."""
        return self.pipeline.begin(self.found.sources, self.found.targets, self.found.unused)


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
        compression: the setting.
        bucket_caps: bytes of the first, second, … bucket; the last holds for all that follow.
        gradient_as_bucket_view: whether `.grad` become views of the buckets.
        dtype: what gradients are averaged in; None means each in the dtype of its parameter.
        sparse: indices of parameters whose gradients are sparse; they travel in no bucket, uncompressed,
            when backward ends.

    Raises:
        TensorError: if a parameter's dtype is not supported.
        BackendUnavailableError: if the kernels cannot run on the parameters' device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        transport: Transport,
        compression: Compression,
        *,
        bucket_caps: Sequence[int] = (FIRST_BUCKET_BYTES, BUCKET_BYTES),
        gradient_as_bucket_view: bool = False,
        dtype: torch.dtype | None = None,
        sparse: Iterable[int] = (),
    ) -> None:
        self.transport, self.compression = transport, compression
        self._caps, self._as_views = tuple(bucket_caps), gradient_as_bucket_view
        self._gradients = Gradients(parameters, names, dtype)
        self._specs = self._gradients.specs
        self._sparse = SparseGradients({i: parameters[i] for i in sorted(sparse)}, transport)
        self._dense = [i for i in range(len(self._specs)) if i not in self._sparse.parameters]
        self._stream = ThreadStream()

        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False
        # Parameters that no rank used in the last reduction: the same set on every rank.
        self._left_over: set[int] = set()

        for device, each in {(self._specs[i].device, self._specs[i].dtype) for i in self._dense}:
            warm_up(each, device, compression)
        self._arrivals = Arrivals(parameters, self._launch_full_buckets, self._report)
        self._install(group_by_size(self._specs, reversed(self._dense), self._caps))
        self._close = weakref.finalize(self, shut_down, self._stream, transport)

    def close(self) -> None:
        """Remove the hooks, end the communication thread and close the transport."""
        self._arrivals.remove()
        self._close()

    # Buckets

    def _install(self, groups: Iterable[Sequence[int]]) -> None:
        self.plan, self.pipelines = self._build(groups)
        self._arrivals.lay_out(self.plan)
        self._members = [self._gradients.members(bucket) for bucket in self.plan.buckets]
        if self._as_views:
            for members, pipeline in zip(self._members, self.pipelines, strict=True):
                self._gradients.install_views(members, pipeline.make_views)
        self._forget_backward()

    def _build(self, groups: Iterable[Sequence[int]]) -> tuple[BucketPlan, list[BucketPipeline]]:
        plan = build_plan(self._specs, groups, alignment=self.compression.alignment, shards=self.transport.world_size)
        return plan, [BucketPipeline(bucket, self.compression, self.transport) for bucket in plan.buckets]

    def rebuild_buckets(self) -> bool:
        """After the first reduced backward, once: lay buckets out in the order that rank 0 observed.

        What only other ranks saw comes next; what has never fired goes last, in buckets of its own, so
        that no bucket waits for it. First-stage residuals move along; second-stage ones start anew,
        because shards change hands. Every rank must call it at the same point.

        Returns:
            Whether buckets were rebuilt.
        """
        if self._rebuilt or not self._reduced_once:
            return False
        observed = self.transport.exchange(self._arrivals.last_seen())
        dense = set(self._dense)
        order = [i for i in dict.fromkeys(itertools.chain(*observed)) if i in dense]
        idle = [i for i in self._dense if i not in set(order)]
        kept = residuals.collect(self.pipelines)
        self._install(group_by_size(self._specs, order, self._caps) + group_by_size(self._specs, idle, self._caps))
        residuals.restore(kept, self.pipelines)
        self._rebuilt = True
        return True

    # One backward

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind."""
        self.drop_broken_backward()
        self._forget_backward()
        self._armed, self._left_over = True, set()
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
                for pipeline in self.pipelines[len(self._launches) :]:
                    pipeline.run_broken()
                self._sparse.take_part(self._active_ranks(), broken=True)
        self._armed = self._in_backward = False
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._launches: list[tuple[Job, Pending]] = []
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
        elif (bucket := self._arrivals.bucket_of[i]) < len(self._launches):
            raise ReducerError(
                f"rank {self.transport.rank}: parameter {self._specs[i].name!r} received a gradient after its "
                f"bucket {bucket} had been sent. In the first backward it received {self._arrivals.fires[i]} "
                "gradient(s), now more: run the forward that uses it most often first, or checkpoint with "
                "use_reentrant=False"
            )

    def _launch_full_buckets(self) -> None:
        # The last bucket is full when backward ends: it is run there, without a change of threads.
        while (index := len(self._launches)) < len(self.pipelines) - 1 and not self._arrivals.waiting[index]:
            job = self._collect(index)
            self._launches.append((job, job.launch(self._stream)))

    @torch.no_grad()
    def _collect(self, index: int) -> Job:
        return Job(self.pipelines[index], self._gradients.collect(self._members[index], self._arrivals.used))

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        if not self._armed:
            self._reduce_left_over()
        elif self._arrivals.counted_any if self._reduced_once else self._arrivals.order:
            self._armed = False
            self._reduce_all()
        else:  # autograd.grad: nothing was accumulated, so the forward stays armed
            self._gradients.check_unmoved(range(len(self._specs)))
            self._arrivals.report()

    def _reduce_all(self) -> None:
        try:
            for _, pending in self._launches[-1:]:
                pending.begun()  # the stream leaves starting collectives to this thread
            under_way = [(job, pending.result) for job, pending in self._launches]
            for index in range(len(self._launches), len(self.pipelines)):
                if self._alone(index):
                    self._left_over |= self._unused(index)
                else:
                    job = self._collect(index)
                    under_way.append((job, job.begin()))
            for job, finish in under_way:
                finish()
                self._left_over |= self._settle(job)
            self._left_over |= self._sparse.settle(self._arrivals.used, self._active_ranks())
        except TransportError:
            for _, pending in self._launches:
                pending.result()  # the first bucket that failed tells more than the last
            raise
        finally:
            for _, pending in self._launches:
                pending.cancel()
            self._arrivals.forget_used()
            if not self._reduced_once:
                self._reduced_once = True
                self._arrivals.learn_fires()
            self._forget_backward()

    def _run_here(self, index: int) -> set[int]:
        if self._alone(index):
            return self._unused(index)
        job = self._collect(index)
        job.begin()()
        return self._settle(job)

    def _alone(self, index: int) -> bool:
        """Whether there is nothing to average and nothing to move."""
        return self.pipelines[index].alone and not self._as_views

    def _unused(self, index: int) -> set[int]:
        return {i for i in self._members[index].indices if not self._arrivals.used[i]}

    def _settle(self, job: Job) -> set[int]:
        """Store what arrived; returns the parameters that no rank used."""
        slots = job.pipeline.bucket.slots
        return {slots[position].parameter for position in job.found.settle(job.pipeline.used_by_any)}

    def _active_ranks(self) -> int:
        """What sums are divided by."""
        return self.transport.world_size

    def _reduce_left_over(self) -> None:
        """Reduce what another backward through the same forward brought: losses over disjoint parts of a model.

        What no rank used in the first backward is the same set on all ranks, so all run the same buckets.
        """
        used = self._arrivals.used
        fired = {i for i in self._left_over if used[i]}
        if not fired:
            return
        twice = [spec.name for i, spec in enumerate(self._specs) if used[i] and i not in fired]
        if twice:
            raise ReducerError(
                f"rank {self.transport.rank}: a second backward through one forward brought first gradients for "
                f"{self._specs[min(fired)].name!r} and further ones for {twice[0]!r}, which was averaged already. "
                "Sum the losses and call backward once"
            )
        for index in sorted({self._arrivals.bucket_of[i] for i in self._left_over.intersection(self._dense)}):
            self._run_here(index)
        self._sparse.settle(used, self._active_ranks(), self._left_over)
        self._left_over -= fired
        self._arrivals.forget_used()

    # State and figures

    @property
    def seconds(self) -> Seconds:
        """Time that the last reduction spent in each stage, summed over the buckets."""
        stages = [pipeline.seconds for pipeline in self.pipelines]
        return Seconds(
            sum(s.compress for s in stages), sum(s.reduce for s in stages), sum(s.decompress for s in stages)
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(pipeline.sent_bytes for pipeline in self.pipelines)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what error feedback keeps by `factor`: new loss scale / old loss scale.

        Residuals are in units of scaled gradients. Call it where a GradScaler's scale changes.
        """
        residuals.rescale(self.pipelines, factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the layout of the buckets; each rank saves its own."""
        state = residuals.save(self.plan, self.pipelines, self.transport.rank, str(self.compression))
        progress = {"reduced_once": self._reduced_once, "rebuilt": self._rebuilt}
        return {**state, **progress, "order": self._arrivals.order.copy(), "fires": self._arrivals.fires.copy()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        At the same world size training resumes bit for bit. At another, each rank gets the mean of the
        old ranks' residuals.

        Raises:
            SettingError: if the state is of another compression or other parameters, or ranks are missing.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        chosen = residuals.pick(states, self.transport.rank, self.transport.world_size, str(self.compression))
        residuals.check_parameters(chosen, [self._specs[i] for i in self._dense])
        self._reduced_once, self._rebuilt = chosen["reduced_once"], chosen["rebuilt"]
        self._arrivals.order[:], self._arrivals.fires[:] = chosen["order"], chosen["fires"]
        index_of = {spec.name: i for i, spec in enumerate(self._specs)}
        self._install([[index_of[name] for name in bucket] for bucket in chosen["buckets"]])
        residuals.restore(chosen["residuals"], self.pipelines)
        for pipeline, saved in zip(self.pipelines, chosen["shard_residuals"], strict=False):
            if pipeline.shard_residual is not None:
                pipeline.shard_residual.copy_(saved)


def shut_down(stream: ThreadStream, transport: Transport) -> None:
    """End what a reducer holds outside itself."""
    if not stream.idle:  # a peer does not come: nobody will miss what is under way
        transport.abort()
    stream.close()
    transport.close()
