"""quantize, dequantize and reduce_quantized in Numba CUDA, in INT8, INT4 and FP8: one launch for a whole bucket.

Each thread holds 16 consecutive elements. The threads that share a block of the format agree on its largest
magnitude in shared memory: an atomic maximum of integers is the same in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from . import numba_cuda_stochastic
from .device_tables import address, device_table
from .numba_cuda_residuals import KEPT, load_residuals, rows_of, store_residuals
from .numba_cuda_statistics import SUMMING, dequantize_and_sum
from .numba_cuda_tiles import (
    CODES,
    INFINITY_BITS,
    INT8,
    LANES,
    MINUS_ONE,
    NAN,
    ROUNDER,
    TAGS,
    THREADS,
    TILE,
    add,
    at_most,
    average_of_blocks,
    bits_of,
    decode,
    e4m3_rounders,
    function,
    is_fp8,
    kernel,
    largest_and_sign,
    largest_bits,
    launch,
    load,
    locate,
    multiply,
    note_scale,
    promise_finite,
    quotient,
    scales_of,
    size_of,
    store,
    store_block,
    tag_of,
    take_turn,
)
from .slots import INT8_FORMAT, BlockFormat, Draws, SlotTable, spare, tile_elements

LARGEST_INT4, MINUS_ROUNDER = np.float32(7), np.float32(-1.5 * 2**23)


@function
def _largest(values, code):
    """What the threads of a block agree on the maximum of."""
    return largest_and_sign(values) if bits_of(code) == 4 else largest_bits(values)


@function
def _encode(values, largest, residual, at, number, elements, kept, shard, blocks, block, index, column, code):
    """Store 16 elements of block `index` and, at its beginning, its scale; returns what was lost.

    Where the block is not finite, that are the old residuals in row `residual`, those of its block `number`.
    """
    if largest >= INFINITY_BITS:
        scale, quantized = NAN, load(shard, INT8, INT8, 0)
        lost = load_residuals(residual, at, number, elements, LANES, kept)
    else:
        scale, inverse = scales_of(largest, code)
        steps = multiply(values, inverse)
        if bits_of(code) == 4:
            steps = at_most(steps, LARGEST_INT4)
        if is_fp8(code):
            rounders = e4m3_rounders(steps)
            quantized = add(add(steps, rounders), multiply(rounders, MINUS_ONE))
        else:
            quantized = add(add(steps, ROUNDER), MINUS_ROUNDER)
        lost = add(values, multiply(quantized, multiply(scale, MINUS_ONE)))
    store_block(shard, blocks, block, index, column, quantized, scale, code)
    return lost


@function
def _largest_lost(magnitudes, row, lost):
    """What the threads of a block lost most of, where they have agreed on a magnitude before."""
    cuda.syncthreads()
    magnitudes[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    cuda.atomic.max(magnitudes, row, largest_bits(lost))
    cuda.syncthreads()
    return magnitudes[row]


@kernel
def _quantize(
    wire, residuals, turn, row_bytes, tiles, addresses, tag, blocks, block, shard_size, finite, elements, kept, code
):  # fmt: skip
    """One tile of one slot, from its tensor to the wire."""
    promise_finite(finite, cuda.blockIdx.x + cuda.threadIdx.x)
    residual, new_residual = rows_of(residuals, turn, row_bytes)
    magnitudes = cuda.shared.array(THREADS, np.int32)
    magnitudes[cuda.threadIdx.x] = 0
    tensor, place, count, extent = locate(tiles, addresses, cuda.blockIdx.x, tag)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = quotient(element, block)
    at, number = place + element, place // block + row
    values = load(tensor + element * size_of(tag), tag, INT8, count - element)
    values = add(values, load_residuals(residual, at, number, elements, count - element, kept))
    cuda.syncthreads()
    cuda.atomic.max(magnitudes, row, _largest(values, code))
    cuda.syncthreads()
    lost = load(wire, INT8, INT8, 0)
    if element < extent:
        rank = quotient(number, blocks)
        shard, index = wire + rank * shard_size, number - rank * blocks
        largest, column = magnitudes[row], element - row * block
        lost = _encode(values, largest, residual, at, number, elements, kept, shard, blocks, block, index, column, code)
    largest = np.int32(0)
    if size_of(kept) == 1:
        largest = _largest_lost(magnitudes, row, lost)
    if element < extent and new_residual:
        store_residuals(new_residual, at, number, elements, lost, largest, element - row * block, kept)


@kernel
def _dequantize(wire, tiles, addresses, tag, blocks, block, shard_size, finite, turn, top, code):
    """One tile of one slot, from the wire to its tensor."""
    take_turn(turn, cuda.blockIdx.x + cuda.threadIdx.x)
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = quotient(element, block)
    if element < count:
        number = place // block + row
        rank = quotient(number, blocks)
        shard, index = wire + rank * shard_size, number - rank * blocks
        values = decode(shard, blocks, block, index, element - row * block, LANES, code)
        store(tensor + element * size_of(tag), tag, values, count - element, count - element)
        note_scale(finite, shard, blocks, block, index, top, code, tag)


@kernel
def _reduce(
    received, ranks, shard, residuals, turn, row_bytes, blocks, block, shard_size, flag_block, scale, room, reciprocal,
    kept, code,
):  # fmt: skip
    """A few blocks of every rank's shard → their sum in rank order, scaled, encoded again."""
    residual, new_residual = rows_of(residuals, turn, row_bytes)
    magnitudes = cuda.shared.array(THREADS, np.int32)
    magnitudes[cuda.threadIdx.x] = 0
    rows = quotient(TILE, block)
    element = np.int64(cuda.threadIdx.x) * LANES
    row = quotient(element, block)
    index, column = cuda.blockIdx.x * rows + row, element - row * block
    count = LANES if row < rows and index < blocks else 0
    at, elements = index * block + column, blocks * block
    values = average_of_blocks(
        received, ranks, shard_size, blocks, block, index, column, count, flag_block, scale, room, reciprocal, code
    )
    if index < flag_block:
        values = add(values, load_residuals(residual, at, index, elements, count, kept))
    cuda.syncthreads()
    cuda.atomic.max(magnitudes, row, _largest(values, code))
    cuda.syncthreads()
    lost = load(shard, INT8, INT8, 0)
    if count:
        largest = magnitudes[row]
        lost = _encode(values, largest, residual, at, index, elements, kept, shard, blocks, block, index, column, code)
        if index >= flag_block:
            lost = load(shard, INT8, INT8, 0)
    largest = np.int32(0)
    if size_of(kept) == 1:
        largest = _largest_lost(magnitudes, row, lost)
    if count and new_residual:
        store_residuals(new_residual, at, index, elements, lost, largest, column, kept)


