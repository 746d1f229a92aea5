"""One bucket's way from gradients to averaged gradients: compress, reduce, decompress."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from .. import ops
from ..compression import Compression, PowerSGD, TopK
from ..errors import TransportError
from ..kernels.slots import FP16_BLOCK, OF_AVERAGES, Draws, Pieces, SlotTable, tile_elements
from ..transports import SlotTransport, Transport, Work
from .buckets import Bucket, ParameterSpec, build_plan
from .clocks import Point, Seconds, make_clock
from .node_level import Levels, NodeLevel, parts_of, two_level
from .residuals.applied import norms_of
from .residuals.error_feedback import ErrorFeedback, Parts, Place
from .shared_buffers import SharedBuffers, zeros
from .streams import Finish
from .wires.block_magnitudes import BlockMagnitudes
from .wires.low_rank import LowRank
from .wires.sparse_top import SparseTop

_START, _COMPRESSED, _EXCHANGED, _SUMMED, _STARTED, _RESUMED, _REDUCED, _END = map(int, Point)


class BucketPipeline:
    """The buffers of one bucket and the three stages over them, under one compression.

    1. `compress`: gradients and used-flags → wire, one kernel launch.
    2. `reduce`: the transport's all-reduce in place, or two-shot: all-to-all of shards, our FP32
       sum of the own shard, all-gather. Before an all-reduce of FP16, ranks gather the exponents of their
       blocks, a byte each, and take the largest of each block.
    3. `decompress`: wire → gradients and reduced used-flags, one kernel launch.

    Under PowerSGD the wire holds factors of matrices, which are summed one after the other (`LowRank`); under top-k all
    ranks' messages, which are gathered (`SparseTop`).

    In two levels (`NodeLevel`) the ranks of a node first sum the gradients, each a column of the flat. `compress` and
    `reduce` are those of a column, among the ranks, one of each node, that own it; then a node's ranks gather the wires
    of all columns. Else there is one column, which belongs to all ranks.

    With N ranks the average's 1/N is applied before a plain all-reduce in the gradients' own dtype
    (as torch does), in the reduction kernel of a two-shot, after an all-reduce of FP16, whose exponents
    leave room for the sum, and split in two for one of BF16: 2^-⌈log2(N)⌉ before, so that no sum overflows
    unless its average does, and the rest after.

    Nothing of a bucket's size is allocated after construction, but for what `keep_statistics` asks for.

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
        low_rank: the factors that travel; None but under PowerSGD.
        apart: these, or what travels under top-k, with a wire and kernels of their own; None mostly.
        feedback: what was lost; None without error feedback.
        remainder: what an earlier setting with error feedback has left, until it has been applied; None mostly.
        finite: whether the last averages were, where that is known; None else. Until the next reduction begins.
        verdicts: the bytes that say so, of this bucket and the others of its device.
        statistics: what `decompress` finds in each tile (kernels/README.md); None before `keep_statistics`.
        has_statistics: whether the last `decompress` made them.
        whole: whether reductions are over whole wires also where the transport can do without, for measurements.
        reduced: by position of the slot, the parameters whose gradients they describe, each with its gradient and
            the version of that, as `statistics.note_reduced` found them.
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
        names = [slot.name for slot in bucket.slots]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        self.about = f"Bucket {bucket.index} holds {', '.join(names[:8])}{more}."
        self._naming = Naming(self.about)
        self._block, self._form, ranks = compression.block, compression.format, transport.world_size
        levels = two_level(transport, compression)
        self._node = None if levels is None else NodeLevel(bucket, levels, staging or SharedBuffers())
        # Of the wire: its columns, shards of each, this rank's place among those that own its column, and rows of
        # memory, since ranks without a column bring a row to the all-gather too.
        columns, shards, place, rows = 1, ranks, transport.rank, 1
        if self._node is not None:
            nodes = self._node.nodes
            columns, shards, place, rows = nodes.columns, len(nodes.ranks), nodes.node, len(nodes.here)
        own_row = 0 if self._node is None else self._node.nodes.local_rank
        self._columns, self._shards, elements = columns, shards, bucket.total // columns
        self._owns = own_row < columns
        self._kernels = ops.choose(bucket.device)
        wire_dtype = compression.wire_dtype(bucket.dtype)
        # Whether the wire is FP16 with block exponents: of as many shards as are summed apart.
        self._fp16 = wire_dtype is torch.uint8 and not self._block
        self._parts = shards if compression.two_shot else 1
        told = ranks, 1 / (divisor or ranks), staging or SharedBuffers()  # both in one level
        self.low_rank = LowRank(bucket, compression, *told) if isinstance(compression, PowerSGD) else None
        self._top = SparseTop(bucket, compression, place, *told) if isinstance(compression, TopK) else None
        self.apart: LowRank | SparseTop | None = self.low_rank or self._top
        if self.apart is not None:
            numel = self.apart.wire.numel()
        elif self._fp16:
            numel = ops.fp16_wire_numel(elements, self._parts)
        else:
            numel = ops.wire_numel(elements, shards, self._block, self._form)

        def buffer(count: int, dtype: torch.dtype) -> Tensor:
            return zeros(count, dtype, bucket.device)

        def wire(name: str, count: int) -> Tensor:
            return shared.take(name, count, wire_dtype, bucket.device) if shared else buffer(count, wire_dtype)

        # Error feedback may measure later what became of the averages, which are in the wire.
        count = numel * rows
        if self.apart is not None:
            self._rows = self.apart.wire
        else:
            self._rows = buffer(count, wire_dtype) if compression.error_feedback else wire("wire", count)
        self.wire = self._rows[: numel * columns]
        self._column = self._rows.view(rows, -1)[own_row]
        # One rank's shard is its wire; quantized ones are summed all the same, for the second rounding's bits.
        two_shot = compression.two_shot and (shards > 1 or self._block > 0)
        self._received = wire("received", numel).view(shards, -1) if two_shot else None
        self._shard = self._column.view(shards, -1)[place] if two_shot else self._column
        self._summed, self._gathered = self._column, None
        if self._fp16 and not two_shot:
            blocks = elements // FP16_BLOCK
            self._summed = self._column[: 2 * elements].view(torch.float16)
            self._exponents = self._column[2 * elements :][:blocks]
            if shards > 1:
                self._gathered = buffer(shards * -(-blocks // 16) * 16, torch.uint8).view(shards, -1)
        self.used = torch.ones(len(bucket.slots), dtype=bucket.dtype, device=bucket.device)
        self.used_by_any = torch.ones_like(self.used)

        own_start, own = own_row * elements + place * (elements // shards), elements // shards
        # Where the wire is the flat in the gradients' own dtype, bucket views can lie in it.
        self._in_place = self._block == 0 and wire_dtype == bucket.dtype and self.apart is None
        # One rank's average in the gradients' own dtype is what it has.
        self.alone = ranks == 1 and self._in_place
        self._sums_in_wire = self._node is not None and self._in_place and wire_dtype == self._node.dtype
        if self._node is not None and self._sums_in_wire:
            self._node.use_wire(self.wire)
        self._direct = transport if isinstance(transport, SlotTransport) and self._takes(transport) else None
        self._flag_block = max(0, bucket.flags_offset - own_start) // self._block if self._block else 0
        self.shard = own_row * shards + place if self._owns else -1
        self.feedback = None
        if self.apart is not None:
            self.feedback = self.apart.feedback
        elif compression.error_feedback:
            where = Place(slice(0, bucket.total), slice(own_start, own_start + own), ranks)
            if self._node is not None:
                where = self._node.place(own if self._owns else 0, own_start, ranks)
            self.feedback = ErrorFeedback(bucket, where, self._block, dtype=compression.residual_dtype)
        self.remainder: ErrorFeedback | None = None
        self._noted: Tensor | None = None
        # Kernels write it. At averages that stay in the wire nobody looks.
        if verdicts is None:
            verdicts = torch.ones(bucket.index + 1, dtype=torch.uint8, device=bucket.device)
        self.verdicts = verdicts
        self._finite = None if self._in_place else verdicts[bucket.index : bucket.index + 1]
        self._verdict = None if self._finite is None else self._finite.view(torch.bool)[0]
        self.finite: Tensor | None = None
        self.statistics: Tensor | None = None
        self.has_statistics = False
        self.whole = False
        self.reduced: dict[int, tuple[Tensor, weakref.ref[Tensor], int]] = {}

        self._draws: Draws | None = None
        self._draws_of_averages: tuple[SlotTable | None, Draws | None] = None, None
        if (seed := compression.random_seed) is not None:  # which is reduced in one level
            step = buffer(1, torch.int64) if step is None else step
            self._draws = Draws(seed, transport.rank, step)
            here = bucket.table.shard(transport.rank * own, (transport.rank + 1) * own)
            self._draws_of_averages = here, Draws(seed, OF_AVERAGES, step)

        unit = 1.0 if self._node is None else self._node.unit
        self._average = unit / (divisor or ranks)
        self._sum_scale = 1.0 / unit
        if compression.two_shot:
            self._scale_before, self._scale_after = 1.0, 1.0
        elif self.apart is not None or self._fp16:
            self._scale_before, self._scale_after = 1.0, self._average
        elif wire_dtype == bucket.dtype:
            self._scale_before, self._scale_after = self._average, 1.0
            if self._node is not None:
                self._sum_scale, self._scale_before = 1.0 / (divisor or ranks), 1.0
        else:
            self._scale_before = 2.0 ** -(shards - 1).bit_length()
            self._scale_after = self._average / self._scale_before

    @property
    def kept(self) -> ErrorFeedback | None:
        """What is to be added to the next gradients, under error feedback or after it."""
        return self.feedback or self.remainder

    def keep_remainder(self) -> ErrorFeedback:
        """What is kept, to be put in by slot: without error feedback it is added to the next gradients, once."""
        if self.kept is None:
            whole, nothing = slice(0, self.bucket.total), slice(0, 0)
            where = Place(whole, nothing, self.transport.world_size)
            self.remainder = ErrorFeedback(self.bucket, where, self.compression.alignment)
        assert self.kept is not None
        return self.kept

    def take(self, i: int) -> Parts:
        """Remove what is kept of slot `i` on this rank, and return it."""
        assert self.kept is not None
        parts = self.kept.take(i)
        return parts if self.low_rank is None else parts._replace(factor=self.low_rank.factor(i))

    def put(self, i: int, parts: Parts) -> None:
        """Go on with what was kept of a slot elsewhere; without error feedback it is added to the next gradients."""
        if self.kept is not None or parts.holds_any:
            self.keep_remainder().put(i, parts)
        if self.low_rank is not None and parts.factor is not None:
            self.low_rank.go_on(i, parts.factor)

    def make_whole(self, flat: Tensor) -> None:
        """A `[total]` tensor of which each rank has its shard → the whole one, on every rank."""
        if self._node is None:
            self.transport.all_gather(flat).wait()
        else:
            self._node.make_whole(flat)

    @property
    def nodes(self) -> str:
        """The ranks of each node, of a reduction in two levels; else nothing."""
        return "" if self._node is None else str(self._node.nodes)

    def of_node(self, parts: Mapping[int, Parts]) -> Mapping[int, Parts]:
        """What this rank keeps of slots, as what is to be put into `feedback`: in two levels its node's sum.

        Every rank of the node calls it then, also one that keeps nothing.
        """
        if self._node is None or self.feedback is None:
            return parts
        return self._node.sum_of_parts(parts)

    def follow(
        self,
        parameters: Sequence[Tensor],
        left: Sequence[int],
        stored: Sequence[Tensor] = (),
        scale: float = 1.0,
        watched: bool = True,
    ) -> None:
        """The averages are stored: see what becomes of them, as far as anything is kept (arguments: `Applied`)."""
        if self.remainder is not None:
            if self.remainder.is_empty:
                self.remainder = self._noted = None
            elif stored:
                self._noted = norms_of(stored) / scale
        if self.kept is not None:
            self.kept.follow(parameters, left, self.magnitudes, scale, watched)

    @property
    def seconds(self) -> Seconds:
        """Time of the last reduction; on a device, of the last after a reading, and waits for its end."""
        between = self.clock.between
        reduce = between(_COMPRESSED, _STARTED) + between(_RESUMED, _REDUCED)
        return Seconds(between(_START, _COMPRESSED), reduce, between(_REDUCED, _END))

    @property
    def sent_bytes(self) -> int:
        """Bytes that one rank sends in one reduction: (N-1)/N of the wire, twice (ring all-reduce or two-shot).

        And its blocks' exponents to every other rank, where ranks agree on them. In two levels what leaves the node: of
        the column's wire, with the number of nodes for N.
        """
        shards = self._shards
        if not self._owns:
            return 0
        if self._top is not None:
            return self._top.sent_bytes
        exponents = 0 if self._gathered is None else self._gathered[0].nbytes * (shards - 1)
        return 2 * self._summed.nbytes * (shards - 1) // shards + exponents

    @property
    def sent_by_stage(self) -> dict[str, int]:
        """The same by stage on the wire: two in PowerSGD, and in a two-shot in one level over whole wires; else one."""
        sent = self.sent_bytes
        if self.low_rank is not None and self.low_rank.holds_matrices:
            second = 2 * self.low_rank.second.nbytes * (self._shards - 1) // self._shards
            return {"wire stage 1": sent - second, "wire stage 2": second}
        if self._received is None or self._node is not None or self.piecewise:
            return {"wire": sent}
        return {"wire stage 1": sent // 2, "wire stage 2": sent // 2}

    def make_views(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the sizes and strides of `like` over one flat: the wire where it can hold gradients."""
        flat = (
            self.wire
            if self._in_place
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
        self.begin(grads, averaged, unused)()

    def begin(self, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()) -> Finish:
        """The first part of `run`: compress, and start the last collective; returns the second part."""
        mark = self.clock.mark
        mark(_START)
        if unused:
            self.used.index_fill_(0, self._on_device(unused), 0)
        direct = self._direct_between(grads, averaged)
        stored = direct is not None and not self._kept_in_wire
        if direct is None:
            with self._naming:
                self.compress(grads)
            if unused:
                self.used.fill_(1)
        mark(_COMPRESSED)
        self.transport.tell_watchdog(self.about)
        with self._naming:
            work = self.reduce() if direct is None else self._reduce_in_place(direct, grads, averaged)
        mark(_STARTED)
        return lambda: self._finish(work, averaged, stored)

    def _finish(self, work: Work, averaged: Sequence[Tensor], stored: bool) -> None:
        mark = self.clock.mark
        mark(_RESUMED)
        with self._naming:
            work.wait()
        mark(_REDUCED)
        if self._direct is not None:
            self.used.fill_(1)  # the transport has read it until now
        if stored:
            self.has_statistics, self.reduced = False, {}
        else:
            self.decompress(averaged)
        self.finite = self._verdict
        if self.kept is not None:  # where nothing tells, the verdict of an earlier step is over
            self.kept.finite = torch.ones_like(self.kept.finite) if self.finite is None else self.finite
        mark(_END)

    def _on_device(self, positions: Sequence[int]) -> Tensor:
        """Positions as an index, for which the host does not wait."""
        host = torch.tensor(list(positions), pin_memory=self.used.is_cuda)
        return host.to(self.used.device, non_blocking=True)

    def _takes(self, transport: SlotTransport) -> bool:
        """Whether the transport can work on the tensors themselves; of a two-shot all ranks answer alike."""
        if self._received is None:
            return self._in_place and self._shards > 1
        fits = not self._block or self._form.blocks(transport.piece_bytes, self._block) > 0
        return fits and self._kernels.pieces is not None and self.compression.random_seed is None

    @property
    def piecewise(self) -> bool:
        """Whether the transport compresses and sums, too."""
        return self._direct is not None and self._received is not None

    @property
    def _kept_in_wire(self) -> bool:  # what a two-shot of tensors themselves makes
        return self._received is not None and (self.statistics is not None or self.feedback is not None)

    def _direct_between(self, grads: Sequence[Tensor], averaged: Sequence[Tensor]) -> SlotTransport | None:
        """What takes tensors as they lie; where nothing is compressed, others may come with a flat."""
        if self.piecewise and not self.whole:
            return self._direct
        if self.whole or self.statistics is not None or self.remainder is not None or not grads:
            return None
        if grads[0].dtype != self.bucket.dtype or averaged[0].dtype != self.bucket.dtype:
            return None
        return self._direct

    def _reduce_in_place(self, direct: SlotTransport, grads: Sequence[Tensor], averaged: Sequence[Tensor]) -> Work:
        """All three stages in one, but for the last where averages are to be in the wire."""
        grads = grads if self.remainder is None else self.remainder.added_to(grads)
        tensors, into = [*grads, self.used], [*averaged, self.used_by_any]
        if self._received is None:
            return direct.all_reduce_slots(tensors, self.bucket.table, self._scale_before, into)
        return direct.two_shot(self._pieces(tensors, into))

    def _pieces(self, tensors: Sequence[Tensor], into: Sequence[Tensor]) -> Pieces:
        assert self._kernels.pieces is not None
        rows: tuple[Tensor | None, ...] = (None, None, None)
        if (kept := self.feedback) is not None:
            kept.commit()
            rows = kept.residuals, kept.shard_residuals, kept.turn
        averages = self.wire if self._kept_in_wire else into
        told = (self.bucket.table, averages, self.wire.dtype, self._shards, self._average, self._finite)
        return self._kernels.pieces(tensors, *told, self._block, self._form, self._flag_block, *rows)

    def compress(self, grads: Sequence[Tensor]) -> None:
        """Gradients and `used` → wire."""
        if self.remainder is not None:
            grads = self.remainder.added_to(grads)
        tensors, slots = [*grads, self.used], self.bucket.table
        if self.feedback is not None:
            self.feedback.commit()
        if self._node is not None:
            self._node.flatten(tensors)
            column = self._node.sum(self._sum_scale)
            if column is None:
                if self._finite is not None:
                    self._finite.fill_(1)
                return
            tensors, slots = [column], self._node.table
        self._compress(tensors, slots)

    def _compress(self, tensors: Sequence[Tensor], slots: SlotTable) -> None:
        if self.apart is not None:
            self.apart.compress(tensors[:-1], tensors[-1], self._finite)
        elif self._block:
            kept = self.feedback
            rows = (kept.residuals, kept.turn) if kept else (None, None)
            told = (self._shards, self._block, *rows, self._finite, self._form, self._draws)
            self._kernels.quantize(tensors, slots, self._column, *told)
        elif self._fp16:
            summed = 1 if self.compression.two_shot else self._shards
            self._kernels.flatten_fp16(tensors, slots, self._column, self._parts, summed, self._finite)
        elif not self._sums_in_wire:
            self._kernels.flatten(tensors, slots, self._column, self._scale_before, self._finite, self._draws)

    def reduce(self) -> Work:
        """Wire → reduced wire, the same bits on every rank, once the returned work is done."""
        if self._node is not None:
            begun = self._sum(self._node.levels.sums.between) if self._owns else None
            return Levels(begun, self._gather_columns)
        if self.low_rank is not None:
            return self._sum_factors(self.low_rank)
        if self._top is not None:
            return self.transport.all_gather(self.wire)
        work = self._sum(self.transport)
        if self._received is None:
            return work
        work.wait()
        self.clock.mark(_EXCHANGED)
        self._reduce_shards(self._received)
        self.clock.mark(_SUMMED)
        return self.transport.all_gather(self.wire)

    def _sum_factors(self, low_rank: LowRank) -> Work:
        work = self.transport.all_reduce(low_rank.first)
        if not low_rank.holds_matrices:
            return work
        work.wait()
        self.clock.mark(_EXCHANGED)
        low_rank.project()
        self.clock.mark(_SUMMED)
        work = self.transport.all_reduce(low_rank.second)
        low_rank.keep_rest()
        return work

    def _sum(self, ranks: Transport) -> Work:
        """The own column over the ranks that own it: the sum itself, or the shards that this rank is to sum."""
        if self._gathered is not None:
            self._gathered[ranks.rank][: len(self._exponents)].copy_(self._exponents)
            ranks.all_gather(self._gathered.view(-1)).wait()
            self._kernels.share_exponents(self._column, self._gathered)
        if self._received is None:
            return ranks.all_reduce(self._summed)
        return ranks.all_to_all(self._received, self._column)

    def _gather_columns(self) -> None:
        """Behind `_sum` in two levels: the averages of the column, then those of all columns."""
        assert self._node is not None
        gathers = self._node.levels.gathers
        if self._owns and self._received is not None:
            self._reduce_shards(self._received)
            gathers.between.all_gather(self._column).wait()
        gathers.within.all_gather(self._rows).wait()

    def _reduce_shards(self, received: Tensor) -> None:
        """Every rank's version of this rank's shard → the average, in its place in the wire."""
        if self._block:
            rows = (self.feedback.shard_residuals, self.feedback.turn) if self.feedback else (None, None)
            told = (*rows, self._form, *self._draws_of_averages)
            self._kernels.reduce_quantized(received, self._shard, self._average, self._block, self._flag_block, *told)
        elif self._fp16:
            self._kernels.reduce_fp16(received, self._shard, self._average)
        else:
            self._kernels.reduce_shards(received, self._shard, self._average, *self._draws_of_averages)

    def decompress(self, averaged: Sequence[Tensor]) -> None:
        """Wire → averaged gradients and `used_by_any`."""
        tensors, slots = [*averaged, self.used_by_any], self.bucket.table
        in_wire = self._in_place and averaged and averaged[0].data_ptr() == self.wire.data_ptr()
        self.has_statistics = self.statistics is not None and not in_wire
        self.reduced = {}
        if in_wire:
            self.used_by_any.copy_(self.wire[self.bucket.flags_offset :][: len(self.used)])
        elif self.apart is not None:
            assert self._finite is not None
            self.apart.decompress(averaged, self.used_by_any, self._finite)
        elif self._block:
            shards = self._columns * self._shards
            turn = None if self.feedback is None else self.feedback.turn
            told = (self.statistics, self._finite, turn)
            self._kernels.dequantize(self.wire, shards, self._block, slots, tensors, *told, self._form)
            if self.feedback is not None:
                self.feedback.turned = True
        elif self._fp16:
            found = self.statistics, self._finite
            self._kernels.unflatten_fp16(
                self.wire, self._columns * self._parts, slots, tensors, self._scale_after, *found
            )
        else:
            self._kernels.unflatten(self.wire, slots, tensors, self._scale_after, self.statistics, self._finite)

    def keep_statistics(self) -> None:
        """Let `decompress` fill `statistics` from now on; under PowerSGD and top-k there are none."""
        if self.statistics is None and self.apart is None:
            shape = ops.statistics_shape(self.bucket.table, self._block)
            dtype = ops.statistics_dtype(self.bucket.dtype)
            self.statistics = torch.zeros(shape, dtype=dtype, device=self.bucket.device)

    def statistics_of(self, first: int, last: int) -> Tensor:
        """The rows of the tiles of the slots from position `first` to before `last`."""
        assert self.statistics is not None
        rows = self.bucket.table.tile_rows(tile_elements(self._block))
        return self.statistics[rows[first] : rows[last]]

    def launch_kernels(self, grads: Sequence[Tensor]) -> None:
        """Launch every kernel of a reduction once, and move nothing between ranks."""
        if self.piecewise:
            self._pieces([*grads, self.used], [*grads, self.used_by_any])
            if self._kept_in_wire:
                self.decompress(grads)
            return
        if self._node is None:
            self.compress(grads)
        else:
            self._node.flatten([*grads, self.used])
            self._node.add_up(self._sum_scale)
            self._compress([self._node.any_column()], self._node.table)
        if self._received is not None:
            self._reduce_shards(self._received)
        if self._gathered is not None:
            self._kernels.share_exponents(self._column, self._gathered)
        if self.apart is not None:
            self.apart.launch_kernels()
        self.decompress(grads)

    def magnitudes(self) -> Tensor:
        """Of each slot's average in the wire: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        if self._noted is not None:
            return self._noted.clone()
        if self.apart is not None:
            return self.apart.magnitudes(self.bucket)
        return self._magnitudes.of_slots(self.wire)

    @cached_property
    def _magnitudes(self) -> BlockMagnitudes:
        return BlockMagnitudes(self.bucket, self._columns * self._shards, self._block, self._form)


class Naming:
    """Around collectives: errors say what the bucket holds, but for one of another, which failed by itself, earlier."""

    def __init__(self, about: str) -> None:
        self._about = about

    def __enter__(self) -> None:
        return

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TransportError) and " Bucket " not in str(error):
            raise TransportError(f"{error} {self._about}", error.missing) from error


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
