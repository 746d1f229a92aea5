"""flatten, unflatten and reduce_shards in Triton: one launch for a whole bucket."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .slots import SlotTable
from .triton_convert import DTYPES, convert, device_table, double_bits, launch, widen

TILE = 2048


@triton.jit
def _scaled(values, scale_bits, COMPUTE: tl.constexpr):
    scale = tl.cast(scale_bits, tl.int64).to(tl.float64, bitcast=True).to(COMPUTE)
    return widen(values, COMPUTE) * scale


@triton.jit(do_not_specialize=["scale_bits"])
def _move(
    wire, addresses, places, tiles, scale_bits, DTYPE: tl.constexpr, TO_WIRE: tl.constexpr, TILE: tl.constexpr
):
    """One tile of one slot, from its tensor to the wire with the padding after it, or back."""
    WIRE: tl.constexpr = wire.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if DTYPE == tl.float64 or WIRE == tl.float64 else tl.float32
    tiles += 2 * tl.program_id(0).to(tl.int64)
    slot, start = tl.load(tiles), tl.load(tiles + 1)
    places += 3 * slot
    numel = tl.load(places + 1) - start
    tensor = tl.load(addresses + slot) + start * (DTYPE.primitive_bitwidth // 8)
    flat = wire.to(tl.int64) + (tl.load(places) + start) * (WIRE.primitive_bitwidth // 8)
    lane = tl.arange(0, TILE)
    # Pointers are made inside the branches: what multiple_of says holds for a value wherever it is used.
    if (numel >= TILE) & (((tensor | flat) & 15) == 0):
        outside = tl.multiple_of(tensor.to(tl.pointer_type(DTYPE)), 16) + lane
        inside = tl.multiple_of(flat.to(tl.pointer_type(WIRE)), 16) + lane
        if TO_WIRE:
            tl.store(inside, convert(_scaled(tl.load(outside), scale_bits, COMPUTE), WIRE))
        else:
            tl.store(outside, convert(_scaled(tl.load(inside), scale_bits, COMPUTE), DTYPE))
    else:
        outside = tensor.to(tl.pointer_type(DTYPE)) + lane
        inside = flat.to(tl.pointer_type(WIRE)) + lane
        mask = lane < numel
        if TO_WIRE:
            values = _scaled(tl.load(outside, mask=mask), scale_bits, COMPUTE)
            extent = tl.load(places + 2) - start
            tl.store(inside, convert(tl.where(mask, values, 0.0), WIRE), mask=lane < extent)
        else:
            values = _scaled(tl.load(inside, mask=mask), scale_bits, COMPUTE)
            tl.store(outside, convert(values, DTYPE), mask=mask)


def flatten(tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float) -> None:
    """Many tensors → one wire in its dtype, scaled; padding becomes zero."""
    _launch_move("flatten", tensors, slots, wire, scale)


def unflatten(wire: Tensor, slots: SlotTable, tensors: Sequence[Tensor], scale: float) -> None:
    """One wire → many tensors in their dtypes, scaled."""
    _launch_move("unflatten", tensors, slots, wire, scale)


def _launch_move(
    operation: str, tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, scale: float
) -> None:
    table = device_table(slots, TILE, wire.device)
    launch(
        _move,
        len(table.tiles),
        wire.device,
        wire,
        table.addresses(operation, tensors),
        table.places,
        table.tiles,
        double_bits(scale),
        DTYPE=DTYPES[tensors[0].dtype if tensors else wire.dtype],
        TO_WIRE=operation == "flatten",
        TILE=TILE,
    )


@triton.jit(do_not_specialize=["scale_bits", "ranks"])
def _reduce(received, shard, ranks, numel, scale_bits, TILE: tl.constexpr):
    """One tile of every rank's shard → their sum in rank order, scaled."""
    WIRE: tl.constexpr = shard.dtype.element_ty
    COMPUTE: tl.constexpr = tl.float64 if WIRE == tl.float64 else tl.float32
    lane = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = lane < numel
    total = widen(tl.load(received + lane, mask=mask), COMPUTE)
    for _ in range(1, ranks):
        received += numel
        total += widen(tl.load(received + lane, mask=mask), COMPUTE)
    tl.store(shard + lane, convert(_scaled(total, scale_bits, COMPUTE), WIRE), mask=mask)


def reduce_shards(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype."""
    numel = shard.numel()
    launch(
        _reduce,
        triton.cdiv(numel, TILE),
        shard.device,
        received,
        shard,
        received.shape[0],
        numel,
        double_bits(scale),
        TILE=TILE,
    )
