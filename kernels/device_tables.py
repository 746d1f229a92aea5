"""What a kernel on a device reads to find its work: tables of addresses and of tiles, uploaded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .slots import SlotTable


class AlignmentError(ValueError):
    """A tensor whose address is no multiple of its element size, where a device cannot access it."""


@dataclass
class DeviceTable:
    """A slot table on one device, cut into tiles of equal size.

    `tiles` holds a row for each program: its slot, its first element counted from the slot's and from the
    flat's beginning, how many of its elements belong to the slot, and how many with the padding that follows.
    Slot 0 is an empty one at offset 0, so that padding before the first real slot belongs to someone as well. Without
    padding, row i is tile i of the slots (`SlotTable.tile_rows`).
    """

    tiles: Tensor
    _captured: list[Tensor] = field(default_factory=list)  # which CUDA graphs read: they are never given back
    _addresses: dict[str, tuple[list[int], int, Tensor]] = field(default_factory=dict)

    def addresses(self, operation: str, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors' addresses on the device, checked and uploaded again only if one has changed.

        Raises:
            AlignmentError: if an address is no multiple of the element size.
        """
        current = [0, *(tensor.data_ptr() for tensor in tensors)]
        itemsize = max((tensor.element_size() for tensor in tensors), default=0)
        known = self._addresses.get(operation)
        device = self.tiles.device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if known is not None and known[0] == current and known[1] >= itemsize:
            if capturing and all(known[2] is not table for table in self._captured):
                self._captured.append(known[2])
            return known[2]
        if capturing:
            raise RuntimeError(
                f"{operation}: the address of a tensor changed during a CUDA graph capture; "
                "capture after a step whose gradients are the same tensors"
            )
        _check_alignment(operation, tensors)
        # Pinned, so that the copy does not make the host wait for the stream.
        host = torch.tensor(current, dtype=torch.int64, pin_memory=device.type == "cuda", device="cpu")
        table = host.to(device, non_blocking=True)
        if known is not None and device.type == "cuda":  # it may have been made on another stream than reads it now
            known[2].record_stream(torch.cuda.current_stream(device))
        self._addresses[operation] = current, itemsize, table
        return table


def address(tensor: Tensor | None) -> int:
    """Where a tensor's elements begin; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _check_alignment(operation: str, tensors: Sequence[Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        size, address = tensor.element_size(), tensor.data_ptr()
        if address % size:
            raise AlignmentError(
                f"{operation}: tensor {index} of {len(tensors)}, {tensor.dtype} of shape {tuple(tensor.shape)} on "
                f"{tensor.device}, lies at {address:#x}, which is {address % size} more than a multiple of its element "
                f"size {size}: a GPU cannot access it there; use a copy, tensor.clone()"
            )


def device_table(slots: SlotTable, tile: int, device: torch.device, padding: bool = True) -> DeviceTable:
    """The table for tiles of `tile` elements, made once for each slot table and device; `padding` counts as work."""
    tables: dict[tuple[torch.device, int, bool], DeviceTable] = slots.cache.setdefault("device_tables", {})
    if (device, tile, padding) not in tables:
        offsets = np.concatenate(([0], slots.offsets))
        numels = np.concatenate(([0], slots.numels))
        extents = np.diff(offsets, append=slots.total) if padding else numels
        counts = -(-extents // tile)
        slot = np.repeat(np.arange(len(offsets)), counts)
        start = (np.arange(len(slot)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile
        elements, extent = (np.clip(sizes[slot] - start, 0, tile) for sizes in (numels, extents))
        tiles = np.stack([slot, start, offsets[slot] + start, elements, extent], axis=1)
        tables[device, tile, padding] = DeviceTable(torch.from_numpy(tiles).to(device))
    return tables[device, tile, padding]


def device_keys(slots: SlotTable, device: torch.device) -> Tensor:
    """`keys` and `firsts` for the slots of `device_table`, int64 `[slots, 2]`, made once for each table and device."""
    kept: dict[torch.device, Tensor] = slots.cache.setdefault("device_keys", {})
    if device not in kept:
        rows = np.stack([np.append(0, slots.keys), np.append(0, slots.firsts)], axis=1)
        kept[device] = torch.from_numpy(rows).to(device)
    return kept[device]