def _row_bytes(residuals: Tensor | None) -> int:
    return 0 if residuals is None else residuals.shape[1] * residuals.element_size()


def quantize(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    shards: int,
    block: int,
    residuals: Tensor | None,
    turn: Tensor | None,
    finite: Tensor | None = None,
    form: BlockFormat = INT8_FORMAT,
    draws: Draws | None = None,
) -> None:
    """Many tensors (+ row `turn` of the residuals) → one quantized wire, and the other row; `finite` becomes 1."""
    if draws is not None:
        numba_cuda_stochastic.quantize(tensors, slots, wire, shards, block, finite, form, draws)
        return
    table = device_table(slots, TILE // block * block, wire.device)
    launch(
        _quantize,
        len(table.tiles),
        wire.device,
        wire.data_ptr(),
        address(residuals),
        address(turn),
        _row_bytes(residuals),
        table.tiles.data_ptr(),
        table.addresses("quantize", tensors).data_ptr(),
        tag_of(tensors),
        slots.total // block // shards,
        block,
        wire.numel() // shards,
        address(finite),
        slots.total,
        KEPT[torch.float32 if residuals is None else residuals.dtype],
        CODES[form],
    )


def dequantize(
    wire: Tensor,
    shards: int,
    block: int,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
    turn: Tensor | None = None,
    form: BlockFormat = INT8_FORMAT,
    by_chance: bool = False,
) -> None:
    """One quantized wire → many tensors in their dtypes (and their statistics); the row `turn` is the other one then.

    `finite` becomes 0 if an average is not, in the tensors' dtype; `by_chance` tells how they were rounded.
    """
    tile = TILE // block * block if statistics is None else tile_elements(block)
    table = device_table(slots, tile, wire.device, padding=False)
    arguments = (
        wire.data_ptr(),
        table.tiles.data_ptr(),
        table.addresses("dequantize", tensors).data_ptr(),
        tag_of(tensors),
        slots.total // block // shards,
        block,
        wire.numel() // shards,
        address(finite),
        address(turn),
        np.float32(form.top(by_chance)),
        CODES[form],
    )
    if statistics is None:
        launch(_dequantize, len(table.tiles), wire.device, *arguments)
    else:
        row = statistics.data_ptr(), TAGS[statistics.dtype]
        launch(dequantize_and_sum, len(table.tiles), wire.device, *arguments, *row, threads=SUMMING)


def reduce_quantized(
    received: Tensor,
    shard: Tensor,
    scale: float,
    block: int,
    flag_block: int,
    residuals: Tensor | None,
    turn: Tensor | None,
    form: BlockFormat = INT8_FORMAT,
    slots: SlotTable | None = None,
    draws: Draws | None = None,
) -> None:
    """world_size quantized shards → their sum in rank order, scaled once, (+ residuals), quantized again.

    `slots`, of the shard, come with `draws`.
    """
    if slots is not None and draws is not None:
        numba_cuda_stochastic.reduce_quantized(received, shard, scale, block, flag_block, form, slots, draws)
        return
    blocks, room = form.blocks(shard.numel(), block), spare(received.shape[0])
    launch(
        _reduce,
        -(-blocks // (TILE // block)),
        shard.device,
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        address(residuals),
        address(turn),
        _row_bytes(residuals),
        blocks,
        block,
        shard.numel(),
        flag_block,
        *(np.float32(number) for number in (scale, room, 1 / room)),
        KEPT[torch.float32 if residuals is None else residuals.dtype],
        CODES[form],
    )
