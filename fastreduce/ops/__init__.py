"""The kernel operations: which backend serves a device, and how large what they read and write must be.

The operations, their formats and arithmetic are in kernels/README.md. They trust their arguments: gradients are checked
where they are collected, and all else is made by the reducer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.slots import (
    FP16_BLOCK,
    INT8_FORMAT,
    BlockFormat,
    SlotTable,
    fp16_shard_bytes,
    residual_bytes,
    shard_bytes,
    tile_elements,
)
from ..kernels.torch_residuals import decode_residuals, encode_residuals
from .backends import ENVIRONMENT_VARIABLE, choose, name_for

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "FLOATS",
    "choose",
    "decode_residuals",
    "encode_residuals",
    "fp16_wire_numel",
    "is_dense",
    "name_for",
    "residual_bytes",
    "statistics_dtype",
    "statistics_shape",
    "wire_numel",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what gradients may be


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the statistics of tensors of `dtype` are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def statistics_shape(slots: SlotTable, block: int = 0) -> tuple[int, int]:
    """A row for each tile: how many of its elements are not finite, and the sum of their squares."""
    return int(slots.tile_rows(tile_elements(block))[-1]), 2


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, each once, in any order of dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def wire_numel(slots_total: int, shards: int, block: int, form: BlockFormat = INT8_FORMAT) -> int:
    """Elements of a wire: the flat's own number, or with `block` the bytes of all quantized shards."""
    return shards * shard_bytes(slots_total // shards // block, block, form) if block else slots_total


def fp16_wire_numel(slots_total: int, shards: int) -> int:
    """Bytes of a wire of FP16 blocks."""
    return shards * fp16_shard_bytes(slots_total // shards // FP16_BLOCK)
