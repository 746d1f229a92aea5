"""Top-k for one bucket: of each gradient travel its largest elements, with their places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...compression import TopK
from ...errors import SettingError, TransportError
from ...kernels.slots import PlacesError
from ...transports import Transport, Work
from ..buckets import Bucket, Slot, round_up, table_of
from ..residuals.applied import norms_of
from ..residuals.bucket_residuals import Share
from ..residuals.error_feedback import ErrorFeedback
from ..residuals.staged_rows import StagedRows
from ..shared_buffers import SharedBuffers
from .base import BucketWires

MOST = 2**31 - 1  # elements of a gradient whose places fit into 32 bits


class _Sparse(NamedTuple):
    """A slot that travels as some of its elements: how many, and where they and their places lie in a message."""

    position: int
    slot: Slot
    number: int
    first: int
    places: int


class SparseTop(BucketWires):
    """The largest elements of one bucket's gradients, slot by slot, and the messages that they travel in.

    1. `compress`: the gradient and what was kept of earlier ones → of each slot that the setting compresses its largest
       elements; the rest is kept. Other slots and the used-flags travel whole, behind them in the same message.
    2. Every rank gets all ranks' messages.
    3. `decompress`: their sums in rank order, in FP32, scaled once → averages. Where no rank has sent an element, its
       average is 0.

    What is chosen depends on a slot alone, and sums are worked out alike on every rank, element by element: neither the
    bucket, the transport nor threads tell in the bits.

    Args:
        bucket: whose gradients.
        setting: how many elements, and of which slots.
        transport: the ranks.
        average: what sums are multiplied by.
        staging: memory for gradients with what was kept, if other buckets use it in turn; on a GPU alone.

    Attributes:
        wire: FP32, all ranks' messages one after the other.
        feedback: what was not sent.

    Raises:
        SettingError: if a slot has too many elements.
    """

    def __init__(
        self, bucket: Bucket, setting: TopK, transport: Transport, average: float, staging: SharedBuffers
    ) -> None:
        self._transport, self.shard, ranks = transport, transport.rank, transport.world_size
        self._kernels, self._average = ops.choose(bucket.device), average
        self._bucket = bucket
        self._sparse, self._small, end = _divide(bucket, setting)
        start = round_up(end, setting.alignment)
        self._table = table_of([*(bucket.slots[i].numel for i in self._small), len(bucket.slots)], setting.alignment)
        self.wire = torch.zeros(ranks * (start + self._table.total), dtype=torch.float32, device=bucket.device)
        self._messages = self.wire.view(ranks, -1)
        own = self._messages[transport.rank]
        numbers = own.view(torch.int32)
        self._own = [(own[s.first :][: s.number], numbers[s.places :][: s.number]) for s in self._sparse]
        # What travels whole: this rank's, that of all ranks, and its sums.
        self._flat, self._flats_of_all = own[start:], self._messages[:, start:]
        self._received = torch.empty_like(self._flats_of_all, memory_format=torch.contiguous_format)
        self._summed = torch.empty_like(self._flat)
        self._flats, self._sums = (self._of_small(flat) for flat in (self._flat, self._summed))
        self.feedback = ErrorFeedback(bucket, Share(slice(0, bucket.total), slice(0, 0), ranks), setting.alignment)
        self._rows = StagedRows(self.feedback, bucket, staging, "kept", self._views_of)

    def _of_small(self, flat: Tensor) -> list[Tensor]:
        """The places of the small slots in a flat of theirs."""
        starts = zip(self._small, self._table.offsets.tolist(), strict=False)  # the flags come behind
        return [flat[start:][: self._bucket.slots[i].numel] for i, start in starts]

    def _views_of(self, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Of a row of residuals, the slots that travel in part and the small ones."""
        parts = [row[slot.offset :][: slot.numel] for slot in self._bucket.slots]
        return [parts[sparse.position] for sparse in self._sparse], [parts[i] for i in self._small]

    @property
    def sent_by_stage(self) -> dict[str, int]:
        """Its message, to every other rank."""
        return {"wire": self._messages[0].nbytes * (len(self._messages) - 1)}

    def compress(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None) -> None:
        """Gradients and used-flags → this rank's message; what is not in it is kept, but for what is not finite."""
        self._kernels.flatten([*(grads[i] for i in self._small), used], self._table, self._flat, 1.0, finite)
        self._rows.load()
        (kept, kept_small), (made, made_small) = self._rows.now()
        if self._small:
            torch._foreach_add_(self._flats, kept_small)
            torch._foreach_zero_(made_small)
        for sparse, own, old, new in zip(self._sparse, self._own, kept, made, strict=True):
            torch.add(_flat(grads[sparse.position]), old, out=new)
            self._kernels.take_largest(new, *own)
        self._rows.store()

    def reduce(self, mark: Callable[[int], None]) -> Work:
        """All messages."""
        return self._transport.all_gather(self.wire)

    def decompress(
        self, averaged: Sequence[Tensor], used: Tensor, finite: Tensor | None, statistics: Tensor | None
    ) -> None:
        """All messages → averages and used-flags; `finite` becomes 0 if they are not.

        Raises:
            TransportError: if a rank's places are none of the gradient.
        """
        self._received.copy_(self._flats_of_all)
        self._kernels.reduce_shards(self._received, self._summed, self._average)
        small = [*(averaged[i] for i in self._small), used]
        self._kernels.unflatten(self._summed, self._table, small, 1.0, None, finite)
        self._average_taken([averaged[sparse.position] for sparse in self._sparse], finite)

    def _average_taken(self, averaged: Sequence[Tensor], finite: Tensor | None) -> None:
        for sparse, into in zip(self._sparse, averaged, strict=True):
            place = sparse.first, sparse.places, sparse.number
            try:
                self._kernels.average_taken(self._messages, *place, self._average, _flat(into), finite)
            except PlacesError as error:
                raise TransportError(
                    f"topk: of parameter {sparse.slot.name!r} in bucket {self._bucket.index} {error}"
                ) from error

    def launch_kernels(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None, in_wire: bool) -> None:
        """Launch both kernels once, where no slot need be large."""
        self.compress(grads, used, finite)
        numbers = torch.zeros(2, dtype=torch.float32, device=self._bucket.device)
        self._kernels.take_largest(numbers.clone(), numbers[:1], numbers[1:].view(torch.int32))
        into = torch.zeros(1, dtype=self._bucket.dtype, device=self._bucket.device)
        self._kernels.average_taken(numbers[None], 0, 1, 1, 1.0, into)

    def magnitudes(self) -> Tensor:
        """Of each slot's average: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        made = [self._summed.new_empty(slot.numel) for slot in self._bucket.slots]
        for i, flat in zip(self._small, self._sums, strict=True):
            made[i] = flat
        self._average_taken([made[sparse.position] for sparse in self._sparse], None)
        return norms_of(made)


def _divide(bucket: Bucket, setting: TopK) -> tuple[list[_Sparse], list[int], int]:
    """The slots that travel in part, the positions of the others, and where in a message the first end.

    Values of all slots come first, then places.
    """
    counts = {position: setting.count(slot.numel) for position, slot in enumerate(bucket.slots)}
    sparse, small, first, total = [], list[int](), 0, sum(counts.values())
    for position, slot in enumerate(bucket.slots):
        if not counts[position]:
            small.append(position)
            continue
        if slot.numel > MOST:
            raise SettingError(
                f"parameter {slot.name!r} has {slot.numel} elements, and under {str(setting)!r} places travel in 32 "
                f"bits: at most {MOST}; give it another setting by a policy"
            )
        sparse.append(_Sparse(position, slot, counts[position], first, total + first))
        first += counts[position]
    return sparse, small, 2 * total


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's elements in memory order."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
