"""BucketedGradients: which gradients travel in which bucket, and what one bucket's average takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..compression import Compression
from ..transports import Transport
from . import saved_residuals
from .applied import notice_unscaling
from .buckets import BucketPlan, build_plan, group_by_size
from .error_feedback import ErrorFeedback
from .gradients import Collected, Gradients
from .nonfinite import NonFiniteSteps
from .pipeline import BucketPipeline, Seconds, warm_up
from .shared_buffers import SharedBuffers
from .sparse import SparseGradients
from .statistics import note_reduced
from .streams import Finish, Pending, Stream, make_stream, one_by_one

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


@dataclass
class Job:
    """One bucket's reduction in one backward."""

    pipeline: BucketPipeline
    found: Collected

    def launch(self, stream: Stream) -> Pending:
        """Run it on `stream`."""
        return self.pipeline.launch(stream, self.found.sources, self.found.targets, self.found.unused)

    def begin_on(self, stream: Stream) -> Finish:
        """Begin it on `stream`; returns what finishes it."""
        return self.pipeline.begin_on(stream, self.found.sources, self.found.targets, self.found.unused)


class BucketedGradients:
    """The gradients of `parameters`, laid out in buckets, each with the pipeline that averages it.

    Args:
        parameters: floating-point or complex leaves that require gradients.
        names: their names, which key saved residuals and appear in errors.
        transport: what moves wires.
        compression: the setting.
        bucket_caps: bytes of the first, second, … bucket; the last holds for all that follow.
        gradient_as_bucket_view: whether `.grad` become views of the buckets.
        dtype: what gradients are averaged in; None means each in the dtype of its parameter.
        sparse: indices of parameters whose gradients are sparse; they travel in no bucket, uncompressed,
            when backward ends.
        overlaps: whether full buckets are launched during backward, or all when it has ended.

    Raises:
        TensorError: if a parameter's dtype is not supported.
        BackendUnavailableError: if the kernels cannot run on the parameters' device.
    """

    _used: list[bool]  # by parameter, whether a backward has reached it; changed in place
    _statistics = False

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
        overlaps: bool = True,
    ) -> None:
        self._overlaps = overlaps
        self.transport, self.compression = transport, compression
        self._caps, self._as_views, self._casts = tuple(bucket_caps), gradient_as_bucket_view, dtype is not None
        self._gradients = Gradients(parameters, names, dtype)
        self._specs = self._gradients.specs
        self._sparse = SparseGradients({i: parameters[i] for i in sorted(sparse)}, transport)
        self._dense = [i for i in range(len(self._specs)) if i not in self._sparse.parameters]
        for device, each in {(self._specs[i].device, self._specs[i].dtype) for i in self._dense}:
            warm_up(each, device, compression, transport)
        self._nonfinite = NonFiniteSteps()
        self._make_streams()

    def _make_streams(self) -> None:
        """One for each device."""
        devices = sorted({self._specs[i].device for i in self._dense}, key=str)
        self._streams = {device: make_stream(device, self.transport) for device in devices}

    def _stream(self, index: int) -> Stream:
        return self._streams[self.plan.buckets[index].device]

    # Layout

    def _first_groups(self) -> list[list[int]]:
        """Reverse order: about that in which gradients arrive."""
        return group_by_size(self._specs, reversed(self._dense), self._caps)

    def _regroup(self, observed: Iterable[int]) -> None:
        """Lay buckets out in the order of `observed`, and what is not in it last, in buckets of its own.

        Residuals move along: second-stage ones as part of the first stage, because shards change hands.
        """
        dense = set(self._dense)
        order = [i for i in observed if i in dense]
        idle = sorted(dense.difference(order))
        for feedback in self._feedbacks():
            feedback.spread(lambda whole: self.transport.all_gather(whole).wait())
        kept = saved_residuals.collect(self.pipelines)
        self._install(group_by_size(self._specs, order, self._caps) + group_by_size(self._specs, idle, self._caps))
        saved_residuals.restore(kept, self.pipelines)

    def _install(self, groups: Iterable[Sequence[int]]) -> None:
        self.plan, self.pipelines = self._build(groups)
        self._members = [self._gradients.members(bucket) for bucket in self.plan.buckets]
        if self._statistics:
            for pipeline in self.pipelines:
                pipeline.keep_statistics()
        if self._as_views:
            for members, pipeline in zip(self._members, self.pipelines, strict=True):
                self._gradients.install_views(members, pipeline.make_views)

    def _build(self, groups: Iterable[Sequence[int]]) -> tuple[BucketPlan, list[BucketPipeline]]:
        plan = build_plan(self._specs, groups, alignment=self.compression.alignment, shards=self.transport.world_size)
        shared, made = SharedBuffers(), {}
        for bucket in sorted(plan.buckets, key=lambda bucket: bucket.total * bucket.dtype.itemsize, reverse=True):
            holds_views = self._as_views and self.compression.wire_dtype(bucket.dtype) is bucket.dtype
            in_turn = one_by_one(bucket.device, self.transport) and not holds_views
            made[bucket.index] = BucketPipeline(
                bucket, self.compression, self.transport, shared=shared if in_turn else None
            )
        return plan, [made[bucket.index] for bucket in plan.buckets]

    # One bucket's average

    @torch.no_grad()
    def _collect(self, index: int) -> Job:
        return Job(self.pipelines[index], self._gradients.collect(self._members[index], self._used))

    def _average(self, index: int) -> set[int]:
        if self._alone(index):
            return self._unused(index)
        job = self._collect(index)
        job.begin_on(self._stream(index))()
        return self._settle(job)

    def _alone(self, index: int) -> bool:
        """Whether there is nothing to average and nothing to move."""
        return self.pipelines[index].alone and not self._as_views and not self._casts

    def _unused(self, index: int) -> set[int]:
        return {i for i in self._members[index].indices if not self._used[i]}

    def _settle(self, job: Job, scale: float = 1.0) -> set[int]:
        """Store what arrived, and has been multiplied by `scale`; returns the parameters that no rank used."""
        pipeline = job.pipeline
        bucket, left = pipeline.bucket, job.found.settle(pipeline.used_by_any)
        parameters = self._members[bucket.index].parameters
        note_reduced(pipeline, parameters, left)
        if pipeline.feedback is not None:
            pipeline.feedback.follow(parameters, left, pipeline.magnitudes, scale)
        return {bucket.slots[position].parameter for position in left}

    def _active_ranks(self) -> int:
        """What sums are divided by."""
        return self.transport.world_size

    def keep_statistics(self) -> None:
        """Let decompression count non-finite elements and sum squares from now on; its kernels are compiled here."""
        if not self._statistics:
            self._statistics = True
            notice_unscaling()
            for device, dtype in {(pipeline.bucket.device, pipeline.bucket.dtype) for pipeline in self.pipelines}:
                warm_up(dtype, device, self.compression, self.transport, statistics=True)
            for pipeline in self.pipelines:
                pipeline.keep_statistics()

    # Figures

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

    @property
    def nonfinite_steps(self) -> int:
        """Steps so far in which an average was NaN or infinite, as far as compression shows it; waits for GPUs."""
        return self._nonfinite.total

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what error feedback keeps by `factor`: new loss scale / old loss scale.

        Residuals are in units of scaled gradients. A GradScaler's scale is followed without it, from the step on that
        takes it out; call it, between a step and the next forward, where a loss is scaled by hand.
        """
        for feedback in self._feedbacks():
            feedback.rescale(factor)

    def _feedbacks(self) -> list[ErrorFeedback]:
        return [pipeline.feedback for pipeline in self.pipelines if pipeline.feedback is not None]
