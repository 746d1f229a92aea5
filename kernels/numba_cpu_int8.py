"""Quantize, dequantize and their two-shot sum for CPU tensors, on the calling thread: INT8 blocks, FP32 scales.

A kernel walks the blocks of a wire in order. What it computes of a block stays in L1 (`stage`) until it is
encoded, so main memory sees every element once. The encoding is numbered as in README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .numba_cpu_convert import STREAM_BYTES, TAGS, addresses, convert, fence, kernel, load, size_of, store
from .slots import SlotTable, shard_bytes

INT8, FP32 = np.int8(0), np.float32(0)
ONE = np.float32(1)
INFINITY_BITS = np.int32(0x7F800000)
TINY = np.float32(2.0**-100)
RECIPROCAL_127 = np.float32(1 / 127)
# Added to |x| < 2^22 it leaves rint(x) in the low bits, two's complement; subtracted again, rint(x), never -0.
ROUNDER = np.float32(1.5 * 2**23)


@kernel
def _zero(start, end):  # type: ignore[no-untyped-def]
    for index in range(end - start):
        store(start, index, INT8, np.int32(0))


@kernel
def _encode(values, block, payload, scale_at, old, new, stream):  # type: ignore[no-untyped-def]
    # 1. As integers, since a maximum of floats drops NaN and does not vectorise.
    bits = np.int32(0)
    for index in range(block):
        bits = max(bits, np.float32(abs(load(values, index, FP32))).view(np.int32))
    absmax = np.int32(bits).view(np.float32)
    scale = inverse = np.float32(0)
    if bits >= INFINITY_BITS:  # 2.
        store(scale_at, 0, FP32, np.float32(np.nan))
        _zero(payload, payload + block)
        if old:
            convert(new, FP32, old, FP32, block, ONE, stream)
        return
    if absmax >= TINY:  # 3. is 4. with zeros.
        scale = absmax * RECIPROCAL_127
        inverse = np.float32(127) / absmax
    store(scale_at, 0, FP32, scale)
    if new:
        for index in range(block):
            value = load(values, index, FP32)
            rounded = value * inverse + ROUNDER
            store(payload, index, INT8, np.float32(rounded).view(np.int32))
            store(values, index, FP32, value - (rounded - ROUNDER) * scale)
        convert(new, FP32, values, FP32, block, ONE, stream)
    else:
        for index in range(block):
            rounded = load(values, index, FP32) * inverse + ROUNDER
            store(payload, index, INT8, np.float32(rounded).view(np.int32))


@kernel
def _quantize(  # type: ignore[no-untyped-def]
    tensors, tag, offsets, numels, wire, shards, shard_size, blocks, block, residual, new_residual, stage, stream
):
    values = stage.ctypes.data
    slot = start = 0
    for shard in range(shards):
        payload = wire + shard * shard_size
        scales = payload + blocks * block
        for _ in range(blocks):
            while slot < len(offsets) and offsets[slot] + numels[slot] <= start:
                slot += 1
            count = 0
            old = new = 0
            if residual:
                old = residual + start * 4
                new = new_residual + start * 4
            if slot < len(offsets) and offsets[slot] <= start:
                count = min(block, offsets[slot] + numels[slot] - start)
                tensor = tensors[slot] + (start - offsets[slot]) * size_of(tag)
                if residual:
                    for index in range(count):
                        value = np.float32(load(tensor, index, tag))
                        store(values, index, FP32, value + load(old, index, FP32))
                else:
                    for index in range(count):
                        store(values, index, FP32, load(tensor, index, tag))
            for index in range(count, block):
                store(values, index, FP32, FP32)
            _encode(values, block, payload, scales, old, new, stream)
            payload += block
            scales += 4
            start += block
        _zero(scales, wire + (shard + 1) * shard_size)
    fence()


@kernel
def _dequantize(wire, shards, shard_size, blocks, block, offsets, numels, tensors, tag, stream):  # type: ignore[no-untyped-def]
    for tensor, offset, numel in zip(tensors, offsets, numels):
        for start in range(0, numel, block):
            shard, number = divmod((offset + start) // block, blocks)
            payload = wire + shard * shard_size
            scale = load(payload + blocks * block, number, FP32)
            to = tensor + start * size_of(tag)
            convert(to, tag, payload + number * block, INT8, min(block, numel - start), scale, stream)
    fence()


@kernel
def _reduce_quantized(  # type: ignore[no-untyped-def]
    received, ranks, shard, shard_size, blocks, block, flag_block, scale, residual, new_residual, stage, stream
):
    values = stage.ctypes.data
    scales = blocks * block
    for number in range(blocks):
        for rank in range(ranks):
            payload = received + rank * shard_size
            factor = load(payload + scales, number, FP32)
            payload += number * block
            if rank == 0:
                for index in range(block):
                    store(values, index, FP32, load(payload, index, INT8) * factor)
            else:
                for index in range(block):
                    decoded = load(payload, index, INT8) * factor
                    store(values, index, FP32, load(values, index, FP32) + decoded)
        old = new = 0
        if residual:
            old = residual + number * block * 4
            new = new_residual + number * block * 4
        if number >= flag_block:
            for index in range(block):
                flag = np.float32(load(values, index, FP32) > np.float32(0.5))
                store(values, index, FP32, flag)
            if residual:
                _zero(new, new + block * 4)
            old = new = 0
        elif residual:
            for index in range(block):
                value = load(values, index, FP32) * scale
                store(values, index, FP32, value + load(old, index, FP32))
        else:
            for index in range(block):
                store(values, index, FP32, load(values, index, FP32) * scale)
        _encode(values, block, shard + number * block, shard + scales + number * 4, old, new, stream)
    _zero(shard + scales + blocks * 4, shard + shard_size)
    fence()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def quantize(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    shards: int,
    block: int,
    residual: Tensor | None,
    new_residual: Tensor | None,
) -> None:
    """Many tensors (+ residual) → one quantized wire, and the new residual."""
    blocks = slots.total // block // shards
    _quantize(
        addresses(tensors),
        TAGS[tensors[0].dtype] if tensors else FP32,
        slots.offsets,
        slots.numels,
        wire.data_ptr(),
        shards,
        shard_bytes(blocks, block),
        blocks,
        block,
        _address(residual),
        _address(new_residual),
        np.empty(block, np.float32),
        slots.total * 4 >= STREAM_BYTES,
    )


def dequantize(wire: Tensor, shards: int, block: int, slots: SlotTable, tensors: Sequence[Tensor]) -> None:
    """One quantized wire → many tensors in their dtypes."""
    if not tensors:
        return
    dtype = tensors[0].dtype
    blocks = slots.total // block // shards
    _dequantize(
        wire.data_ptr(),
        shards,
        shard_bytes(blocks, block),
        blocks,
        block,
        slots.offsets,
        slots.numels,
        addresses(tensors),
        TAGS[dtype],
        slots.total * dtype.itemsize >= STREAM_BYTES,
    )


def reduce_quantized(
    received: Tensor,
    shard: Tensor,
    scale: float,
    block: int,
    flag_block: int,
    residual: Tensor | None,
    new_residual: Tensor | None,
) -> None:
    """world_size quantized shards → their sum in rank order, scaled once, (+ residual), quantized again."""
    blocks = shard.numel() // (block + 4)
    _reduce_quantized(
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        shard.numel(),
        blocks,
        block,
        flag_block,
        np.float32(scale),
        _address(residual),
        _address(new_residual),
        np.empty(block, np.float32),
        blocks * block * 4 >= STREAM_BYTES,
    )
