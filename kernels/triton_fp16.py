"""FP16 with block exponents in Triton: flatten, unflatten and the two-shot sum, one launch for a whole bucket."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .device_tables import address, device_table
from .slots import FP16_BLOCK, FP16_BLOCK_BYTES, SlotTable, exponent_rule, spare, tile_elements
from .triton_tiles import (
    DTYPES,
    Launch,
    any_not_finite,
    convert,
    double,
    double_bits,
    launch,
    load_tile,
    note_finite,
    repeat,
    repeat_sum,
    store_statistics,
    widen,
)

SHAPE = {"ROWS": tile_elements(FP16_BLOCK) // FP16_BLOCK, "BLOCK": FP16_BLOCK}
NOT_SUMMED = exponent_rule(1)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def _pointers(shard, index, blocks, BLOCK: tl.constexpr):
    """Where block `index` of a shard (one of each a row) keeps its payload and its exponent."""
    payload = (shard + index.to(tl.int64) * (2 * BLOCK)).to(tl.pointer_type(tl.float16))
    exponent = shard + tl.cast(blocks, tl.int64) * (2 * BLOCK) + index
    return payload[:, None] + tl.arange(0, BLOCK), exponent


@triton.jit
def _power(exponent):
    """2^(exponent - 127)."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _decode(shard, index, blocks, inside, scale, BLOCK: tl.constexpr):
    payload, exponent = _pointers(shard, index, blocks, BLOCK)
    halves = tl.load(payload, mask=inside[:, None], other=0.0)
    factor = _power(tl.load(exponent, mask=inside, other=127)).to(scale.dtype) * scale
    return halves.to(scale.dtype) * factor[:, None]


