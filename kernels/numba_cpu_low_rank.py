"""Products of thin factors on CPUs, term by term."""

from __future__ import annotations

import torch
from torch import Tensor

from .numba_cpu_elements import kernel
from .torch_low_rank import in_parts


@kernel
def _multiply(left, right, start, into):
    """A row stays in the cache while its terms come."""
    stop = start + into.shape[1]
    for i in range(into.shape[0]):
        row = into[i]
        factor, terms = left[i, 0], right[0, start:stop]
        for j in range(len(row)):
            row[j] = factor * terms[j]
        for k in range(1, left.shape[1]):
            factor, terms = left[i, k], right[k, start:stop]
            for j in range(len(row)):
                row[j] += factor * terms[j]


def multiply(left: Tensor, right: Tensor, start: int, into: Tensor, finite: Tensor | None = None) -> None:
    """`[rows, rank]` · the columns of `[rank, all columns]` from `start` on → `into`, as many as it has."""
    factors = left.numpy(), right.numpy()

    def fill(first: int, part: Tensor) -> None:
        _multiply(factors[0][first : first + len(part)], factors[1], start, part.numpy())

    if into.dtype is torch.float32:
        fill(0, into)
    else:
        in_parts(fill, into, finite)
