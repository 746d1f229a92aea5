"""Quantize, dequantize and the quantized two-shot sum for CPU tensors, on the calling thread, in INT8, INT4 and FP8.

A kernel goes through the wire block by block. A block's values stay in L1 until they are encoded, so that
main memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from . import numba_cpu_stochastic
from .numba_cpu_elements import (
    STREAM_BYTES,
    TAGS,
    addresses,
    bits_of,
    byte_of,
    convert,
    fence,
    held,
    inlined,
    is_fp8,
    kernel,
    load,
    prefetch_block,
    rows,
    size_of,
    slot_at,
    stage,
    store,
)
from .numba_cpu_int4 import NOTHING, SINGLE, decode_int4, decode_int4_and_sum, encode_int4, run_of
from .numba_cpu_residuals import group_of, keep_residuals, new_residuals, old_residuals, rows_of, scratch_for
from .numba_cpu_statistics import convert_and_sum, end_tile, lanes_for
from .numba_cpu_sums import CODES, E4M3, FP32, INT8, add_blocks, average_of_blocks, flags_of, scale_of, zero
from .slots import INT8_FORMAT, BlockFormat, Draws, SlotTable, shard_bytes, spare, tile_elements

ZERO, ONE, NAN, INFINITY = np.float32(0), np.float32(1), np.float32(np.nan), np.float32(np.inf)
INFINITY_BITS = np.int32(0x7F800000)
# x + ROUNDER holds rint(x) in its low byte, and minus ROUNDER again it is rint(x), never -0: |x| < 2^22.
ROUNDER = np.float32(1.5 * 2**23)
SMALLEST, TO_ROUNDER = np.int32(121 << 23), np.int32((20 << 23) + (1 << 22))  # E4M3's smallest normal number, 2^-6


@inlined
def _rounded_to_e4m3(value):
    """The nearest number of E4M3, ties to even; `value` is no larger than 448, but for rounding."""
    binade = max(np.float32(abs(value)).view(np.int32), SMALLEST) & INFINITY_BITS
    rounder = np.int32(binade + TO_ROUNDER).view(np.float32)  # 1.5 times 2^20 of the value's power of two
    return (value + rounder) - rounder


@kernel
def _encode(source, tag, count, scale, old, new, values, block, payload, scale_at, stream, code):
    # Returns whether the block is finite.
    # Magnitudes compare as integers: a maximum of floats loses NaN, and does not vectorise.
    largest = np.int32(0)
    if old:
        for index in range(count):
            value = np.float32(load(source, index, tag)) * scale + load(old, index, FP32)
            store(values, index, FP32, value)
            largest = max(largest, np.float32(abs(value)).view(np.int32))
    else:
        for index in range(count):
            value = np.float32(load(source, index, tag)) * scale
            store(values, index, FP32, value)
            largest = max(largest, np.float32(abs(value)).view(np.int32))
    for index in range(count, block):
        store(values, index, FP32, ZERO)

    if largest >= INFINITY_BITS:
        store(scale_at, 0, FP32, NAN)
        zero(payload, payload + block)
        if new:
            convert(new, FP32, old, FP32, block, ONE, stream)
        return False
    unit, inverse = scale_of(largest, code)
    store(scale_at, 0, FP32, unit)
    if is_fp8(code):
        for index in range(block):
            store(payload, index, E4M3, _rounded_to_e4m3(load(values, index, FP32) * inverse))
    else:
        for index in range(block):
            rounded = load(values, index, FP32) * inverse + ROUNDER
            store(payload, index, INT8, np.float32(rounded).view(np.int32))
    if new:
        for index in range(block):
            value = load(values, index, FP32)
            steps = value * inverse
            sent = _rounded_to_e4m3(steps) if is_fp8(code) else (steps + ROUNDER) - ROUNDER
            store(values, index, FP32, value - sent * unit)
        convert(new, FP32, values, FP32, block, ONE, stream)
    return True


@kernel
def quantize_blocks(
    tensors, tag, offsets, numels, start, blocks, payload, block, elements, residual, new_residual, kept, values,
    stream, code, scale_tag,
):  # fmt: skip
    """Blocks of the flat from element `start` on (+ residuals) → payloads, and behind them scales; where these end.

    `elements`: of a row of residuals.
    """
    slot, width, group = slot_at(offsets, start), block * bits_of(code) // 8, group_of(block)
    old_values, new_values = values + group * block * 4, values + 2 * group * block * 4
    to_row = stream and size_of(kept) == 4
    scale_at = payload + blocks * width
    number, last = start // block, start // block + blocks
    while number < last:
        begin, end, new_at = number, min(number + group, last), new_values
        while number < end:
            start = number * block
            while slot < len(tensors) and offsets[slot] + numels[slot] <= start:
                slot += 1
            source = count = 0
            if slot < len(tensors) and offsets[slot] <= start:
                source = tensors[slot] + (start - offsets[slot]) * size_of(tag)
                count = offsets[slot] + numels[slot] - start
            run = run_of(count, end - number, block, code)
            count = min(count, run * block)
            old = old_residuals(residual, number, run, block, elements, old_values, kept)
            new = new_residuals(new_residual, number, block, new_at, kept)
            if bits_of(code) == 4:
                encode_int4(source, tag, run, count, ONE, old, new, values, block, payload, scale_at, to_row, 0)
            else:
                prefetch_block(source, block * size_of(tag))
                _encode(source, tag, count, ONE, old, new, values, block, payload, scale_at, to_row, code)
            payload += run * width
            scale_at += run * size_of(scale_tag)
            new_at += run * block * 4
            number += run
        keep_residuals(new_residual, begin, end - begin, block, elements, new_values, kept)
    return scale_at


@kernel
def _quantize(
    tensors, tag, offsets, numels, wire, shards, blocks, block, shard_size, residual, new_residual, kept, values,
    stream, code, scale_tag,
):  # fmt: skip
    for shard in range(shards):
        start, payload = shard * blocks * block, wire + shard * shard_size
        end = quantize_blocks(
            tensors, tag, offsets, numels, start, blocks, payload, block, shards * blocks * block, residual,
            new_residual, kept, values, stream, code, scale_tag,
        )  # fmt: skip
        zero(end, payload + shard_size)
    fence()


@kernel
def _note(finite, scale, top, tag):
    if finite and not abs(held(tag, scale * top)) < INFINITY:
        store(finite, 0, INT8, np.int32(0))


@kernel
def dequantize_blocks(
    payload, blocks, block, start, offsets, numels, tensors, tag, stream, finite, top, code, scale_tag
):  # fmt: skip
    """Blocks of a flat from element `start` on, as `quantize_blocks` writes them → the tensors."""
    width, stop, slot = block * bits_of(code) // 8, start + blocks * block, slot_at(offsets, start)
    while slot < len(tensors) and offsets[slot] < stop:
        first, end = max(start, offsets[slot]), min(stop, offsets[slot] + numels[slot])
        place = first
        while place < end:
            number = (place - start) // block
            scale_at = payload + blocks * width + number * size_of(scale_tag)
            run = -((place - end) // block) if bits_of(code) == 4 else 1
            for index in range(run):
                _note(finite, load(scale_at, index, scale_tag), top, tag)
            to, count = tensors[slot] + (place - offsets[slot]) * size_of(tag), min(run * block, end - place)
            if bits_of(code) == 4:
                decode_int4(to, tag, payload + number * width, scale_at, count, block, stream)
            else:
                scale = load(scale_at, 0, scale_tag)
                convert(to, tag, payload + number * width, byte_of(code), count, scale, stream)
            place += count
        slot += 1


@kernel
def _dequantize(
    shards, wire, blocks, block, shard_size, offsets, numels, tensors, tag, stream, finite, top, code, scale_tag
):
    for shard in range(shards):
        start, payload = shard * blocks * block, wire + shard * shard_size
        dequantize_blocks(
            payload, blocks, block, start, offsets, numels, tensors, tag, stream, finite, top, code, scale_tag
        )
    fence()


@kernel
def _dequantize_and_sum(
    wire, blocks, block, shard_size, offsets, numels, tensors, tag, stream, finite, top, code, scale_tag,
    values, tile, statistics, sum_tag, sums,
):  # fmt: skip
    width = block * bits_of(code) // 8
    for slot in range(len(tensors)):
        for first in range(0, numels[slot], tile):
            end = min(first + tile, numels[slot])
            start = first
            while start < end:
                shard, number = divmod((offsets[slot] + start) // block, blocks)
                run = min(-((start - end) // block), blocks - number) if bits_of(code) == 4 else 1
                payload = wire + shard * shard_size
                scale_at = payload + blocks * width + number * size_of(scale_tag)
                payload += number * width
                for index in range(run):
                    _note(finite, load(scale_at, index, scale_tag), top, tag)
                to, count = tensors[slot] + start * size_of(tag), min(run * block, end - start)
                if bits_of(code) == 4:
                    decode_int4_and_sum(
                        to, tag, payload, scale_at, run, count, block, stream, values, sums, sum_tag
                    )  # fmt: skip
                else:
                    scale = load(scale_at, 0, scale_tag)
                    convert_and_sum(to, tag, payload, byte_of(code), count, scale, stream, sums, sum_tag)
                start += count
            end_tile(tensors[slot] + first * size_of(tag), tag, end - first, sums, sum_tag, statistics)
            statistics += 2 * size_of(sum_tag)
    fence()


@kernel
def reduce_blocks(
    terms, shard, first, blocks, block, flag_block, scale, spare, elements, residual, new_residual, kept, values,
    stream, code, scale_tag,
):  # fmt: skip
    """All ranks' versions of blocks from `first` on, as `quantize_blocks` writes them, each at an address → averages.

    `elements`: of a row of residuals.
    """
    width, group = block * bits_of(code) // 8, group_of(block)
    scratch = group * block * 4
    total, old_values, new_values = values + scratch, values + 2 * scratch, values + 3 * scratch
    to_row = stream and size_of(kept) == 4
    for begin in range(0, blocks, group):
        end, new_at, at = min(begin + group, blocks), new_values, begin
        while at < end:
            number, payload = first + at, at * width
            scale_at = blocks * width + at * size_of(scale_tag)
            run = run_of((flag_block - number) * block, end - at, block, code)
            add_blocks(total, terms, payload, scale_at, run, block, code, scale_tag)
            to, to_scale = shard + payload, shard + scale_at
            new = new_residuals(new_residual, number, block, new_at, kept)
            new_at += run * block * 4
            at += run
            if number < flag_block:
                old = old_residuals(residual, number, run, block, elements, old_values, kept)
                odd = _encode_sum(total, run, scale, old, new, values, block, to, to_scale, to_row, code)
                for index in range(run):
                    if odd >> index & 1:
                        place = index * block * 4
                        average_of_blocks(
                            terms, payload + index * width, scale_at + index * size_of(scale_tag), block, scale, spare,
                            total, code, scale_tag,
                        )  # fmt: skip
                        _encode_sum(
                            total, SINGLE, ONE, old + place if old else old, new + place if new else new, values, block,
                            to + index * width, to_scale + index * size_of(scale_tag), to_row, code,
                        )  # fmt: skip
                continue
            flags_of(total, block)
            _encode_sum(total, run, ONE, NOTHING, NOTHING, values, block, to, to_scale, to_row, code)
            if new:
                zero(new, new + block * 4)
        keep_residuals(new_residual, first + begin, end - begin, block, elements, new_values, kept)
    return shard + blocks * (width + size_of(scale_tag))


@kernel
def _reduce_quantized(
    terms, shard, blocks, block, shard_size, flag_block, scale, spare, residual, new_residual, kept, values, stream,
    code, scale_tag,
):  # fmt: skip
    end = reduce_blocks(
        terms, shard, 0, blocks, block, flag_block, scale, spare, blocks * block, residual, new_residual, kept, values,
        stream, code, scale_tag,
    )  # fmt: skip
    zero(end, shard + shard_size)
    fence()


@inlined
def _encode_sum(total, blocks, scale, old, new, values, block, payload, scale_at, stream, code):
    # Returns bits, 1 where a block is not finite.
    if bits_of(code) == 4:
        count = blocks * block
        return encode_int4(total, FP32, blocks, count, scale, old, new, values, block, payload, scale_at, stream, 0)
    finite = _encode(total, FP32, block, scale, old, new, values, block, payload, scale_at, stream, code)
    return np.int32(0 if finite else 1)


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
    if finite is not None:
        finite.fill_(1)
    if draws is not None:
        numba_cpu_stochastic.quantize(tensors, slots, wire, shards, block, form, draws)
        return
    blocks = slots.total // shards // block
    values = scratch_for(block)
    _quantize(
        addresses(tensors),
        TAGS[tensors[0].dtype] if tensors else FP32,
        slots.offsets,
        slots.numels,
        wire.data_ptr(),
        shards,
        blocks,
        block,
        shard_bytes(blocks, block, form),
        *rows_of(residuals, turn),
        values.data_ptr(),
        slots.total * 4 >= STREAM_BYTES,
        *CODES[form],
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
    if not tensors:
        return
    if turn is not None:
        turn.bitwise_xor_(1)
    dtype = tensors[0].dtype
    blocks = slots.total // shards // block
    arguments = (
        wire.data_ptr(),
        blocks,
        block,
        shard_bytes(blocks, block, form),
        slots.offsets,
        slots.numels,
        addresses(tensors),
        TAGS[dtype],
        slots.total * dtype.itemsize >= STREAM_BYTES,
        0 if finite is None else finite.data_ptr(),
        np.float32(form.top(by_chance)),
        *CODES[form],
    )
    if statistics is None:
        _dequantize(shards, *arguments)
    else:
        (address, sum_tag, lanes), values = lanes_for(statistics), stage(block)
        _dequantize_and_sum(*arguments, values.data_ptr(), tile_elements(block), address, sum_tag, lanes.data_ptr())


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
        numba_cpu_stochastic.reduce_quantized(received, shard, scale, block, flag_block, form, slots, draws)
        return
    blocks = form.blocks(shard.numel(), block)
    values = scratch_for(block)
    _reduce_quantized(
        rows(received),
        shard.data_ptr(),
        blocks,
        block,
        shard.numel(),
        flag_block,
        np.float32(scale),
        np.float32(spare(received.shape[0])),
        *rows_of(residuals, turn),
        values.data_ptr(),
        blocks * block * 4 >= STREAM_BYTES,
        *CODES[form],
    )
