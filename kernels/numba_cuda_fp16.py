"""FP16 with block exponents in Numba CUDA: flatten, unflatten and the two-shot sum, one launch for a whole bucket.

Each thread that encodes holds 16 consecutive elements. The eight threads of a block of the format agree on its largest
magnitude in shared memory: an atomic maximum of integers is the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from torch import Tensor

from .device_tables import address, device_table
from .numba_cuda_statistics import unflatten_fp16_and_sum
from .numba_cuda_tiles import (
    FP16,
    FP32,
    INFINITY_BITS,
    INT8,
    LANES,
    TAGS,
    THREADS,
    TILE,
    add,
    decode_fp16,
    fetch_byte,
    function,
    in_compute_type,
    kernel,
    lanes_of,
    largest_bits,
    launch,
    load,
    locate,
    multiply,
    not_finite,
    note_odd,
    power,
    promise_finite,
    quotient,
    size_of,
    store,
    store_byte,
    tag_of,
    where_finite,
)
from .slots import FP16_BLOCK, FP16_BLOCK_BYTES, SlotTable, exponent_rule, spare, tile_elements

BLOCK, PAYLOAD = FP16_BLOCK, 2 * FP16_BLOCK
ROWS = TILE // BLOCK


@function
def _decode(shard, blocks, index, column, count):
    """16 elements of block `index` from `column` on, as FP32; zeros where `count` is 0."""
    halves = load(shard + index * PAYLOAD + column * 2, FP16, INT8, count)
    exponent = fetch_byte(shard + blocks * PAYLOAD + index) if count else 127
    return multiply(halves, power(exponent, FP32))


@function
def _encode(values, largest, shard, blocks, shard_size, index, column, low, high, ordinary, lift):
    """Store 16 elements of block `index` and, at its beginning, its exponent."""
    exponent = np.int64(ordinary)
    if (largest < low or largest >= high) and largest < INFINITY_BITS:
        exponent = max(np.int64((largest >> 23) + lift), np.int64(1))
    store(shard + index * PAYLOAD + column * 2, FP16, multiply(values, power(254 - exponent, FP32)), LANES, LANES)
    if column == 0:
        at = shard + blocks * PAYLOAD + index
        store_byte(at, exponent)
        if index == blocks - 1:  # which clears the padding too
            for padding in range(at + 1, shard + shard_size):
                store_byte(padding, 0)


@kernel
def _flatten(wire, tiles, addresses, tag, blocks, shard_size, low, high, ordinary, lift, finite):
    """One tile of one slot, from its tensor to the wire."""
    promise_finite(finite, cuda.blockIdx.x + cuda.threadIdx.x)
    magnitudes = cuda.shared.array(THREADS, np.int32)
    magnitudes[cuda.threadIdx.x] = 0
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = element // BLOCK
    values = load(tensor + element * size_of(tag), tag, INT8, count - element)
    cuda.syncthreads()
    cuda.atomic.max(magnitudes, row, largest_bits(values))
    cuda.syncthreads()
    if element < extent:
        number = place // BLOCK + row
        rank = quotient(number, blocks)
        shard, index, column = wire + rank * shard_size, number - rank * blocks, element - row * BLOCK
        _encode(values, magnitudes[row], shard, blocks, shard_size, index, column, low, high, ordinary, lift)


@kernel
def _unflatten(wire, tiles, addresses, tag, blocks, shard_size, scale, finite):
    """One tile of one slot, from the wire to its tensor."""
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    lanes, odd = lanes_of(FP16, tag), 0
    for first in range(cuda.threadIdx.x * lanes, count, THREADS * lanes):
        values = decode_fp16(wire, blocks, shard_size, place + first, tag, scale, count - first)
        store(tensor + first * size_of(tag), tag, values, count - first, count - first)
        odd += not_finite(values, tag, count - first)
    note_odd(finite, odd)


@kernel
def _reduce(received, ranks, shard, blocks, shard_size, scale, room, reciprocal, low, high, ordinary, lift):
    """A few blocks of every rank's shard → their sum in rank order, scaled, encoded again."""
    magnitudes = cuda.shared.array(THREADS, np.int32)
    magnitudes[cuda.threadIdx.x] = 0
    element = np.int64(cuda.threadIdx.x) * LANES
    row = element // BLOCK
    index, column = cuda.blockIdx.x * ROWS + row, element - row * BLOCK
    count = LANES if index < blocks else 0
    total = _decode(received, blocks, index, column, count)
    for rank in range(1, ranks):
        total = add(total, _decode(received + rank * shard_size, blocks, index, column, count))
    values = multiply(total, scale)
    if largest_bits(total) >= INFINITY_BITS:
        small = multiply(_decode(received, blocks, index, column, count), reciprocal)
        for rank in range(1, ranks):
            term = _decode(received + rank * shard_size, blocks, index, column, count)
            small = add(small, multiply(term, reciprocal))
        values = where_finite(total, values, multiply(small, multiply(scale, room)))
    cuda.syncthreads()
    cuda.atomic.max(magnitudes, row, largest_bits(values))
    cuda.syncthreads()
    if count:
        _encode(values, magnitudes[row], shard, blocks, shard_size, index, column, low, high, ordinary, lift)


