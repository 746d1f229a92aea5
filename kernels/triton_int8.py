"""quantize, dequantize and reduce_quantized in Triton, in INT8, INT4 and FP8: one launch for a whole bucket."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .device_tables import address, device_table
from .slots import INT8_FORMAT, BlockFormat, Draws, SlotTable, spare, tile_elements
from .triton_residuals import load_residuals, rows_of, store_residuals
from .triton_stochastic import PER_COUNTER, drawing, int4_scales, random_bits, to_e4m3, to_whole
from .triton_tiles import (
    DTYPES,
    Launch,
    any_not_finite,
    convert,
    double,
    double_bits,
    launch,
    load_tile,
    overflows,
    repeat,
    repeat_sum,
    store_statistics,
    widen,
)

TINY = tl.constexpr(2.0**-100)
RECIPROCAL_127, RECIPROCAL_448 = tl.constexpr(1 / 127), tl.constexpr(1 / 448)
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no bits behind the point


@triton.jit
def _pointers(shard, index, blocks, FORM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Where block `index` of a shard (one of each a row) keeps its payload and its scale."""
    BITS: tl.constexpr = 4 if FORM == "int4" else 8
    payload = (shard + index.to(tl.int64) * (BLOCK * BITS // 8)).to(tl.pointer_type(tl.int8))
    scale = shard + tl.cast(blocks, tl.int64) * (BLOCK * BITS // 8)
    scale = scale.to(tl.pointer_type(tl.float32 if BITS == 8 else tl.bfloat16)) + index
    return payload[:, None] + tl.arange(0, WIDTH * BITS // 8), scale


@triton.jit
def _rounded_to_e4m3(values):
    """The nearest numbers of E4M3, ties to even, never -0; values are no larger than 448, but for rounding."""
    binade = tl.maximum(values.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    rounder = (binade + ((20 << 23) + (1 << 22))).to(tl.float32, bitcast=True)  # 1.5 * 2^20 of a value's power of two
    return (values + rounder) - rounder


@triton.jit
def _to_e4m3(values):
    """Numbers of E4M3 → their bytes."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    tiny = (tl.abs(values) * 512.0).to(tl.int32)
    code = tl.where(size >= (121 << 23), (size >> 20) - (120 << 3), tiny)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _from_e4m3(byte):
    """Bytes → numbers of E4M3."""
    bits = byte.to(tl.int32)
    code = bits & 0x7F
    tiny = (code.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
    size = tl.where(code >= 8, (code << 20) + (120 << 23), tiny)
    return (size | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _decode(shard, index, blocks, inside, FORM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    payload, scale = _pointers(shard, index, blocks, FORM, BLOCK, WIDTH)
    BITS: tl.constexpr = 4 if FORM == "int4" else 8
    byte = tl.arange(0, WIDTH * BITS // 8)
    quantized = tl.load(payload, mask=inside[:, None] & (byte < BLOCK * BITS // 8), other=0)
    if FORM == "int4":
        quantized = tl.interleave((quantized << 4) >> 4, quantized >> 4)
    steps = _from_e4m3(quantized) if FORM == "fp8" else quantized.to(tl.float32)
    return steps * widen(tl.load(scale, mask=inside, other=0.0), tl.float32)[:, None]


@triton.jit
def _scales(values, FORM: tl.constexpr, BY_CHANCE: tl.constexpr):
    """Of a block of FP32 values a row: whether it is finite and not tiny, its scale, and what it is multiplied by."""
    # As integers, magnitudes compare as the numbers do, with infinity and every NaN above them.
    bits = values.to(tl.int32, bitcast=True)
    if FORM == "int4" and not BY_CHANCE:
        largest = tl.max((bits & 0x7FFFFFFE) | tl.where(bits >= 0, 1, 0), axis=1)
    else:
        largest = tl.max(bits & 0x7FFFFFFF, axis=1)
    absmax = largest.to(tl.float32, bitcast=True)
    finite = largest < 0x7F800000
    normal = finite & (absmax >= TINY)
    if FORM == "fp8":
        scale, inverse = absmax * RECIPROCAL_448, tl.div_rn(448.0, tl.where(normal, absmax, 1.0))
    elif FORM == "int8":
        scale, inverse = absmax * RECIPROCAL_127, tl.div_rn(127.0, tl.where(normal, absmax, 1.0))
    elif BY_CHANCE:
        scale, inverse = int4_scales(largest, normal)
    else:
        eighth = ((largest - (3 << 23)) & -65536).to(tl.float32, bitcast=True)  # of as many bits as BF16 has
        scale = tl.where((largest & 1) == 1, -eighth, eighth)
        inverse = tl.div_rn(1.0, tl.where(normal, scale, 1.0))
    return normal, tl.where(finite, tl.where(normal, scale, 0.0), float("nan")), inverse


@triton.jit
def _encode(
    values, old, shard, index, blocks, inside, bits, FORM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store a block of FP32 values a row; returns what was lost, `old` where a block is not finite."""
    normal, scale, inverse = _scales(values, FORM, bits is not None)
    steps = values * inverse[:, None]
    if bits is not None:
        steps = tl.where(normal[:, None], steps, 0.0)
        rounded = to_e4m3(steps, bits) if FORM == "fp8" else to_whole(steps, bits)
    else:
        if FORM == "int4":
            steps = tl.minimum(steps, 7.0)
        rounded = _rounded_to_e4m3(steps) if FORM == "fp8" else (steps + MAGIC) - MAGIC
    rounded = tl.where(normal[:, None], rounded, 0.0)
    quantized = _to_e4m3(rounded) if FORM == "fp8" else rounded.to(tl.int8)

    BITS: tl.constexpr = 4 if FORM == "int4" else 8
    to_payload, to_scale = _pointers(shard, index, blocks, FORM, BLOCK, WIDTH)
    payload = quantized
    if FORM == "int4":
        low, high = tl.split(tl.reshape(quantized, [quantized.shape[0], WIDTH // 2, 2]))
        payload = (low & 15) | (high << 4)
    byte = tl.arange(0, WIDTH * BITS // 8)
    tl.store(to_payload, payload, mask=inside[:, None] & (byte < BLOCK * BITS // 8))
    tl.store(to_scale, convert(scale, to_scale.dtype.element_ty), mask=inside)
    # The last block clears the padding too: the scales that are missing from as many as fill 16 bytes.
    for extra in tl.static_range(1, 32 // BITS):
        padding = inside & (index == blocks - 1) & (index + extra < ((blocks + 32 // BITS - 1) & -(32 // BITS)))
        tl.store(to_scale + extra, tl.zeros_like(scale).to(to_scale.dtype.element_ty), mask=padding)
    return tl.where((scale == scale)[:, None], values - rounded * scale[:, None], old)


@triton.jit(do_not_specialize=["blocks", "size", "seed", "who"], do_not_specialize_on_alignment=["finite"])
def _quantize(
    wire, residuals, turn, size, finite, tiles, addresses, blocks, shard_size, keys, step, seed, who,
    dtype: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of one slot, a block a row, from its tensor to the wire."""
    if finite is not None:
        tl.store(finite, 1, mask=tl.program_id(0) == 0)
    tensor, place, count, extent = load_tile(tiles, addresses, dtype)
    first = place // BLOCK  # and first * BLOCK, unlike place, is seen to be a multiple of 16
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    element = row[:, None] * BLOCK + column
    inside = row * BLOCK < extent
    valid = (element < count) & (column < BLOCK)
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used.
    if (count == ROWS * BLOCK) & ((tensor & 15) == 0):
        aligned = tl.multiple_of(tensor.to(tl.pointer_type(dtype)), 16)
        loaded = tl.load(aligned + element, mask=(column < BLOCK)[None, :], other=0.0)
        values = widen(loaded, tl.float32)
    else:
        loaded = tl.load(tensor.to(tl.pointer_type(dtype)) + element, mask=valid, other=0.0)
        values = widen(loaded, tl.float32)
    old = tl.zeros_like(values)
    owned = inside[:, None] & (column < BLOCK)
    block = first.to(tl.int32) + row
    if residuals is not None:
        residual, new_residual = rows_of(residuals, turn, size, BLOCK)
        old = load_residuals(residual, first * BLOCK, element, block, size, owned, inside)
        values += tl.where(valid, old, 0.0)

    rank = block // blocks
    shard = wire + rank.to(tl.int64) * shard_size
    bits = None
    if keys is not None:
        counted = row[:, None] * BLOCK + tl.arange(0, WIDTH // PER_COUNTER) * PER_COUNTER
        bits = random_bits(keys, tiles, step, seed, who, counted)
    lost = _encode(values, old, shard, block - rank * blocks, blocks, inside, bits, FORM, BLOCK, WIDTH)
    if residuals is not None:
        store_residuals(new_residual, first * BLOCK, element, block, size, lost, owned, inside)


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

    def make() -> Launch | None:
        shape = _tile_shape(block, form)
        table = device_table(slots, shape["ROWS"] * block, wire.device)
        return launch(
            _quantize,
            len(table.tiles),
            wire.device,
            wire,
            residuals,
            turn,
            slots.total,
            finite,
            table.tiles,
            table.addresses("quantize", tensors),
            slots.total // block // shards,
            wire.numel() // shards,
            *drawing(slots, draws, wire.device),
            dtype=DTYPES[tensors[0].dtype] if tensors else tl.float32,
            **shape,
        )

    drawn = draws and (draws.seed, draws.who, address(draws.step))
    kept = None if residuals is None else residuals.dtype
    more = (shards, block, form, drawn, kept, *map(address, (residuals, turn, finite)))
    repeat("quantize", slots, wire, tensors, more, make)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["finite"])
def _dequantize(
    wire, tiles, addresses, blocks, shard_size, statistics, finite, turn,
    dtype: tl.constexpr, TOP: tl.constexpr,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One tile of one slot, a block a row, from the wire to its tensor."""
    tensor, place, count, _ = load_tile(tiles, addresses, dtype)
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    element = row[:, None] * BLOCK + column
    block = (place // BLOCK).to(tl.int32) + row
    rank = block // blocks
    shard = wire + rank.to(tl.int64) * shard_size
    index, inside = block - rank * blocks, row * BLOCK < count
    if statistics is not None:
        values = convert(_decode(shard, index, blocks, inside, FORM, BLOCK, WIDTH), dtype)
    if finite is not None:
        _, scale_at = _pointers(shard, index, blocks, FORM, BLOCK, WIDTH)
        scale = widen(tl.load(scale_at, mask=inside, other=0.0), tl.float32)
        odd = overflows(scale * TOP, dtype)
        tl.store(finite + tl.zeros_like(row), tl.zeros_like(row).to(tl.uint8), mask=odd)
    if turn is not None:
        tl.store(turn, 1 - tl.load(turn), mask=tl.program_id(0) == 0)
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used. Values
    # too, but for statistics: Triton 3.6 else computes them for both ways in which branches let threads share them out.
    if (count == ROWS * BLOCK) & ((tensor & 15) == 0):
        if statistics is None:
            values = convert(_decode(shard, index, blocks, inside, FORM, BLOCK, WIDTH), dtype)
        aligned = tl.multiple_of(tensor.to(tl.pointer_type(dtype)), 16)
        tl.store(aligned + element, values, mask=(column < BLOCK)[None, :])
    else:
        if statistics is None:
            values = convert(_decode(shard, index, blocks, inside, FORM, BLOCK, WIDTH), dtype)
        valid = (element < count) & (column < BLOCK)
        tl.store(tensor.to(tl.pointer_type(dtype)) + element, values, mask=valid)
    if statistics is not None:
        store_statistics(statistics, values, (element < count) & (column < BLOCK))


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

    def make() -> Launch | None:
        shape = _tile_shape(block, form)
        table = device_table(slots, shape["ROWS"] * block, wire.device, padding=False)
        return launch(
            _dequantize,
            len(table.tiles),
            wire.device,
            wire,
            table.tiles,
            table.addresses("dequantize", tensors),
            slots.total // block // shards,
            wire.numel() // shards,
            statistics,
            finite,
            turn,
            dtype=DTYPES[tensors[0].dtype] if tensors else tl.float32,
            TOP=form.top(by_chance),
            **shape,
        )

    more = (shards, block, form, by_chance, *map(address, (statistics, finite, turn)))
    repeat("dequantize", slots, wire, tensors, more, make)


@triton.jit(do_not_specialize=["blocks", "scale_bits", "flag_block", "seed", "who"])
def _reduce(
    received, shard, residuals, turn, blocks, shard_size, scale_bits, flag_block, tiles, keys, step, seed, who,
    RANKS: tl.constexpr, SPARE: tl.constexpr,
    FORM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A block a row: every rank's → their sum in rank order, scaled, encoded again."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    if tiles is None:
        index = tl.program_id(0) * ROWS + row
        inside = index < blocks
    else:
        tile = tiles + 5 * tl.program_id(0).to(tl.int64)
        index = (tl.load(tile + 2) // BLOCK).to(tl.int32) + row
        inside = row * BLOCK < tl.load(tile + 4)
    total = _decode(received, index, blocks, inside, FORM, BLOCK, WIDTH)
    other = received
    for _ in range(1, RANKS):
        other += shard_size
        total += _decode(other, index, blocks, inside, FORM, BLOCK, WIDTH)

    scale = double(scale_bits).to(tl.float32)
    values = total * scale
    if any_not_finite(total):
        small = _decode(received, index, blocks, inside, FORM, BLOCK, WIDTH) * (1 / SPARE)
        for _ in range(1, RANKS):
            received += shard_size
            small += _decode(received, index, blocks, inside, FORM, BLOCK, WIDTH) * (1 / SPARE)
        values = tl.where(tl.abs(total) < float("inf"), values, small * (scale * SPARE))
    old = tl.zeros_like(values)
    element = index.to(tl.int64)[:, None] * BLOCK + column
    owned = inside[:, None] & (column < BLOCK)
    if residuals is not None:
        elements = tl.cast(blocks, tl.int64) * BLOCK
        residual, new_residual = rows_of(residuals, turn, elements, BLOCK)
        old = load_residuals(residual, 0, element, index, elements, owned, inside)
        values += old
    flags = (index >= flag_block)[:, None]
    values = tl.where(flags, tl.where(total > 0.5, 1.0, 0.0), values)
    bits = None
    if keys is not None:
        counted = row[:, None] * BLOCK + tl.arange(0, WIDTH // PER_COUNTER) * PER_COUNTER
        bits = random_bits(keys, tiles, step, seed, who, counted)
    lost = _encode(values, old, shard, index, blocks, inside, bits, FORM, BLOCK, WIDTH)
    if residuals is not None:
        lost = tl.where(flags, 0.0, lost)
        store_residuals(new_residual, 0, element, index, elements, lost, owned, inside)


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

    def make() -> Launch | None:
        shape = _tile_shape(block, form)
        blocks = form.blocks(shard.numel(), block)
        tiles = None if slots is None else device_table(slots, shape["ROWS"] * block, shard.device).tiles
        return launch(
            _reduce,
            -(-blocks // shape["ROWS"]) if tiles is None else len(tiles),
            shard.device,
            received,
            shard,
            residuals,
            turn,
            blocks,
            shard.numel(),
            double_bits(scale),
            flag_block,
            tiles,
            *drawing(slots, draws, shard.device),
            RANKS=received.shape[0],
            SPARE=spare(received.shape[0]),
            **shape,
        )

    if slots is None:
        kept = None if residuals is None else residuals.dtype
        more = (scale, block, flag_block, form, kept, address(residuals), address(turn))
        repeat_sum("reduce_quantized", received, shard, more, make)
    else:  # which tables belong to
        make()


@cache
def _tile_shape(block: int, form: BlockFormat) -> dict[str, Any]:
    """The format, rows of a tile, elements of a block, columns of a tile: a power of two, as Triton asks."""
    width = triton.next_power_of_2(block)
    return {"FORM": form.name, "ROWS": tile_elements(block) // block, "BLOCK": block, "WIDTH": width}
