"""A program's tile in the Numba CUDA kernels, its elements on the way from a wire, and the launch of all programs.

Vectors of numbers are those of a GPU or, in Numba's simulator, their twins.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from .slots import FP8_FORMAT, FP16_BLOCK, INT4_FORMAT, INT8_FORMAT

SIMULATED = bool(cuda.config.ENABLE_CUDASIM)

if SIMULATED:
    from . import numba_cuda_simulated as memory
    from . import numba_cuda_simulated as vectors
else:
    from . import numba_cuda_memory as memory  # type: ignore[no-redef]
    from . import numba_cuda_vectors as vectors  # type: ignore[no-redef]

kernel, function = vectors.kernel, vectors.function
size_of, lanes_of, quotient = memory.size_of, memory.lanes_of, memory.quotient
fetch, fetch_int32, load, store = memory.fetch, memory.fetch_int32, memory.load, memory.store
multiply, add, divide = vectors.multiply, vectors.add, vectors.divide
sum_of_squares, not_finite = vectors.sum_of_squares, vectors.not_finite
largest_bits, from_bits, to_bits = vectors.largest_bits, vectors.from_bits, vectors.to_bits
more_than_half = vectors.more_than_half
fetch_byte, store_byte = memory.fetch_byte, memory.store_byte
power, where_finite = vectors.power, vectors.where_finite
bits_of, load_int4, store_int4 = memory.bits_of, memory.load_int4, memory.store_int4
largest_and_sign, at_most = vectors.largest_and_sign, vectors.at_most
bf16_by_chance, whole_by_chance, signed_as = vectors.bf16_by_chance, vectors.whole_by_chance, vectors.signed_as
e4m3_bases, e4m3_by_chance, magnitudes = vectors.e4m3_bases, vectors.e4m3_by_chance, vectors.magnitudes
whole_by_own_bits = vectors.whole_by_own_bits
byte_of, is_fp8, e4m3_rounders = memory.byte_of, memory.is_fp8, vectors.e4m3_rounders

LANES = 16  # of a thread that works on a quantized wire
THREADS = 32 if SIMULATED else 256  # of a block; a simulated one is a thread of Python
TILE = LANES * THREADS  # the largest block of a format on a GPU

INT4, E4M3, INT8 = np.uint32(0), np.uint8(0), np.int8(0)
FP16, BF16, FP32 = np.int16(0), np.uint16(0), np.float32(0)
INFINITY_BITS = np.int32(0x7F800000)
ZERO, ONE, MINUS_ONE, NAN = np.float32(0), np.float32(1), np.float32(-1), np.float32(np.nan)
LARGEST_INT8, LARGEST_E4M3 = np.float32(127), np.float32(448)
TINY, TINY_BITS = np.float32(2.0**-100), np.int32(27 << 23)
ROUNDER = np.float32(1.5 * 2**23)  # a sum with it has no bits behind the point
THREE, UPPER_HALF = np.int32(3 << 23), np.int32(-65536)  # a subtraction from the exponent; BF16's bits
RECIPROCAL_127, RECIPROCAL_448 = np.float32(1 / 127), np.float32(1 / 448)
CODES = {INT8_FORMAT: INT8, INT4_FORMAT: INT4, FP8_FORMAT: E4M3}

TAGS: dict[torch.dtype, Any] = {
    torch.float64: np.float64(0),
    torch.float32: np.float32(0),
    torch.float16: np.int16(0),
    torch.bfloat16: np.uint16(0),
}


def tag_of(tensors: Sequence[Tensor]) -> Any:
    """The tag of their dtype, which they share."""
    return TAGS[tensors[0].dtype] if tensors else FP32


@function
def locate(tiles, addresses, program, tag):
    """A program's tile: its address, its place in the flat, its elements without and with the padding."""
    row = np.int64(program) * 5
    tensor = fetch(addresses, fetch(tiles, row)) + fetch(tiles, row + 1) * size_of(tag)
    return tensor, fetch(tiles, row + 2), fetch(tiles, row + 3), fetch(tiles, row + 4)


