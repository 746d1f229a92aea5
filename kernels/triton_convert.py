"""What the Triton kernels share: number conversions, and the tables of addresses and tiles on a device."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .slots import SlotTable

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def widen(values, compute: tl.constexpr):
    """Any wire or tensor dtype → the compute type; BF16 by its bits, for the interpreter's sake."""
    if values.dtype == tl.bfloat16:
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(compute)


@triton.jit
def convert(values, dtype: tl.constexpr):
    """The compute type → any wire or tensor dtype, to nearest even; FP64 reaches 16 bits through FP32."""
    if dtype != tl.float64:
        values = values.to(tl.float32)
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(values == values, rounded, (bits >> 16) | 0x40)
        values = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


def double_bits(value: float) -> int:
    """A float as the integer of its 64 bits: Triton would pass a float argument as FP32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit
def load_tile(tiles, addresses, dtype: tl.constexpr):
    """This program's tile: its address, its place in the flat, its elements without and with the padding."""
    tiles += 5 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(addresses + tl.load(tiles)), tl.load(tiles + 1)
    count, extent = tl.load(tiles + 3).to(tl.int32), tl.load(tiles + 4).to(tl.int32)
    return tensor + start * (dtype.primitive_bitwidth // 8), tl.load(tiles + 2), count, extent


@dataclass
class DeviceTable:
    """A slot table on one device, cut into tiles of equal size.

    `tiles` holds a row for each program: its slot, its first element counted from the slot's and from the
    flat's beginning, how many of its elements belong to the slot, and how many with the padding that follows.
    Slot 0 is an empty one at offset 0, so that padding before the first real slot belongs to someone as well.
    """

    tiles: Tensor
    _addresses: dict[str, tuple[list[int], Tensor]] = field(default_factory=dict)

    def addresses(self, operation: str, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors' addresses on the device, uploaded again only if one has changed since last time."""
        current = [0, *(tensor.data_ptr() for tensor in tensors)]
        known = self._addresses.get(operation)
        if known is not None and known[0] == current:
            return known[1]
        device = self.tiles.device
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{operation}: the address of a tensor changed during a CUDA graph capture; "
                "capture after a step whose gradients are the same tensors"
            )
        # Pinned, so that the copy does not make the host wait for the stream.
        host = torch.tensor(current, dtype=torch.int64, pin_memory=device.type == "cuda")
        table = host.to(device, non_blocking=True)
        self._addresses[operation] = current, table
        return table


def device_table(slots: SlotTable, tile: int, device: torch.device) -> DeviceTable:
    """The table for tiles of `tile` elements, made once for each slot table and device."""
    tables: dict[tuple[torch.device, int], DeviceTable] = slots.cache.setdefault("triton", {})
    if (device, tile) not in tables:
        offsets = np.concatenate(([0], slots.offsets))
        numels = np.concatenate(([0], slots.numels))
        extents = np.diff(offsets, append=slots.total)
        counts = -(-extents // tile)
        slot = np.repeat(np.arange(len(offsets)), counts)
        start = (np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
        elements, extent = (np.clip(sizes[slot] - start, 0, tile) for sizes in (numels, extents))
        tiles = np.stack([slot, start, offsets[slot] + start, elements, extent], axis=1)
        tables[device, tile] = DeviceTable(torch.from_numpy(tiles).to(device))
    return tables[device, tile]


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on a device, multiplications and additions rounded one by one."""
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            kernel[(programs,)](*arguments, **constants, num_warps=4, enable_fp_fusion=False)
