"""Products of thin factors in plain torch: what GPUs run, and the reference of `numba_cpu_low_rank.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

AT_A_TIME = 1 << 17  # elements that are worked out at a time on a CPU: they stay in the cache


def multiply(left: Tensor, right: Tensor, start: int, into: Tensor, finite: Tensor | None = None) -> None:
    """`[rows, rank]` · the columns of `[rank, all columns]` from `start` on → `into`, as many as it has.

    Products and sums are rounded to FP32 one by one, in the order of the terms, and sums to the dtype of `into` at the
    end: the bits are the same on every machine, which a library's product does not promise. Where what is finite in
    FP32 may not be in that dtype, FP16, `finite` becomes 0 if it is not.
    """
    columns = right[:, start : start + into.shape[1]]

    def fill(first: int, part: Tensor) -> None:
        rows = left[first : first + len(part)]
        torch.mul(rows[:, :1], columns[0], out=part)
        for k in range(1, len(columns)):
            part.add_(rows[:, k : k + 1] * columns[k])

    in_parts(fill, into, finite)


def in_parts(fill: Callable[[int, Tensor], None], into: Tensor, finite: Tensor | None) -> None:
    """Let `fill` make some rows at a time, from a first one on, in FP32, and round them to the dtype of `into`."""
    step = len(into) if into.is_cuda else max(1, AT_A_TIME // max(1, into.shape[1]))
    made = None if into.dtype is torch.float32 else into.new_empty(step, into.shape[1], dtype=torch.float32)
    for first in range(0, len(into), step):
        part = into[first : first + step]
        if made is None:
            fill(first, part)
        else:
            fill(first, made[: len(part)])
            part.copy_(made[: len(part)])
            if part.dtype is torch.float16 and finite is not None:
                finite.mul_(part.isfinite().all())
