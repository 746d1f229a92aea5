"""What travels ahead of data of unknown shape: a small tensor with shape, dtype and whether gradients come back."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import TensorError, TransportError

NUMEL = 16
MAX_DIMENSIONS = NUMEL - 3
MAX_BYTES = 1 << 48  # more than any machine has

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


class Header(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(call: str, tensor: Tensor) -> Header:
        """What `tensor` is, under the current grad mode.

        Raises:
            TensorError: if it has too many dimensions or a dtype that cannot be told.
        """
        if tensor.dim() > MAX_DIMENSIONS or tensor.dtype not in _DTYPES:
            raise TensorError(
                f"{call}: a tensor of {tensor.dim()} dimensions and {tensor.dtype}; allowed: up to {MAX_DIMENSIONS}, "
                f"and {', '.join(map(str, _DTYPES))}"
            )
        return Header(tuple(tensor.shape), tensor.dtype, tensor.requires_grad and torch.is_grad_enabled())

    def encode(self, device: torch.device) -> Tensor:
        """`[NUMEL]` of int64: dtype, requires_grad, the number of dimensions, their sizes, zeros."""
        numbers = [_DTYPES.index(self.dtype), int(self.requires_grad), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (NUMEL - len(numbers)), dtype=torch.int64, device=device)

    @staticmethod
    def decode(call: str, rank: int, encoded: Tensor) -> Header:
        """The header that `rank` encoded.

        Raises:
            TransportError: if it sent something else.
        """
        dtype, requires_grad, dimensions, *sizes = told = encoded.tolist()
        shape = tuple(sizes[: max(0, dimensions)])
        if (
            dtype not in range(len(_DTYPES))
            or requires_grad not in (0, 1)
            or dimensions != len(shape)
            or min(sizes) < 0
            or any(sizes[dimensions:])
            or math.prod(shape) * _DTYPES[dtype].itemsize > MAX_BYTES
        ):
            raise TransportError(f"{call}: rank {rank} sent {told}, which is no shape and dtype of a tensor")
        return Header(shape, _DTYPES[dtype], bool(requires_grad))

    def empty(self, device: torch.device) -> Tensor:
        """A tensor for the data."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)
