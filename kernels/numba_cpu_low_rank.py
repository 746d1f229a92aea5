"""PowerSGD's own kernels on CPUs: products of thin factors, and columns made orthonormal."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .numba_cpu_elements import kernel
from .torch_low_rank import DEPENDENT, in_parts


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


@kernel
def _product(first, second, terms):
    for i in range(len(terms)):
        terms[i] = first[i] * second[i]
    half = len(terms)
    while half > 1:
        half //= 2
        for i in range(half):
            terms[i] += terms[i + half]
    return terms[0]


@kernel
def _orthonormal(columns, dependent):
    """Matrix by matrix, column by column; sums by halves, as torch_low_rank.py has them."""
    rows, rank = columns.shape[1:]
    work, terms = np.empty((rank, rows)), np.empty(rows)
    gram, squares, factors = np.empty((rank, rank)), np.empty(rank), np.empty(rank)
    for matrix in range(columns.shape[0]):
        for k in range(rank):
            for i in range(rows):
                work[k, i] = columns[matrix, i, k]
        for _ in range(2):
            for a in range(rank):
                for b in range(a + 1):
                    gram[a, b] = gram[b, a] = _product(work[a], work[b], terms)
            poison = 0.0
            for k in range(rank):
                squares[k] = gram[k, k]
                poison += squares[k] * 0.0
            for k in range(rank):
                pivot = gram[k, k]
                scale = 1.0 / np.sqrt(pivot) if pivot > squares[k] * dependent else 0.0
                for i in range(rows):
                    work[k, i] *= scale
                for a in range(k + 1, rank):
                    factors[a] = gram[a, k] * scale
                for a in range(k + 1, rank):
                    for b in range(k + 1, rank):
                        gram[a, b] -= factors[a] * factors[b]
                    for i in range(rows):
                        work[a, i] -= work[k, i] * factors[a]
            for k in range(rank):
                for i in range(rows):
                    work[k, i] += poison
        for k in range(rank):
            for i in range(rows):
                columns[matrix, i, k] = work[k, i]


def orthonormal(columns: Tensor) -> None:
    """FP64 `[matrices, rows, rank]`, whose rows are a power of two in number → orthonormal columns, in place."""
    _orthonormal(columns.numpy(), DEPENDENT**2)
