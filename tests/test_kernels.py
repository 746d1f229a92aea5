"""Every kernel backend over the same cases, by bits against the reference; then checks that do without it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastreduce import ops
from fastreduce.kernels import reference
from fastreduce.kernels.device_tables import device_table
from fastreduce.kernels.slots import FP16_BLOCK, FP16_BLOCK_BYTES, SlotTable, fp16_shard_bytes, tile_elements
from fastreduce.ops import backends
from fastreduce.ops.backends import Backend
from tests.support import tolerances

from .kernel_cases import (
    BACKENDS,
    BLOCKS,
    DTYPE_PAIRS,
    DTYPES,
    EXAMPLES,
    SIZES,
    STATISTICS_BLOCKS,
    STATISTICS_PAIRS,
    STATISTICS_SIZES,
    STRIDE,
    Memory,
    assert_same_bits,
    assert_same_wire,
    device_of,
    memory_order,
    slot_table,
    split_wire,
    values,
    wire_size,
)

# Triton's interpreter computes with numpy, which warns of every overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALES = (1.0, 1 / 3, 0.5)
GAPS = (3, 0, 1, 40)

# In units of absmax / 127: rint is off by 1/2; inverse and product are rounded before it, the constant 1/127, the
# scale and the decoding product after it, each by at most 2^-24 of at most 127.
INT8_BOUND = (0.5 + 127 * 5 * 2.0**-24) / 127


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.load(request.param)


@pytest.fixture
def memory(backend: Backend):
    memory = Memory(device_of(backend.name))
    yield memory
    memory.check()


def tensors_of(numels, dtype: torch.dtype, special: bool = True) -> list[Tensor]:
    return [values(numel, dtype, seed, special) for seed, numel in enumerate(numels)]


def expected_wire(tensors: list[Tensor], slots: SlotTable, dtype: torch.dtype, scale: float) -> Tensor:
    wire = torch.empty(slots.total, dtype=dtype)
    reference.flatten(tensors, slots, wire, scale)
    return wire


# Casts


@pytest.mark.parametrize(("dtype", "wire_dtype"), DTYPE_PAIRS, ids=str)
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


# Sum of shards


@pytest.mark.parametrize("world_size", [1, 2, 3])
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


# FP16 with block exponents


def fp16_size(slots: SlotTable, shards: int) -> int:
    return shards * fp16_shard_bytes(slots.total // shards // FP16_BLOCK)


def assert_same_fp16_wire(actual: Tensor, expected: Tensor, shards: int) -> None:
    """Two FP16 wires with block exponents that are equal by bits, part for part."""
    assert actual.numel() == expected.numel()
    if not actual.numel():
        return
    for mine, theirs in zip(actual.clone().cpu().view(shards, -1), expected.view(shards, -1), strict=True):
        parts = zip(reference._split_fp16(mine), reference._split_fp16(theirs), strict=True)
        for what, (a, b) in zip(("payload", "exponents", "padding"), parts, strict=True):
            assert_same_bits(a, b, what)


def fp16_tensors(numels, dtype: torch.dtype) -> list[Tensor]:
    """Ordinary numbers, and in the larger tensors blocks of every size that numbers have."""
    tensors = tensors_of(numels, dtype, special=False)
    for number, tensor in enumerate(tensors):
        for block, part in enumerate(tensor.split(FP16_BLOCK)):
            part.mul_(2.0 ** ((0, -30, 20, 100, -100, -140, 60, 0)[(number + block) % 8]))
    large = tensors[-1]
    edges = [2.0**-14, 65504.0, 65519.996, 65520.0, 2.0**-126, 2.0**-149, 3.4e38, torch.finfo(torch.float32).max]
    for block, edge in enumerate(edges[: large.numel() // FP16_BLOCK]):
        part = large[block * FP16_BLOCK :][:FP16_BLOCK]
        part.copy_(torch.linspace(-1, 1, FP16_BLOCK, dtype=torch.float64) * edge)
        part[77] = float(-np.nextafter(np.float32(edge), np.float32(0))) if block % 2 else edge
    for place, odd in ((-700, torch.nan), (-500, torch.inf), (-200, -torch.inf), (-1, torch.nan)):
        if large.numel() > 1000:
            large[place] = odd
    return tensors


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp16_blocks(backend, memory, dtype, shards):
    slots = slot_table(SIZES, FP16_BLOCK, [1, 0, 2], shards)
    tensors = fp16_tensors(SIZES, dtype)
    for shift, (summed, scale) in enumerate([(1, 1.0), (2, 0.5), (3, 1 / 3), (1000, 1 / 1000)][: shards + 1]):
        size = fp16_size(slots, shards)
        wire, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
        backend.flatten_fp16([memory.copy(t, shift) for t in tensors], slots, wire, shards, summed)
        reference.flatten_fp16(tensors, slots, expected, shards, summed)
        assert_same_fp16_wire(wire, expected, shards)

        targets = [memory.like(tensor, shift) for tensor in tensors]
        decoded = [torch.empty_like(tensor) for tensor in tensors]
        backend.unflatten_fp16(wire, shards, slots, targets, scale)
        reference.unflatten_fp16(expected, shards, slots, decoded, scale)
        for i, (target, want) in enumerate(zip(targets, decoded, strict=True)):
            assert_same_bits(target, want, f"tensor {i} for a sum of {summed}")


@pytest.mark.parametrize("tensor_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_ordinary_fp16_blocks_are_plain_fp16(backend, memory, tensor_dtype):
    """Where exponents are 0, payload and result are what `flatten` and `unflatten` make of a plain wire."""
    slots = slot_table([1000, 129, 640], FP16_BLOCK)
    tensors = [values(numel, tensor_dtype, numel, special=False).clamp(-60000, 60000) for numel in (1000, 129, 640)]
    for tensor in tensors:
        tensor[:: FP16_BLOCK // 2] = 3.0  # in every block
    tensors[2][384:512], tensors[2][400], tensors[2][401] = 70000.0, torch.inf, torch.nan
    wire = memory.empty(fp16_size(slots, 1), torch.uint8)
    backend.flatten_fp16([memory.copy(tensor) for tensor in tensors], slots, wire, 1, 1)
    payload, exponents, _ = reference._split_fp16(wire.cpu())
    assert exponents.tolist() == [127] * len(exponents)
    assert_same_bits(payload.flatten(), expected_wire(tensors, slots, torch.float16, 1.0))
    targets = [memory.like(tensor) for tensor in tensors]
    backend.unflatten_fp16(wire, 1, slots, targets, 1.0)
    plain = [torch.empty_like(tensor) for tensor in tensors]
    reference.unflatten(payload.flatten(), slots, plain, 1.0)
    for target, want in zip(targets, plain, strict=True):
        assert_same_bits(target, want)


@pytest.mark.parametrize("summed", [1, 2, 3, 1000])
def test_fp16_blocks_keep_their_precision_from_end_to_end_of_fp32(backend, memory, summed):
    """Each block's error is FP16's, relative to its largest magnitude: 2^-11, and nothing is left of 2^-38 of that."""
    blocks = 276 // (8 if STRIDE > 1 else 1)
    slots = slot_table([blocks * FP16_BLOCK], FP16_BLOCK)
    tensor = values(slots.total, torch.float64, 6, special=False).view(blocks, FP16_BLOCK)
    tensor = tensor / tensor.abs().amax(1, keepdim=True) * 2.0 ** torch.linspace(-149, 126.9, blocks)[:, None].floor()
    tensor = tensor.float().flatten()
    wire = memory.empty(fp16_size(slots, 1), torch.uint8)
    backend.flatten_fp16([memory.copy(tensor)], slots, wire, 1, summed)
    back = memory.like(tensor)
    backend.unflatten_fp16(wire, 1, slots, [back], 1.0)
    largest = tensor.view(blocks, FP16_BLOCK).abs().amax(1).repeat_interleave(FP16_BLOCK).double()
    ordinary = (largest >= 2.0**-14) & (largest < 65520)
    lowest = torch.maximum(ordinary * 2.0**-25, largest * 2.0**-38) * summed
    error = (back.cpu().double() - tensor.double()).abs()
    assert bool((error <= tensor.double().abs() * 2.0**-11 + lowest).all())


def received_fp16(world_size: int, numel: int) -> Tensor:
    """What ranks send to one: blocks of all sizes, some of them not finite on some ranks, some at FP32's end."""
    slots, rows = slot_table([numel], FP16_BLOCK), []
    for rank in range(world_size):
        (tensor,) = fp16_tensors([numel], torch.float32)
        tensor.mul_(1 + rank)[:: 3 + rank] *= -0.7
        tensor[rank * 300 :: 1999] = (torch.inf, torch.nan, -torch.inf)[rank % 3]
        tensor[130:140] = 3e38 if rank != 1 else -1e38
        rows.append(torch.empty(fp16_size(slots, 1), dtype=torch.uint8))
        reference.flatten_fp16([tensor], slots, rows[-1], 1, 1)
    return torch.stack(rows)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_reduce_fp16(backend, memory, world_size):
    for numel in (1, 2048, max(SIZES)):
        received = received_fp16(world_size, numel)
        for scale in (1 / world_size, 1.0, 1e-9):
            shard = memory.empty(received.shape[1], torch.uint8)
            expected = torch.empty(received.shape[1], dtype=torch.uint8)
            backend.reduce_fp16(memory.copy(received), shard, scale)
            reference.reduce_fp16(received, expected, scale)
            assert_same_fp16_wire(shard, expected, 1)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_share_exponents(backend, memory, world_size):
    for numel in (1, 2048, max(SIZES)):
        received = received_fp16(world_size, numel)
        blocks = received.shape[1] // FP16_BLOCK_BYTES
        gathered = torch.stack([reference._split_fp16(row)[1] for row in received])
        gathered = torch.nn.functional.pad(gathered, (0, -blocks % 16), value=255)
        for row in received:
            wire, expected = memory.copy(row), row.clone()
            backend.share_exponents(wire, memory.copy(gathered))
            reference.share_exponents(expected, gathered)
            assert_same_fp16_wire(wire, expected, 1)
            assert torch.equal(reference._split_fp16(expected)[1], gathered[:, :blocks].amax(0))


