"""Casts and sums of shards in a dtype: every backend over the same cases, by bits against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels import reference
from fastreduce.kernels.slots import SlotTable
from fastreduce.ops.backends import Backend

from .cases import (
    DTYPE_PAIRS,
    DTYPES,
    GAPS,
    QUIET,
    SIZES,
    STRIDE,
    Memory,
    assert_same_bits,
    expected_wire,
    slot_table,
    tensors_of,
    values,
)

pytestmark = QUIET


SCALES = (1.0, 1 / 3, 0.5)
SHORT = {
    *((torch.float32, wire_dtype) for wire_dtype in DTYPES[1:]),
    (torch.float64, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [pytest.param(*pair, marks=[pytest.mark.long] * (pair not in SHORT)) for pair in DTYPE_PAIRS],
    ids=str,
)
def test_flatten_and_unflatten(backend, memory, dtype, wire_dtype):
    slots = slot_table(SIZES, gaps=GAPS)
    tensors = tensors_of(SIZES, dtype)
    for shift, scale in enumerate(SCALES):
        sources = [memory.copy(tensor, shift) for tensor in tensors]
        wire = memory.empty(slots.total, wire_dtype)
        backend.flatten(sources, slots, wire, scale)
        expected = expected_wire(tensors, slots, wire_dtype, scale)
        assert_same_bits(wire, expected, f"wire at scale {scale}")

        targets = [memory.like(tensor, shift) for tensor in tensors]
        expected_targets = [torch.empty_like(tensor) for tensor in tensors]
        backend.unflatten(wire, slots, targets, scale)
        reference.unflatten(expected, slots, expected_targets, scale)
        for i, (target, wanted) in enumerate(zip(targets, expected_targets, strict=True)):
            assert_same_bits(target, wanted, f"tensor {i} at scale {scale}")


@pytest.mark.parametrize("shift", [0, 1])
def test_alignment_of_the_wire_does_not_matter(backend, memory, shift):
    slots = slot_table([4099, 2048, 2049], gaps=[0, 1])
    tensors = tensors_of(slots.numels, torch.float32)
    wire = memory.empty(slots.total, torch.float16, shift)
    backend.flatten([memory.copy(tensor) for tensor in tensors], slots, wire, 0.5)
    assert_same_bits(wire, expected_wire(tensors, slots, torch.float16, 0.5))


def test_tensors_travel_in_memory_order(backend, memory):
    image = torch.arange(2 * 3 * 4 * 5, dtype=torch.float32).view(2, 3, 4, 5)
    tensors = [
        torch.tensor(7.0),
        image.to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(5.0),
    ]
    slots = slot_table([tensor.numel() for tensor in tensors])
    wire = memory.empty(slots.total, torch.float32)
    backend.flatten([memory.copy(tensor) for tensor in tensors], slots, wire, 1.0)
    by_hand = [
        torch.tensor([7.0]),
        image.permute(0, 2, 3, 1).flatten(),
        torch.arange(12.0),
        torch.arange(5.0),
    ]
    assert_same_bits(wire, torch.cat(by_hand))
    targets = [memory.like(tensor) for tensor in tensors]
    backend.unflatten(wire, slots, targets, 1.0)
    for target, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(target.cpu(), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_may_be_its_own_slot(backend, memory, dtype):
    slots = slot_table([129, 4099, 0, 16], gaps=[2, 0, 13])
    tensors = tensors_of(slots.numels, dtype)
    wire = memory.empty(slots.total, dtype)
    places = zip(slots.offsets.tolist(), slots.numels.tolist(), tensors, strict=True)
    views = [wire[offset : offset + numel].copy_(tensor) for offset, numel, tensor in places]
    expected = expected_wire(tensors, slots, dtype, 1 / 3)
    backend.flatten(views, slots, wire, 1 / 3)
    assert_same_bits(wire, expected)
    twice = [torch.empty_like(tensor) for tensor in tensors]
    reference.unflatten(expected, slots, twice, 1 / 3)
    backend.unflatten(wire, slots, views, 1 / 3)
    for view, wanted in zip(views, twice, strict=True):
        assert_same_bits(view, wanted)


@pytest.mark.parametrize("total", [0, 37])
def test_no_slots(backend, memory, total):
    slots = SlotTable(np.array([], np.int64), np.array([], np.int64), total)
    wire = memory.empty(total, torch.float32)
    backend.flatten([], slots, wire, 1.0)
    assert_same_bits(wire, torch.zeros(total))
    backend.unflatten(wire, slots, [], 1.0)


def test_new_addresses_are_noticed(backend, memory):
    slots = slot_table([100, 3])
    wire = memory.empty(slots.total, torch.float32)
    for step in range(3):
        tensors = [values(100, torch.float32, step), values(3, torch.float32, step + 9)]
        backend.flatten([memory.copy(tensor) for tensor in tensors], slots, wire, 1.0)
        assert_same_bits(wire, torch.cat(tensors), f"step {step}")


def test_fp16_conversion_is_numpys(backend, memory):
    """Every finite FP16, the midpoint to the next one and its FP32 neighbours, to FP16."""
    halves = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).to(torch.float32)
    middle = (halves[:-1] + halves[1:]) / 2
    inputs = torch.cat([halves, middle, _next_to(middle, 1), _next_to(middle, -1), _next_to(halves[1:], -1)])[::STRIDE]
    inputs = torch.cat([inputs, -inputs, torch.tensor([65519.996, 65520.0, -65520.0, 1e38, torch.inf])])
    with np.errstate(over="ignore"):
        expected = torch.from_numpy(inputs.numpy().astype(np.float16))
    assert_same_bits(_cast(backend, memory, inputs, torch.float16), expected)


def test_bf16_conversion_is_torchs(backend, memory):
    """All exponents and signs with mantissas around the rounding position, to BF16 and back."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int64)
    high = torch.arange(0, 0x10000, 7 * STRIDE, dtype=torch.int64) << 16
    bits = (high[:, None] | low).flatten()
    inputs = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    narrow = inputs.to(torch.bfloat16)
    assert_same_bits(_cast(backend, memory, inputs, torch.bfloat16), narrow)
    assert_same_bits(_cast(backend, memory, narrow, torch.float32), narrow.to(torch.float32))


