"""FP16 with block exponents for CPU tensors, on the calling thread: flatten, unflatten and the two-shot sum.

A kernel goes through the wire block by block. A block's values stay in L1 until its exponent is known, so that main
memory is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from .numba_cpu_elements import (
    STREAM_BYTES,
    TAGS,
    add_to_block,
    addresses,
    at_most_fp32,
    convert,
    convert_block,
    fence,
    inlined,
    kernel,
    load,
    load_byte,
    rows,
    size_of,
    slot_at,
    stage,
    store,
)
from .numba_cpu_statistics import convert_and_sum, end_tile, lanes_for
from .numba_cpu_sums import zero
from .numba_cpu_vectors import LOOK, narrow_block, narrow_sum, note_finite
from .slots import FP16_BLOCK, FP16_BLOCK_BYTES, SlotTable, exponent_rule, fp16_shard_bytes, spare, tile_elements

BLOCK, PAYLOAD = FP16_BLOCK, 2 * FP16_BLOCK
INT8, FP16, FP32 = np.int8(0), np.int16(0), np.float32(0)
ZERO, INFINITY = np.float32(0), np.float32(np.inf)
INFINITY_BITS = np.int32(0x7F800000)


@inlined
def _power(byte):
    """2^(byte - 127), for a byte from 1 to 254."""
    return np.int32(byte << 23).view(np.float32)


@inlined
def _exponent(largest, rule):
    low, high, ordinary, lift = rule
    if (low <= largest and largest < high) or largest >= INFINITY_BITS:
        return ordinary
    return max((largest >> 23) + lift, np.int32(1))


@inlined
def _encode(source, tag, rule, guess, payload, exponent_at, stream):
    """Write a block with its neighbour's exponent byte, and once more if that is not its own, which is returned."""
    byte = _exponent(narrow_block(payload, source, tag, _power(254 - guess), stream), rule)
    if byte != guess:
        narrow_block(payload, source, tag, _power(254 - byte), stream)
    store(exponent_at, 0, INT8, byte)
    return byte


@kernel
def _run(exponents, number, most):
    """How many blocks from `number` on share its exponent, of at most so many."""
    byte = load_byte(exponents, number)
    count = 1
    while count < most and load_byte(exponents, number + count) == byte:
        count += 1
    return count


@kernel
def flatten_blocks(tensors, tag, offsets, numels, start, blocks, payload, rule, values, stream):
    """Blocks of the flat from element `start` on → their payloads, and behind them the exponents; where these end."""
    narrow = at_most_fp32(tag)
    slot, stop, byte = slot_at(offsets, start), start + blocks * BLOCK, rule[2]
    exponent_at = payload + blocks * PAYLOAD
    while start < stop:
        while slot < len(tensors) and offsets[slot] + numels[slot] <= start:
            slot += 1
        source = count = 0
        if slot < len(tensors) and offsets[slot] <= start:
            source = tensors[slot] + (start - offsets[slot]) * size_of(tag)
            count = min(offsets[slot] + numels[slot], stop) - start
        whole = count // BLOCK if size_of(tag) <= 4 else 0
        if whole == 0:
            for index in range(min(count, BLOCK)):
                store(values, index, narrow, np.float32(load(source, index, tag)))
            for index in range(count, BLOCK):
                store(values, index, narrow, ZERO)
            source, whole = values, 1
        for number in range(whole):
            block = source + number * BLOCK * size_of(narrow)
            byte = _encode(block, narrow, rule, byte, payload, exponent_at, stream)
            payload += PAYLOAD
            exponent_at += 1
        start += whole * BLOCK
    return exponent_at


@kernel
def _flatten(tensors, tag, offsets, numels, wire, shards, blocks, shard_size, rule, values, stream):
    for shard in range(shards):
        start, payload = shard * blocks * BLOCK, wire + shard * shard_size
        end = flatten_blocks(tensors, tag, offsets, numels, start, blocks, payload, rule, values, stream)
        zero(end, payload + shard_size)
    fence()