@pytest.mark.parametrize("ranks", [2, 3, 5, 64, 1000])
def test_sums_of_fp16_payloads_have_room(ranks):
    """What a transport adds up in FP16, in any order, does not overflow, whatever the ranks' magnitudes."""
    slots = slot_table([FP16_BLOCK * 6], FP16_BLOCK)
    size = fp16_size(slots, 1)
    wires = []
    for rank in range(ranks):
        tensor = torch.full((6, FP16_BLOCK), 1.0)
        tensor[0], tensor[1], tensor[2] = 65519.0, 60000.0, 3.4e38
        tensor[3], tensor[4] = 32767.0, 2e-8 if rank else 1e30
        wires.append(torch.empty(size, dtype=torch.uint8))
        reference.flatten_fp16([tensor.flatten()], slots, wires[-1], 1, ranks)
    gathered = torch.stack([reference._split_fp16(wire)[1] for wire in wires])
    for wire in wires:
        reference.share_exponents(wire, gathered)
    payloads = [reference._split_fp16(wire)[0] for wire in wires]
    one_by_one = payloads[0].clone()
    for payload in payloads[1:]:
        one_by_one += payload
    assert bool(one_by_one.isfinite().all())
    reference._split_fp16(wires[0])[0].copy_(one_by_one)
    target = torch.empty(slots.total)
    reference.unflatten_fp16(wires[0], 1, slots, [target], 1 / ranks)
    mean = torch.tensor([65519.0, 60000.0, 3.4e38, 32767.0, 1e30 / ranks, 1.0])
    bound = mean.abs() * (ranks + 2) * 2.0**-11
    assert bool(((target.view(6, -1) - mean[:, None]).abs() <= bound[:, None]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_of_fp16_blocks(backend, memory, dtype):
    slots = slot_table(STATISTICS_SIZES, FP16_BLOCK, [1, 0, 2], 2)
    tensors = fp16_tensors(STATISTICS_SIZES, dtype)
    wire = torch.empty(fp16_size(slots, 2), dtype=torch.uint8)
    reference.flatten_fp16(tensors, slots, wire, 2, 1)
    wire, kept = memory.copy(wire), []
    for shift in (0, 1):
        targets = [memory.like(tensor, shift) for tensor in tensors]
        statistics = statistics_of(memory, slots, dtype, FP16_BLOCK)
        backend.unflatten_fp16(wire, 2, slots, targets, 1.0, statistics)
        without = [memory.like(tensor) for tensor in tensors]
        backend.unflatten_fp16(wire, 2, slots, without, 1.0)
        for i, (target, other) in enumerate(zip(targets, without, strict=True)):
            assert_same_bits(target, other, f"tensor {i}")
        check_statistics(backend, statistics, targets, FP16_BLOCK)
        kept.append(statistics)
    assert_same_bits(kept[0].flatten(), kept[1].flatten(), "wherever tensors lie")


def test_empty_fp16_wires(backend, memory):
    slots = SlotTable(np.array([], np.int64), np.array([], np.int64), 0)
    wire = memory.empty(0, torch.uint8)
    backend.flatten_fp16([], slots, wire, 2, 1)
    backend.unflatten_fp16(wire, 2, slots, [], 1.0)
    backend.reduce_fp16(wire.view(2, 0), memory.empty(0, torch.uint8), 0.5)
    backend.share_exponents(wire, memory.empty(0, torch.uint8).view(2, 0))


@pytest.mark.parametrize("ranks", [2, 4096])
def test_one_flag_of_many_ranks_stays_above_zero(backend, memory, ranks):
    slots = slot_table([32], FP16_BLOCK)
    flags = torch.zeros(32)
    flags[16] = 1.0
    rows = torch.zeros(2, fp16_size(slots, 1), dtype=torch.uint8)
    reference.flatten_fp16([flags], slots, rows[0], 1, 1)
    reference.flatten_fp16([flags * 0 + torch.eye(32)[17]], slots, rows[1], 1, 1)
    shard, found = memory.empty(rows.shape[1], torch.uint8), memory.empty(32, torch.float32)
    backend.reduce_fp16(memory.copy(rows), shard, 1 / ranks)
    backend.unflatten_fp16(shard, 1, slots, [found], 1.0)
    assert (found.cpu() > 0).nonzero().flatten().tolist() == [16, 17]


# INT8


def residual_of(slots: SlotTable) -> Tensor:
    """A residual with numbers in the padding too: what is there must not get into the wire."""
    return values(slots.total, torch.float32, 99, special=False)


NO_RESIDUALS: tuple[list[Any], list[Any]] = ([None, None], [None, None])


def residuals_of(memory: Memory, old: Tensor, turn: int) -> tuple[list[Tensor], list[Tensor]]:
    """Residuals whose row `turn` is `old`, and the turn: those of a backend, and the reference's."""
    residuals = torch.full((2, old.numel()), torch.nan)
    residuals[turn] = old
    turns = torch.tensor([turn], dtype=torch.int32)
    return [memory.copy(residuals), memory.copy(turns)], [residuals, turns]


def int8_tensors(numels, dtype: torch.dtype) -> list[Tensor]:
    """Ordinary numbers and, in the larger tensors, blocks of every special kind."""
    tensors = tensors_of(numels, dtype, special=False)
    for tensor, odd in zip(tensors[-3:], (torch.inf, torch.nan, -torch.inf), strict=True):
        tensor[tensor.numel() // 2] = odd
    large = tensors[-1]
    large[:128] = 0.0
    large[128:256] *= -0.0
    large[256:384] = 2.0**-101  # in FP16 zero
    large[384:512] = 2.0**-100
    large[512:640] = torch.finfo(dtype).max
    large[640:768] = torch.linspace(-127, 127, 128).to(dtype)
    large[768:1024] = (torch.arange(256.0) - 128) / 2  # half of them are ties
    return tensors


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_quantize_and_dequantize(backend, memory, block, shards, with_residual):
    _check_quantize(backend, memory, torch.float32, block, shards, with_residual)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float32], ids=str)
def test_quantize_and_dequantize_other_dtypes(backend, memory, dtype):
    _check_quantize(backend, memory, dtype, 128, 2, True)


def _check_quantize(backend, memory, dtype, block, shards, with_residual):
    slots = slot_table(SIZES, block, [1, 0, 2], shards)
    tensors = int8_tensors(SIZES, dtype)
    mine, theirs = residuals_of(memory, residual_of(slots), shards % 2) if with_residual else NO_RESIDUALS
    size = wire_size(slots, shards, block)
    wire, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
    backend.quantize([memory.copy(t, shards - 1) for t in tensors], slots, wire, shards, block, *mine)
    reference.quantize(tensors, slots, expected, shards, block, *theirs)
    assert_same_wire(wire, expected, shards, block)
    if with_residual:
        assert_same_bits(mine[0], theirs[0], "residuals")
        assert int(mine[1]) == shards % 2

    targets = [memory.like(tensor, shards - 1) for tensor in tensors]
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    backend.dequantize(wire, shards, block, slots, targets)
    reference.dequantize(expected, shards, block, slots, decoded)
    for i, (target, want) in enumerate(zip(targets, decoded, strict=True)):
        assert_same_bits(target, want, f"tensor {i}")


def received_of(world_size: int, numel: int, block: int) -> Tensor:
    """What `world_size` ranks send to one: shards of `numel` elements, some of their blocks not finite."""
    slots, shards = slot_table([numel], block), []
    for rank in range(world_size):
        tensor = values(numel, torch.float32, rank, special=False)
        tensor[rank * block // 2 :: 7 * block + 1] = (torch.inf, torch.nan, -torch.inf)[rank % 3]
        shards.append(torch.empty(wire_size(slots, 1, block), dtype=torch.uint8))
        reference.quantize([tensor], slots, shards[-1], 1, block, None, None)
    return torch.stack(shards)


@pytest.mark.parametrize("with_residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("block", BLOCKS)
def test_reduce_quantized(backend, memory, block, world_size, with_residual):
    blocks = 2051 // block + 1
    received = received_of(world_size, blocks * block, block)
    old = values(blocks * block, torch.float32, 77, special=False)
    for turn, (flag_block, scale) in enumerate([(0, 1.0), (blocks // 2, 1 / world_size), (blocks + 5, 1 / 3)]):
        mine, theirs = residuals_of(memory, old, turn % 2) if with_residual else NO_RESIDUALS
        shard = memory.empty(received.shape[1], torch.uint8)
        expected = torch.empty(received.shape[1], dtype=torch.uint8)
        backend.reduce_quantized(memory.copy(received), shard, scale, block, flag_block, *mine)
        reference.reduce_quantized(received, expected, scale, block, flag_block, *theirs)
        assert_same_wire(shard, expected, 1, block)
        if with_residual:
            assert_same_bits(mine[0], theirs[0], "residuals")


def test_empty_quantized_wires(backend, memory):
    slots = SlotTable(np.array([], np.int64), np.array([], np.int64), 0)
    wire = memory.empty(0, torch.uint8)
    backend.quantize([], slots, wire, 2, 128, None, None)
    backend.dequantize(wire, 2, 128, slots, [])
    backend.reduce_quantized(wire.view(2, 0), memory.empty(0, torch.uint8), 0.5, 128, 0, None, None)


def test_an_int8_sum_that_overflows_is_no_reason_for_an_infinite_average(backend, memory):
    block, numel = 128, 640
    slots, rows = slot_table([numel], block), []
    for rank in range(3):
        tensor = values(numel, torch.float32, rank, special=False)
        tensor[:300], tensor[130] = 3e38 if rank != 1 else -1e38, torch.nan if rank == 1 else 1.0
        rows.append(torch.empty(wire_size(slots, 1, block), dtype=torch.uint8))
        reference.quantize([tensor], slots, rows[-1], 1, block, None, None)
    received = torch.stack(rows)
    old = values(numel, torch.float32, 77, special=False)
    for with_residual in (False, True):
        mine, theirs = residuals_of(memory, old, 1) if with_residual else NO_RESIDUALS
        shard, expected = memory.empty(len(rows[0]), torch.uint8), torch.empty(len(rows[0]), dtype=torch.uint8)
        backend.reduce_quantized(memory.copy(received), shard, 1 / 3, block, 4, *mine)
        reference.reduce_quantized(received, expected, 1 / 3, block, 4, *theirs)
        assert_same_wire(shard, expected, 1, block)
        _, scales, _ = split_wire(shard, 1, block)
        assert (~scales.isfinite()).flatten().tolist() == [False, True, False, False, False]
        assert bool((scales[0, [0, 2]] * 127 > 1.6e38).all())
        if with_residual:
            assert_same_bits(mine[0], theirs[0], "residuals")


def test_int8_error_stays_in_its_bound(backend, memory):
    block, slots = 128, slot_table([4099, 640], 128)
    tensors = [values(4099, torch.float32, 5, special=False), torch.linspace(-1e30, 1e30, 640)]
    decoded, _, _ = _round_trip(backend, memory, tensors, slots, block)
    for tensor, back in zip(tensors, decoded, strict=True):
        padded = torch.zeros(-(-tensor.numel() // block) * block, dtype=torch.float64)
        padded[: tensor.numel()] = tensor
        absmax = padded.view(-1, block).abs().amax(dim=1).repeat_interleave(block)[: tensor.numel()]
        assert bool(((back.double() - tensor.double()).abs() <= absmax * INT8_BOUND).all())


def test_int8_arithmetic_step_by_step(backend, memory):
    """The payload where it is hardest to hit, at ties of v * inverse and one ulp beside them, as numpy rounds."""
    block, blocks = 16, 1500 // STRIDE
    random = np.random.default_rng(0)
    absmax = random.uniform(1, 2, (blocks, 1)).astype(np.float32)
    numbers = ((random.integers(-126, 126, (blocks, block)) + 0.5) * (absmax / 127.0)).astype(np.float32)
    numbers = (numbers.view(np.int32) + random.integers(-1, 2, numbers.shape, np.int32)).view(np.float32)
    numbers[:, 5] = -absmax[:, 0]
    slots = slot_table([blocks * block], block)
    inputs = [torch.from_numpy(numbers.flatten())]
    _, new, wire = _round_trip(backend, memory, inputs, slots, block, torch.zeros(slots.total))
    payload, scales, _ = split_wire(wire, 1, block)
    scale, inverse = absmax * np.float32(1 / 127), np.float32(127) / absmax
    quantized = np.rint(numbers * inverse)
    assert_same_bits(scales, torch.from_numpy(scale.reshape(1, blocks)), "scales")
    assert_same_bits(payload, torch.from_numpy(quantized.astype(np.int8)), "payload")
    assert_same_bits(new, torch.from_numpy((numbers - quantized * scale).flatten()), "residual")


def test_blocks_that_are_not_finite_arrive_so_and_no_others(backend, memory):
    block, slots = 128, slot_table([1000, 300], 128)
    tensors = tensors_of([1000, 300], torch.float32, special=False)
    tensors[0][130], tensors[0][999], tensors[1][0] = torch.nan, torch.inf, -torch.inf
    old = residual_of(slots)
    decoded, new, _ = _round_trip(backend, memory, tensors, slots, block, old)
    bad = [torch.zeros(1000, dtype=torch.bool), torch.zeros(300, dtype=torch.bool)]
    bad[0][128:256] = bad[0][896:] = bad[1][:128] = True
    for back, mask in zip(decoded, bad, strict=True):
        assert torch.equal(~back.isfinite(), mask)
    assert bool(new.isfinite().all())
    assert_same_bits(new[128:256], old[128:256], "residual of a block that is not finite")


def test_residual_is_what_was_lost(backend, memory):
    block, slots = 128, slot_table([4099], 128)
    tensor, old = values(4099, torch.float32, 3, special=False), residual_of(slots)
    (back,), new, _ = _round_trip(backend, memory, [tensor], slots, block, old)
    kept = new[:4099].double()
    sent = (tensor + old[:4099]).double()
    # Of what happens after the addition only the last subtraction rounds: by half an ulp of the residual.
    assert bool(((kept + back.double() - sent).abs() <= kept.abs() * 2.0**-24).all())
    assert bool((kept != 0).any())
    assert_same_bits(new[4099:], torch.zeros(slots.total - 4099), "padding of the residual")


def test_padding_of_a_residual_is_not_read(backend, memory):
    slots, old = slot_table([100], 128), torch.full((128,), torch.nan)
    tensor, old[:100] = values(100, torch.float32, 1, special=False), 0.0
    (back,), new, _ = _round_trip(backend, memory, [tensor], slots, 128, old)
    assert bool(back.isfinite().all())
    assert_same_bits(new[100:], torch.zeros(28))


def test_tiny_blocks_wait_in_the_residual(backend, memory):
    slots = slot_table([100], 16)
    tensor = torch.full((100,), 2.0**-101)
    (back,), new, wire = _round_trip(backend, memory, [tensor], slots, 16, torch.zeros(slots.total))
    assert_same_bits(back, torch.zeros(100))
    assert_same_bits(new[:100], tensor)
    assert not bool(wire.any())


def _round_trip(backend, memory, tensors, slots, block, old=None):
    """What arrives, the new residual and the wire, all on the CPU."""
    wire = memory.empty(wire_size(slots, 1, block), torch.uint8)
    (residuals, turn), _ = NO_RESIDUALS if old is None else residuals_of(memory, old, 1)
    backend.quantize([memory.copy(tensor) for tensor in tensors], slots, wire, 1, block, residuals, turn)
    targets = [memory.like(tensor) for tensor in tensors]
    backend.dequantize(wire, 1, block, slots, targets)
    return [memory_order(target) for target in targets], None if old is None else residuals[0].cpu(), wire.cpu()


def test_one_rank_of_many_keeps_its_flag(backend, memory):
    """1/200 of a flag would vanish beside a whole one: flags are not averaged."""
    block, slots, world_size = 16, slot_table([32], 16), 200
    rows = []
    for rank in range(world_size):
        flags = torch.zeros(32)
        flags[16] = 1.0  # used on every rank
        flags[17] = float(rank == 150)
        rows.append(torch.empty(wire_size(slots, 1, block), dtype=torch.uint8))
        reference.quantize([flags], slots, rows[-1], 1, block, None, None)
    shard = memory.empty(len(rows[0]), torch.uint8)
    backend.reduce_quantized(memory.copy(torch.stack(rows)), shard, 1 / world_size, block, 1, None, None)
    payload, scales, _ = split_wire(shard, 1, block)
    decoded = payload[0, 1].float() * scales[0, 1]
    assert torch.equal(decoded > 0.5, torch.tensor([True, True] + [False] * 14))


# Statistics


def statistics_of(memory: Memory, slots: SlotTable, dtype: torch.dtype, block: int = 0) -> Tensor:
    rows, columns = ops.statistics_shape(slots, block)
    return memory.empty(rows * columns, ops.statistics_dtype(dtype)).view(rows, columns)


def check_statistics(backend: Backend, found: Tensor, tensors: list[Tensor], block: int = 0) -> None:
    """Held against counts and FP64 sums of what is in the tensors, tile for tile, in slot order."""
    tile = tile_elements(block)
    tiles = [part for tensor in tensors for part in memory_order(tensor).split(tile) if part.numel()]
    assert found.shape == (len(tiles), 2)
    for i, (part, (count, squares)) in enumerate(zip(tiles, found.cpu().double(), strict=True)):
        exact = part.double().square().sum()
        assert count == (~part.isfinite()).sum(), f"tile {i}"
        if count or exact > torch.finfo(found.dtype).max:
            assert not squares.isfinite(), f"tile {i}"
        else:
            bound = tolerances.sum_of_squares(exact, tile, found.dtype)
            assert (squares - exact).abs() <= bound, f"tile {i}: {squares} for {exact}"
    if backend.name in ("reference", "numba_cpu"):
        assert_same_bits(found.flatten(), _reference_statistics(tensors, found, block), "statistics")


def _reference_statistics(tensors: list[Tensor], like: Tensor, block: int) -> Tensor:
    expected = torch.empty_like(like)
    reference._count_and_sum([memory_order(tensor) for tensor in tensors], tile_elements(block), expected)
    return expected.flatten()


@pytest.mark.parametrize(("dtype", "wire_dtype"), STATISTICS_PAIRS, ids=str)
def test_statistics_of_unflatten(backend, memory, dtype, wire_dtype):
    slots = slot_table(STATISTICS_SIZES, gaps=GAPS)
    for special in (False, True):
        tensors = [values(numel, dtype, seed, special) for seed, numel in enumerate(STATISTICS_SIZES)]
        wire = memory.copy(expected_wire(tensors, slots, wire_dtype, 2.0**-8))
        kept = []
        for shift in (0, 1):
            targets = [memory.like(tensor, shift) for tensor in tensors]
            statistics = statistics_of(memory, slots, dtype)
            backend.unflatten(wire, slots, targets, 1 / 3, statistics)
            without = [memory.like(tensor) for tensor in tensors]
            backend.unflatten(wire, slots, without, 1 / 3)
            for i, (target, other) in enumerate(zip(targets, without, strict=True)):
                assert_same_bits(target, other, f"tensor {i}")
            check_statistics(backend, statistics, targets)
            kept.append(statistics)
        assert_same_bits(kept[0].flatten(), kept[1].flatten(), "wherever tensors lie")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", STATISTICS_BLOCKS)
def test_statistics_of_dequantize(backend, memory, dtype, block):
    slots = slot_table(STATISTICS_SIZES, block, [1, 0, 2], 2)
    tensors = int8_tensors(STATISTICS_SIZES, dtype)
    wire = torch.empty(wire_size(slots, 2, block), dtype=torch.uint8)
    reference.quantize(tensors, slots, wire, 2, block, None, None)
    wire, kept = memory.copy(wire), []
    for shift in (0, 1):
        targets = [memory.like(tensor, shift) for tensor in tensors]
        statistics = statistics_of(memory, slots, dtype, block)
        backend.dequantize(wire, 2, block, slots, targets, statistics)
        without = [memory.like(tensor) for tensor in tensors]
        backend.dequantize(wire, 2, block, slots, without)
        for i, (target, other) in enumerate(zip(targets, without, strict=True)):
            assert_same_bits(target, other, f"tensor {i}")
        check_statistics(backend, statistics, targets, block)
        kept.append(statistics)
    assert_same_bits(kept[0].flatten(), kept[1].flatten(), "wherever tensors lie")


def test_statistics_of_nothing(backend, memory):
    for numels in ([], [0, 0]):
        slots = SlotTable(np.zeros(len(numels), np.int64), np.array(numels, np.int64), 0)
        tensors, statistics = [torch.empty(0) for _ in numels], statistics_of(memory, slots, torch.float32)
        assert statistics.shape == (0, 2)
        backend.unflatten(memory.empty(0, torch.float16), slots, tensors, 1.0, statistics)
        backend.dequantize(memory.empty(0, torch.uint8), 2, 128, slots, tensors, statistics)


def test_statistics_do_not_depend_on_threads(backend, memory):
    """Not on how many Numba and torch may use, nor on which one runs the kernel, nor on what else runs."""
    numels = [4099, 2048, 1]
    slots = slot_table(numels)
    tensors = [values(numel, torch.float32, seed, special=False) for seed, numel in enumerate(numels)]
    wire = memory.copy(expected_wire(tensors, slots, torch.bfloat16, 1.0))

    def run(_: Any = None) -> Tensor:
        targets = [memory.like(tensor) for tensor in tensors]
        statistics = statistics_of(memory, slots, torch.float32)
        backend.unflatten(wire, slots, targets, 1.0, statistics)
        return statistics.flatten()

    threads, numba_threads = torch.get_num_threads(), numba.get_num_threads()
    expected = run()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            numba.set_num_threads(min(count, numba_threads))
            assert_same_bits(run(), expected, f"{count} threads")
    finally:
        torch.set_num_threads(threads)
        numba.set_num_threads(numba_threads)
    if backend.name == "numba_cpu":
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(run, range(8)):
                assert_same_bits(found, expected, "beside another thread")


# Any shape


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_shape(name, data):
    backend, memory = backends.load(name), Memory(device_of(name))
    draw = data.draw
    numels = draw(st.lists(st.integers(0, 400), max_size=6), label="numels")
    gaps = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3), label="gaps")
    block = draw(st.sampled_from([16, 32, 48, 112, 128]), label="block")
    shards = draw(st.integers(1, 4), label="shards")
    dtype, wire_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    slots = slot_table(numels, block, gaps, shards)
    tensors = tensors_of(numels, dtype)

    wire = memory.empty(slots.total, wire_dtype)
    backend.flatten([memory.copy(tensor) for tensor in tensors], slots, wire, 1 / shards)
    assert_same_bits(wire, expected_wire(tensors, slots, wire_dtype, 1 / shards), "flat")

    blocked = slot_table(numels, FP16_BLOCK, gaps, shards)
    size = fp16_size(blocked, shards)
    halves, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
    backend.flatten_fp16([memory.copy(tensor) for tensor in tensors], blocked, halves, shards, 1)
    reference.flatten_fp16(tensors, blocked, expected, shards, 1)
    assert_same_fp16_wire(halves, expected, shards)

    mine, theirs = residuals_of(memory, residual_of(slots), shards % 2)
    size = wire_size(slots, shards, block)
    quantized, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
    copies = [memory.copy(tensor) for tensor in tensors]
    backend.quantize(copies, slots, quantized, shards, block, *mine)
    reference.quantize(tensors, slots, expected, shards, block, *theirs)
    assert_same_wire(quantized, expected, shards, block)
    assert_same_bits(mine[0], theirs[0], "residuals")
    memory.check()


# The tables of the GPU backends


def test_device_tables():
    numels = [3] * 1000 + [100_000]
    slots = slot_table(numels)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = device_table(slots, 2048, device)
    assert table is device_table(slots, 2048, device)
    assert len(table.tiles) == 1000 + -(-100_000 // 2048), "a tensor must cost the tiles that it fills"

    tensors = [torch.zeros(numel, device=device) for numel in numels]
    uploaded = table.addresses("flatten", tensors)
    assert uploaded.tolist() == [0, *(tensor.data_ptr() for tensor in tensors)]
    assert table.addresses("flatten", tensors) is uploaded
    tensors[7] = torch.zeros(3, device=device)
    assert table.addresses("flatten", tensors).tolist()[8] == tensors[7].data_ptr()
