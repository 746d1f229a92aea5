"""How large a quantized wire's averages are, slot by slot, from the wire itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.slots import FP8_FORMAT, INT4_FORMAT, BlockFormat
from ..buckets import Bucket


class BlockMagnitudes:
    """Magnitudes of a bucket's averages under a format, in a wire of `shards` shards."""

    def __init__(self, bucket: Bucket, shards: int, block: int, form: BlockFormat) -> None:
        self._bucket, self._shards, self._block, self._form = bucket, shards, block, form
        counts = [-(-(s.offset + s.numel) // block) - s.offset // block for s in bucket.slots]
        self._blocks_of_slots = torch.tensor(counts, device="cpu").to(bucket.device)

    def of_slots(self, wire: Tensor) -> Tensor:
        """Of each slot's average in the wire: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""
        elements, form = self._bucket.total // self._shards, self._form
        rows, own = wire.view(self._shards, -1), form.payload_bytes(elements)
        size = elements // self._block * form.scale_bytes
        dtype = torch.bfloat16 if form is INT4_FORMAT else torch.float32
        scales = rows[:, own : own + size].view(dtype).float().abs()
        payload = rows[:, :own].view(torch.int8)
        if form is INT4_FORMAT:
            payload = torch.stack([payload << 4 >> 4, payload >> 4], dim=2)
        elif form is FP8_FORMAT:
            payload = payload.view(torch.float8_e4m3fn).float()
        exact = torch.float64 if form is FP8_FORMAT else torch.int32
        sums = scales.double() * payload.reshape(self._shards, -1, self._block).abs().sum(2, dtype=exact)
        last = self._bucket.slots[-1]
        end = -(-(last.offset + last.numel) // self._block)
        # Unsafe: it does not look at lengths, for which the host would wait.
        told: dict[str, Any] = {"lengths": self._blocks_of_slots, "initial": 0.0, "unsafe": True}
        peaks = torch.segment_reduce(scales.flatten()[:end], "max", **told)
        total = torch.segment_reduce(sums.flatten()[:end], "sum", **told)
        return torch.stack([(form.largest * peaks).double(), total])
