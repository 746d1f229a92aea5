"""Stochastic rounding in Numba CUDA: flatten to BF16, quantize, and both two-shot sums.

As `numba_cuda_cast.py` and `numba_cuda_int8.py`, but tile by tile of slots in the sums too: random bits belong to
elements of slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import cuda
from torch import Tensor

from .device_tables import address, device_keys, device_table
from .numba_cuda_tiles import (
    BF16,
    CODES,
    INFINITY_BITS,
    INT8,
    LANES,
    MINUS_ONE,
    NAN,
    ONE,
    ROUNDER,
    THREADS,
    TILE,
    TINY,
    UPPER_HALF,
    ZERO,
    add,
    average_of_blocks,
    average_of_elements,
    bf16_by_chance,
    bits_of,
    divide,
    e4m3_bases,
    e4m3_by_chance,
    fetch,
    from_bits,
    function,
    in_compute_type,
    is_fp8,
    kernel,
    lanes_of,
    largest_bits,
    launch,
    load,
    locate,
    magnitudes,
    multiply,
    promise_finite,
    quotient,
    scales_of,
    signed_as,
    size_of,
    store,
    store_block,
    tag_of,
    to_bits,
    whole_by_chance,
)
from .reference_stochastic import LARGEST_INT4_SCALE, MASK, MULTIPLIERS, RECIPROCAL_7, ROUNDS, WEYL
from .slots import DRAWN, BlockFormat, Draws, SlotTable, spare, tile_elements

CAST_TILE = tile_elements()

M0, M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
W0, W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
LOWER, HALF = np.uint64(MASK), np.uint64(32)
FIXED = np.float32(2.0**15)
SEVEN, SEVENTH, LARGEST_SCALE = np.float32(7), np.float32(RECIPROCAL_7), np.float32(LARGEST_INT4_SCALE)
LOWER_HALF = np.int32(0xFFFF)


@function
def _word(number):
    return np.uint64(number & MASK)


@function
def _draw(element, key, who, step, seed):
    """The four words with the random bits of 16 elements of a slot."""
    c0, c1, c2, c3 = _word(element // DRAWN), _word(who), _word(step), _word(seed)
    k0, k1 = _word(key), _word(key >> 32)
    for _ in range(ROUNDS):
        a, b = c0 * M0, c2 * M1
        c0, c1, c2, c3 = (b >> HALF) ^ c1 ^ k0, b & LOWER, (a >> HALF) ^ c3 ^ k1, a & LOWER
        k0, k1 = (k0 + W0) & LOWER, (k1 + W1) & LOWER
    return c0, c1, c2, c3


@function
def _draw_for_8(element, key, who, step, seed):
    """The two words with the random bits of 8 elements."""
    w0, w1, w2, w3 = _draw(element, key, who, step, seed)
    return (w2, w3) if element & 8 else (w0, w1)


@function
def _slot_of(tiles, keys, program):
    """The key of a program's tile's slot, and the element of the parameter that the tile begins with."""
    slot = fetch(tiles, np.int64(program) * 5)
    return fetch(keys, slot * 2), fetch(keys, slot * 2 + 1) + fetch(tiles, np.int64(program) * 5 + 1)


@kernel
def _flatten(wire, tiles, addresses, tag, scale, finite, keys, who, step, seed):
    """One tile of one slot, from its tensor to the wire, with the padding after it."""
    promise_finite(finite, cuda.blockIdx.x + cuda.threadIdx.x)
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    key, start = _slot_of(tiles, keys, cuda.blockIdx.x)
    counted = fetch(step, 0)
    lanes = lanes_of(tag, BF16)
    for first in range(cuda.threadIdx.x * lanes, extent, THREADS * lanes):
        values = multiply(load(tensor + first * size_of(tag), tag, BF16, count - first), scale)
        rounded = bf16_by_chance(values, _draw_for_8(start + first, key, who, counted, seed))
        store(wire + (place + first) * 2, BF16, rounded, count - first, extent - first)


@kernel
def _reduce(received, ranks, shard, numel, scale, room, reciprocal, tiles, keys, who, step, seed):
    """One tile of every rank's shard → their sum in rank order, scaled."""
    row = np.int64(cuda.blockIdx.x) * 5
    place, extent = fetch(tiles, row + 2), fetch(tiles, row + 4)
    key, start = _slot_of(tiles, keys, cuda.blockIdx.x)
    counted = fetch(step, 0)
    lanes = lanes_of(BF16, BF16)
    for first in range(cuda.threadIdx.x * lanes, extent, THREADS * lanes):
        at, count = received + (place + first) * 2, extent - first
        values = average_of_elements(at, ranks, numel * 2, BF16, count, scale, room, reciprocal)
        rounded = bf16_by_chance(values, _draw_for_8(start + first, key, who, counted, seed))
        store(shard + (place + first) * 2, BF16, rounded, extent - first, extent - first)


@function
def _scales(largest, code):
    """A finite block's scale and what its values are multiplied by."""
    if bits_of(code) == 4:
        scale = inverse = ZERO
        absmax = from_bits(largest)
        if absmax >= TINY:
            scale = from_bits(np.int32((to_bits(multiply(absmax, SEVENTH)) + LOWER_HALF) & UPPER_HALF))
            if scale > LARGEST_SCALE:
                scale, inverse = LARGEST_SCALE, divide(SEVEN, absmax)
            else:
                inverse = divide(ONE, scale)
    else:
        scale, inverse = scales_of(largest, code)
    return scale, inverse