@kernel
def unflatten_blocks(payload, blocks, start, offsets, numels, tensors, tag, scale, stream, finite):
    """Blocks of a flat from element `start` on, as `flatten_blocks` writes them → the tensors."""
    slot, stop, exponents = slot_at(offsets, start), start + blocks * BLOCK, payload + blocks * PAYLOAD
    while slot < len(tensors) and offsets[slot] < stop:
        place, end = max(start, offsets[slot]), min(stop, offsets[slot] + numels[slot])
        while place < end:
            number = (place - start) // BLOCK
            run = _run(exponents, number, min(-(-(end - place) // BLOCK), LOOK // BLOCK))
            count = min(run * BLOCK, end - place)
            factor = _power(load_byte(exponents, number)) * scale
            to, source = tensors[slot] + (place - offsets[slot]) * size_of(tag), payload + number * PAYLOAD
            note_finite(finite, source, FP16, count, factor, tag)
            convert(to, tag, source, FP16, count, factor, stream)
            place += count
        slot += 1


@kernel
def _unflatten(shards, wire, blocks, shard_size, offsets, numels, tensors, tag, scale, stream, finite):
    for shard in range(shards):
        start, payload = shard * blocks * BLOCK, wire + shard * shard_size
        unflatten_blocks(payload, blocks, start, offsets, numels, tensors, tag, scale, stream, finite)
    fence()


@kernel
def _unflatten_and_sum(
    wire, blocks, shard_size, offsets, numels, tensors, tag, scale, stream, finite, tile, statistics, sum_tag, sums
):  # fmt: skip
    for slot in range(len(tensors)):
        for first in range(0, numels[slot], tile):
            start, end = np.int64(first), min(first + tile, numels[slot])
            while start < end:
                shard, number = divmod((offsets[slot] + start) // BLOCK, blocks)
                payload = wire + shard * shard_size
                exponents = payload + blocks * PAYLOAD
                run = _run(exponents, number, min(blocks - number, -(-(end - start) // BLOCK)))
                count = min(run * BLOCK, end - start)
                factor = _power(load_byte(exponents, number)) * scale
                to = tensors[slot] + start * size_of(tag)
                note_finite(finite, payload + number * PAYLOAD, FP16, count, factor, tag)
                convert_and_sum(to, tag, payload + number * PAYLOAD, FP16, count, factor, stream, sums, sum_tag)
                start += count
            end_tile(tensors[slot] + first * size_of(tag), tag, end - first, sums, sum_tag, statistics)
            statistics += 2 * size_of(sum_tag)
    fence()


@kernel
def _average(terms, payload, exponent, scale, spare, averages):
    for index in range(BLOCK):
        total = small = ZERO
        for rank in range(len(terms)):
            term = load(terms[rank] + payload, index, FP16) * _power(load_byte(terms[rank], exponent))
            total = term if rank == 0 else total + term
            small = term / spare if rank == 0 else small + term / spare
        average = total * scale if abs(total) < INFINITY else small * (scale * spare)
        store(averages, index, FP32, average)


@kernel
def reduce_blocks(terms, shard, blocks, rule, scale, spare, total, stream):
    """All ranks' versions of some blocks, as `flatten_blocks` writes them, each at an address → their average."""
    exponents, ranks = blocks * PAYLOAD, len(terms)
    byte = rule[2]
    for number in range(blocks):
        payload, exponent = number * PAYLOAD, exponents + number
        to, to_exponent = shard + payload, shard + exponent
        largest = INFINITY_BITS  # unless there is a sum, and it is finite
        if ranks > 1:
            unit = _power(load_byte(terms[0], exponent))
            convert_block(total, FP32, terms[0] + payload, FP16, BLOCK, unit)
            for rank in range(1, ranks - 1):
                unit = _power(load_byte(terms[rank], exponent))
                add_to_block(total, FP32, terms[rank] + payload, FP16, BLOCK, unit)
            last = terms[ranks - 1]
            unit = _power(load_byte(last, exponent))
            largest = narrow_sum(to, total, last + payload, unit, scale, _power(254 - byte), stream)
        if largest < INFINITY_BITS and _exponent(largest, rule) == byte:
            store(to_exponent, 0, INT8, byte)
            continue
        if largest >= INFINITY_BITS:
            _average(terms, payload, exponent, scale, spare, total)
        byte = _encode(total, FP32, rule, byte, to, to_exponent, stream)


@kernel
def _reduce(terms, shard, blocks, shard_size, rule, scale, spare, total, stream):
    reduce_blocks(terms, shard, blocks, rule, scale, spare, total, stream)
    zero(shard + blocks * FP16_BLOCK_BYTES, shard + shard_size)
    fence()


@kernel
def _share(wire, blocks, gathered, ranks, row):
    exponents = wire + blocks * PAYLOAD
    for number in range(blocks):
        own = shared = load_byte(exponents, number)
        for rank in range(ranks):
            shared = max(shared, load_byte(gathered, rank * row + number))
        if shared > own:
            payload = wire + number * PAYLOAD
            convert(payload, FP16, payload, FP16, BLOCK, _power(127 - min(shared - own, 126)), False)
            store(exponents, number, INT8, shared)


@cache
def rule_for(summed: int) -> tuple[np.int32, ...]:
    """`exponent_rule`, as kernels take it."""
    return tuple(map(np.int32, exponent_rule(summed)))


def flatten_fp16(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, shards: int, summed: int, finite: Tensor | None = None
) -> None:
    """Many tensors → one FP16 wire with block exponents, for a transport that adds up `summed` of them (1: none).

    `finite` becomes 1.
    """
    if finite is not None:
        finite.fill_(1)
    blocks = slots.total // shards // BLOCK
    values = stage(BLOCK)
    _flatten(
        addresses(tensors),
        TAGS[tensors[0].dtype] if tensors else FP32,
        slots.offsets,
        slots.numels,
        wire.data_ptr(),
        shards,
        blocks,
        fp16_shard_bytes(blocks),
        rule_for(summed),
        values.data_ptr(),
        wire.nbytes >= STREAM_BYTES,
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
    if not tensors:
        return
    dtype = tensors[0].dtype
    blocks = slots.total // shards // BLOCK
    arguments = (
        wire.data_ptr(),
        blocks,
        fp16_shard_bytes(blocks),
        slots.offsets,
        slots.numels,
        addresses(tensors),
        TAGS[dtype],
        np.float64(scale) if dtype is torch.float64 else np.float32(scale),
        slots.total * dtype.itemsize >= STREAM_BYTES,
        0 if finite is None else finite.data_ptr(),
    )
    if statistics is None:
        _unflatten(shards, *arguments)
    else:
        address, sum_tag, lanes = lanes_for(statistics)
        _unflatten_and_sum(*arguments, tile_elements(BLOCK), address, sum_tag, lanes.data_ptr())


def reduce_fp16(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size FP16 shards → their sum in rank order, scaled once, with exponents of its own."""
    total = stage(BLOCK)
    _reduce(
        rows(received),
        shard.data_ptr(),
        shard.numel() // FP16_BLOCK_BYTES,
        shard.numel(),
        rule_for(1),
        np.float32(scale),
        np.float32(spare(received.shape[0])),
        total.data_ptr(),
        shard.nbytes >= STREAM_BYTES,
    )


def share_exponents(wire: Tensor, gathered: Tensor) -> None:
    """One shard and all ranks' exponents `[world_size, blocks or more]` → the shard with the largest of each block."""
    _share(wire.data_ptr(), wire.numel() // FP16_BLOCK_BYTES, gathered.data_ptr(), *gathered.shape)