@function
def _scale(shard, blocks, block, index, code, count):
    """The scale of block `index`; 0 where `count` is."""
    if bits_of(code) == 4:
        scale = load(shard + blocks * block // 2 + index * 2, BF16, BF16, count)[0]
    else:
        scale = load(shard + blocks * block + index * 4, FP32, FP32, count)[0]
    return scale


@function
def decode(shard, blocks, block, index, column, count, code):
    """16 elements of block `index` from `column` on; zeros where `count` is 0."""
    if bits_of(code) == 4:
        quantized = load_int4(shard + (index * block + column) // 2, count)
    else:
        quantized = load(shard + index * block + column, byte_of(code), INT8, count)
    return multiply(quantized, _scale(shard, blocks, block, index, code, min(count, 1)))


@function
def average_of_blocks(
    received, ranks, shard_size, blocks, block, index, column, count, flag_block, scale, room, reciprocal, code
):  # fmt: skip
    """Of 16 elements as `decode` has them: the average of every rank's, or flags where the block has those."""
    total = decode(received, blocks, block, index, column, count, code)
    for rank in range(1, ranks):
        total = add(total, decode(received + rank * shard_size, blocks, block, index, column, count, code))
    if index >= flag_block:
        values = more_than_half(total)
    else:
        values = multiply(total, scale)
        if largest_bits(total) >= INFINITY_BITS:
            small = multiply(decode(received, blocks, block, index, column, count, code), reciprocal)
            for rank in range(1, ranks):
                term = decode(received + rank * shard_size, blocks, block, index, column, count, code)
                small = add(small, multiply(term, reciprocal))
            values = where_finite(total, values, multiply(small, multiply(scale, room)))
    return values


@function
def average_of_elements(received, ranks, stride, tag, count, scale, room, reciprocal):
    """Of a vector of elements of each rank, `stride` bytes apart: the average; those from `count` on are zero."""
    other, total = received, load(received, tag, tag, count)
    for _ in range(1, ranks):
        other += stride
        total = add(total, load(other, tag, tag, count))
    values = multiply(total, scale)
    if not_finite(total, scale, lanes_of(tag, tag)) > 0:
        other, small = received, multiply(load(received, tag, tag, count), reciprocal)
        for _ in range(1, ranks):
            other += stride
            small = add(small, multiply(load(other, tag, tag, count), reciprocal))
        values = where_finite(total, values, multiply(small, multiply(scale, room)))
    return values


@function
def scales_of(largest, code):
    """A finite block's scale and what its values are multiplied by."""
    scale = inverse = ZERO
    if bits_of(code) == 4:
        if largest >= TINY_BITS:
            eighth = from_bits(np.int32((largest - THREE) & UPPER_HALF))
            scale = multiply(eighth, MINUS_ONE) if largest & 1 else eighth
            inverse = divide(ONE, scale)
    else:
        absmax = from_bits(largest)
        if absmax >= TINY:
            scale = multiply(absmax, RECIPROCAL_448 if is_fp8(code) else RECIPROCAL_127)
            inverse = divide(LARGEST_E4M3 if is_fp8(code) else LARGEST_INT8, absmax)
    return scale, inverse


@function
def store_block(shard, blocks, block, index, column, quantized, scale, code):
    """Store 16 codes of block `index` and, at its beginning, its scale."""
    if bits_of(code) == 4:
        store_int4(shard + (index * block + column) // 2, quantized)
    else:
        store(shard + index * block + column, byte_of(code), quantized, LANES, LANES)
    if column == 0:
        # The last block clears the padding too: the scales that are missing from as many as fill 16 bytes.
        if bits_of(code) == 4:
            extent = 1 if index < blocks - 1 else 1 + (-blocks & 7)
            scales = (scale, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO)
            store(shard + blocks * block // 2 + index * 2, BF16, scales, 1, extent)
        else:
            extent = 1 if index < blocks - 1 else 1 + (-blocks & 3)
            store(shard + blocks * block + index * 4, FP32, (scale, ZERO, ZERO, ZERO), 1, extent)


@function
def note_odd(finite, odd):
    """Make the byte at `finite` 0 if this thread had `odd` numbers that are not; without an address nothing."""
    if finite and odd > 0:
        store_byte(finite, 0)


@function
def note_scale(finite, shard, blocks, block, index, top, code, tag):
    """Make the byte at `finite` 0 if code `top` of a block is not in memory of type `tag`; at no address nothing."""
    if finite:
        note_odd(finite, not_finite((multiply(_scale(shard, blocks, block, index, code, 1), top),), tag, 1))


@function
def promise_finite(finite, number):
    """Make the byte at `finite` 1, by the thread with number 0 alone; without an address nothing."""
    if finite and number == 0:
        store_byte(finite, 1)


@function
def take_turn(turn, number):
    """Let the other row of residuals count, by the thread with number 0 alone; without an address nothing."""
    if turn and number == 0:
        store_byte(turn, 1 - fetch_int32(turn))


@function
def decode_fp16(wire, blocks, shard_size, place, tag, scale, count):
    """8 elements of FP16 blocks from `place` in the flat on, scaled, on their way to memory of type `tag`."""
    number = place // FP16_BLOCK
    rank = quotient(number, blocks)
    shard, index = wire + rank * shard_size, number - rank * blocks
    halves = load(shard + (index * FP16_BLOCK + place - number * FP16_BLOCK) * 2, FP16, tag, count)
    return multiply(halves, multiply(power(fetch_byte(shard + blocks * 2 * FP16_BLOCK + index), scale), scale))


def in_compute_type(number: float, *dtypes: torch.dtype) -> Any:
    """A factor of kernels that compute with numbers of these types."""
    return np.float64(number) if torch.float64 in dtypes else np.float32(number)


@lru_cache(4096)
def _configured(kernel: Any, programs: int, threads: int, _device: torch.device, stream: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numba warns of every small grid, and buckets may be small
        return kernel[programs, threads, cuda.external_stream(stream) if stream else 0]


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, threads: int = THREADS) -> None:
    """Run `programs` blocks of a kernel on a device's current stream."""
    if SIMULATED and programs:
        kernel[programs, threads](*arguments)
    elif programs:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream().cuda_stream
            _configured(kernel, programs, threads, device, stream)(*arguments)
