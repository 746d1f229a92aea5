"""flatten, unflatten and reduce_shards in Numba CUDA: one launch for a whole bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from torch import Tensor

from .device_tables import device_table
from .numba_cuda_statistics import unflatten_and_sum
from .numba_cuda_tiles import (
    TAGS,
    THREADS,
    add,
    function,
    in_compute_type,
    kernel,
    lanes_of,
    launch,
    load,
    locate,
    multiply,
    not_finite,
    size_of,
    store,
    where_finite,
)
from .slots import SlotTable, spare, tile_elements

TILE = tile_elements()


@function
def _move(source, source_tag, target, target_tag, count, extent, scale, thread):
    lanes = lanes_of(source_tag, target_tag)
    for first in range(thread * lanes, extent, THREADS * lanes):
        values = load(source + first * size_of(source_tag), source_tag, target_tag, count - first)
        values = multiply(values, scale)
        store(target + first * size_of(target_tag), target_tag, values, count - first, extent - first)


@kernel
def _flatten(wire, wire_tag, tiles, addresses, tag, scale):
    """One tile of one slot, from its tensor to the wire, with the padding after it."""
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    flat = wire + place * size_of(wire_tag)
    _move(tensor, tag, flat, wire_tag, count, extent, scale, cuda.threadIdx.x)


@kernel
def _unflatten(wire, wire_tag, tiles, addresses, tag, scale):
    """One tile of one slot, from the wire to its tensor."""
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    flat = wire + place * size_of(wire_tag)
    _move(flat, wire_tag, tensor, tag, count, count, scale, cuda.threadIdx.x)


@kernel
def _reduce(received, ranks, shard, tag, numel, scale, room, reciprocal):
    """One tile of every rank's shard → their sum in rank order, scaled."""
    lanes = lanes_of(tag, tag)
    start = np.int64(cuda.blockIdx.x) * TILE
    for first in range(start + cuda.threadIdx.x * lanes, min(start + TILE, numel), THREADS * lanes):
        at = received + first * size_of(tag)
        total = load(at, tag, tag, numel - first)
        for _ in range(1, ranks):
            at += numel * size_of(tag)
            total = add(total, load(at, tag, tag, numel - first))
        values = multiply(total, scale)
        if not_finite(total, scale, lanes) > 0:
            at = received + first * size_of(tag)
            small = multiply(load(at, tag, tag, numel - first), reciprocal)
            for _ in range(1, ranks):
                at += numel * size_of(tag)
                small = add(small, multiply(load(at, tag, tag, numel - first), reciprocal))
            values = where_finite(total, values, multiply(small, multiply(scale, room)))
        store(shard + first * size_of(tag), tag, values, numel - first, numel - first)


def flatten(tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float) -> None:
    """Many tensors → one wire in its dtype, scaled; padding becomes zero."""
    _launch_move(_flatten, "flatten", tensors, slots, wire, scale)


def unflatten(
    wire: Tensor, slots: SlotTable, tensors: Sequence[Tensor], scale: float, statistics: Tensor | None = None
) -> None:
    """One wire → many tensors in their dtypes, scaled (and their statistics)."""
    if statistics is None:
        _launch_move(_unflatten, "unflatten", tensors, slots, wire, scale)
    else:
        row = statistics.data_ptr(), TAGS[statistics.dtype]
        _launch_move(unflatten_and_sum, "unflatten", tensors, slots, wire, scale, *row)


def _launch_move(
    kernel: Any,
    operation: str,
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    *statistics: Any,
) -> None:
    table = device_table(slots, TILE, wire.device, padding=operation == "flatten")
    dtype = tensors[0].dtype if tensors else wire.dtype
    launch(
        kernel,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        TAGS[wire.dtype],
        table.tiles.data_ptr(),
        table.addresses(operation, tensors).data_ptr(),
        TAGS[dtype],
        in_compute_type(scale, dtype, wire.dtype),
        *statistics,
    )


def reduce_shards(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype."""
    numel, room = shard.numel(), spare(received.shape[0])
    launch(
        _reduce,
        -(-numel // TILE),
        shard.device,
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        TAGS[shard.dtype],
        numel,
        *(in_compute_type(number, shard.dtype) for number in (scale, room, 1 / room)),
    )
