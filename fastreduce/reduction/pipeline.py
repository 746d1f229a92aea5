"""One bucket's way from gradients to averaged gradients: compress, reduce, decompress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from ..compression import Compression, PowerSGD, TopK
from ..errors import TransportError, listed
from ..transports import Transport, Work
from .buckets import Bucket, ParameterSpec, build_plan
from .clocks import Point, Seconds, make_clock
from .jobs import Part, do_all
from .residuals.applied import norms_of
from .residuals.bucket_residuals import Share, SlotResiduals
from .residuals.error_feedback import ErrorFeedback
from .residuals.factors import to_device
from .residuals.rows import reads_late
from .shared_buffers import SharedBuffers
from .statistics import Statistics
from .wires.base import BucketWires, Sum
from .wires.flat import FlatWires
from .wires.low_rank import LowRank
from .wires.node_level import parts_of
from .wires.sparse_top import SparseTop

_START, _COMPRESSED, _STARTED, _SUMMING, _GATHERING, _RESUMED, _REDUCED, _END = (
    int(point) for point in Point if point not in (Point.EXCHANGED, Point.SUMMED)
)
ASKS = 8  # reductions from one look at a device whether anything is left of an earlier setting to the next


class BucketPipeline:
    """The buffers of one bucket and the three stages over them, under one compression.

    1. `compress`: gradients and used-flags → wire.
    2. `reduce`: wire → reduced wire, between ranks.
    3. `decompress`: wire → gradients and reduced used-flags.

    What is on the wire, and how it is reduced, is the matter of `wires`: the flat (`FlatWires`), under PowerSGD factors
    of matrices (`LowRank`), under top-k the largest elements (`SparseTop`). Where the transport takes tensors as they
    lie, the three stages are one.

    What a step needs of a bucket's size is allocated at construction. More is allocated for statistics, for averages
    that stay in `.grad`, and while something is left of an earlier setting.

    Args:
        bucket: what is averaged.
        compression: the setting.
        transport: the ranks.
        divisor: what sums are divided by; None means the number of ranks.
        shared: memory for the wire, if other buckets use it in turn; none of it is this pipeline's between runs.
        verdicts: bytes, of which the one with the bucket's index is to say whether its averages are finite.
        step: INT64 `[1]` on the device, from which random bits follow, and which its owner counts; None means always 0.
        staging: memory for what is summed within a node, if other buckets use it in turn.

    Attributes:
        about: what the bucket holds, as a sentence.
        clock: when the last reduction passed each `Point`.
        wires: what travels.
        feedback: what was lost; None without error feedback.
        remainder: what an earlier setting with error feedback has left, until it has been applied; None mostly.
        finite: whether the last averages were, where that is known; None else. Until the next reduction begins.
        verdicts: the bytes that say so, of this bucket and the others of its device.
        watches_for_others: whether a rank without inputs, or one that may have none soon, has a remainder, and this
            one tells it what averages become, whether it has any itself or not.
        alone: whether there is nothing to average and nothing to move: one rank has its average.
        statistics: what `decompress` finds in each tile; None before `keep_statistics`.
        whole: whether reductions are over whole wires also where the transport can do without, for measurements.
    """

    def __init__(
        self,
        bucket: Bucket,
        compression: Compression,
        transport: Transport,
        divisor: int | None = None,
        shared: SharedBuffers | None = None,
        verdicts: Tensor | None = None,
        step: Tensor | None = None,
        staging: SharedBuffers | None = None,
    ) -> None:
        self.bucket, self.compression, self.transport = bucket, compression, transport
        self.clock = make_clock(bucket.device, len(Point))
        self.about = f"Bucket {bucket.index} holds {listed([slot.name for slot in bucket.slots])}."
        self._collectives = Collectives(transport, self.about)
        ranks, staging = transport.world_size, staging or SharedBuffers()
        self.wires: BucketWires
        if isinstance(compression, PowerSGD):
            self.wires = LowRank(bucket, compression, transport, 1 / (divisor or ranks), staging)
        elif isinstance(compression, TopK):
            self.wires = SparseTop(bucket, compression, transport, 1 / (divisor or ranks), staging)
        else:
            self.wires = FlatWires(bucket, compression, transport, divisor or ranks, shared, staging, step)
        self.wire, self.feedback = self.wires.wire, self.wires.feedback
        self.used = torch.ones(len(bucket.slots), dtype=bucket.dtype, device=bucket.device)
        self.used_by_any = torch.ones_like(self.used)
        self.alone = ranks == 1 and self.wires.in_place
        self.remainder: ErrorFeedback | None = None
        self._behind = 0  # reductions with it
        self.watches_for_others = False
        self._noted: Tensor | None = None
        # Kernels write it. At averages that stay in the wire nobody looks.
        if verdicts is None:
            verdicts = torch.ones(bucket.index + 1, dtype=torch.uint8, device=bucket.device)
        self.verdicts = verdicts
        self._finite = None if self.wires.in_place else verdicts[bucket.index : bucket.index + 1]
        self._verdict = None if self._finite is None else self._finite.view(torch.bool)[0]
        self.finite: Tensor | None = None
        self.statistics: Statistics | None = None
        self.whole = False

    # What is kept between steps

    @property
    def kept(self) -> ErrorFeedback | None:
        """What is to be added to the next gradients, under error feedback or after it."""
        return self.feedback or self.remainder

    def take(self, i: int) -> SlotResiduals:
        """Remove what is kept of slot `i` on this rank, and return it."""
        assert self.kept is not None
        return self.kept.take(i)._replace(factor=self.wires.factor(i))

    def put(self, i: int, parts: SlotResiduals) -> None:
        """Go on with what was kept of a slot elsewhere; without error feedback it is added to the next gradients."""
        if self.kept is None and parts.holds_any:
            self._make_remainder()
        if self.kept is not None:
            self.kept.put(i, parts)
        if parts.factor is not None:
            self.wires.go_on(i, parts.factor)

    def _make_remainder(self) -> ErrorFeedback:
        share = Share(slice(0, self.bucket.total), slice(0, 0), self.transport.world_size)
        self.remainder = ErrorFeedback(self.bucket, share, self.compression.alignment)
        return self.remainder

    def follow(
        self,
        parameters: Sequence[Tensor],
        left: Sequence[int],
        stored: Sequence[Tensor] = (),
        scale: float = 1.0,
        watched: bool = True,
    ) -> None:
        """The averages are stored: see what becomes of them, as far as anything is kept (arguments: `Applied`)."""
        if self.watches_for_others and self.kept is None:
            made = self._make_remainder()
            made.finite = made.finite if self.finite is None else self.finite
        if self.remainder is not None:
            if not self.watches_for_others and self._asks_whether_empty() and self.remainder.is_empty:
                self.remainder = self._noted = None
            elif stored:
                self._noted = norms_of(stored) / scale
        if self.kept is not None:
            self.kept.follow(parameters, left, self.magnitudes, scale, watched)

    def _asks_whether_empty(self) -> bool:
        """Where the host waits for it, now and then: where gradients are clipped, something is left for long."""
        self._behind += 1
        return not reads_late(self.verdicts) or self._behind % ASKS == 0

    def magnitudes(self) -> Tensor:
        """Of each slot's average: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        if self._noted is None:
            return self.wires.magnitudes()
        if self._noted.is_cuda:  # made on another stream, which takes its memory anew once this one has read it
            self._noted.record_stream(torch.cuda.current_stream(self._noted.device))
        return self._noted.clone()

    # Figures

    @property
    def seconds(self) -> Seconds:
        """Time of the last reduction; on a device, of the last after a reading, and waits for its end."""
        between = self.clock.between
        reduce = between(_COMPRESSED, _STARTED) + between(_SUMMING, _GATHERING) + between(_RESUMED, _REDUCED)
        return Seconds(between(_START, _COMPRESSED), reduce, between(_REDUCED, _END))

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in one reduction; in two levels what leaves the node."""
        return sum(self.wires.sent_by_stage.values())

    # A reduction

    def make_views(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the sizes and strides of `like` over one flat: the wire where it can hold gradients."""
        flat = (
            self.wire
            if self.wires.in_place
            else torch.zeros(self.bucket.total, dtype=self.bucket.dtype, device=self.bucket.device)
        )
        return [
            flat.as_strided(tensor.size(), tensor.stride(), slot.offset)
            for tensor, slot in zip(like, self.bucket.slots, strict=True)
        ]

    def run_broken(self) -> None:
        """Take part in a reduction that the other ranks may be in, with NaN: this rank's backward raised."""
        broken = [self.used.new_full((slot.numel,), torch.nan) for slot in self.bucket.slots]
        self.run(broken, broken)

    def run(self, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()) -> None:
        """Average `grads` over the ranks into `averaged`, tensor by tensor; they may be the same tensors.

        `unused` are the positions of slots that this rank did not use. Afterwards `used_by_any` tells
        for each slot whether any rank did (greater than zero).

        Raises:
            TransportError: naming rank, operation, bucket and parameters, if the reduction failed.
        """
        do_all(self.begin(grads, averaged, unused))

    def begin(self, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()) -> Part:
        """The first part of `run`: compress, and start the first collective that need not be waited for here."""
        mark = self.clock.mark
        mark(_START)
        if unused:
            self.used.index_fill_(0, to_device(torch.tensor(list(unused), device="cpu"), self.used.device), 0)
        direct = self._goes_direct(grads, averaged)
        in_wire = self._kept_in_wire  # once: a hook may ask for statistics meanwhile
        if not direct:
            try:
                with self._collectives if self.wires.nodes else nullcontext():  # it begins with a node's
                    self.compress(grads)
            finally:
                if unused:
                    self.used.fill_(1)
        mark(_COMPRESSED)
        self.transport.tell_watchdog(self.about)
        with self._collectives:
            started = self._reduce_between(grads, averaged, in_wire) if direct else self.wires.reduce(mark)
        mark(_STARTED)
        stored = direct and not in_wire
        if callable(started):
            return lambda: self._sum(started, averaged)
        # Nothing is to be done in the middle: the last part waits, which must not keep sums of others from being sent.
        return lambda: partial(self._finish, started, averaged, stored)

    def _sum(self, sum_up: Sum, averaged: Sequence[Tensor]) -> Part:
        self.clock.mark(_SUMMING)
        with self._collectives:
            work = sum_up()
        self.clock.mark(_GATHERING)
        return lambda: self._finish(work, averaged, False)

    def _finish(self, work: Work, averaged: Sequence[Tensor], stored: bool) -> None:
        mark = self.clock.mark
        mark(_RESUMED)
        with self._collectives:
            work.wait()
        mark(_REDUCED)
        if self.wires.direct is not None:
            self.used.fill_(1)  # the transport has read it until now
        if not stored:
            self.decompress(averaged)
        self.finite = self._verdict
        if self.kept is not None:  # where nothing tells, the verdict of an earlier step is over
            self.kept.finite = torch.ones_like(self.kept.finite) if self.finite is None else self.finite
        mark(_END)

    def compress(self, grads: Sequence[Tensor]) -> None:
        """Gradients and `used` → wire."""
        self.wires.compress(self._with_kept(grads), self.used, self._finite)

    def _with_kept(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients as they are to be compressed, once it is known what of earlier ones is to be added."""
        if self.feedback is not None:
            self.feedback.commit()
        return grads if self.remainder is None else self.remainder.added_to(grads)

    def decompress(self, averaged: Sequence[Tensor]) -> None:
        """Wire → averaged gradients and `used_by_any`."""
        rows = None
        if self.statistics is not None:
            self.statistics.begin(not self.wires.holds(averaged))
            rows = self.statistics.rows
        self.wires.decompress(averaged, self.used_by_any, self._finite, rows)

    def _goes_direct(self, grads: Sequence[Tensor], averaged: Sequence[Tensor]) -> bool:
        """Whether tensors are taken as they lie; where nothing is compressed, other ranks may come with a flat."""
        if self.whole or self.wires.direct is None:
            return False
        if self.wires.piecewise:
            return True
        if self.statistics is not None or self.remainder is not None or not grads:
            return False
        return grads[0].dtype == self.bucket.dtype and averaged[0].dtype == self.bucket.dtype

    @property
    def _kept_in_wire(self) -> bool:
        """Whether averages that pieces make are to be in the wire, where statistics and feedback look at them."""
        return self.wires.piecewise and (self.statistics is not None or self.feedback is not None)

    def _reduce_between(self, grads: Sequence[Tensor], averaged: Sequence[Tensor], in_wire: bool) -> Work:
        """All three stages in one, but for the last where averages are to be in the wire."""
        tensors, into = [*self._with_kept(grads), self.used], [*averaged, self.used_by_any]
        return self.wires.reduce_between(tensors, into, self._finite, in_wire)

    def launch_kernels(self, grads: Sequence[Tensor]) -> None:
        """Launch every kernel of a reduction once, and move nothing between ranks."""
        self.wires.launch_kernels(grads, self.used, self._finite, self._kept_in_wire)
        if not self.wires.piecewise or self._kept_in_wire:
            self.decompress(grads)

    def keep_statistics(self) -> None:
        """Let `decompress` fill `statistics` from now on; under PowerSGD and top-k there are none."""
        if self.statistics is None and self.wires.keeps_statistics:
            self.statistics = Statistics(self.bucket, self.wires.block)


class Collectives:
    """Around a bucket's collectives: their errors say what it holds, and another one ends the connection.

    One of another bucket failed by itself, earlier. What fails on this rank alone, between two collectives, leaves the
    others in the second: nobody makes up for that, and the next collective of this rank would meet it.
    """

    def __init__(self, transport: Transport, about: str) -> None:
        self._transport, self._about = transport, about

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TransportError):
            if " Bucket " not in str(error):
                raise TransportError(f"{error} {self._about}", error.missing) from error
        elif error is not None:
            self._transport.abort()


def warm_up(
    dtype: torch.dtype, device: torch.device, compression: Compression, transport: Transport, statistics: bool = False
) -> None:
    """Compile (or load from the disk cache) every kernel that buckets of `dtype` on `device` will launch."""
    alignment, shards = compression.alignment, parts_of(transport, compression)
    plan = build_plan([ParameterSpec("", 1, dtype, device)], [[0]], alignment=alignment, shards=shards)
    pipeline = BucketPipeline(plan.buckets[0], compression, transport)
    if statistics:
        pipeline.keep_statistics()
    pipeline.launch_kernels([torch.zeros(1, dtype=dtype, device=device)])
