"""flatten, unflatten and reduce_shards in Numba CUDA: one launch for a whole bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from torch import Tensor

from . import numba_cuda_stochastic
from .device_tables import address, device_table
from .numba_cuda_statistics import unflatten_and_sum
from .numba_cuda_tiles import (
    TAGS,
    THREADS,
    average_of_elements,
    in_compute_type,
    kernel,
    lanes_of,
    launch,
    load,
    locate,
    multiply,
    not_finite,
    note_odd,
    promise_finite,
    size_of,
    store,
)
from .slots import Draws, SlotTable, spare, tile_elements

TILE = tile_elements()


@kernel
def _flatten(wire, wire_tag, tiles, addresses, tag, scale, finite):
    """One tile of one slot, from its tensor to the wire, with the padding after it."""
    promise_finite(finite, cuda.blockIdx.x + cuda.threadIdx.x)
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    flat = wire + place * size_of(wire_tag)
    lanes = lanes_of(tag, wire_tag)
    for first in range(cuda.threadIdx.x * lanes, extent, THREADS * lanes):
        values = multiply(load(tensor + first * size_of(tag), tag, wire_tag, count - first), scale)
        store(flat + first * size_of(wire_tag), wire_tag, values, count - first, extent - first)


@kernel
def _unflatten(wire, wire_tag, tiles, addresses, tag, scale, finite):
    """One tile of one slot, from the wire to its tensor."""
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    flat = wire + place * size_of(wire_tag)
    lanes, odd = lanes_of(wire_tag, tag), 0
    for first in range(cuda.threadIdx.x * lanes, count, THREADS * lanes):
        values = multiply(load(flat + first * size_of(wire_tag), wire_tag, tag, count - first), scale)
        store(tensor + first * size_of(tag), tag, values, count - first, count - first)
        odd += not_finite(values, tag, count - first)
    note_odd(finite, odd)


@kernel
def _reduce(received, ranks, shard, tag, numel, scale, room, reciprocal):
    """One tile of every rank's shard → their sum in rank order, scaled."""
    lanes = lanes_of(tag, tag)
    start = np.int64(cuda.blockIdx.x) * TILE
    for first in range(start + cuda.threadIdx.x * lanes, min(start + TILE, numel), THREADS * lanes):
        at, stride = received + first * size_of(tag), numel * size_of(tag)
        values = average_of_elements(at, ranks, stride, tag, numel - first, scale, room, reciprocal)
        store(shard + first * size_of(tag), tag, values, numel - first, numel - first)


def flatten(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    finite: Tensor | None = None,
    draws: Draws | None = None,
) -> None:
    """Many tensors → one wire in its dtype, scaled; padding becomes zero, `finite` 1."""
    if draws is not None:
        numba_cuda_stochastic.flatten(tensors, slots, wire, scale, finite, draws)
        return
    _launch_move(_flatten, "flatten", tensors, slots, wire, scale, finite)


def unflatten(
    wire: Tensor,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    scale: float,
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    """One wire → many tensors in their dtypes, scaled (and their statistics); `finite` becomes 0 if they are not."""
    if statistics is None:
        _launch_move(_unflatten, "unflatten", tensors, slots, wire, scale, finite)
    else:
        row = statistics.data_ptr(), TAGS[statistics.dtype]
        _launch_move(unflatten_and_sum, "unflatten", tensors, slots, wire, scale, finite, *row)


def _launch_move(
    kernel: Any,
    operation: str,
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    finite: Tensor | None,
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
        address(finite),
        *statistics,
    )


def reduce_shards(
    received: Tensor, shard: Tensor, scale: float, slots: SlotTable | None = None, draws: Draws | None = None
) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype.

    `slots`, of the shard, come with `draws`.
    """
    if slots is not None and draws is not None:
        numba_cuda_stochastic.reduce_shards(received, shard, scale, slots, draws)
        return
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
