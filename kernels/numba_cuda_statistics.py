"""unflatten, unflatten_fp16 and dequantize with statistics in Numba CUDA.

The order of a tile's sum is fixed: each thread's numbers as they come, then threads by halves.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

from .numba_cuda_tiles import (
    FP16,
    LANES,
    THREADS,
    add,
    decode,
    decode_fp16,
    function,
    kernel,
    lanes_of,
    load,
    locate,
    multiply,
    not_finite,
    note_odd,
    note_scale,
    quotient,
    size_of,
    store,
    sum_of_squares,
    take_turn,
)

SUMMING = min(THREADS, 128)  # threads for a tile of a quantized wire, which is smaller than without statistics
ZERO = np.float64(0)


@function
def _store_row(statistics, sum_tag, squares, odd, threads):
    """Write this program's row: what all of its threads counted and summed, halves added to halves."""
    totals = cuda.shared.array((2, THREADS), np.float64)
    thread = cuda.threadIdx.x
    totals[0, thread], totals[1, thread] = odd, squares
    half = threads // 2
    while half > 0:
        cuda.syncthreads()
        if thread < half:
            totals[0, thread] = add(totals[0, thread], totals[0, thread + half])
            totals[1, thread] = add(totals[1, thread], totals[1, thread + half])
        half //= 2
    if thread == 0:
        row = statistics + np.int64(cuda.blockIdx.x) * 2 * size_of(sum_tag)
        store(row, sum_tag, (totals[0, 0], totals[1, 0], ZERO, ZERO), 2, 2)


@kernel
def unflatten_and_sum(wire, wire_tag, tiles, addresses, tag, scale, finite, statistics, sum_tag):
    """One tile of one slot, from the wire to its tensor, and its statistics."""
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    flat = wire + place * size_of(wire_tag)
    lanes = lanes_of(wire_tag, tag)
    squares, odd = sum_tag, 0
    for first in range(cuda.threadIdx.x * lanes, count, THREADS * lanes):
        values = multiply(load(flat + first * size_of(wire_tag), wire_tag, tag, count - first), scale)
        store(tensor + first * size_of(tag), tag, values, count - first, count - first)
        squares = add(squares, sum_of_squares(values, tag, sum_tag, count - first))
        odd += not_finite(values, tag, count - first)
    note_odd(finite, odd)
    _store_row(statistics, sum_tag, squares, odd, THREADS)


@kernel
def unflatten_fp16_and_sum(wire, tiles, addresses, tag, blocks, shard_size, scale, finite, statistics, sum_tag):
    """One tile of one slot, from a wire of FP16 blocks to its tensor, and its statistics."""
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    lanes = lanes_of(FP16, tag)
    squares, odd = sum_tag, 0
    for first in range(cuda.threadIdx.x * lanes, count, THREADS * lanes):
        values = decode_fp16(wire, blocks, shard_size, place + first, tag, scale, count - first)
        store(tensor + first * size_of(tag), tag, values, count - first, count - first)
        squares = add(squares, sum_of_squares(values, tag, sum_tag, count - first))
        odd += not_finite(values, tag, count - first)
    note_odd(finite, odd)
    _store_row(statistics, sum_tag, squares, odd, THREADS)


@kernel
def dequantize_and_sum(
    wire, tiles, addresses, tag, blocks, block, shard_size, finite, turn, top, code, statistics, sum_tag
):  # fmt: skip
    """One tile of one slot, from the wire to its tensor, and its statistics."""
    take_turn(turn, cuda.blockIdx.x + cuda.threadIdx.x)
    tensor, place, count, _ = locate(tiles, addresses, cuda.blockIdx.x, tag)
    squares, odd = sum_tag, 0
    for element in range(np.int64(cuda.threadIdx.x) * LANES, count, SUMMING * LANES):
        row = quotient(element, block)
        number = place // block + row
        rank = quotient(number, blocks)
        shard, index = wire + rank * shard_size, number - rank * blocks
        values = decode(shard, blocks, block, index, element - row * block, LANES, code)
        store(tensor + element * size_of(tag), tag, values, count - element, count - element)
        note_scale(finite, shard, blocks, block, index, top, code, tag)
        squares = add(squares, sum_of_squares(values, tag, sum_tag, count - element))
        odd += not_finite(values, tag, count - element)
    _store_row(statistics, sum_tag, squares, odd, SUMMING)
