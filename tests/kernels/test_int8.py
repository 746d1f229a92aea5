"""INT8, INT4 and FP8: every backend over the same cases, by bits against the reference; then checks without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce import ops
from fastreduce.kernels import reference
from fastreduce.kernels.slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT, BlockFormat, SlotTable

from .cases import (
    BLOCKS,
    NO_RESIDUALS,
    QUIET,
    SIZES,
    STRIDE,
    assert_same_bits,
    assert_same_wire,
    case_name,
    int8_tensors,
    memory_order,
    residual_of,
    residuals_of,
    slot_table,
    split_wire,
    tensors_of,
    values,
    wire_size,
)

pytestmark = QUIET


# In units of absmax / 127: rint is off by 1/2; inverse and product are rounded before it, the constant 1/127, the
# scale and the decoding product after it, each by at most 2^-24 of at most 127.
INT8_BOUND = (0.5 + 127 * 5 * 2.0**-24) / 127
# An element of the other sign than the largest, and as large, has the code 7 of a scale of an eighth, less BF16's rest.
INT4_BOUND = 1 - 7 / 8 * (1 - 2.0**-7) + 2.0**-23
# Half of 2^-9, E4M3's smallest step, in 448; beside half a unit of an element's last of 4 digits.
FP8_BOUND, FP8_RELATIVE = 2.0**-10 / 448, 2.0**-4 + 2.0**-21
BOUNDS = {INT8_FORMAT: (INT8_BOUND, 0.0), INT4_FORMAT: (INT4_BOUND, 0.0), FP8_FORMAT: (FP8_BOUND, FP8_RELATIVE)}
DEFAULTS = [(INT8_FORMAT, 128), (INT4_FORMAT, 32), (FP8_FORMAT, 128)]
CASES = [
    pytest.param(
        form,
        block,
        count,
        with_residual,
        id=f"{form.name}-{block}-{count}-{'residual' if with_residual else 'plain'}",
        marks=[] if count == 3 and (with_residual or (form, block) in DEFAULTS) else pytest.mark.long,
    )
    for form, block in BLOCKS
    for count in (1, 2, 3)
    for with_residual in (False, True)
]
OTHER_DTYPES = [torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(("form", "block", "shards", "with_residual"), CASES)
def test_quantize_and_dequantize(backend, memory, form, block, shards, with_residual):
    _check_quantize(backend, memory, torch.float32, form, block, shards, with_residual)


@pytest.mark.parametrize(
    ("form", "block", "dtype"),
    [
        pytest.param(*blocks, dtype, marks=[pytest.mark.long] * (i != j))
        for i, blocks in enumerate(DEFAULTS)
        for j, dtype in enumerate(OTHER_DTYPES)
    ],
    ids=case_name,
)
def test_quantize_and_dequantize_other_dtypes(backend, memory, form, block, dtype):
    _check_quantize(backend, memory, dtype, form, block, 2, True)


def _check_quantize(backend, memory, dtype, form, block, shards, with_residual):
    slots = slot_table(SIZES, block, [1, 0, 2], shards)
    tensors = int8_tensors(SIZES, dtype)
    mine, theirs = residuals_of(memory, residual_of(slots), shards % 2) if with_residual else NO_RESIDUALS
    size = wire_size(slots, shards, block, form)
    wire, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
    backend.quantize([memory.copy(t, shards - 1) for t in tensors], slots, wire, shards, block, *mine, form=form)
    reference.quantize(tensors, slots, expected, shards, block, *theirs, form=form)
    assert_same_wire(wire, expected, shards, block, form)
    if with_residual:
        assert_same_bits(mine[0], theirs[0], "residuals")
        assert int(mine[1]) == shards % 2

    targets = [memory.like(tensor, shards - 1) for tensor in tensors]
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    backend.dequantize(wire, shards, block, slots, targets, form=form)
    reference.dequantize(expected, shards, block, slots, decoded, form=form)
    for i, (target, want) in enumerate(zip(targets, decoded, strict=True)):
        assert_same_bits(target, want, f"tensor {i}")


def received_of(world_size: int, numel: int, form: BlockFormat, block: int) -> Tensor:
    """What `world_size` ranks send to one: shards of `numel` elements, some of their blocks not finite."""
    slots, shards = slot_table([numel], block), []
    for rank in range(world_size):
        tensor = values(numel, torch.float32, rank, special=False)
        tensor[rank * block // 2 :: 7 * block + 1] = (torch.inf, torch.nan, -torch.inf)[rank % 3]
        shards.append(torch.empty(wire_size(slots, 1, block, form), dtype=torch.uint8))
        reference.quantize([tensor], slots, shards[-1], 1, block, None, None, form=form)
    return torch.stack(shards)


@pytest.mark.parametrize(("form", "block", "world_size", "with_residual"), CASES)
def test_reduce_quantized(backend, memory, form, block, world_size, with_residual):
    blocks = 2051 // block + 1
    received = received_of(world_size, blocks * block, form, block)
    old = values(blocks * block, torch.float32, 77, special=False)
    for turn, (flag_block, scale) in enumerate([(0, 1.0), (blocks // 2, 1 / world_size), (blocks + 5, 1 / 3)]):
        mine, theirs = residuals_of(memory, old, turn % 2) if with_residual else NO_RESIDUALS
        shard = memory.empty(received.shape[1], torch.uint8)
        expected = torch.empty(received.shape[1], dtype=torch.uint8)
        backend.reduce_quantized(memory.copy(received), shard, scale, block, flag_block, *mine, form=form)
        reference.reduce_quantized(received, expected, scale, block, flag_block, *theirs, form=form)
        assert_same_wire(shard, expected, 1, block, form)
        if with_residual:
            assert_same_bits(mine[0], theirs[0], "residuals")


def test_empty_quantized_wires(backend, memory):
    slots = SlotTable(np.array([], np.int64), np.array([], np.int64), 0)
    wire = memory.empty(0, torch.uint8)
    backend.quantize([], slots, wire, 2, 128, None, None)
    backend.dequantize(wire, 2, 128, slots, [])
    backend.reduce_quantized(wire.view(2, 0), memory.empty(0, torch.uint8), 0.5, 128, 0, None, None)


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_a_sum_that_overflows_is_no_reason_for_an_infinite_average(backend, memory, form, block):
    numel = 5 * block
    slots, rows = slot_table([numel], block), []
    for rank in range(3):
        tensor = values(numel, torch.float32, rank, special=False)
        tensor[: 2 * block + 40] = 3e38 if rank != 1 else -1e38
        tensor[block + 2] = torch.nan if rank == 1 else 1.0
        rows.append(torch.empty(wire_size(slots, 1, block, form), dtype=torch.uint8))
        reference.quantize([tensor], slots, rows[-1], 1, block, None, None, form=form)
    received = torch.stack(rows)
    old = values(numel, torch.float32, 77, special=False)
    for with_residual in (False, True):
        mine, theirs = residuals_of(memory, old, 1) if with_residual else NO_RESIDUALS
        shard, expected = memory.empty(len(rows[0]), torch.uint8), torch.empty(len(rows[0]), dtype=torch.uint8)
        backend.reduce_quantized(memory.copy(received), shard, 1 / 3, block, 4, *mine, form=form)
        reference.reduce_quantized(received, expected, 1 / 3, block, 4, *theirs, form=form)
        assert_same_wire(shard, expected, 1, block, form)
        _, scales, _ = split_wire(shard, 1, block, form)
        assert (~scales.isfinite()).flatten().tolist() == [False, True, False, False, False]
        assert bool((scales[0, [0, 2]].abs() * form.largest > 1.6e38).all())
        if with_residual:
            assert_same_bits(mine[0], theirs[0], "residuals")


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_the_error_stays_in_its_bound(backend, memory, form, block):
    slots = slot_table([4099, 640], block)
    tensors = [values(4099, torch.float32, 5, special=False), torch.linspace(-1e30, 1e30, 640)]
    decoded, _, _ = _round_trip(backend, memory, tensors, slots, block, form=form)
    for tensor, back in zip(tensors, decoded, strict=True):
        padded = torch.zeros(-(-tensor.numel() // block) * block, dtype=torch.float64)
        padded[: tensor.numel()] = tensor
        absmax = padded.view(-1, block).abs().amax(dim=1).repeat_interleave(block)[: tensor.numel()]
        of_largest, of_itself = BOUNDS[form]
        bound = absmax * of_largest + tensor.double().abs() * of_itself
        assert bool(((back.double() - tensor.double()).abs() <= bound).all())


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


def test_int4_arithmetic_step_by_step(backend, memory):
    """Codes, scales and residuals where they are hardest to hit: ties of v * inverse, ties of the largest magnitude."""
    block, blocks = 32, 1500 // STRIDE
    random = np.random.default_rng(0)
    sign = random.choice([-1, 1], (blocks, 1)).astype(np.float32)
    absmax = random.uniform(1, 2, (blocks, 1)).astype(np.float32)
    scale = -sign * (absmax.view(np.int32) & -65536).view(np.float32) / 8
    numbers = ((random.integers(-8, 7, (blocks, block)) + 0.5) * scale).astype(np.float32)
    numbers = (numbers.view(np.int32) + random.integers(-1, 2, numbers.shape, np.int32)).view(np.float32)
    numbers = np.clip(numbers, -0.99 * absmax, 0.99 * absmax)
    even = absmax.view(np.int32) & -2
    numbers[:, 5] = (sign * even.view(np.float32))[:, 0]
    # Of two signs plus counts, even where the other is larger by the last bit, but not by more.
    for start, more in ((0, 0), (1, 1), (2, 2)):
        rows = slice(start, None, 4)
        numbers[rows, 5] = np.abs(numbers[rows, 5])
        numbers[rows, 9] = -(even[rows, 0] + np.int32(more)).view(np.float32)
        scale[rows] = np.abs(scale[rows]) * (1 if more == 2 else -1)
    slots = slot_table([blocks * block], block)
    inputs = [torch.from_numpy(numbers.flatten())]
    (back,), new, wire = _round_trip(backend, memory, inputs, slots, block, torch.zeros(slots.total), INT4_FORMAT)
    codes = np.minimum(np.rint(numbers * (np.float32(1) / scale)), 7)
    assert set(np.unique(codes)) == set(range(-8, 8))
    pairs = codes.astype(np.int64).reshape(-1, 2) % 16
    payload = (pairs[:, 0] + 16 * pairs[:, 1]).astype(np.uint8)
    assert_same_bits(wire[: blocks * 16], torch.from_numpy(payload), "payload")
    _, scales, _ = split_wire(wire, 1, block, INT4_FORMAT)
    assert_same_bits(scales.float(), torch.from_numpy(scale.reshape(1, blocks)), "scales")
    decoded = codes.astype(np.int8).astype(np.float32) * scale
    assert_same_bits(back, torch.from_numpy(decoded.flatten()), "what arrives")
    assert_same_bits(new, torch.from_numpy((numbers - decoded).flatten()), "residual")


def test_fp8_arithmetic_step_by_step(backend, memory):
    """Every number of E4M3, and ties and what lies one ulp beside them, under scales of one block each."""
    block, blocks = 128, 512 // STRIDE
    random = np.random.default_rng(0)
    powers = 2.0 ** random.integers(-60, 60, (blocks, 1))
    absmax = (random.uniform(1, 2, (blocks, 1)) * powers).astype(np.float32)
    codes = np.arange(127)
    exponents, digits = np.maximum(codes >> 3, 1), np.where(codes < 8, codes, 8 + codes % 8)
    numbers = np.ldexp(digits.astype(np.float64), exponents - 10)  # 2^-9 to 448
    assert numbers[-1] == 448 and numbers[1] == 2.0**-9 and numbers[8] == 2.0**-6
    assert bool((np.diff(numbers) > 0).all())
    ties = (numbers[1:] + numbers[:-1]) / 2
    chosen = random.choice([*numbers, *ties, *ties], (blocks, block)) * random.choice([-1, 1], (blocks, block))
    inputs_ = (chosen * (absmax.astype(np.float64) / 448)).astype(np.float32)
    inputs_ = (inputs_.view(np.int32) + random.integers(-1, 2, inputs_.shape, np.int32)).view(np.float32)
    inputs_ = np.where(chosen == 0, 0, np.clip(inputs_, -absmax, absmax)).astype(np.float32)
    inputs_[:, 5] = -absmax[:, 0]
    slots = slot_table([blocks * block], block)
    tensors = [torch.from_numpy(inputs_.flatten())]
    (back,), new, wire = _round_trip(backend, memory, tensors, slots, block, torch.zeros(slots.total), FP8_FORMAT)
    scale, steps = absmax * np.float32(1 / 448), inputs_ * (np.float32(448) / absmax)
    above = np.searchsorted(numbers, np.abs(steps).clip(max=448))
    below = np.maximum(above - 1, 0)
    middle = (numbers[above] + numbers[below]) / 2
    up = (np.abs(steps) > middle) | ((np.abs(steps) == middle) & (above % 2 == 0))
    code = np.where(up, above, below)
    assert set(np.unique(code)) == set(range(127)) or STRIDE > 1
    payload, scales, _ = split_wire(wire, 1, block, FP8_FORMAT)
    byte = np.where((steps < 0) & (code > 0), code | 0x80, code).astype(np.uint8)
    assert_same_bits(payload.view(torch.uint8), torch.from_numpy(byte), "payload")
    assert_same_bits(scales, torch.from_numpy(scale.reshape(1, blocks)), "scales")
    sent = (np.where(steps < 0, -1, 1) * numbers[code] + 0.0).astype(np.float32) * scale
    assert_same_bits(back, torch.from_numpy(sent.flatten()), "what arrives")
    assert_same_bits(new, torch.from_numpy((inputs_ - sent).flatten()), "residual")


def test_int4_keeps_the_largest_numbers_finite(backend, memory):
    slots, most = slot_table([32], 32), torch.finfo(torch.float32).max
    tensor = torch.linspace(-most, most, 32, dtype=torch.float64).float()
    (back,), new, _ = _round_trip(backend, memory, [tensor], slots, 32, torch.zeros(32), INT4_FORMAT)
    assert bool(back.isfinite().all() and new.isfinite().all())


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_blocks_that_are_not_finite_arrive_so_and_no_others(backend, memory, form, block):
    slots = slot_table([1000, 300], block)
    tensors = tensors_of([1000, 300], torch.float32, special=False)
    tensors[0][130], tensors[0][999], tensors[1][0] = torch.nan, torch.inf, -torch.inf
    old = residual_of(slots)
    decoded, new, _ = _round_trip(backend, memory, tensors, slots, block, old, form)
    bad = [torch.zeros(1000, dtype=torch.bool), torch.zeros(300, dtype=torch.bool)]
    for mask, place in ((bad[0], 130), (bad[0], 999), (bad[1], 0)):
        mask[place // block * block :][:block] = True
    for back, mask in zip(decoded, bad, strict=True):
        assert torch.equal(~back.isfinite(), mask)
    assert bool(new.isfinite().all())
    its = slice(130 // block * block, 130 // block * block + block)
    assert_same_bits(new[its], old[its], "residual of a block that is not finite")


@pytest.mark.parametrize(
    ("form", "block", "at", "summed"),
    [
        pytest.param(
            form,
            block,
            at,
            summed,
            id=f"{form.name}-{block}-{at}-{'statistics' if summed else 'plain'}",
            marks=[] if at == ((2, 4999) if (i + summed) % 2 else None) else pytest.mark.long,
        )
        for i, (form, block) in enumerate(DEFAULTS)
        for at in (None, (0, 0), (1, 3), (2, 4999))
        for summed in (False, True)
    ],
)
def test_dequantizing_tells_whether_all_blocks_are_finite_and_turns_the_row(backend, memory, form, block, at, summed):
    numels = [300, 128, 5000, 5]  # several tiles: an even number of turns would be none
    slots = slot_table(numels, block, shards=2)
    tensors = [values(numel, torch.float32, seed, special=False) for seed, numel in enumerate(numels)]
    if at is not None:
        tensors[at[0]][at[1]] = torch.inf
    wire = memory.copy(torch.zeros(wire_size(slots, 2, block, form), dtype=torch.uint8))
    finite, turn = (memory.copy(torch.zeros(1, dtype=dtype)) for dtype in (torch.uint8, torch.int32))
    statistics = None
    if summed:
        statistics = memory.copy(torch.zeros(ops.statistics_shape(slots, block)))
    copies = [memory.copy(tensor) for tensor in tensors]
    for turned in (1, 0):
        backend.quantize(copies, slots, wire, 2, block, None, None, finite, form)
        assert int(finite) == 1
        backend.dequantize(wire, 2, block, slots, copies, statistics, finite, turn, form)
        assert (int(finite), int(turn)) == (at is None, turned)
    backend.dequantize(wire, 2, block, slots, copies, statistics, form=form)
    assert int(turn) == 0
    memory.check()


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_residual_is_what_was_lost(backend, memory, form, block):
    slots = slot_table([4099], block)
    tensor, old = values(4099, torch.float32, 3, special=False), residual_of(slots)
    (back,), new, _ = _round_trip(backend, memory, [tensor], slots, block, old, form)
    kept = new[:4099].double()
    sent = (tensor + old[:4099]).double()
    # Of what happens after the addition only the last subtraction rounds: by half an ulp of the residual.
    assert bool(((kept + back.double() - sent).abs() <= kept.abs() * 2.0**-24).all())
    assert bool((kept != 0).any())
    assert_same_bits(new[4099:], torch.zeros(slots.total - 4099), "padding of the residual")


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_padding_of_a_residual_is_not_read(backend, memory, form, block):
    slots, old = slot_table([100], block), torch.full((128,), torch.nan)
    tensor, old[:100] = values(100, torch.float32, 1, special=False), 0.0
    (back,), new, _ = _round_trip(backend, memory, [tensor], slots, block, old, form)
    assert bool(back.isfinite().all())
    assert_same_bits(new[100:], torch.zeros(28))


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_tiny_blocks_wait_in_the_residual(backend, memory, form, block):
    slots = slot_table([100], block)
    tensor = torch.full((100,), 2.0**-101)
    (back,), new, wire = _round_trip(backend, memory, [tensor], slots, block, torch.zeros(slots.total), form)
    assert_same_bits(back, torch.zeros(100))
    assert_same_bits(new[:100], tensor)
    assert not bool(wire.any())


def _round_trip(backend, memory, tensors, slots, block, old=None, form=INT8_FORMAT):
    """What arrives, the new residual and the wire, all on the CPU."""
    wire = memory.empty(wire_size(slots, 1, block, form), torch.uint8)
    (residuals, turn), _ = NO_RESIDUALS if old is None else residuals_of(memory, old, 1)
    backend.quantize([memory.copy(tensor) for tensor in tensors], slots, wire, 1, block, residuals, turn, form=form)
    targets = [memory.like(tensor) for tensor in tensors]
    backend.dequantize(wire, 1, block, slots, targets, form=form)
    return [memory_order(target) for target in targets], None if old is None else residuals[0].cpu(), wire.cpu()


@pytest.mark.parametrize(("form", "block"), DEFAULTS, ids=case_name)
def test_one_rank_of_many_keeps_its_flag(backend, memory, form, block):
    """1/200 of a flag would vanish beside a whole one: flags are not averaged."""
    slots, world_size = slot_table([2 * block], block), 200
    rows = []
    for rank in range(world_size):
        flags = torch.zeros(2 * block)
        flags[block] = 1.0  # used on every rank
        flags[block + 1] = float(rank == 150)
        rows.append(torch.empty(wire_size(slots, 1, block, form), dtype=torch.uint8))
        reference.quantize([flags], slots, rows[-1], 1, block, None, None, form=form)
    shard = memory.empty(len(rows[0]), torch.uint8)
    backend.reduce_quantized(memory.copy(torch.stack(rows)), shard, 1 / world_size, block, 1, None, None, form=form)
    decoded = memory.empty(2 * block, torch.float32)
    backend.dequantize(shard, 1, block, slots, [decoded], form=form)
    assert torch.equal(decoded[block:].cpu() > 0.5, torch.arange(block) < 2)
