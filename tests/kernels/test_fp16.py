"""FP16 with block exponents: every backend by bits against the reference, and what the format keeps of a number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels import reference
from fastreduce.kernels.slots import FP16_BLOCK, FP16_BLOCK_BYTES, SlotTable

from .cases import (
    DTYPES,
    QUIET,
    SIZES,
    STRIDE,
    assert_same_bits,
    assert_same_fp16_wire,
    expected_wire,
    fp16_size,
    fp16_tensors,
    slot_table,
    values,
)

pytestmark = QUIET


@pytest.mark.parametrize("shards", [*(pytest.param(shards, marks=pytest.mark.long) for shards in (1, 2)), 3])
@pytest.mark.parametrize(
    "dtype", [*DTYPES[:2], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[2:])], ids=str
)
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


@pytest.mark.parametrize("summed", [1, *(pytest.param(summed, marks=pytest.mark.long) for summed in (2, 3)), 1000])
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


@pytest.mark.parametrize(
    "world_size",
    [*(pytest.param(size, marks=pytest.mark.long) for size in (1, 2)), 3, pytest.param(5, marks=pytest.mark.long)],
)
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


def test_empty_fp16_wires(backend, memory):
    slots = SlotTable(np.array([], np.int64), np.array([], np.int64), 0)
    wire = memory.empty(0, torch.uint8)
    backend.flatten_fp16([], slots, wire, 2, 1)
    backend.unflatten_fp16(wire, 2, slots, [], 1.0)
    backend.reduce_fp16(wire.view(2, 0), memory.empty(0, torch.uint8), 0.5)
    backend.share_exponents(wire, memory.empty(0, torch.uint8).view(2, 0))


@pytest.mark.parametrize("ranks", [2, pytest.param(4096, marks=pytest.mark.long)])
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
