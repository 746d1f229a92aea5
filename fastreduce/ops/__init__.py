"""The kernel operations: validate, choose a backend, launch.

Formats and arithmetic are in kernels/README.md. Every operation writes into tensors that the caller
owns, over the slots of one bucket, and raises TensorError before it touches memory. The step itself
takes the kernels from `unchecked`: its tensors have been checked where they were collected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TensorError
from ..kernels.slots import FP16_BLOCK, SlotTable, fp16_shard_bytes, shard_bytes, tile_elements
from . import backends

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _check_tensors(operation: str, tensors: Sequence[Tensor], slots: SlotTable, device: torch.device) -> None:
    numels = slots.numels.tolist()
    if len(tensors) != len(numels):
        raise TensorError(f"{operation}: {len(tensors)} tensors for {len(numels)} slots")
    dtype = tensors[0].dtype if tensors else torch.float32
    if dtype not in FLOATS:
        raise TensorError(f"{operation}: dtype {dtype}; allowed: {', '.join(map(str, FLOATS))}")
    for i, (tensor, numel) in enumerate(zip(tensors, numels, strict=True)):
        if tensor.numel() != numel or tensor.dtype is not dtype or tensor.device != device:
            raise TensorError(
                f"{operation}: tensor {i} has {tensor.numel()} elements of {tensor.dtype} on {tensor.device}; "
                f"its slot takes {numel} of {dtype} on {device}"
            )
        if not tensor.is_contiguous() and not is_dense(tensor):
            raise TensorError(
                f"{operation}: tensor {i} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not dense"
            )


def _check_flat(operation: str, what: str, flat: Tensor, numel: int, dtypes: Sequence[torch.dtype]) -> None:
    if flat.dtype not in dtypes or flat.numel() != numel or not flat.is_contiguous():
        raise TensorError(
            f"{operation}: {what} is {flat.numel()} elements of {flat.dtype}, strides {flat.stride()}; "
            f"needed: {numel}, contiguous, of {' or '.join(map(str, dtypes))}"
        )
    _check_alignment(operation, what, flat)


def _check_table(
    operation: str, what: str, table: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if tuple(table.shape) != shape or table.dtype != dtype or table.device != device or not table.is_contiguous():
        raise TensorError(
            f"{operation}: {what} is {list(table.shape)} of {table.dtype} on {table.device}, strides {table.stride()}; "
            f"needed: {list(shape)}, contiguous, of {dtype} on {device}"
        )
    _check_alignment(operation, what, table)


def _check_alignment(operation: str, what: str, tensor: Tensor) -> None:
    """A CPU reads anything anywhere. The addresses of gradients are checked where the kernels look them up."""
    size = 4 if tensor.dtype is torch.uint8 else tensor.element_size()
    if not tensor.is_cpu and tensor.data_ptr() % size:
        raise TensorError(
            f"{operation}: {what} lies at {tensor.data_ptr():#x}, which is {tensor.data_ptr() % size} more than a "
            f"multiple of {size}: a GPU cannot access it there; use a copy, tensor.clone()"
        )


def _check_residuals(
    operation: str, numel: int, device: torch.device, residuals: Tensor | None, turn: Tensor | None
) -> None:
    if (residuals is None) != (turn is None):
        raise TensorError(f"{operation}: residuals and turn go together; one of them is None")
    if residuals is not None and turn is not None:
        _check_table(operation, "residuals", residuals, (2, numel), torch.float32, device)
        _check_table(operation, "turn", turn, (1,), torch.int32, device)


def _check_statistics(
    operation: str, slots: SlotTable, block: int, tensors: Sequence[Tensor], statistics: Tensor | None, wire: Tensor
) -> None:
    if statistics is not None:
        dtype = statistics_dtype(tensors[0].dtype if tensors else wire.dtype)
        _check_table(operation, "statistics", statistics, statistics_shape(slots, block), dtype, wire.device)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the statistics of tensors of `dtype` are kept in."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def statistics_shape(slots: SlotTable, block: int = 0) -> tuple[int, int]:
    """A row for each tile: how many of its elements are not finite, and the sum of their squares."""
    return int(slots.tile_rows(tile_elements(block))[-1]), 2


def unchecked(device: torch.device) -> backends.Backend:
    """The kernels for `device` as kernels/README.md describes them, which trust their arguments.

    Raises:
        SettingError: if FASTREDUCE_KERNELS names no backend.
        BackendUnavailableError: if the backend cannot serve `device`.
    """
    return backends.choose(device)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, each once, in any order of dimensions."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def wire_numel(slots_total: int, shards: int, block: int) -> int:
    """Elements of a wire: the flat's own number, or with `block` the bytes of all quantized shards."""
    return shards * shard_bytes(slots_total // shards // block, block) if block else slots_total


def fp16_wire_numel(slots_total: int, shards: int) -> int:
    """Bytes of a wire of FP16 blocks."""
    return shards * fp16_shard_bytes(slots_total // shards // FP16_BLOCK)


def flatten(tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float = 1.0) -> None:
    """Many dense tensors of one dtype → one wire (FP64, FP32, FP16 or BF16), scaled and cast; padding is zeroed.

    Raises:
        TensorError: if a tensor or the wire does not fit `slots`.
    """
    _check_flat("flatten", "wire", wire, slots.total, FLOATS)
    _check_tensors("flatten", tensors, slots, wire.device)
    backends.choose(wire.device).flatten(tensors, slots, wire, scale)


def unflatten(
    wire: Tensor, slots: SlotTable, tensors: Sequence[Tensor], scale: float = 1.0, statistics: Tensor | None = None
) -> None:
    """One wire → many dense tensors of one dtype, scaled and cast, and `[tiles, 2]` statistics of what is stored.

    Raises:
        TensorError: if a tensor, the wire or the statistics do not fit `slots`.
    """
    _check_flat("unflatten", "wire", wire, slots.total, FLOATS)
    _check_tensors("unflatten", tensors, slots, wire.device)
    _check_statistics("unflatten", slots, 0, tensors, statistics, wire)
    backends.choose(wire.device).unflatten(wire, slots, tensors, scale, statistics)


def quantize(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    *,
    shards: int = 1,
    block: int = 128,
    residuals: Tensor | None = None,
    turn: Tensor | None = None,
) -> None:
    """Many dense tensors (+ FP32 residual) → block-scaled INT8 wire of `shards` shards, and the new residual.

    Of `residuals`, FP32 `[2, slots.total]`, row `turn` (int32 `[1]`) is read and the other one written.

    Raises:
        TensorError: if a tensor, the wire, the residuals or the turn do not fit `slots`.
    """
    _check_flat("quantize", "wire", wire, wire_numel(slots.total, shards, block), [torch.uint8])
    _check_tensors("quantize", tensors, slots, wire.device)
    _check_residuals("quantize", slots.total, wire.device, residuals, turn)
    backends.choose(wire.device).quantize(tensors, slots, wire, shards, block, residuals, turn)


def dequantize(
    wire: Tensor,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    *,
    shards: int = 1,
    block: int = 128,
    statistics: Tensor | None = None,
) -> None:
    """Block-scaled INT8 wire → many dense tensors of one dtype, and `[tiles, 2]` statistics of what is stored.

    Raises:
        TensorError: if a tensor, the wire or the statistics do not fit `slots`.
    """
    _check_flat("dequantize", "wire", wire, wire_numel(slots.total, shards, block), [torch.uint8])
    _check_tensors("dequantize", tensors, slots, wire.device)
    _check_statistics("dequantize", slots, block, tensors, statistics, wire)
    backends.choose(wire.device).dequantize(wire, shards, block, slots, tensors, statistics)


def reduce_shards(received: Tensor, shard: Tensor, scale: float) -> None:
    """`[world_size, n]` shards in a wire dtype → `[n]`: summed in FP32 (FP64 for FP64) in rank order, scaled once.

    Raises:
        TensorError: if dtypes or sizes do not fit.
    """
    _check_flat("reduce_shards", "shard", shard, shard.numel(), FLOATS)
    _check_flat("reduce_shards", "received", received, received.shape[0] * shard.numel(), [shard.dtype])
    backends.choose(shard.device).reduce_shards(received, shard, scale)


def reduce_quantized(
    received: Tensor,
    shard: Tensor,
    scale: float,
    *,
    block: int = 128,
    flag_block: int,
    residuals: Tensor | None = None,
    turn: Tensor | None = None,
) -> None:
    """`[world_size, bytes]` INT8 shards → one: summed in FP32 in rank order, scaled once, (+ residual), INT8 again.

    Blocks from `flag_block` on hold used-flags: 1 where any rank's is, else 0. `residuals`, FP32 `[2, elements]`, and
    `turn` are those of `quantize`.

    Raises:
        TensorError: if sizes do not fit.
    """
    blocks = shard.numel() // (block + 4)
    _check_flat("reduce_quantized", "shard", shard, shard_bytes(blocks, block), [torch.uint8])
    _check_flat("reduce_quantized", "received", received, received.shape[0] * shard.numel(), [torch.uint8])
    _check_residuals("reduce_quantized", blocks * block, shard.device, residuals, turn)
    backends.choose(shard.device).reduce_quantized(received, shard, scale, block, flag_block, residuals, turn)
