"""flatten, unflatten and reduce_shards in Triton: one launch for a whole bucket."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .device_tables import address, device_table
from .slots import Draws, SlotTable, spare, tile_elements
from .triton_stochastic import PER_COUNTER, drawing, random_bits, to_bf16
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

TILE = tile_elements()


@triton.jit
def _scaled(values, scale_bits, compute: tl.constexpr):
    scale = double(scale_bits).to(compute)
    return widen(values, compute) * scale


@triton.jit(do_not_specialize=["scale_bits", "seed", "who"], do_not_specialize_on_alignment=["finite"])
def _move(
    wire, tiles, addresses, scale_bits, statistics, finite, keys, step, seed, who,
    dtype: tl.constexpr, TO_WIRE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one slot, from its tensor to the wire with the padding after it, or back (with its statistics)."""
    wire_dtype: tl.constexpr = wire.dtype.element_ty
    compute: tl.constexpr = tl.float64 if dtype == tl.float64 or wire_dtype == tl.float64 else tl.float32
    tensor, place, count, extent = load_tile(tiles, addresses, dtype)
    flat = wire.to(tl.int64) + place * (wire_dtype.primitive_bitwidth // 8)
    lane = tl.arange(0, TILE)
    if TO_WIRE and finite is not None:
        tl.store(finite, 1, mask=tl.program_id(0) == 0)
    if keys is not None:
        bits = random_bits(keys, tiles, step, seed, who, tl.arange(0, TILE // PER_COUNTER) * PER_COUNTER)
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used.
    if (count == TILE) & (((tensor | flat) & 15) == 0):
        tensor_at = tl.multiple_of(tensor.to(tl.pointer_type(dtype)), 16) + lane
        wire_at = tl.multiple_of(flat.to(tl.pointer_type(wire_dtype)), 16) + lane
        if TO_WIRE:
            values = _scaled(tl.load(tensor_at), scale_bits, compute)
            if keys is not None:
                values = to_bf16(values.to(tl.float32), bits)
            tl.store(wire_at, convert(values, wire_dtype))
        else:
            scaled = _scaled(tl.load(wire_at), scale_bits, compute)
            values = convert(scaled, dtype)
            tl.store(tensor_at, values)
            if finite is not None:
                note_finite(finite, scaled, dtype)
    else:
        tensor_at = tensor.to(tl.pointer_type(dtype)) + lane
        wire_at = flat.to(tl.pointer_type(wire_dtype)) + lane
        mask = lane < count
        if TO_WIRE:
            values = _scaled(tl.load(tensor_at, mask=mask), scale_bits, compute)
            if keys is not None:
                values = to_bf16(values.to(tl.float32), bits)
            tl.store(wire_at, convert(tl.where(mask, values, 0.0), wire_dtype), mask=lane < extent)
        else:
            scaled = _scaled(tl.load(wire_at, mask=mask, other=0.0), scale_bits, compute)
            values = convert(scaled, dtype)
            tl.store(tensor_at, values, mask=mask)
            if finite is not None:
                note_finite(finite, scaled, dtype)
    # Here and not in the branches, so that the order of the sum does not depend on where memory lies.
    if statistics is not None:
        store_statistics(statistics, values, lane < count)


def flatten(
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    finite: Tensor | None = None,
    draws: Draws | None = None,
) -> None:
    """Many tensors → one wire in its dtype, scaled; padding becomes zero, `finite` 1."""
    _launch_move("flatten", tensors, slots, wire, scale, None, finite, draws)


def unflatten(
    wire: Tensor,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    scale: float,
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    """One wire → many tensors in their dtypes, scaled (and their statistics); `finite` becomes 0 if they are not."""
    _launch_move("unflatten", tensors, slots, wire, scale, statistics, finite)


def _launch_move(
    operation: str,
    tensors: Sequence[Tensor],
    slots: SlotTable,
    wire: Tensor,
    scale: float,
    statistics: Tensor | None,
    finite: Tensor | None,
    draws: Draws | None = None,
) -> None:
    def make() -> Launch | None:
        table = device_table(slots, TILE, wire.device, padding=operation == "flatten")
        return launch(
            _move,
            len(table.tiles),
            wire.device,
            wire,
            table.tiles,
            table.addresses(operation, tensors),
            double_bits(scale),
            statistics,
            finite,
            *drawing(slots, draws, wire.device),
            dtype=DTYPES[tensors[0].dtype if tensors else wire.dtype],
            TO_WIRE=operation == "flatten",
            TILE=TILE,
        )

    more = (scale, address(statistics), address(finite), draws and (draws.seed, draws.who, address(draws.step)))
    repeat(operation, slots, wire, tensors, more, make)


@triton.jit(do_not_specialize=["scale_bits", "seed", "who"])
def _reduce(
    received, shard, numel, scale_bits, tiles, keys, step, seed, who,
    RANKS: tl.constexpr, SPARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of every rank's shard → their sum in rank order, scaled."""
    wire_dtype: tl.constexpr = shard.dtype.element_ty
    compute: tl.constexpr = tl.float64 if wire_dtype == tl.float64 else tl.float32
    if tiles is None:
        lane = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        mask = lane < numel
    else:
        row = tiles + 5 * tl.program_id(0).to(tl.int64)
        lane = tl.multiple_of(tl.load(row + 2), 16) + tl.arange(0, TILE)
        mask = tl.arange(0, TILE) < tl.multiple_of(tl.load(row + 4).to(tl.int32), 16)
    total = widen(tl.load(received + lane, mask=mask, other=0.0), compute)
    other = received
    for _ in range(1, RANKS):
        other += numel
        total += widen(tl.load(other + lane, mask=mask, other=0.0), compute)
    values = _scaled(total, scale_bits, compute)
    if any_not_finite(total):
        small = widen(tl.load(received + lane, mask=mask), compute) * (1 / SPARE)
        for _ in range(1, RANKS):
            received += numel
            small += widen(tl.load(received + lane, mask=mask), compute) * (1 / SPARE)
        scale = double(scale_bits).to(compute)
        values = tl.where(tl.abs(total) < float("inf"), values, small * (scale * SPARE))
    if keys is not None:
        element = tl.arange(0, TILE // PER_COUNTER) * PER_COUNTER
        values = to_bf16(values, random_bits(keys, tiles, step, seed, who, element))
    tl.store(shard + lane, convert(values, wire_dtype), mask=mask)


def reduce_shards(
    received: Tensor, shard: Tensor, scale: float, slots: SlotTable | None = None, draws: Draws | None = None
) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype.

    `slots`, of the shard, come with `draws`.
    """

    def make() -> Launch | None:
        numel = shard.numel()
        tiles = None if slots is None else device_table(slots, TILE, shard.device).tiles
        return launch(
            _reduce,
            -(-numel // TILE) if tiles is None else len(tiles),
            shard.device,
            received,
            shard,
            numel,
            double_bits(scale),
            tiles,
            *drawing(slots, draws, shard.device),
            RANKS=received.shape[0],
            SPARE=spare(received.shape[0]),
            TILE=TILE,
        )

    if slots is None:
        repeat_sum("reduce_shards", received, shard, (scale,), make)
    else:  # which tables belong to
        make()
