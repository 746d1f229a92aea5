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
    addresses,
    convert,
    fence,
    kernel,
    load,
    size_of,
    stage,
    store,
)
from .numba_cpu_statistics import convert_and_sum, end_tile, lanes_for
from .numba_cpu_sums import CHUNK, average_of_shards
from .numba_cpu_vectors import LOOK, add_last, note_finite
from .slots import Draws, SlotTable, spare, tile_elements


def _factor(scale: float, *dtypes: torch.dtype) -> np.floating[Any]:
    return np.float64(scale) if torch.float64 in dtypes else np.float32(scale)


@kernel
def _zero(wire, wire_tag, start, end):
    for index in range(start, end):
        store(wire, index, wire_tag, np.float32(0))


@kernel
def _flatten(tensors, tensor_tag, offsets, numels, total, wire, wire_tag, scale, stream):
    end = np.int64(0)
    for slot in range(len(tensors)):
        _zero(wire, wire_tag, end, offsets[slot])
        to = wire + offsets[slot] * size_of(wire_tag)
        convert(to, wire_tag, tensors[slot], tensor_tag, numels[slot], scale, stream)
        end = offsets[slot] + numels[slot]
    _zero(wire, wire_tag, end, total)
    fence()


@kernel
def _unflatten(wire, wire_tag, offsets, numels, tensors, tensor_tag, scale, stream, finite):
    for slot in range(len(tensors)):
        for start in range(0, numels[slot], LOOK):
            source = wire + (offsets[slot] + start) * size_of(wire_tag)
            to, count = tensors[slot] + start * size_of(tensor_tag), min(LOOK, numels[slot] - start)
            note_finite(finite, source, wire_tag, count, scale)
            convert(to, tensor_tag, source, wire_tag, count, scale, stream)
    fence()


@kernel
def _unflatten_and_sum(
    wire, wire_tag, offsets, numels, tensors, tensor_tag, scale, stream, finite, tile, statistics, tag, sums
):  # fmt: skip
    for slot in range(len(tensors)):
        for start in range(0, numels[slot], tile):
            source = wire + (offsets[slot] + start) * size_of(wire_tag)
            to, count = tensors[slot] + start * size_of(tensor_tag), min(tile, numels[slot] - start)
            note_finite(finite, source, wire_tag, count, scale)
            convert_and_sum(to, tensor_tag, source, wire_tag, count, scale, stream, sums, tag)
            end_tile(to, tensor_tag, count, sums, tag, statistics)
            statistics += 2 * size_of(tag)
    fence()


@kernel
def _reduce_shards(received, ranks, shard, numel, tag, scale, spare, total, stream):
    for start in range(0, numel, CHUNK):
        count = min(CHUNK, numel - start)
        term, to = received + start * size_of(tag), shard + start * size_of(tag)
        finite = ranks == 1  # or no sum at least
        if count == CHUNK:
            for index in range(CHUNK):
                store(total, index, scale, load(term, index, tag))
            for _ in range(1, ranks - 1):
                term += numel * size_of(tag)
                for index in range(CHUNK):
                    store(total, index, scale, load(total, index, scale) + load(term, index, tag))
            if ranks > 1:
                finite = add_last(total, scale, term + numel * size_of(tag), tag, CHUNK)
        if count == CHUNK and finite:
            convert(to, tag, total, scale, CHUNK, scale, stream)
        else:
            for index in range(count):
                store(to, index, tag, average_of_shards(received, ranks, numel, start + index, tag, scale, spare))
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
        wire.data_ptr(),
        TAGS[wire.dtype],
        slots.offsets,
        slots.numels,
        addresses(tensors),
        TAGS[dtype],
        _factor(scale, dtype, wire.dtype),
        slots.total * dtype.itemsize >= STREAM_BYTES,
        0 if finite is None else finite.data_ptr(),
    )
    if statistics is None:
        _unflatten(*arguments)
    else:
        address, tag, lanes = lanes_for(statistics)
        _unflatten_and_sum(*arguments, tile_elements(), address, tag, lanes.data_ptr())


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
        received.data_ptr(),
        received.shape[0],
        shard.data_ptr(),
        shard.numel(),
        TAGS[shard.dtype],
        _factor(scale, shard.dtype),
        _factor(spare(received.shape[0]), shard.dtype),
        total.data_ptr(),
        shard.nbytes >= STREAM_BYTES,
    )