@function
def _encode(values, largest, shard, blocks, block, index, column, element, key, who, step, seed, code):
    """Store 16 elements of block `index`, the first of which is `element` of its slot; at its beginning, the scale."""
    if largest >= INFINITY_BITS:
        scale, quantized = NAN, load(shard, INT8, INT8, 0)
    else:
        scale, inverse = _scales(largest, code)
        steps = multiply(values, inverse)
        words = _draw(element, key, who, step, seed)
        if is_fp8(code):
            bases = e4m3_bases(steps)
            sums = e4m3_by_chance(add(magnitudes(steps), bases), words)
            quantized = signed_as(add(sums, multiply(bases, MINUS_ONE)), steps)
        else:
            quantized = whole_by_chance(add(multiply(steps, FIXED), ROUNDER), words)
    store_block(shard, blocks, block, index, column, quantized, scale, code)


@kernel
def _quantize(
    wire, tiles, addresses, tag, blocks, block, shard_size, finite, code, keys, who, step, seed
):  # fmt: skip
    """One tile of one slot, from its tensor to the wire."""
    promise_finite(finite, cuda.blockIdx.x + cuda.threadIdx.x)
    largest = cuda.shared.array(THREADS, np.int32)
    largest[cuda.threadIdx.x] = 0
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    key, start = _slot_of(tiles, keys, cuda.blockIdx.x)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = quotient(element, block)
    values = load(tensor + element * size_of(tag), tag, INT8, count - element)
    cuda.syncthreads()
    cuda.atomic.max(largest, row, largest_bits(values))
    cuda.syncthreads()
    if element < extent:
        number = place // block + row
        rank = quotient(number, blocks)
        shard, index, column = wire + rank * shard_size, number - rank * blocks, element - row * block
        drawn = start + element
        _encode(values, largest[row], shard, blocks, block, index, column, drawn, key, who, fetch(step, 0), seed, code)


@kernel
def _reduce_quantized(
    received, ranks, shard, blocks, block, shard_size, flag_block, scale, room, reciprocal, code,
    tiles, keys, who, step, seed,
):  # fmt: skip
    """One tile of a slot's part of every rank's shard → their sum in rank order, scaled, encoded again."""
    largest = cuda.shared.array(THREADS, np.int32)
    largest[cuda.threadIdx.x] = 0
    at = np.int64(cuda.blockIdx.x) * 5
    place, extent = fetch(tiles, at + 2), fetch(tiles, at + 4)
    key, start = _slot_of(tiles, keys, cuda.blockIdx.x)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = quotient(element, block)
    index, column = place // block + row, element - row * block
    count = LANES if element < extent else 0
    values = average_of_blocks(
        received, ranks, shard_size, blocks, block, index, column, count, flag_block, scale, room, reciprocal, code
    )
    cuda.syncthreads()
    cuda.atomic.max(largest, row, largest_bits(values))
    cuda.syncthreads()
    if count:
        drawn = start + element
        _encode(values, largest[row], shard, blocks, block, index, column, drawn, key, who, fetch(step, 0), seed, code)


def _drawing(slots: SlotTable, draws: Draws, wire: Tensor) -> tuple[int, int, int, int]:
    return device_keys(slots, wire.device).data_ptr(), draws.who, draws.step.data_ptr(), draws.seed


def flatten(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float, finite: Tensor | None, draws: Draws
) -> None:
    """Many tensors → one BF16 wire, scaled; padding becomes zero, `finite` 1."""
    table = device_table(slots, CAST_TILE, wire.device)
    launch(
        _flatten,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        table.tiles.data_ptr(),
        table.addresses("flatten", tensors).data_ptr(),
        tag_of(tensors),
        in_compute_type(scale, *(tensor.dtype for tensor in tensors[:1])),
        address(finite),
        *_drawing(slots, draws, wire),
    )


def reduce_shards(received: Tensor, shard: Tensor, scale: float, slots: SlotTable, draws: Draws) -> None:
    """world_size BF16 shards → their sum in rank order, scaled once."""
    table, room = device_table(slots, CAST_TILE, shard.device), spare(received.shape[0])
    launch(
        _reduce,
        len(table.tiles),
        shard.device,
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        shard.numel(),
        *(np.float32(number) for number in (scale, room, 1 / room)),
        table.tiles.data_ptr(),
        *_drawing(slots, draws, shard),
    )


def quantize(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    shards: int,
    block: int,
    finite: Tensor | None,
    form: BlockFormat,
    draws: Draws,
) -> None:
    """Many tensors → one quantized wire; `finite` becomes 1."""
    table = device_table(slots, TILE // block * block, wire.device)
    launch(
        _quantize,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        table.tiles.data_ptr(),
        table.addresses("quantize", tensors).data_ptr(),
        tag_of(tensors),
        slots.total // block // shards,
        block,
        wire.numel() // shards,
        address(finite),
        CODES[form],
        *_drawing(slots, draws, wire),
    )


def reduce_quantized(
    received: Tensor,
    shard: Tensor,
    scale: float,
    block: int,
    flag_block: int,
    form: BlockFormat,
    slots: SlotTable,
    draws: Draws,
) -> None:
    """world_size quantized shards → their sum in rank order, scaled once, quantized again."""
    table, room = device_table(slots, TILE // block * block, shard.device), spare(received.shape[0])
    launch(
        _reduce_quantized,
        len(table.tiles),
        shard.device,
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        form.blocks(shard.numel(), block),
        block,
        shard.numel(),
        flag_block,
        *(np.float32(number) for number in (scale, room, 1 / room)),
        CODES[form],
        table.tiles.data_ptr(),
        *_drawing(slots, draws, shard),
    )
