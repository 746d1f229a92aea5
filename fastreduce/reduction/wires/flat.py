"""A bucket's flat on its way: cast, in FP16 with exponents, or quantized; summed by the transport or in two shots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch import Tensor

from ... import ops
from ...compression import Compression
from ...kernels.slots import FP16_BLOCK, OF_AVERAGES, Draws, Pieces, SlotTable
from ...transports import LateGatherTransport, SlotTransport, Transport, Work
from ..buckets import Bucket, round_up
from ..clocks import Point
from ..residuals.bucket_residuals import Share, SlotResiduals
from ..residuals.error_feedback import ErrorFeedback
from ..shared_buffers import SharedBuffers, zeros
from .base import BucketWires, Sum
from .block_magnitudes import BlockMagnitudes
from .node_level import Levels, NodeLevel, two_level

_EXCHANGED, _SUMMED = int(Point.EXCHANGED), int(Point.SUMMED)


class FlatWires(BucketWires):
    """The flat as a wire of equal shards.

    1. `compress`: gradients and used-flags → wire, one kernel launch.
    2. `reduce`: the transport's all-reduce in place, or two-shot: all-to-all of shards, our FP32
       sum of the own shard, all-gather. Before an all-reduce of FP16, ranks gather the exponents of their
       blocks, a byte each, and take the largest of each block.
    3. `decompress`: wire → gradients and reduced used-flags, one kernel launch.

    In two levels (`NodeLevel`) the ranks of a node first sum the gradients, each a column of the flat. `compress` and
    `reduce` are those of a column, among the ranks, one of each node, that own it; then a node's ranks gather the wires
    of all columns. Else there is one column, which belongs to all ranks.

    With N ranks the average's 1/N is applied before a plain all-reduce in the gradients' own dtype
    (as torch does), in the reduction kernel of a two-shot, after an all-reduce of FP16, whose exponents
    leave room for the sum, and split in two for one of BF16: 2^-⌈log2(N)⌉ before, so that no sum overflows
    unless its average does, and the rest after.

    Args:
        bucket: what is averaged.
        compression: the setting.
        transport: the ranks.
        divisor: what sums are divided by.
        shared: memory for the wire, if other buckets use it in turn.
        staging: memory for what is summed within a node, if other buckets use it in turn.
        step: INT64 `[1]` on the device, from which random bits follow.

    Attributes:
        direct: the transport, if it can do without a wire.
        piecewise: whether it compresses and sums, too.
        received: of a two-shot every rank's version of this rank's shard, `[ranks, elements]`; else None.
    """

    keeps_statistics = True

    def __init__(
        self,
        bucket: Bucket,
        compression: Compression,
        transport: Transport,
        divisor: int,
        shared: SharedBuffers | None,
        staging: SharedBuffers,
        step: Tensor | None,
    ) -> None:
        self._bucket, self._transport, self._kernels = bucket, transport, ops.choose(bucket.device)
        self.block, self._form = compression.block, compression.format
        self._dtype = compression.wire_dtype(bucket.dtype)
        self.in_place = self._dtype == bucket.dtype
        levels = two_level(transport, compression)
        self._node = None if levels is None else NodeLevel(bucket, levels, staging)
        # Of the wire: its columns, shards of each, this rank's place among those that own its column, and rows of
        # memory, since ranks without a column bring a row to the all-gather too.
        self._columns, self._shards, place, rows, own_row = 1, transport.world_size, transport.rank, 1, 0
        if self._node is not None:
            nodes = self._node.nodes
            self._columns, self._shards, place, rows = nodes.columns, len(nodes.ranks), nodes.node, len(nodes.here)
            own_row, self.nodes = nodes.local_rank, str(nodes)
        self._owns = own_row < self._columns
        self.shard = own_row * self._shards + place if self._owns else -1
        elements = bucket.total // self._columns
        own = elements // self._shards
        own_start = own_row * elements + place * own
        # One rank's shard is its wire; quantized ones are summed all the same, for the second rounding's bits.
        two_shot = compression.two_shot and (self._shards > 1 or self.block > 0)
        # Whether the wire is FP16 with block exponents: of as many shards as are summed apart.
        self._fp16 = self._dtype is torch.uint8 and not self.block
        self._parts, self._summed_in_wire = (self._shards, 1) if compression.two_shot else (1, self._shards)
        # Error feedback may measure later what became of the averages, which are in the wire.
        self._make_wires(elements, rows, own_row, place, two_shot, shared, not compression.error_feedback)
        self._sums_in_wire = self._node is not None and self.in_place and self._dtype == self._node.dtype
        if self._node is not None and self._sums_in_wire:
            self._node.use_wire(self.wire)
        random = compression.random_seed is not None
        self.direct = transport if isinstance(transport, SlotTransport) and self._fits(transport, random) else None
        self.piecewise = self.direct is not None and two_shot
        self._flag_block = max(0, bucket.flags_offset - own_start) // self.block if self.block else 0
        self.feedback = None
        if compression.error_feedback:
            second = slice(own_start, own_start + own)
            share = Share(slice(0, bucket.total), second, divisor, shared=divisor / transport.world_size)
            if self._node is not None:
                share = self._node.share(own if self._owns else 0, own_start, divisor)
            self.feedback = ErrorFeedback(bucket, share, self.block, dtype=compression.residual_dtype)
        self._draws: Draws | None = None
        self._draws_of_averages: tuple[SlotTable | None, Draws | None] = None, None
        if (seed := compression.random_seed) is not None:  # which is reduced in one level
            step = zeros(1, torch.int64, bucket.device) if step is None else step
            self._draws = Draws(seed, transport.rank, step)
            here = bucket.table.shard(transport.rank * own, (transport.rank + 1) * own)
            self._draws_of_averages = here, Draws(seed, OF_AVERAGES, step)
        self._set_scales(compression.two_shot, divisor)

    def _make_wires(
        self,
        elements: int,
        rows: int,
        own_row: int,
        place: int,
        two_shot: bool,
        shared: SharedBuffers | None,
        may_share: bool,
    ) -> None:
        device = self._bucket.device
        if self._fp16:
            numel = ops.fp16_wire_numel(elements, self._parts)
        else:
            numel = ops.wire_numel(elements, self._shards, self.block, self._form)

        def memory(name: str, count: int, may_share: bool = True) -> Tensor:
            if shared is None or not may_share:
                return zeros(count, self._dtype, device)
            return shared.take(name, count, self._dtype, device)

        self._rows = memory("wire", numel * rows, may_share)
        self.wire = self._rows[: numel * self._columns]
        self._column = self._rows.view(rows, -1)[own_row]
        self.received = memory("received", numel).view(self._shards, -1) if two_shot else None
        self._shard = self._column.view(self._shards, -1)[place] if two_shot else self._column
        self._summed, self._gathered = self._column, None
        if self._fp16 and not two_shot:
            blocks = elements // FP16_BLOCK
            self._summed = self._column[: 2 * elements].view(torch.float16)
            self._exponents = self._column[2 * elements :][:blocks]
            if self._shards > 1:
                count = self._shards * round_up(blocks, 16)
                self._gathered = zeros(count, torch.uint8, device).view(self._shards, -1)

    def _set_scales(self, two_shot: bool, divisor: int) -> None:
        unit = 1.0 if self._node is None else self._node.unit
        self._average, self._sum_scale = unit / divisor, 1.0 / unit
        if two_shot:
            self._scale_before, self._scale_after = 1.0, 1.0
        elif self._fp16:
            self._scale_before, self._scale_after = 1.0, self._average
        elif self.in_place:
            self._scale_before, self._scale_after = self._average, 1.0
            if self._node is not None:
                self._sum_scale, self._scale_before = 1.0 / divisor, 1.0
        else:
            self._scale_before = 2.0 ** -(self._shards - 1).bit_length()
            self._scale_after = self._average / self._scale_before

    def compress(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None) -> None:
        """Gradients and used-flags → wire."""
        tensors, slots = [*grads, used], self._bucket.table
        if self._node is not None:
            column = self._node.sum(tensors, self._sum_scale)
            if column is None:
                if finite is not None:
                    finite.fill_(1)
                return
            tensors, slots = [column], self._node.table
        self._compress(tensors, slots, finite)

    def _compress(self, tensors: Sequence[Tensor], slots: SlotTable, finite: Tensor | None) -> None:
        if self.block:
            kept = self.feedback
            rows = (kept.residuals, kept.turn) if kept else (None, None)
            told = (self._shards, self.block, *rows, finite, self._form, self._draws)
            self._kernels.quantize(tensors, slots, self._column, *told)
        elif self._fp16:
            self._kernels.flatten_fp16(tensors, slots, self._column, self._parts, self._summed_in_wire, finite)
        elif self._is_there(tensors):
            self.wire[self._bucket.flags_offset :][: len(tensors[-1])].copy_(tensors[-1])
        elif not self._sums_in_wire:
            self._kernels.flatten(tensors, slots, self._column, self._scale_before, finite, self._draws)

    def _is_there(self, tensors: Sequence[Tensor]) -> bool:
        """Whether gradients, with which flags come last, are views of the wire, and are to be there as they are."""
        if self._scale_before != 1 or self._draws is not None or not self.holds(tensors):
            return False
        start, size = self.wire.data_ptr(), self.wire.itemsize
        places = [start + size * slot.offset for slot in self._bucket.slots]
        return list(map(Tensor.data_ptr, tensors[:-1])) == places

    def reduce(self, mark: Callable[[int], None]) -> Work | Sum:
        """Wire → reduced wire."""
        if self._node is not None:
            begun = self._sum(self._node.levels.sums.between) if self._owns else None
            return lambda: self._sum_column(begun)
        work = self._sum(self._transport)
        if self.received is None:
            return work
        received, transport = self.received, self._transport
        gather = transport.late_all_gather() if isinstance(transport, LateGatherTransport) else None

        def sum_shards() -> Work:
            work.wait()
            mark(_EXCHANGED)
            self.reduce_shards(received)
            mark(_SUMMED)
            return (gather or transport.all_gather)(self.wire)

        return sum_shards() if gather is None else sum_shards

    def _sum(self, ranks: Transport) -> Work:
        """The own column over the ranks that own it: the sum itself, or the shards that this rank is to sum."""
        if self._gathered is not None:
            self._gathered[ranks.rank][: len(self._exponents)].copy_(self._exponents)
            ranks.all_gather(self._gathered.view(-1)).wait()
            self._kernels.share_exponents(self._column, self._gathered)
        if self.received is None:
            return ranks.all_reduce(self._summed)
        return ranks.all_to_all(self.received, self._column)

    def _sum_column(self, begun: Work | None) -> Work:
        """Behind `_sum` in two levels: the averages of the column, then those of all columns."""
        assert self._node is not None
        gathers = self._node.levels.gathers
        if begun is not None and self.received is not None:
            begun.wait()
            self.reduce_shards(self.received)
            begun = gathers.between.all_gather(self._column)
        return Levels(begun, lambda: gathers.within.all_gather(self._rows).wait())

    def reduce_shards(self, received: Tensor) -> None:
        """Every rank's version of this rank's shard → the average, in its place in the wire."""
        if self.block:
            rows = (self.feedback.shard_residuals, self.feedback.turn) if self.feedback else (None, None)
            told = (*rows, self._form, *self._draws_of_averages)
            self._kernels.reduce_quantized(received, self._shard, self._average, self.block, self._flag_block, *told)
        elif self._fp16:
            self._kernels.reduce_fp16(received, self._shard, self._average)
        else:
            self._kernels.reduce_shards(received, self._shard, self._average, *self._draws_of_averages)

    def decompress(
        self, averaged: Sequence[Tensor], used: Tensor, finite: Tensor | None, statistics: Tensor | None
    ) -> None:
        """Wire → averaged gradients and used-flags of all ranks."""
        tensors, slots = [*averaged, used], self._bucket.table
        if self.holds(averaged):
            used.copy_(self.wire[self._bucket.flags_offset :][: len(used)])
        elif self.block:
            shards, feedback = self._columns * self._shards, self.feedback
            turn = None if feedback is None else feedback.turn
            told = (statistics, finite, turn, self._form, self._draws_of_averages[1] is not None)
            with nullcontext() if feedback is None else feedback.changing():
                self._kernels.dequantize(self.wire, shards, self.block, slots, tensors, *told)
                if feedback is not None:
                    feedback.turned()
        elif self._fp16:
            parts = self._columns * self._parts
            self._kernels.unflatten_fp16(self.wire, parts, slots, tensors, self._scale_after, statistics, finite)
        else:
            self._kernels.unflatten(self.wire, slots, tensors, self._scale_after, statistics, finite)

    def holds(self, averaged: Sequence[Tensor]) -> bool:
        """Whether averages are views of the wire, and need not be written."""
        return self.in_place and bool(averaged) and averaged[0].data_ptr() == self.wire.data_ptr()

    # Without a wire

    def _fits(self, transport: SlotTransport, random: bool) -> bool:
        """Whether the transport can work on the tensors themselves; of a two-shot all ranks answer alike."""
        if self.received is None:
            return self.in_place and self._shards > 1
        fits = not self.block or self._form.blocks(transport.piece_bytes, self.block) > 0
        return fits and self._kernels.pieces is not None and not random

    def reduce_between(
        self, tensors: Sequence[Tensor], into: Sequence[Tensor], finite: Tensor | None, in_wire: bool
    ) -> Work:
        """All three stages in one, from gradients and used-flags; of a two-shot averages are `in_wire`, or `into`."""
        assert self.direct is not None
        if self.received is None:
            return self.direct.all_reduce_slots(tensors, self._bucket.table, self._scale_before, into)
        return self.direct.two_shot(self._pieces(tensors, self.wire if in_wire else into, finite))

    def _pieces(self, tensors: Sequence[Tensor], averages: Tensor | Sequence[Tensor], finite: Tensor | None) -> Pieces:
        assert self._kernels.pieces is not None
        rows: tuple[Tensor | None, ...] = (None, None, None)
        if (kept := self.feedback) is not None:
            rows = kept.residuals, kept.shard_residuals, kept.turn
        told = (self._bucket.table, averages, self.wire.dtype, self._shards, self._average, finite)
        return self._kernels.pieces(tensors, *told, self.block, self._form, self._flag_block, *rows)

    # The rest

    def launch_kernels(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None, in_wire: bool) -> None:
        """Launch every kernel once but those that `decompress` launches, or compile those of pieces."""
        if self.piecewise:
            self._pieces([*grads, used], self.wire if in_wire else [*grads, used], finite)
            return
        if self._node is None:
            self.compress(grads, used, finite)
        else:
            column = self._node.launch_kernels([*grads, used], self._sum_scale)
            if not self._owns:  # it compresses nothing, and keeps no residuals
                return
            self._compress([column], self._node.table, finite)
        if self.received is not None:
            self.reduce_shards(self.received)
        if self._gathered is not None:
            self._kernels.share_exponents(self._column, self._gathered)

    def magnitudes(self) -> Tensor:
        """Of each slot's average in the wire: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        return self._magnitudes.of_slots(self.wire)

    @cached_property
    def _magnitudes(self) -> BlockMagnitudes:
        return BlockMagnitudes(self._bucket, self._columns * self._shards, self.block, self._form)

    @property
    def sent_by_stage(self) -> dict[str, int]:
        """(N-1)/N of the wire, twice (ring all-reduce or two-shot): by stage of a two-shot over a wire in one level.

        And its blocks' exponents to every other rank, where ranks agree on them. In two levels what leaves the node: of
        the column's wire, with the number of nodes for N.
        """
        shards = self._shards
        exponents = 0 if self._gathered is None else self._gathered[0].nbytes * (shards - 1)
        sent = 2 * self._summed.nbytes * (shards - 1) // shards + exponents if self._owns else 0
        if self.received is None or self._node is not None or self.piecewise:
            return {"wire": sent}
        return {"wire stage 1": sent // 2, "wire stage 2": sent // 2}

    def spread(self) -> None:
        """Move what is kept of shards into the first stage, on every rank alike."""
        if self.feedback is not None:
            self.feedback.spread(self._make_whole)

    def _make_whole(self, flat: Tensor) -> None:
        """A `[total]` tensor of which each rank has its shard → the whole one, on every rank."""
        if self._node is None:
            self._transport.all_gather(flat).wait()
        else:
            self._node.make_whole(flat)

    def of_node(self, parts: Mapping[int, SlotResiduals]) -> Mapping[int, SlotResiduals]:
        """What this rank keeps of slots, as what is to be put into `feedback`: in two levels its node's sum."""
        return parts if self._node is None or self.feedback is None else self._node.sum_of_parts(parts)

    def of_rank(self, parts: Mapping[int, SlotResiduals]) -> Mapping[int, SlotResiduals]:
        """What was taken of slots, as what is this rank's own: in two levels the node's, on its first rank."""
        return parts if self._node is None or self.feedback is None else self._node.on_first_rank(parts)
