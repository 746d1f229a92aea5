"""Two rows of residuals whose turn the host may not know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..buckets import Bucket
from ..shared_buffers import SharedBuffers
from .error_feedback import ErrorFeedback
from .rows import reads_late

Views = tuple[list[Tensor], list[Tensor]]  # of slots that travel in part, and of those that travel whole


class StagedRows:
    """Views of the row of residuals that counts, and of the one that is to count next.

    Where the host need not wait to know which is which, they are views of these rows. Elsewhere, on a GPU, both are
    views of one staged row: `load` copies there what counts, and `store` copies from there to what counts next.

    Args:
        feedback: of a bucket, its rows in FP32.
        bucket: this one.
        staging: memory for the staged row, if other buckets use it in turn; on a GPU alone.
        name: of the staged row there.
        views_of: what is to be seen of a row.
    """

    def __init__(
        self,
        feedback: ErrorFeedback,
        bucket: Bucket,
        staging: SharedBuffers,
        name: str,
        views_of: Callable[[Tensor], Views],
    ) -> None:
        self._feedback = feedback
        late = reads_late(feedback.turn)
        self._staged = staging.take(name, bucket.total, torch.float32, bucket.device) if late else None
        rows = feedback.residuals.unbind() if self._staged is None else (self._staged,)
        self._views = [views_of(row) for row in rows]

    @property
    def is_staged(self) -> bool:
        """Whether there is a staged row."""
        return self._staged is not None

    def load(self) -> None:
        """Staged: the residuals that count."""
        if self._staged is not None:
            torch.index_select(self._feedback.residuals, 0, self._feedback.turn, out=self._staged[None])

    def now(self) -> tuple[Views, Views]:
        """What counts, and what is to count next."""
        if self._staged is not None:
            return self._views[0], self._views[0]
        turn = int(self._feedback.turn)
        return self._views[turn], self._views[1 - turn]

    def store(self) -> None:
        """Staged → the residuals that are to count next."""
        if self._staged is not None:
            self._feedback.residuals.index_copy_(0, (1 - self._feedback.turn).long(), self._staged[None])