def test_fp64_reaches_16_bits_through_fp32(backend, memory):
    """Just above a tie of the 16-bit format in FP64, a tie in FP32: two roundings give the even neighbour."""
    for dtype, digits in [(torch.float16, 11), (torch.bfloat16, 8)]:
        inputs = torch.tensor([1 + 2.0**-digits + 2.0**-40], dtype=torch.float64)
        assert_same_bits(_cast(backend, memory, inputs, dtype), torch.ones(1, dtype=dtype))


def test_fp64_scale_is_not_rounded_to_fp32(backend, memory):
    inputs = values(100, torch.float64, 0, special=False)
    assert_same_bits(_cast(backend, memory, inputs, torch.float64, 0.1), inputs * 0.1)


def _next_to(numbers: Tensor, step: int) -> Tensor:
    return (numbers.view(torch.int32) + step).view(torch.float32)


def _cast(backend: Backend, memory: Memory, inputs: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    wire = memory.empty(inputs.numel(), dtype)
    backend.flatten([memory.copy(inputs)], slot_table([inputs.numel()]), wire, scale)
    return wire.cpu()


@pytest.mark.parametrize("world_size", [*(pytest.param(size, marks=pytest.mark.long) for size in (1, 2)), 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reduce_shards(backend, memory, dtype, world_size):
    for numel, scale in [(0, 1.0), (1, 1 / 3), (129, 0.5), (4099, 1 / 3), (4096, 1.0)]:
        received = values(world_size * numel, dtype, numel).view(world_size, numel)
        shard, expected = memory.empty(numel, dtype), torch.empty(numel, dtype=dtype)
        backend.reduce_shards(memory.copy(received), shard, scale)
        reference.reduce_shards(received, expected, scale)
        assert_same_bits(shard, expected, f"{numel} elements")


def test_reduce_shards_sums_in_rank_order(backend, memory):
    received = values(9 * 500, torch.float16, 1, special=False).view(9, 500)
    total = received[0].numpy().astype(np.float32)
    for row in received[1:]:
        total = total + row.numpy().astype(np.float32)
    with np.errstate(over="ignore"):
        expected = torch.from_numpy((total * np.float32(1 / 9)).astype(np.float16))
    shard = memory.empty(500, torch.float16)
    backend.reduce_shards(memory.copy(received), shard, 1 / 9)
    assert_same_bits(shard, expected)
    # In another order the same numbers give other bits, or this test would show nothing.
    assert not np.array_equal(total, received.numpy().astype(np.float32)[::-1].sum(axis=0))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_sum_that_overflows_is_no_reason_for_an_infinite_average(backend, memory, dtype, world_size):
    large = torch.finfo(dtype).max
    received = values(world_size * 300, dtype, 4, special=False).view(world_size, 300)
    received[:, 7], received[:, 100] = large * 0.6, -large
    received[0, 50:60], received[1, 50:60], received[-1, 50:60] = large, large, -large
    received[:, 120], received[0, 121] = torch.inf, torch.nan
    shard, expected = memory.empty(300, dtype), torch.empty(300, dtype=dtype)
    for scale in (1 / world_size, 0.5, 1.0):
        backend.reduce_shards(memory.copy(received), shard, scale)
        reference.reduce_shards(received, expected, scale)
        assert_same_bits(shard, expected, f"scale {scale}")
        if scale == 1 / world_size:
            exact = (received.double() / world_size).sum(0) if dtype != torch.float64 else expected
            odd = torch.tensor([120, 121])
            assert torch.equal((~shard.cpu().isfinite()).nonzero().flatten(), odd)
            close = (shard.cpu().double() - exact).abs() <= exact.abs() * world_size * torch.finfo(dtype).eps
            assert bool((close | ~exact.isfinite() | (exact.abs() < 1)).all())
