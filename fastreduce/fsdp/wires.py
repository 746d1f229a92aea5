"""The wire of a reduce-scatter: the gradients of some parameters of a group, a row for each rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..compression import Compression
from ..kernels.slots import SlotTable
from ..reduction.buckets import Bucket, Slot, round_up
from ..reduction.residuals.bucket_residuals import Share
from ..reduction.residuals.error_feedback import ErrorFeedback


class RowWire:
    """Parameters under one setting, in rows of equal layout: row r is what rank r gets, and shard r of the wire.

    A parameter's part of a row is a slot, so that no block holds elements of two parameters. What the sums become is
    not this wire's: they stay on their rank, in full precision. So there is one stage of error feedback.

    Args:
        members: positions of the parameters in their group.
        names: their names.
        pieces: elements of each in a row.
        compression: the setting.
        ranks: the number of rows.
        device: where it is.

    Attributes:
        feedback: what was lost of this rank's gradients; None without error feedback.
        finite: of the decoded terms, a byte.
    """

    def __init__(
        self,
        members: Sequence[int],
        names: Sequence[str],
        pieces: Sequence[int],
        compression: Compression,
        ranks: int,
        device: torch.device,
    ) -> None:
        self.members, self.compression, self.ranks = list(members), compression, ranks
        self._kernels = ops.choose(device)
        self._block, self._form = compression.block, compression.format
        slots, end, alignment = [], 0, compression.alignment
        for member, name, piece in zip(members, names, pieces, strict=True):
            slots.append(Slot(member, name, end, piece))
            end += round_up(piece, alignment)
        self.row = Bucket(0, torch.float32, device, tuple(slots), end, end)
        offsets = np.array([[r * end + slot.offset for slot in slots] for r in range(ranks)], dtype=np.int64)
        numels = np.array([[slot.numel for slot in slots]] * ranks, dtype=np.int64)
        self._table = SlotTable(offsets.ravel(), numels.ravel(), ranks * end)
        self.finite = torch.ones(1, dtype=torch.uint8, device=device)
        self.feedback: ErrorFeedback | None = None
        if compression.error_feedback:
            place, dtype = Share(slice(0, end), slice(0, 0), 1), compression.residual_dtype
            self.feedback = ErrorFeedback(self.row, place, self._block, ranks, dtype)

    def dtype(self, of: torch.dtype) -> torch.dtype:
        """What the wire of gradients of a dtype consists of."""
        return self.compression.wire_dtype(of)

    def numel(self, of: torch.dtype) -> int:
        """Elements of the wire of gradients of a dtype."""
        if self._is_fp16(of):
            return ops.fp16_wire_numel(self._table.total, self.ranks)
        return ops.wire_numel(self._table.total, self.ranks, self._block, self._form)

    def _is_fp16(self, of: torch.dtype) -> bool:
        """Whether it consists of FP16 blocks."""
        return not self._block and self.dtype(of) is torch.uint8

    def compress(self, gradients: Sequence[Tensor], wire: Tensor) -> None:
        """Row by row the parameters' parts → the wire."""
        if self._block:
            kept = self.feedback
            if kept is not None:
                kept.commit()
            rows = (kept.residuals.view(2, -1), kept.turn) if kept else (None, None)
            told = (self.ranks, self._block, *rows, self.finite, self._form)
            self._kernels.quantize(gradients, self._table, wire, *told)
        elif self._is_fp16(gradients[0].dtype):
            self._kernels.flatten_fp16(gradients, self._table, wire, self.ranks, 1, self.finite)
        else:
            self._kernels.flatten(gradients, self._table, wire, 1.0, self.finite)

    def decode(self, received: Tensor, of: torch.dtype, terms: Sequence[Tensor]) -> None:
        """Every rank's version of this rank's row → FP32 or FP64 terms, rank by rank the parameters' parts.

        Args:
            received: as the wire, a row from each rank.
            of: the dtype of the gradients.
            terms: what is written.
        """
        if self._block:
            told = (None, self.finite, None, self._form)
            self._kernels.dequantize(received, self.ranks, self._block, self._table, terms, *told)
        elif self._is_fp16(of):
            self._kernels.unflatten_fp16(received, self.ranks, self._table, terms, 1.0, None, self.finite)
        else:
            self._kernels.unflatten(received, self._table, terms, 1.0, None, self.finite)


def warm_up(dtype: torch.dtype, device: torch.device, compression: Compression, ranks: int) -> None:
    """Compile (or load from the disk cache) every kernel that a reduce-scatter of `dtype` will launch."""
    wire = RowWire([0], [""], [1], compression, ranks, device)
    gradients = list(torch.zeros(ranks, 1, dtype=dtype, device=device))
    terms = torch.zeros(ranks, 1, dtype=dtype if dtype is torch.float64 else torch.float32, device=device)
    packed = torch.zeros(wire.numel(dtype), dtype=wire.dtype(dtype), device=device)
    wire.compress(gradients, packed)
    wire.decode(packed, dtype, list(terms))
    for each in {terms.dtype, wire.dtype(dtype)} - {torch.uint8}:
        for numel in (32, 33):  # Triton compiles for multiples of 16, for others, and for 1
            shards = torch.zeros(ranks, numel, dtype=each, device=device)
            ops.choose(device).reduce_shards(shards, torch.zeros_like(shards[0]), 1.0)


def warm_up_gather(dtype: torch.dtype, device: torch.device, compression: Compression, ranks: int) -> None:
    """Compile (or load from the disk cache) every kernel that an all-gather of `dtype` will launch."""
    own, every = (RowWire([0], [""], [1], compression, rows, device) for rows in (1, ranks))
    packed = torch.zeros(every.numel(dtype), dtype=every.dtype(dtype), device=device)
    own.compress([torch.zeros(1, dtype=dtype, device=device)], packed.view(ranks, -1)[0])
    every.decode(packed, dtype, list(torch.zeros(ranks, 1, dtype=dtype, device=device)))
