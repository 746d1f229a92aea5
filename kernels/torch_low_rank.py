"""PowerSGD's own kernels in plain torch: what GPUs run, and the reference of `numba_cpu_low_rank.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

DEPENDENT = 2.0**-20
GRAM = 1 << 22  # numbers at most that a step of `_gram` works on at a time
AT_A_TIME = 1 << 17  # elements that are worked out at a time on a CPU: they stay in the cache


def multiply(left: Tensor, right: Tensor, start: int, into: Tensor, finite: Tensor | None = None) -> None:
    """`[rows, rank]` · the columns of `[rank, all columns]` from `start` on → `into`, as many as it has.

    Products and sums are rounded to FP32 one by one, in the order of the terms, and sums to the dtype of `into` at the
    end: the bits are the same on every machine, which a library's product does not promise. Where that dtype is not
    FP32, `finite` becomes 0 if a sum is not finite in it.
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
    step = max(1, len(into) if into.is_cuda else AT_A_TIME // max(1, into.shape[1]))
    made = None if into.dtype is torch.float32 else into.new_empty(step, into.shape[1], dtype=torch.float32)
    for first in range(0, len(into), step):
        part = into[first : first + step]
        if made is None:
            fill(first, part)
        else:
            fill(first, made[: len(part)])
            part.copy_(made[: len(part)])
            if finite is not None:
                finite.mul_(part.isfinite().all())


def orthonormal(columns: Tensor) -> None:
    """FP64 `[matrices, rows, rank]`, whose rows are a power of two in number → orthonormal columns, in place.

    A column that depends on those before, but for 2^-20 of it, becomes zero: FP32's rounding has no direction. All of a
    matrix becomes NaN where a number in it is not finite. Twice by Cholesky's factor of the columns' products: the
    second time makes good what the first one's rounding left.
    """
    rank = columns.shape[2]
    for _ in range(2):
        gram = _gram(columns)
        squares = gram.diagonal(dim1=1, dim2=2).clone()
        for k in range(rank):
            pivot = gram[:, k, k]
            scale = torch.where(pivot > squares[:, k] * DEPENDENT**2, _root(pivot).reciprocal(), 0.0)[:, None]
            columns[:, :, k].mul_(scale)
            if k + 1 < rank:
                factor = gram[:, k + 1 :, k] * scale
                gram[:, k + 1 :, k + 1 :].sub_(factor[:, :, None] * factor[:, None, :])
                columns[:, :, k + 1 :].sub_(columns[:, :, k : k + 1] * factor[:, None, :])
        columns.add_(_sum((squares * 0.0)[:, :, None], 1)[:, :, None])  # NaN if not all was finite


def _root(values: Tensor) -> Tensor:
    """Square roots as IEEE rounds them, of what is negative 0; torch's own on a CPU come from MKL, and are not all."""
    values = values.clamp(min=0.0)
    return values.sqrt() if values.is_cuda else torch.from_numpy(np.sqrt(values.numpy()))


def _gram(columns: Tensor) -> Tensor:
    """The products of each matrix's columns, `[matrices, rank, rank]`."""
    rank = columns.shape[2]
    step = max(1, GRAM // max(1, columns.numel()))
    parts = [columns[:, :, :, None] * columns[:, :, None, k : k + step] for k in range(0, rank, step)]
    return torch.cat([_sum(part, 1) for part in parts], 2)


def _sum(values: Tensor, dimension: int) -> Tensor:
    """The sum over a dimension, by halves: no library's order, and no number of threads, is in its bits."""
    while (count := values.shape[dimension]) > 1:
        half = count // 2
        halves = values.narrow(dimension, 0, half) + values.narrow(dimension, half, half)
        if count % 2:
            halves.narrow(dimension, 0, 1).add_(values.narrow(dimension, count - 1, 1))
        values = halves
    return values.squeeze(dimension)
