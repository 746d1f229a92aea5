"""Stochastic rounding for CPU tensors, on the calling thread: flatten to BF16, quantize, and both two-shot sums.

As `numba_cpu_cast.py` and `numba_cpu_int8.py`, but sums go slot by slot too: random bits belong to elements of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .numba_cpu_elements import (
    STREAM_BYTES,
    TAGS,
    add_to_block,
    addresses,
    bits_of,
    convert_block,
    fence,
    inlined,
    is_fp8,
    kernel,
    load,
    prefetch_block,
    rows,
    size_of,
    stage,
    store,
)
from .numba_cpu_int4 import BLOCKS, NOTHING, SINGLE, encode_int4, run_of
from .numba_cpu_philox import BATCH, draw, load_draw
from .numba_cpu_stochastic_vectors import LINE_LANES, largest_of_block, round_block, round_lines
from .numba_cpu_sums import (
    CHUNK,
    CODES,
    FP32,
    ZERO,
    add_blocks,
    average_of_blocks,
    average_of_shards,
    flags_of,
    scale_of,
    zero,
)
from .numba_cpu_vectors import add_last
from .slots import BlockFormat, Draws, SlotTable, shard_bytes, spare

BF16 = np.uint16(0)
ONE, NAN = np.float32(1), np.float32(np.nan)
INFINITY_BITS = np.int32(0x7F800000)
UPPER_HALF = np.int32(-65536)
FIXED = np.float32(2.0**15)
SPAN = 1024  # elements for which bits are drawn at a time, at least: keys of the rounds are made once


@inlined
def _to_bf16(value, bits):
    """FP32 → the BF16 number that these bits choose, as FP32."""
    if value != value:
        return value
    return np.int32((np.float32(value).view(np.int32) + bits) & UPPER_HALF).view(np.float32)


@inlined
def _round(to, source, tag, count, scale, bits, stream):
    lines = count // LINE_LANES * LINE_LANES
    round_lines(to, source, tag, lines, scale, bits, stream)
    for index in range(lines, count):
        value = np.float32(load(source, index, tag) * scale)
        store(to, index, BF16, _to_bf16(value, load_draw(bits, index)))


@inlined
def _encode(source, tag, run, count, scale, values, block, payload, scale_at, bits, code):
    # Returns bits, 1 where a block of the run is not finite.
    if bits_of(code) == 4:
        return encode_int4(
            source, tag, run, count, scale, NOTHING, NOTHING, values, block, payload, scale_at, False, bits
        )
    if count == block:
        return _encode_whole(source, tag, scale, block, payload, scale_at, bits, code)
    for index in range(block):
        store(values, index, FP32, np.float32(load(source, index, tag)) if index < count else ZERO)
    return _encode_whole(values, FP32, scale, block, payload, scale_at, bits, code)


@inlined
def _encode_whole(source, tag, scale, block, payload, scale_at, bits, code):
    largest = largest_of_block(source, tag, scale, block)
    if largest >= INFINITY_BITS:
        store(scale_at, 0, FP32, NAN)
        zero(payload, payload + block)
        return np.int32(1)
    unit, inverse = scale_of(largest, code)
    store(scale_at, 0, FP32, unit)
    # A product with a power of two is exact, so that it can be had here.
    round_block(payload, source, tag, scale, inverse if is_fp8(code) else inverse * FIXED, bits, block, code)
    return np.int32(0)


@kernel
def _quantize(
    tensors, tag, offsets, numels, keys, firsts, who, step, seed, wire, shards, blocks, block, shard_size, values, bits,
    span, code, scale_tag,
):  # fmt: skip
    slot = start = place = 0
    width = block * bits_of(code) // 8
    for shard in range(shards):
        payload = wire + shard * shard_size
        scale_at = payload + blocks * width
        left = blocks
        while left > 0:
            while slot < len(tensors) and offsets[slot] + numels[slot] <= start:
                slot += 1
            source = count = 0
            run = 1
            if slot == len(tensors) or offsets[slot] > start:
                place = 0
            else:
                within = start - offsets[slot]
                source = tensors[slot] + within * size_of(tag)
                count = numels[slot] - within
                if place == span or not within:
                    place = 0
                    draw(bits, min(span, count), firsts[slot] + within, who, step, seed, keys[slot])
                run = run_of(min(count, span - place), left, block, code)
                count = min(count, run * block)
                if bits_of(code) == 8:
                    prefetch_block(source, block * size_of(tag))
            _encode(source, tag, run, count, ONE, values, block, payload, scale_at, bits + place, code)
            payload += run * width
            scale_at += run * size_of(scale_tag)
            start += run * block
            place += run * block
            left -= run
        zero(scale_at, wire + (shard + 1) * shard_size)
    fence()


@kernel
def _reduce_quantized(
    terms, shard, blocks, block, shard_size, flag_block, offsets, numels, keys, firsts, who, step, seed,
    scale, spare, total, values, bits, span, code, scale_tag,
):  # fmt: skip
    slot = place = number = 0
    width = block * bits_of(code) // 8
    while number < blocks:
        start, payload = number * block, number * width
        scale_at = blocks * width + number * size_of(scale_tag)
        while slot < len(offsets) and offsets[slot] + numels[slot] <= start:
            slot += 1
        run = 1
        if slot == len(offsets) or offsets[slot] > start:
            place = 0
        else:
            within = start - offsets[slot]
            count = numels[slot] - within
            if place == span or not within:
                place = 0
                draw(bits, min(span, count), firsts[slot] + within, who, step, seed, keys[slot])
            run = run_of(min(count, span - place, (flag_block - number) * block), blocks - number, block, code)
        for term in terms:
            prefetch_block(term + payload, run * width)
        add_blocks(total, terms, payload, scale_at, run, block, code, scale_tag)
        to, to_scale, drawn = shard + payload, shard + scale_at, bits + place
        if number < flag_block:
            odd = _encode(total, FP32, run, run * block, scale, values, block, to, to_scale, drawn, code)
            for index in range(run):
                if odd >> index & 1:
                    at, scales = index * width, index * size_of(scale_tag)
                    average_of_blocks(
                        terms, payload + at, scale_at + scales, block, scale, spare, total, code, scale_tag
                    )  # fmt: skip
                    of_block = drawn + index * block
                    _encode(total, FP32, SINGLE, block, ONE, values, block, to + at, to_scale + scales, of_block, code)
        else:
            flags_of(total, block)
            _encode(total, FP32, run, block, ONE, values, block, to, to_scale, drawn, code)
        place += run * block
        number += run
    zero(shard + blocks * (width + size_of(scale_tag)), shard + shard_size)
    fence()


@kernel
def _flatten(
    tensors, tag, offsets, numels, keys, firsts, who, step, seed, total, wire, scale, bits, stream
):  # fmt: skip
    end = np.int64(0)
    for slot in range(len(tensors)):
        zero(wire + 2 * end, wire + 2 * offsets[slot])
        for start in range(0, numels[slot], CHUNK):
            count = min(CHUNK, numels[slot] - start)
            source, to = tensors[slot] + start * size_of(tag), wire + 2 * (offsets[slot] + start)
            prefetch_block(source, count * size_of(tag))
            draw(bits, count, firsts[slot] + start, who, step, seed, keys[slot])
            _round(to, source, tag, count, scale, bits, stream)
        end = offsets[slot] + numels[slot]
    zero(wire + 2 * end, wire + 2 * total)
    fence()


@kernel
def _reduce_shards(
    terms, shard, numel, offsets, numels, keys, firsts, who, step, seed, scale, spare, values, bits, stream
):  # fmt: skip
    end, ranks = np.int64(0), len(terms)
    for slot in range(len(offsets)):
        zero(shard + 2 * end, shard + 2 * offsets[slot])
        for start in range(0, numels[slot], CHUNK):
            count, place = min(CHUNK, numels[slot] - start), offsets[slot] + start
            for term in terms:
                prefetch_block(term + 2 * place, 2 * count)
            whole = count // LINE_LANES * LINE_LANES
            convert_block(values, FP32, terms[0] + 2 * place, BF16, whole, ONE)
            for rank in range(1, ranks - 1):
                add_to_block(values, FP32, terms[rank] + 2 * place, BF16, whole, ONE)
            if ranks > 1 and not add_last(values, FP32, terms[ranks - 1] + 2 * place, BF16, whole):
                whole = 0
            draw(bits, count, firsts[slot] + start, who, step, seed, keys[slot])
            to = shard + 2 * place
            round_lines(to, values, FP32, whole, scale, bits, stream)
            for index in range(whole, count):
                average = average_of_shards(terms, place + index, BF16, scale, spare)
                store(to, index, BF16, _to_bf16(average, load_draw(bits, index)))
        end = offsets[slot] + numels[slot]
    zero(shard + 2 * end, shard + 2 * numel)
    fence()


def _slots(slots: SlotTable, draws: Draws) -> tuple[Any, ...]:
    return slots.offsets, slots.numels, slots.keys, slots.firsts, draws.who, int(draws.step), draws.seed


def _span(block: int) -> tuple[int, Tensor]:
    """As many elements, of whole blocks, as random bits are drawn for at a time, and where these are kept."""
    span = max(1, SPAN // block) * block
    return span, _bits_of(span)


def _bits_of(elements: int) -> Tensor:
    """Where the random bits of so many elements are kept, a byte each: they are drawn by the batch."""
    return stage(-(-elements // BATCH) * BATCH // 8)


def flatten(tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float, draws: Draws) -> None:
    """Many tensors → one BF16 wire, scaled; padding becomes zero."""
    dtype = tensors[0].dtype if tensors else torch.float32
    bits = _bits_of(CHUNK)
    _flatten(
        addresses(tensors),
        TAGS[dtype],
        *_slots(slots, draws),
        slots.total,
        wire.data_ptr(),
        np.float64(scale) if dtype is torch.float64 else np.float32(scale),
        bits.data_ptr(),
        wire.nbytes >= STREAM_BYTES,
    )


def reduce_shards(received: Tensor, shard: Tensor, scale: float, slots: SlotTable, draws: Draws) -> None:
    """world_size BF16 shards → their sum in rank order, scaled once."""
    values, bits = stage(CHUNK // 2), _bits_of(CHUNK)
    _reduce_shards(
        rows(received),
        shard.data_ptr(),
        shard.numel(),
        *_slots(slots, draws),
        np.float32(scale),
        np.float32(spare(received.shape[0])),
        values.data_ptr(),
        bits.data_ptr(),
        shard.nbytes >= STREAM_BYTES,
    )


def quantize(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, shards: int, block: int, form: BlockFormat, draws: Draws
) -> None:
    """Many tensors → one quantized wire."""
    blocks, values = slots.total // shards // block, stage(block)
    span, bits = _span(block)
    _quantize(
        addresses(tensors),
        TAGS[tensors[0].dtype] if tensors else FP32,
        *_slots(slots, draws),
        wire.data_ptr(),
        shards,
        blocks,
        block,
        shard_bytes(blocks, block, form),
        values.data_ptr(),
        bits.data_ptr(),
        span,
        *CODES[form],
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
    blocks, values = form.blocks(shard.numel(), block), stage(block)
    total = stage(BLOCKS * block // 2 if form.bits == 4 else block)
    span, bits = _span(block)
    _reduce_quantized(
        rows(received),
        shard.data_ptr(),
        blocks,
        block,
        shard.numel(),
        flag_block,
        *_slots(slots, draws),
        np.float32(scale),
        np.float32(spare(received.shape[0])),
        total.data_ptr(),
        values.data_ptr(),
        bits.data_ptr(),
        span,
        *CODES[form],
    )
