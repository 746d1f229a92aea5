"""What the ranks of one node do with a bucket: sum it before it is compressed, gather it when it has been reduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ... import ops
from ...compression import Compression, OfWholeParameters
from ...kernels.slots import Pieces, spare
from ...transports import Connected, Nodes, PieceTransport, Transport, TwoLevelTransport, Work
from ...transports.base import gather_rows
from ..buckets import Bucket, table_of
from ..residuals.bucket_residuals import Share, SlotResiduals
from ..shared_buffers import SharedBuffers


def in_one_level(compression: Compression) -> bool:
    """Whether all ranks reduce as equals under a setting, on however many hosts.

    Random bits of stochastic rounding follow slots of a rank's own gradients, a column is no matrix, and parameters,
    not columns, have largest elements.
    """
    of_parameters = compression.random_seed is not None or isinstance(compression, OfWholeParameters)
    return compression.flat or of_parameters


def two_level(transport: Transport, compression: Compression) -> TwoLevelTransport | None:
    """The transport, if buckets under a setting are reduced in two levels over it."""
    return transport if isinstance(transport, TwoLevelTransport) and not in_one_level(compression) else None


def parts_of(transport: Transport, compression: Compression) -> int:
    """Into how many equal parts a bucket under a setting must divide."""
    levels = two_level(transport, compression)
    return transport.world_size if levels is None else levels.nodes.parts


class NodeLevel:
    """The level of a node, for one bucket.

    1. `sum`: tensors → flat in FP32 (FP64 for FP64); an all-to-all of the node's parts; our kernel sums the own one,
       in rank order. In shared memory piece by piece, in which nothing is in the flat but the sum. Where the node has
       more ranks than there are columns, parts are gathered, too.
    2. When the column has been compressed and reduced between nodes, `levels.gathers.within` makes the wire whole.

    Sums of a node are divided by `unit`, a power of two, as large as it takes for them not to overflow, and the same
    for all nodes: so the sum over nodes of what they compress is the sum over ranks divided by `unit`.

    Args:
        bucket: what is reduced.
        transport: the levels.
        staging: memory for what buckets hold in turn while they are summed.

    Attributes:
        nodes: the ranks of each node.
        elements: of a column.
        table: a column as kernels see it, one slot.
        unit: by which sums are divided.
    """

    def __init__(self, bucket: Bucket, transport: TwoLevelTransport, staging: SharedBuffers) -> None:
        self.nodes: Nodes = transport.nodes
        self._bucket, self._transport, self._kernels = bucket, transport, ops.choose(bucket.device)
        self.elements = bucket.total // self.nodes.columns
        self.table = table_of([self.elements], 1)
        self.unit = spare(max(map(len, self.nodes.ranks)))
        self.dtype = torch.float64 if bucket.dtype is torch.float64 else torch.float32
        self._flat = staging.take("flat of a node", bucket.total, self.dtype, bucket.device)
        self._received = staging.take("received in a node", bucket.total, self.dtype, bucket.device)

    @property
    def first(self) -> int:
        """Where the column begins; at the flat's end, of no elements, for a rank that owns none."""
        return min(self.nodes.local_rank * self.elements, self._bucket.total)

    @property
    def levels(self) -> Connected:
        """What moves data."""
        return self._transport.levels

    def share(self, own: int, start: int, divisor: int) -> Share:
        """Which residuals this rank keeps, with `own` averages from `start` on."""
        first = slice(self.first, min(self.first + self.elements, self._bucket.total))
        alike = divisor / self._transport.world_size * len(self.nodes.here)
        return Share(first, slice(start, start + own), divisor, self.unit, alike / self.unit)

    def use_wire(self, wire: Tensor) -> None:
        """Sum in the wire: it is the flat, in the dtype of sums."""
        self._flat = wire

    def sum(self, tensors: Sequence[Tensor], scale: float) -> Tensor | None:
        """Tensors of all ranks of the node → the own column of their sum times `scale`; None if this rank has none."""
        within = self._transport.levels.sums.within
        if len(self.nodes.here) == 1:  # the flat is the sum
            self._flatten(tensors, scale)
        elif isinstance(within, PieceTransport) and (pieces := self._pieces(tensors, scale)) is not None:
            within.reduce_scatter(pieces).wait()
        else:
            self._flatten(tensors, 1.0)
            within.all_to_all(self._received.view(len(self.nodes.here), -1), self._flat).wait()
            self._add_up(scale)
        return self._column(within)

    def launch_kernels(self, tensors: Sequence[Tensor], scale: float) -> Tensor:
        """Launch every kernel of `sum` once, in either way; returns a column, whatever is in it."""
        self._pieces(tensors, scale)
        self._flatten(tensors, 1.0)
        self._add_up(scale)
        return self._flat.view(self.nodes.columns, -1)[0]

    def _flatten(self, tensors: Sequence[Tensor], scale: float) -> None:
        self._kernels.flatten(tensors, self._bucket.table, self._flat, scale)

    def _pieces(self, tensors: Sequence[Tensor], scale: float) -> Pieces | None:
        """What sums tensors piece by piece into the flat, where kernels can."""
        if self._kernels.pieces is None:
            return None
        return self._kernels.pieces(tensors, self._bucket.table, self._flat, self.dtype, len(self.nodes.here), scale)

    def _add_up(self, scale: float) -> None:
        """The parts that have been received → their sum, in the own part of the flat."""
        ranks = len(self.nodes.here)
        own = self._flat.view(ranks, -1)[self.nodes.local_rank]
        self._kernels.reduce_shards(self._received.view(ranks, -1), own, scale)

    def _column(self, within: Transport) -> Tensor | None:
        if len(self.nodes.here) > self.nodes.columns:
            within.all_gather(self._flat).wait()
        if not self.nodes.column:
            return None
        column = self._flat.view(self.nodes.columns, -1)[self.nodes.local_rank]
        start, stop = self._bucket.flags_offset, self._bucket.flags_offset + len(self._bucket.slots)
        flags = slice(*(min(max(end - self.first, 0), self.elements) for end in (start, stop)))
        column[flags].sign_()  # used-flags are 1 or 0, however many ranks used the slot
        return column

    def sum_of_parts(self, parts: Mapping[int, SlotResiduals]) -> dict[int, SlotResiduals]:
        """What this rank keeps of slots → of each slot the sum over the ranks of the node, which all call it.

        That is the own column of it, over `unit`; the rest is zeros. Of a slot of which no rank brings anything there
        is none.
        """
        return self._sum_of_parts(parts, 1 / self.unit, slice(self.first, self.first + self.elements))

    def on_first_rank(self, parts: Mapping[int, SlotResiduals]) -> dict[int, SlotResiduals]:
        """What this rank keeps of slots → on the node's first rank that of all its ranks, which call it; else zeros."""
        return self._sum_of_parts(parts, 1.0, slice(0, 0 if self.nodes.local_rank else self._bucket.total))

    def _sum_of_parts(self, parts: Mapping[int, SlotResiduals], scale: float, here: slice) -> dict[int, SlotResiduals]:
        nothing = torch.zeros(0, dtype=torch.float32, device="cpu")
        slots = [parts.get(i, SlotResiduals(nothing, None, math.nan)) for i in range(len(self._bucket.slots))]
        mine = [(part.unit, float(part.base is not None), float(i in parts)) for i, part in enumerate(slots)]
        within, device = self._transport.levels.moves, self._bucket.device
        told = gather_rows(within, torch.tensor(mine, dtype=torch.float64, device=device))
        units, with_base, with_any = (row.tolist() for row in told.nan_to_num(-math.inf).amax(0).unbind(1))
        sums = self._moved([part.residual for part in slots], scale, here)
        bases = self._moved([part.residual if part.base is None else part.base for part in slots], scale, here)
        found = {}
        for i, (slot, unit, has_base) in enumerate(zip(self._bucket.slots, units, with_base, strict=True)):
            if not with_any[i]:
                continue
            place = slice(slot.offset, slot.offset + slot.numel)
            unit = math.nan if unit == -math.inf else unit
            found[i] = SlotResiduals(sums[place], bases[place] if has_base else None, unit)
        return found

    def _moved(self, slots: Sequence[Tensor], scale: float, here: slice) -> Tensor:
        """Residuals that the ranks of the node hold, one 1-D tensor a slot → their sum times `scale`, as far as `here`.

        An empty one stands for zeros. The rest of the `[total]` tensor is zeros.
        """
        within, ranks = self._transport.levels.moves, len(self.nodes.here)
        flat = torch.zeros(self._bucket.total, dtype=torch.float32, device=self._bucket.device)
        for slot, values in zip(self._bucket.slots, slots, strict=True):
            flat[slot.offset : slot.offset + len(values)] = values
        received = torch.empty_like(flat).view(ranks, -1)
        within.all_to_all(received, flat).wait()
        self._kernels.reduce_shards(received, flat.view(ranks, -1)[self.nodes.local_rank], scale)
        within.all_gather(flat).wait()
        flat[: here.start] = 0
        flat[here.stop :] = 0
        return flat

    def make_whole(self, flat: Tensor) -> None:
        """A `[total]` tensor of which each rank that owns a column has its shard → the whole one."""
        levels, columns = self._transport.levels.sums, self.nodes.columns
        rows = flat.new_zeros(len(self.nodes.here), self.elements)
        if self.nodes.column:
            rows[self.nodes.local_rank] = flat.view(columns, -1)[self.nodes.local_rank]
            levels.between.all_gather(rows[self.nodes.local_rank]).wait()
        levels.within.all_gather(rows.view(-1)).wait()
        flat.copy_(rows.view(-1)[: len(flat)])


class Levels:
    """A bucket's reduction in two levels: what has been started between nodes, and what is to follow."""

    def __init__(self, started: Work | None, then: Callable[[], None]) -> None:
        self._started, self._then = started, then

    def wait(self) -> None:
        """Return when all is done."""
        if self._started is not None:
            self._started.wait()
        self._then()
