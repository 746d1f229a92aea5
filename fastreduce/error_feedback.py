"""What quantization loses of one bucket, kept on the device until the next step adds it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .buckets import Bucket


class ErrorFeedback:
    """The residuals of one bucket on one rank, in FP32.

    Which of two rows is kept only the device knows, so that the host need not wait to learn whether a step was
    finite: kernels read row `turn` and write the other one, and `advance` turns.

    Attributes:
        residuals: `[2, total]`, of this rank's gradients.
        shard_residuals: `[2, total / shards]`, of the average of this rank's shard.
        turn: INT32 `[1]`.
    """

    def __init__(self, bucket: Bucket, rank: int, shards: int) -> None:
        self._bucket, self._own = bucket, bucket.total // shards
        self._first = rank * self._own
        self.residuals = torch.zeros(2, bucket.total, device=bucket.device)
        self.shard_residuals = torch.zeros(2, self._own, device=bucket.device)
        self.turn = torch.zeros(1, dtype=torch.int32, device=bucket.device)

    @property
    def residual(self) -> Tensor:
        """What is kept of this rank's gradients: a view, which makes the host wait for `turn`."""
        return self.residuals[int(self.turn)]

    @property
    def shard_residual(self) -> Tensor:
        """What is kept of the own shard's average, likewise."""
        return self.shard_residuals[int(self.turn)]

    def advance(self, finite: Tensor, unused: Sequence[int], used_by_any: Tensor) -> None:
        """Go on with what the last reduction wrote, if it was `finite`: the same answer on every rank.

        Slots at the positions `unused`, which no rank used, keep what they had: what they sent is thrown away.
        """
        for position in unused:
            slot, used = self._bucket.slots[position], used_by_any[position] != 0
            start, stop = slot.offset, slot.offset + slot.numel
            _keep_unless(used, self.residuals[:, start:stop], self.turn)
            start, stop = max(start - self._first, 0), min(stop - self._first, self._own)
            if start < stop:
                _keep_unless(used, self.shard_residuals[:, start:stop], self.turn)
        self.turn.bitwise_xor_(finite)


def _keep_unless(used: Tensor, rows: Tensor, turn: Tensor) -> None:
    """Copy row `turn` over the other one, unless `used`."""
    for turned, (row, other) in enumerate(((rows[1], rows[0]), (rows[0], rows[1]))):
        torch.where(used | (turn != turned), row, other, out=row)