@kernel
def _share(wire, blocks, gathered, ranks, gathered_size):
    """A few blocks: their exponents → the largest of all ranks', and their payloads with them."""
    element = np.int64(cuda.threadIdx.x) * LANES
    row = element // BLOCK
    index, column = cuda.blockIdx.x * ROWS + row, element - row * BLOCK
    own = fetch_byte(wire + blocks * PAYLOAD + index) if index < blocks else 127
    shared = own
    if index < blocks:
        for rank in range(ranks):
            shared = max(shared, fetch_byte(gathered + rank * gathered_size + index))
    cuda.syncthreads()  # all have read their block's exponent
    if shared > own:
        at = wire + index * PAYLOAD + column * 2
        halves = load(at, FP16, INT8, LANES)
        store(at, FP16, multiply(halves, power(127 - min(shared - own, 126), FP32)), LANES, LANES)
        if column == 0:
            store_byte(wire + blocks * PAYLOAD + index, shared)


def _rule(summed: int) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, exponent_rule(summed)))


def flatten_fp16(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, shards: int, summed: int, finite: Tensor | None = None
) -> None:
    """Many tensors → one FP16 wire with block exponents, for a transport that adds up `summed` of them (1: none).

    `finite` becomes 1.
    """
    table = device_table(slots, TILE, wire.device)
    launch(
        _flatten,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        table.tiles.data_ptr(),
        table.addresses("flatten_fp16", tensors).data_ptr(),
        tag_of(tensors),
        slots.total // BLOCK // shards,
        wire.numel() // shards,
        *_rule(summed),
        address(finite),
    )


def unflatten_fp16(
    wire: Tensor,
    shards: int,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    scale: float,
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    """One FP16 wire with block exponents → many tensors in their dtypes, scaled (and their statistics).

    `finite` becomes 0 if they are not.
    """
    table = device_table(slots, tile_elements(BLOCK), wire.device, padding=False)
    kernel: Any = _unflatten
    row: tuple[Any, ...] = ()
    if statistics is not None:
        kernel, row = unflatten_fp16_and_sum, (statistics.data_ptr(), TAGS[statistics.dtype])
    launch(
        kernel,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        table.tiles.data_ptr(),
        table.addresses("unflatten_fp16", tensors).data_ptr(),
        tag_of(tensors),
        slots.total // BLOCK // shards,
        wire.numel() // shards,
        in_compute_type(scale, *(tensor.dtype for tensor in tensors[:1])),
        address(finite),
        *row,
    )


def reduce_fp16(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size FP16 shards → their sum in rank order, scaled once, with exponents of its own."""
    blocks, room = shard.numel() // FP16_BLOCK_BYTES, spare(received.shape[0])
    launch(
        _reduce,
        -(-blocks // ROWS),
        shard.device,
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        blocks,
        shard.numel(),
        *(np.float32(number) for number in (scale, room, 1 / room)),
        *_rule(1),
    )


def share_exponents(wire: Tensor, gathered: Tensor) -> None:
    """One shard and all ranks' exponents `[world_size, blocks or more]` → the shard with the largest of each block."""
    blocks = wire.numel() // FP16_BLOCK_BYTES
    launch(_share, -(-blocks // ROWS), wire.device, wire.data_ptr(), blocks, gathered.data_ptr(), *gathered.shape)