@triton.jit
def _encode(
    values, shard, index, blocks, shard_size, inside, low, high, ordinary, lift,
    BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """Store a block of FP32 values a row."""
    # As integers, magnitudes compare as the numbers do, with infinity and every NaN above them.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    usual = ((largest >= low) & (largest < high)) | (largest >= INFINITY_BITS)
    exponent = tl.where(usual, ordinary, tl.maximum((largest >> 23) + lift, 1))
    to_payload, to_exponent = _pointers(shard, index, blocks, BLOCK)
    tl.store(to_payload, (values * _power(254 - exponent)[:, None]).to(tl.float16), mask=inside[:, None])
    tl.store(to_exponent, exponent.to(tl.uint8), mask=inside)
    # The last block of a shard clears the padding too.
    last = inside & (index == blocks - 1)
    if tl.max(last.to(tl.int32), axis=0) > 0:
        lane = tl.arange(0, 64)
        padding = last[:, None] & (tl.cast(blocks, tl.int64) * BLOCK_BYTES + lane < shard_size)
        tl.store(to_exponent[:, None] + 1 + lane, tl.zeros_like(padding).to(tl.uint8), mask=padding)


@triton.jit(do_not_specialize=["blocks", "low", "high", "ordinary", "lift"], do_not_specialize_on_alignment=["finite"])
def _flatten(
    wire, tiles, addresses, blocks, shard_size, low, high, ordinary, lift, finite,
    dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """One tile of one slot, a block a row, from its tensor to the wire."""
    if finite is not None:
        tl.store(finite, 1, mask=tl.program_id(0) == 0)
    tensor, place, count, extent = load_tile(tiles, addresses, dtype)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    element = row[:, None] * BLOCK + column
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used.
    if (count == ROWS * BLOCK) & ((tensor & 15) == 0):
        aligned = tl.multiple_of(tensor.to(tl.pointer_type(dtype)), 16)
        values = widen(tl.load(aligned + element), tl.float32)
    else:
        loaded = tl.load(tensor.to(tl.pointer_type(dtype)) + element, mask=element < count, other=0.0)
        values = widen(loaded, tl.float32)
    block = (place // BLOCK).to(tl.int32) + row
    rank = block // blocks
    shard, inside = wire + rank.to(tl.int64) * shard_size, row * BLOCK < extent
    index = block - rank * blocks
    _encode(values, shard, index, blocks, shard_size, inside, low, high, ordinary, lift, BLOCK, BLOCK_BYTES)


def flatten_fp16(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, shards: int, summed: int, finite: Tensor | None = None
) -> None:
    """Many tensors → one FP16 wire with block exponents, for a transport that adds up `summed` of them (1: none).

    `finite` becomes 1.
    """

    def make() -> Launch | None:
        table = device_table(slots, tile_elements(FP16_BLOCK), wire.device)
        return launch(
            _flatten,
            len(table.tiles),
            wire.device,
            wire,
            table.tiles,
            table.addresses("flatten_fp16", tensors),
            slots.total // FP16_BLOCK // shards,
            wire.numel() // shards,
            *exponent_rule(summed),
            finite,
            dtype=DTYPES[tensors[0].dtype] if tensors else tl.float32,
            **SHAPE,
            BLOCK_BYTES=FP16_BLOCK_BYTES,
        )

    repeat("flatten_fp16", slots, wire, tensors, (shards, summed, address(finite)), make)


@triton.jit(do_not_specialize=["blocks", "scale_bits"], do_not_specialize_on_alignment=["finite"])
def _unflatten(
    wire, tiles, addresses, blocks, shard_size, scale_bits, statistics, finite,
    dtype: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one slot, a block a row, from the wire to its tensor."""
    tensor, place, count, _ = load_tile(tiles, addresses, dtype)
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    element = row[:, None] * BLOCK + column
    block = (place // BLOCK).to(tl.int32) + row
    rank = block // blocks
    shard = wire + rank.to(tl.int64) * shard_size
    scale = double(scale_bits).to(tl.float64 if dtype == tl.float64 else tl.float32)
    index, inside = block - rank * blocks, row * BLOCK < count
    if statistics is not None:
        decoded = _decode(shard, index, blocks, inside, scale, BLOCK)
        values = convert(decoded, dtype)
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used. Values
    # too, but for statistics: Triton 3.6 else computes them for both ways in which branches let threads share them out.
    if (count == ROWS * BLOCK) & ((tensor & 15) == 0):
        if statistics is None:
            decoded = _decode(shard, index, blocks, inside, scale, BLOCK)
            values = convert(decoded, dtype)
        aligned = tl.multiple_of(tensor.to(tl.pointer_type(dtype)), 16)
        tl.store(aligned + element, values)
        if finite is not None:
            note_finite(finite, decoded, dtype)
    else:
        if statistics is None:
            decoded = _decode(shard, index, blocks, inside, scale, BLOCK)
            values = convert(decoded, dtype)
        tl.store(tensor.to(tl.pointer_type(dtype)) + element, values, mask=element < count)
        if finite is not None:
            note_finite(finite, tl.where(element < count, decoded, 0.0), dtype)
    if statistics is not None:
        store_statistics(statistics, values, element < count)


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

    def make() -> Launch | None:
        table = device_table(slots, tile_elements(FP16_BLOCK), wire.device, padding=False)
        return launch(
            _unflatten,
            len(table.tiles),
            wire.device,
            wire,
            table.tiles,
            table.addresses("unflatten_fp16", tensors),
            slots.total // FP16_BLOCK // shards,
            wire.numel() // shards,
            double_bits(scale),
            statistics,
            finite,
            dtype=DTYPES[tensors[0].dtype] if tensors else tl.float32,
            **SHAPE,
        )

    more = (shards, scale, address(statistics), address(finite))
    repeat("unflatten_fp16", slots, wire, tensors, more, make)


@triton.jit(do_not_specialize=["blocks", "scale_bits", "low", "high", "ordinary", "lift"])
def _reduce(
    received, shard, blocks, shard_size, scale_bits, low, high, ordinary, lift,
    RANKS: tl.constexpr, SPARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_BYTES: tl.constexpr,
):  # fmt: skip
    """A block a row: every rank's → their sum in rank order, scaled, encoded again."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < blocks
    one = tl.cast(1.0, tl.float32)
    total = _decode(received, index, blocks, inside, one, BLOCK)
    other = received
    for _ in range(1, RANKS):
        other += shard_size
        total += _decode(other, index, blocks, inside, one, BLOCK)
    scale = double(scale_bits).to(tl.float32)
    values = total * scale
    if any_not_finite(total):
        small = _decode(received, index, blocks, inside, one, BLOCK) * (1 / SPARE)
        for _ in range(1, RANKS):
            received += shard_size
            small += _decode(received, index, blocks, inside, one, BLOCK) * (1 / SPARE)
        values = tl.where(tl.abs(total) < float("inf"), values, small * (scale * SPARE))
    _encode(values, shard, index, blocks, shard_size, inside, low, high, ordinary, lift, BLOCK, BLOCK_BYTES)


def reduce_fp16(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size FP16 shards → their sum in rank order, scaled once, with exponents of its own."""

    def make() -> Launch | None:
        blocks = shard.numel() // FP16_BLOCK_BYTES
        return launch(
            _reduce,
            -(-blocks // SHAPE["ROWS"]),
            shard.device,
            received,
            shard,
            blocks,
            shard.numel(),
            double_bits(scale),
            *NOT_SUMMED,
            RANKS=received.shape[0],
            SPARE=spare(received.shape[0]),
            **SHAPE,
            BLOCK_BYTES=FP16_BLOCK_BYTES,
        )

    repeat_sum("reduce_fp16", received, shard, (scale,), make)


@triton.jit(do_not_specialize=["blocks"])
def _share(
    wire, gathered, blocks, gathered_size, RANKS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A block a row: its exponent → the largest of all ranks', and its payload with it."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < blocks
    payload, exponent = _pointers(wire, index, blocks, BLOCK)
    own = tl.load(exponent, mask=inside, other=127).to(tl.int32)
    shared = own
    for _ in range(RANKS):
        shared = tl.maximum(shared, tl.load(gathered + index, mask=inside, other=0).to(tl.int32))
        gathered += gathered_size
    tl.debug_barrier()  # every warp has read the exponents that one of them writes over
    if tl.max(shared - own, axis=0) > 0:
        halves = tl.load(payload, mask=inside[:, None], other=0.0).to(tl.float32)
        halves *= _power(127 - tl.minimum(shared - own, 126))[:, None]
        tl.store(payload, halves.to(tl.float16), mask=inside[:, None])
        tl.store(exponent, shared.to(tl.uint8), mask=inside)


def share_exponents(wire: Tensor, gathered: Tensor) -> None:
    """One shard and all ranks' exponents `[world_size, blocks or more]` → the shard with the largest of each block."""
    blocks = wire.numel() // FP16_BLOCK_BYTES
    launch(
        _share,
        -(-blocks // SHAPE["ROWS"]),
        wire.device,
        wire,
        gathered,
        blocks,
        gathered.shape[1],
        RANKS=gathered.shape[0],
        **SHAPE,
    )
