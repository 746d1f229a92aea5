"""Every kernel in plain torch: readable, obviously right, the oracle of the tests (see README.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .reference_stochastic import int4_scale, random_bits, to_bf16, to_e4m3, to_whole
from .slots import (
    FP8_FORMAT,
    FP16_BLOCK,
    FP16_BLOCK_BYTES,
    INT4_FORMAT,
    INT8_FORMAT,
    BlockFormat,
    Draws,
    ExponentRule,
    SlotTable,
    exponent_rule,
    fp16_shard_bytes,
    shard_bytes,
    spare,
    tile_elements,
)
from .torch_residuals import decode_residuals, encode_residuals

TINY = 2.0**-100


def _memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as one 1-D view, in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _with_slots(tensors: Sequence[Tensor], slots: SlotTable) -> Iterator[tuple[Tensor, slice]]:
    """Each tensor, and its elements of the flat."""
    for tensor, offset, numel in zip(tensors, slots.offsets.tolist(), slots.numels.tolist(), strict=True):
        yield tensor, slice(offset, offset + numel)


def _compute_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in (a, b) else torch.float32


def _convert(values: Tensor, dtype: torch.dtype) -> Tensor:
    if values.dtype == torch.float64 and dtype in (torch.float16, torch.bfloat16):
        values = values.to(torch.float32)
    return values.to(dtype)


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
    bits = None if draws is None else random_bits(slots, draws, wire.device)
    end = 0
    for tensor, slot in _with_slots(tensors, slots):
        compute = _compute_dtype(tensor.dtype, wire.dtype)
        factor = torch.tensor(scale, dtype=compute, device=wire.device)
        wire[end : slot.start] = 0
        values = _memory_order(tensor).to(compute) * factor
        if bits is None:
            wire[slot] = _convert(values, wire.dtype)
        else:
            wire[slot] = to_bf16(values.to(torch.float32), bits[slot])
        end = slot.stop
    wire[end:] = 0


def unflatten(
    wire: Tensor,
    slots: SlotTable,
    tensors: Sequence[Tensor],
    scale: float,
    statistics: Tensor | None = None,
    finite: Tensor | None = None,
) -> None:
    """One wire → many tensors in their dtypes, scaled (and their statistics); `finite` becomes 0 if they are not."""
    for tensor, slot in _with_slots(tensors, slots):
        compute = _compute_dtype(tensor.dtype, wire.dtype)
        factor = torch.tensor(scale, dtype=compute, device=wire.device)
        values = _convert(wire[slot].to(compute) * factor, tensor.dtype)
        _memory_order(tensor).copy_(values)
        _note_finite(finite, values)
    if statistics is not None:
        _count_and_sum(tensors, tile_elements(), statistics)


def _note_finite(finite: Tensor | None, values: Tensor) -> None:
    if finite is not None:
        finite.mul_(values.isfinite().all())


def _count_and_sum(tensors: Sequence[Tensor], tile: int, statistics: Tensor) -> None:
    """Each tile's count of non-finite elements and its sum of squares, in the order of `numba_cpu`."""
    lanes = 64 // statistics.element_size()
    padded = [torch.nn.functional.pad(_memory_order(tensor), (0, -tensor.numel() % tile)) for tensor in tensors]
    if not len(statistics):
        return
    values = torch.cat(padded).to(statistics.dtype).view(-1, tile // lanes, lanes)
    total = values.new_zeros(len(values), lanes)
    for row in values.unbind(1):
        total = total + row * row
    while total.shape[1] > 1:
        first, second = total.chunk(2, dim=1)
        total = first + second
    statistics[:, 0] = (~values.isfinite()).sum((1, 2))
    statistics[:, 1] = total[:, 0]


def reduce_shards(
    received: Tensor, shard: Tensor, scale: float, slots: SlotTable | None = None, draws: Draws | None = None
) -> None:
    """world_size shards → their sum in rank order, scaled once, in the wire dtype.

    `slots`, of the shard, come with `draws`.
    """
    compute = _compute_dtype(shard.dtype, shard.dtype)
    average, _ = _average([row.to(compute) for row in received], scale)
    if slots is not None and draws is not None:
        shard.copy_(to_bf16(average, random_bits(slots, draws, shard.device)))
    else:
        shard.copy_(_convert(average, shard.dtype))


def _average(terms: Sequence[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """The sum of the ranks' terms times `scale`, and the plain sum.

    Where that sum is not finite, terms are made small first: what overflows then is infinite as an average too.
    """
    room = spare(len(terms))
    total, small = terms[0], terms[0] / room
    for term in terms[1:]:
        total, small = total + term, small + term / room
    factor = torch.tensor(scale, dtype=total.dtype, device=total.device)
    return torch.where(total.isfinite(), total * factor, small * (factor * room)), total


def _split_shard(shard: Tensor, block: int, form: BlockFormat) -> tuple[Tensor, Tensor, Tensor]:
    """The payload `[blocks, bytes of one]` int8, the scales `[blocks]` in their dtype and the padding of one shard."""
    blocks = form.blocks(shard.numel(), block)
    assert shard_bytes(blocks, block, form) == shard.numel()
    ends = blocks * form.payload_bytes(block), blocks * form.scale_bytes
    payload, scales, padding = shard.split([*ends, shard.numel() - sum(ends)])
    dtype = torch.bfloat16 if form is INT4_FORMAT else torch.float32
    return payload.view(torch.int8).view(blocks, form.payload_bytes(block)), scales.view(dtype), padding


def _encode(
    values: Tensor, shard: Tensor, block: int, old: Tensor | None, form: BlockFormat, bits: Tensor | None
) -> Tensor:
    """FP32 values → one quantized shard, by chance with random bits; returns what was lost (`old` if not finite)."""
    payload, scales, padding = _split_shard(shard, block, form)
    values = values.view(-1, block)
    absmax = values.abs().amax(dim=1) if values.numel() else values.new_zeros(0)
    finite = values.isfinite().all(dim=1)
    normal = finite & (absmax >= TINY)
    if form is INT4_FORMAT and bits is not None:
        scale, inverse = int4_scale(torch.where(normal, absmax, 1.0))
    else:
        scale, inverse = _scales(values, torch.where(normal, absmax, 1.0), form)
    steps = torch.where(normal[:, None], values * inverse[:, None], 0.0)
    if bits is not None and form is FP8_FORMAT:
        quantized = to_e4m3(steps, bits.view(-1, block)).to(torch.float8_e4m3fn)
    elif bits is not None:
        quantized = to_whole(steps, bits.view(-1, block)).to(torch.int8)
    elif form is FP8_FORMAT:
        quantized = (steps.to(torch.float8_e4m3fn).to(torch.float32) + 0.0).to(torch.float8_e4m3fn)  # no -0
    else:
        quantized = (steps.round().clamp(max=7) if form is INT4_FORMAT else steps.round()).to(torch.int8)
    scale = torch.where(finite, torch.where(normal, scale, 0.0), torch.nan)
    payload.copy_(_packed(quantized) if form is INT4_FORMAT else quantized.view(torch.int8))
    scales.copy_(scale)
    padding.zero_()
    lost = values - quantized.to(torch.float32) * scale[:, None]
    kept = torch.zeros_like(lost) if old is None else old.view(-1, block)
    return torch.where(finite[:, None], lost, kept).flatten()


def _scales(values: Tensor, absmax: Tensor, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """The scales of blocks, and what their values are multiplied by: the largest magnitude has the largest code.

    INT4's have a sign: the largest magnitude has the lowest code, -8.
    """
    if form is not INT4_FORMAT:
        # Not `127.0 / …`: torch computes that as 127 times a rounded reciprocal.
        return absmax * (1 / form.largest), torch.full_like(absmax, form.largest) / absmax
    bits = values.view(torch.int32)
    largest = (bits & 0x7FFFFFFE | (bits >= 0)).amax(dim=1) if values.numel() else absmax.to(torch.int32)
    eighth = (largest - (3 << 23) & -(1 << 16)).view(torch.float32)
    scale = torch.where(largest & 1 == 1, -eighth, eighth)
    return scale, torch.ones_like(scale) / scale


def _packed(quantized: Tensor) -> Tensor:
    """Two codes a byte, the first one in the low bits."""
    return quantized[:, ::2] & 15 | quantized[:, 1::2] << 4


def _unpacked(payload: Tensor) -> Tensor:
    return torch.stack([payload << 4 >> 4, payload >> 4], dim=2).flatten(1)


def _decode(shard: Tensor, block: int, form: BlockFormat) -> Tensor:
    payload, scales, _ = _split_shard(shard, block, form)
    quantized = payload.view(torch.float8_e4m3fn) if form is FP8_FORMAT else payload
    if form is INT4_FORMAT:
        quantized = _unpacked(payload)
    return (quantized.to(torch.float32) * scales.to(torch.float32)[:, None]).flatten()


def _row(residuals: Tensor | None, turn: Tensor | None, elements: int, block: int) -> Tensor | None:
    """The residuals that count, FP32 `[elements]`."""
    if residuals is None or turn is None:
        return None
    row = residuals.index_select(0, turn)[0]
    if row.dtype is torch.uint8:
        codes, exponents, _ = row.tensor_split([elements, elements + elements // block])
        return decode_residuals(codes.view(torch.int8), exponents, block)
    return row.to(torch.float32)


def _set_other_row(residuals: Tensor | None, turn: Tensor | None, values: Tensor, block: int) -> None:
    if residuals is None or turn is None:
        return
    row = values.to(torch.bfloat16) if residuals.dtype is torch.bfloat16 else values
    if residuals.dtype is torch.uint8:
        row = residuals.new_zeros(residuals.shape[1])
        codes, exponents, _ = row.tensor_split([len(values), len(values) + len(values) // block])
        encode_residuals(values, codes.view(torch.int8), exponents, block)
    residuals.index_copy_(0, 1 - turn.to(torch.int64), row[None])


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
    if not slots.total:
        return
    bits = None if draws is None else random_bits(slots, draws, wire.device)
    residual = _row(residuals, turn, slots.total, block)
    values = torch.zeros(slots.total, dtype=torch.float32, device=wire.device)
    kept = torch.zeros_like(values)
    for tensor, slot in _with_slots(tensors, slots):
        values[slot] = _memory_order(tensor).to(torch.float32)
        if residual is not None:
            values[slot] += residual[slot]
    size = slots.total // shards
    for rank, shard in enumerate(wire.view(shards, -1)):
        elements = slice(rank * size, (rank + 1) * size)
        old = None if residual is None else residual[elements]
        drawn = None if bits is None else bits[elements]
        kept[elements] = _encode(values[elements], shard, block, old, form, drawn)
    _set_other_row(residuals, turn, kept, block)


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
    if not slots.total:
        return
    if finite is not None and tensors:
        scales = [_split_shard(shard, block, form)[1] for shard in wire.view(shards, -1)]
        _note_finite(finite, _convert(torch.cat(scales).float() * form.top(by_chance), tensors[0].dtype))
    if turn is not None:
        turn.bitwise_xor_(1)
    values = torch.cat([_decode(shard, block, form) for shard in wire.view(shards, -1)])
    for tensor, slot in _with_slots(tensors, slots):
        _memory_order(tensor).copy_(values[slot])
    if statistics is not None:
        _count_and_sum(tensors, tile_elements(block), statistics)


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
    if not shard.numel():
        return
    values, total = _average([_decode(row, block, form) for row in received], scale)
    residual = _row(residuals, turn, len(values), block)
    if residual is not None:
        values = values + residual
    flags = flag_block * block
    values[flags:] = (total[flags:] > 0.5).to(torch.float32)
    bits = None if slots is None or draws is None else random_bits(slots, draws, shard.device)
    lost = _encode(values, shard, block, residual, form, bits)
    lost[flags:] = 0
    _set_other_row(residuals, turn, lost, block)


# FP16 with block exponents


def _split_fp16(shard: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The payload `[blocks, 128]` FP16, the exponent bytes `[blocks]` and the padding of one shard."""
    blocks = shard.numel() // FP16_BLOCK_BYTES
    assert fp16_shard_bytes(blocks) == shard.numel()
    payload, exponents, padding = shard.split(
        [blocks * 2 * FP16_BLOCK, blocks, shard.numel() - blocks * FP16_BLOCK_BYTES]
    )
    return payload.view(torch.float16).view(blocks, FP16_BLOCK), exponents, padding


def _power(exponents: Tensor) -> Tensor:
    """2^(byte - 127) for each byte from 1 to 254."""
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def _encode_fp16(values: Tensor, shard: Tensor, rule: ExponentRule) -> None:
    """FP32 values → one shard."""
    payload, exponents, padding = _split_fp16(shard)
    values = values.view(-1, FP16_BLOCK)
    magnitudes = values.view(torch.int32) & 0x7FFFFFFF
    largest = magnitudes.amax(dim=1) if values.numel() else magnitudes.new_zeros(0)
    ordinary = ((largest >= rule.low) & (largest < rule.high)) | (largest >= 0x7F800000)
    exponents.copy_(torch.where(ordinary, rule.ordinary, ((largest >> 23) + rule.lift).clamp(min=1)))
    payload.copy_(values * _power(254 - exponents)[:, None])
    padding.zero_()


def _decode_fp16(shard: Tensor) -> Tensor:
    payload, exponents, _ = _split_fp16(shard)
    return (payload.to(torch.float32) * _power(exponents)[:, None]).flatten()


def flatten_fp16(
    tensors: Sequence[Tensor], slots: SlotTable, wire: Tensor, shards: int, summed: int, finite: Tensor | None = None
) -> None:
    """Many tensors → one FP16 wire with block exponents, for a transport that adds up `summed` of them (1: none).

    `finite` becomes 1.
    """
    if not slots.total:
        return
    if finite is not None:
        finite.fill_(1)
    values = torch.zeros(slots.total, dtype=torch.float32, device=wire.device)
    for tensor, slot in _with_slots(tensors, slots):
        values[slot] = _memory_order(tensor).to(torch.float32)
    for part, shard in zip(values.view(shards, -1), wire.view(shards, -1), strict=True):
        _encode_fp16(part, shard, exponent_rule(summed))


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
    if not slots.total:
        return
    parts = [_split_fp16(shard) for shard in wire.view(shards, -1)]
    payload = torch.cat([part[0].flatten() for part in parts])
    powers = _power(torch.cat([part[1] for part in parts]))
    for tensor, slot in _with_slots(tensors, slots):
        compute = _compute_dtype(tensor.dtype, torch.float16)
        factors = powers.to(compute) * torch.tensor(scale, dtype=compute, device=wire.device)
        values = payload[slot].to(compute) * factors.repeat_interleave(FP16_BLOCK)[slot]
        values = _convert(values, tensor.dtype)
        _memory_order(tensor).copy_(values)
        _note_finite(finite, values)
    if statistics is not None:
        _count_and_sum(tensors, tile_elements(FP16_BLOCK), statistics)


def reduce_fp16(received: Tensor, shard: Tensor, scale: float) -> None:
    """world_size FP16 shards → their sum in rank order, scaled once, with exponents of its own."""
    if shard.numel():
        average, _ = _average([_decode_fp16(row) for row in received], scale)
        _encode_fp16(average, shard, exponent_rule(1))


def share_exponents(wire: Tensor, gathered: Tensor) -> None:
    """One shard and all ranks' exponents `[world_size, blocks or more]` → the shard with the largest of each block."""
    payload, exponents, _ = _split_fp16(wire)
    if not exponents.numel():
        return
    shared = gathered[:, : exponents.numel()].amax(dim=0)
    less = (shared.to(torch.int32) - exponents.to(torch.int32)).clamp(max=126)
    payload.copy_(payload.to(torch.float32) * _power(127 - less)[:, None])
    exponents.copy_(shared)
