"""Flatten, unflatten and the two-shot sum for CPU tensors, on the calling thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import numba_cpu_stochastic
from .numba_cpu_elements import (
    STREAM_BYTES,
    TAGS,
    add_to_block,
    addresses,
    convert,
    convert_block,
    fence,
    kernel,
    rows,
    size_of,
    slot_at,
    stage,
    store,
)
from .numba_cpu_statistics import convert_and_sum, end_tile, lanes_for
from .numba_cpu_sums import CHUNK, average_of_shards
from .numba_cpu_vectors import LOOK, add_last, note_finite
from .slots import Draws, SlotTable, spare, tile_elements

ONE = np.float32(1)


def _factor(scale: float, *dtypes: torch.dtype) -> np.floating[Any]:
    return np.float64(scale) if torch.float64 in dtypes else np.float32(scale)


@kernel
def _zero(wire, wire_tag, start, end):
    for index in range(start, end):
        store(wire, index, wire_tag, np.float32(0))


@kernel
def flatten_range(tensors, tensor_tag, offsets, numels, start, stop, wire, wire_tag, scale, stream):
    """Elements `start` to `stop` of the flat → their wire, which begins with the first of them; gaps become zero."""
    slot, end = slot_at(offsets, start), start
    while slot < len(tensors) and offsets[slot] < stop:
        low, high = max(start, offsets[slot]), min(stop, offsets[slot] + numels[slot])
        if low < high:
            _zero(wire, wire_tag, end - start, low - start)
            to = wire + (low - start) * size_of(wire_tag)
            source = tensors[slot] + (low - offsets[slot]) * size_of(tensor_tag)
            convert(to, wire_tag, source, tensor_tag, high - low, scale, stream)
            end = high
        slot += 1
    _zero(wire, wire_tag, end - start, stop - start)


@kernel
def _flatten(tensors, tensor_tag, offsets, numels, total, wire, wire_tag, scale, stream):
    flatten_range(tensors, tensor_tag, offsets, numels, 0, total, wire, wire_tag, scale, stream)
    fence()


@kernel
def unflatten_range(wire, wire_tag, start, stop, offsets, numels, tensors, tensor_tag, scale, stream, finite):
    """Elements `start` to `stop` of a flat, whose wire begins with the first of them → the tensors."""
    slot = slot_at(offsets, start)
    while slot < len(tensors) and offsets[slot] < stop:
        place, end = max(start, offsets[slot]), min(stop, offsets[slot] + numels[slot])
        while place < end:
            count = min(LOOK, end - place)
            source = wire + (place - start) * size_of(wire_tag)
            to = tensors[slot] + (place - offsets[slot]) * size_of(tensor_tag)
            note_finite(finite, source, wire_tag, count, scale, tensor_tag)
            convert(to, tensor_tag, source, wire_tag, count, scale, stream)
            place += count
        slot += 1


@kernel
def _unflatten(wire, wire_tag, total, offsets, numels, tensors, tensor_tag, scale, stream, finite):
    unflatten_range(wire, wire_tag, 0, total, offsets, numels, tensors, tensor_tag, scale, stream, finite)
    fence()


@kernel
def _unflatten_and_sum(
    wire, wire_tag, offsets, numels, tensors, tensor_tag, scale, stream, finite, tile, statistics, tag, sums
):  # fmt: skip
    for slot in range(len(tensors)):
        for start in range(0, numels[slot], tile):
            source = wire + (offsets[slot] + start) * size_of(wire_tag)
            to, count = tensors[slot] + start * size_of(tensor_tag), min(tile, numels[slot] - start)
            note_finite(finite, source, wire_tag, count, scale, tensor_tag)
            convert_and_sum(to, tensor_tag, source, wire_tag, count, scale, stream, sums, tag)
            end_tile(to, tensor_tag, count, sums, tag, statistics)
            statistics += 2 * size_of(tag)
    fence()


@kernel
def reduce_range(terms, shard, numel, tag, scale, spare, total, stream):
    """All ranks' versions of some elements, each at an address → their average."""
    ranks = len(terms)
    for start in range(0, numel, CHUNK):
        count, place = min(CHUNK, numel - start), start * size_of(tag)
        finite = ranks == 1  # or no sum at least
        if count == CHUNK:
            convert_block(total, scale, terms[0] + place, tag, CHUNK, ONE)
            for rank in range(1, ranks - 1):
                add_to_block(total, scale, terms[rank] + place, tag, CHUNK, ONE)
            if ranks > 1:
                finite = add_last(total, scale, terms[ranks - 1] + place, tag, CHUNK)
        if count == CHUNK and finite:
            convert(shard + place, tag, total, scale, CHUNK, scale, stream)
        else:
            for index in range(start, start + count):
                store(shard, index, tag, average_of_shards(terms, index, tag, scale, spare))


@kernel
def _reduce_shards(terms, shard, numel, tag, scale, spare, total, stream):
    reduce_range(terms, shard, numel, tag, scale, spare, total, stream)
    fence()


def flatten(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    finite: Tensor | None = None,
    draws: Draws | None = None,
) -> None:
    """Many tensors → one wire in its dtype, scaled; padding becomes zero, `finite` 1."""
    if finite is not None:
        finite.fill_(1)
    if draws is not None:
        numba_cpu_stochastic.flatten(tensors, slots, wire, scale, draws)
        return
    dtype = tensors[0].dtype if tensors else wire.dtype
    _flatten(
        addresses(tensors),
        TAGS[dtype],
        slots.offsets,
        slots.numels,
        slots.total,
        wire.data_ptr(),
        TAGS[wire.dtype],
        _factor(scale, dtype, wire.dtype),
        wire.nbytes >= STREAM_BYTES,
    )


def unflatten(
    wire: Tensor,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    scale: float,
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    """One wire → many tensors in their dtypes, scaled (and their statistics); `finite` becomes 0 if they are not."""
    dtype = tensors[0].dtype if tensors else wire.dtype
    arguments = (
        slots.offsets,
        slots.numels,
        addresses(tensors),
        TAGS[dtype],
        _factor(scale, dtype, wire.dtype),
        slots.total * dtype.itemsize >= STREAM_BYTES,
        0 if finite is None else finite.data_ptr(),
    )
    if statistics is None:
        _unflatten(wire.data_ptr(), TAGS[wire.dtype], slots.total, *arguments)
    else:
        address, tag, lanes = lanes_for(statistics)
        _unflatten_and_sum(
            wire.data_ptr(), TAGS[wire.dtype], *arguments, tile_elements(), address, tag, lanes.data_ptr()
        )


def reduce_shards(
    received: Tensor, shard: Tensor, scale: float, slots: SlotTable | None = None, draws: Draws | None = None
) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype.

    `slots`, of the shard, come with `draws`.
    """
    if slots is not None and draws is not None:
        numba_cpu_stochastic.reduce_shards(received, shard, scale, slots, draws)
        return
    total = stage(CHUNK)
    _reduce_shards(
        rows(received),
        shard.data_ptr(),
        shard.numel(),
        TAGS[shard.dtype],
        _factor(scale, shard.dtype),
        _factor(spare(received.shape[0]), shard.dtype),
        total.data_ptr(),
        shard.nbytes >= STREAM_BYTES,
    )
