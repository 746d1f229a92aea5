"""Sparse gradients (COO), as `Embedding(sparse=True)` makes them: averaged by gathering every rank's rows."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import TransportError
from ..transports import Transport
from ..transports.base import gather_rows

_DENSE, _SPARSE, _NOTHING = 2, 1, 0  # what a rank brings; with `_USED` where a backward reached the parameter
_USED = 4


class SparseGradients:
    """The gradients of `parameters`, by index, that are expected to be sparse.

    All ranks call the same methods in the same order.

    Attributes:
        dtype: what gradients arrive in, on ranks that have some; None: that of each parameter.
    """

    dtype: torch.dtype | None = None

    def __init__(self, parameters: Mapping[int, Tensor], transport: Transport) -> None:
        self.parameters, self.transport = dict(parameters), transport

    def settle(self, used: Sequence[bool], divisor: int, among: Container[int] | None = None) -> set[int]:
        """Average and store the gradients of all parameters, or of those `among` them that are given.

        Args:
            used: by parameter index, whether a backward reached it on this rank.
            divisor: what sums are divided by.
            among: indices; the same on every rank.

        Returns:
            The indices of parameters that no rank used; their gradients are left as they are.
        """
        chosen = {i: p for i, p in self.parameters.items() if among is None or i in among}
        grads, flags = [p.grad for p in chosen.values()], [used[i] for i in chosen]
        averages = average(self.transport, grads, flags, list(chosen.values()), divisor, self.dtype)
        for parameter, averaged in zip(chosen.values(), averages, strict=True):
            if averaged is not None:
                parameter.grad = averaged.to(parameter.dtype)
        return {i for i, averaged in zip(chosen, averages, strict=True) if averaged is None}

    def take_part(self, divisor: int, broken: bool = False) -> None:
        """Bring nothing to `settle` on the other ranks, or NaN from a rank whose backward raised."""
        parameters = list(self.parameters.values())
        grads = [torch.full_like(p, torch.nan) if broken else None for p in parameters]
        average(self.transport, grads, [broken] * len(grads), parameters, divisor, self.dtype)


def average(
    transport: Transport,
    grads: Sequence[Tensor | None],
    used: Sequence[bool],
    like: Sequence[Tensor],
    divisor: int,
    dtype: torch.dtype | None = None,
) -> list[Tensor | None]:
    """Average sparse gradients over the ranks; blocks.

    1. Gather how many rows each rank has of each gradient.
    2. Divide by the number of ranks, pad to the longest, gather indices and values.
    3. Lay all ranks' rows one after the other, in rank order, and coalesce.

    A gradient that is dense on any rank is all-reduced as a dense one.

    Args:
        transport: the ranks.
        grads: this rank's; None where it has none.
        used: whether a backward reached the parameter on this rank.
        like: the parameters.
        divisor: what sums are divided by.
        dtype: what values travel in, the same on every rank; None: their own, which must be their parameter's where a
            rank may have none.

    Returns:
        The same tensors on every rank; None where no rank used the parameter.
    """
    if not grads:
        return []
    parts = [None if grad is None else grad.to(dtype or grad.dtype) / divisor for grad in grads]
    parts = [part.coalesce() if part is not None and part.is_sparse else part for part in parts]
    described = [_describe(part, flag) for part, flag in zip(parts, used, strict=True)]
    brought = gather_rows(transport, torch.tensor(described, device=like[0].device))
    _check(brought.tolist(), like)
    averages: list[Tensor | None] = []
    for i, (part, parameter) in enumerate(zip(parts, like, strict=True)):
        kinds, sparse_dims, rows = (brought[:, i, column].tolist() for column in range(3))
        if not any(kind & _USED for kind in kinds):
            averages.append(None)
        elif any(kind & _DENSE for kind in kinds):
            # In one order of memory on all ranks, in which transports add.
            dense = parameter.new_zeros(parameter.shape, dtype=dtype) if part is None else part.to_dense().contiguous()
            transport.all_reduce(dense).wait()
            averages.append(dense)
        else:
            if part is None:
                part = _empty(parameter, max(sparse_dims) or 1, dtype or parameter.dtype)
            averages.append(_gather_sparse(transport, part, rows))
    return averages


def _check(brought: list[list[list[int]]], like: Sequence[Tensor]) -> None:
    """Raise TransportError where a rank describes what no gradient of these parameters can be."""
    for rank, described in enumerate(brought):
        for i, ((kind, sparse_dim, rows), parameter) in enumerate(zip(described, like, strict=True)):
            kind_known = kind & ~_USED in (_DENSE, _SPARSE, _NOTHING)
            most = math.prod(parameter.shape[:sparse_dim]) if 0 <= sparse_dim <= parameter.dim() else -1
            if not kind_known or not 0 <= rows <= most:
                raise TransportError(
                    f"rank {rank} says of sparse gradient {i}, of shape {tuple(parameter.shape)}: kind {kind}, "
                    f"{sparse_dim} sparse dimensions, {rows} rows; there is no such gradient"
                )


def _describe(part: Tensor | None, used: bool) -> tuple[int, int, int]:
    kind = _USED if used else 0
    if part is None:
        return kind | _NOTHING, 0, 0
    if not part.is_sparse:
        return kind | _DENSE, 0, 0
    return kind | _SPARSE, part.sparse_dim(), part._nnz()


def _empty(parameter: Tensor, sparse_dim: int, dtype: torch.dtype) -> Tensor:
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dim:], dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, is_coalesced=True, check_invariants=False, device=parameter.device
    )


def _gather_sparse(transport: Transport, part: Tensor, rows: list[int]) -> Tensor:
    longest, indices, values = max(rows), part.indices(), part.values()
    if longest == 0:
        return part
    sparse_dim, width = indices.shape[0], math.prod(values.shape[1:])
    all_indices = gather_rows(transport, _padded(indices.t(), longest))
    all_values = gather_rows(transport, _padded(values.reshape(-1, width), longest))
    kept = [(all_indices[rank, :n], all_values[rank, :n]) for rank, n in enumerate(rows)]
    return torch.sparse_coo_tensor(
        torch.cat([i for i, _ in kept]).t().reshape(sparse_dim, -1),
        torch.cat([v for _, v in kept]).reshape(-1, *values.shape[1:]),
        part.shape,
        check_invariants=False,
        device=part.device,
    ).coalesce()


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros(count, rows.shape[1])
    padded[: len(rows)] = rows
    return padded
