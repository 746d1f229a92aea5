"""Stochastic rounding: every backend by bits against the reference; then what it promises, by the reference."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels import reference
from fastreduce.kernels.reference_stochastic import for_two, philox, random_bits
from fastreduce.kernels.slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT, OF_AVERAGES, BlockFormat, Draws, SlotTable

from .cases import (
    BLOCKS,
    DTYPES,
    QUIET,
    SIMULATOR,
    SIZES,
    Memory,
    assert_same_bits,
    assert_same_wire,
    case_name,
    int8_tensors,
    slot_table,
    split_wire,
    tensors_of,
    values,
    wire_size,
)

pytestmark = QUIET

FORMATS = [(INT8_FORMAT, 128), (INT4_FORMAT, 32), (FP8_FORMAT, 128)]
CASES = [
    pytest.param(*each, dtype, marks=[pytest.mark.long] * (each not in FORMATS))
    for each, dtype in zip(BLOCKS, itertools.cycle(DTYPES), strict=False)
]
KEYS = np.array([0x0123456789ABCDEF, -1, 0, 1 << 40, -(1 << 62), 5, 6, 7, 8], np.int64)


def keyed(slots: SlotTable) -> SlotTable:
    """The same table with keys."""
    firsts = np.zeros(len(slots.offsets), np.int64)
    return SlotTable(slots.offsets, slots.numels, slots.total, KEYS[: len(firsts)].copy(), firsts)


def draws_on(memory: Memory, who: int = 3, step: int = (1 << 33) + 5, seed: int = 0xFFFFFFFF) -> tuple[Draws, Draws]:
    """A backend's, and the reference's."""
    host = torch.tensor([step])
    return Draws(seed, who, memory.copy(host)), Draws(seed, who, host)


@pytest.mark.parametrize(
    ("word", "key", "words"),
    [
        (0, 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
        (0xFFFFFFFF, 0xFFFFFFFF, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
    ],
)
def test_philox_has_the_answers_of_its_authors(word: int, key: int, words: list[int]):
    """Philox4x32-7 in the `kat_vectors` of Random123."""
    assert [int(each) for each in philox((torch.tensor([word]), word, word, word), (key, key))] == words


@pytest.mark.parametrize(("form", "block", "dtype"), CASES, ids=case_name)
def test_quantize(backend, memory, form, block, dtype):
    shards = 1 if block == 16 else 2
    slots, (mine, theirs) = keyed(slot_table(SIZES, block, gaps=(1, 0, 3), shards=shards)), draws_on(memory)
    tensors = tensors_of(SIZES, dtype, False) if SIMULATOR else int8_tensors(SIZES, dtype)
    wire = memory.empty(wire_size(slots, shards, block, form), torch.uint8)
    expected = torch.empty(wire.numel(), dtype=torch.uint8)
    finite = memory.empty(1, torch.uint8)
    sources = [memory.copy(tensor, shards - 1) for tensor in tensors]
    backend.quantize(sources, slots, wire, shards, block, None, None, finite, form, mine)
    reference.quantize(tensors, slots, expected, shards, block, None, None, None, form, theirs)
    assert_same_wire(wire, expected, shards, block, form)
    assert int(finite) == 1


@pytest.mark.parametrize(
    ("form", "block"),
    [pytest.param(*each, marks=[pytest.mark.long] * (each not in FORMATS)) for each in BLOCKS],
    ids=case_name,
)
def test_reduce_quantized(backend, memory, form, block):
    """Of the second of two shards, which begins within a slot."""
    world_size = 3 if block > 16 else 1
    slots, (mine, theirs) = keyed(slot_table(SIZES, block, gaps=(1, 0), shards=2)), draws_on(memory, OF_AVERAGES)
    size, shards = slots.total // 2, []
    for rank in range(world_size):
        tensors = [values(numel, torch.float32, 9 * rank + i, special=False) for i, numel in enumerate(SIZES)]
        wire = torch.empty(wire_size(slots, 2, block, form), dtype=torch.uint8)
        if rank == 1:
            tensors[-1][-1], tensors[-1][-300] = torch.finfo(torch.float32).max, torch.inf
        reference.quantize(tensors, slots, wire, 2, block, None, None, form=form)
        shards.append(wire.view(2, -1)[1])
    received, here = torch.stack(shards), slots.shard(size, 2 * size)
    shard, expected = memory.empty(received.shape[1], torch.uint8), torch.empty(received.shape[1], dtype=torch.uint8)
    for scale, flag_block in ((1 / 3, size // block - 1), (1.0, size // block)):
        told = (scale, block, flag_block, None, None, form, here)
        backend.reduce_quantized(memory.copy(received), shard, *told, mine)
        reference.reduce_quantized(received, expected, *told, theirs)
        assert_same_wire(shard, expected, 1, block, form)


@pytest.mark.parametrize(
    "dtype", [*DTYPES[:2], *(pytest.param(dtype, marks=pytest.mark.long) for dtype in DTYPES[2:])], ids=str
)
def test_bf16(backend, memory, dtype):
    slots, (mine, theirs) = keyed(slot_table(SIZES, 16, gaps=(3, 0, 1), shards=2)), draws_on(memory)
    tensors, size = tensors_of(SIZES, dtype), slots.total // 2
    for shift, scale in enumerate((1.0, 1 / 3)):
        wire, expected = memory.empty(slots.total, torch.bfloat16), torch.empty(slots.total, dtype=torch.bfloat16)
        finite = memory.empty(1, torch.uint8)
        backend.flatten([memory.copy(tensor, shift) for tensor in tensors], slots, wire, scale, finite, mine)
        reference.flatten(tensors, slots, expected, scale, None, theirs)
        assert_same_bits(wire, expected, f"wire at scale {scale}")
        assert int(finite) == 1
    for rank in (0, 1):
        here = slots.shard(rank * size, (rank + 1) * size)
        received = torch.stack([expected[rank * size :][:size]] * 3)
        shard, wanted = memory.empty(size, torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
        backend.reduce_shards(memory.copy(received), shard, 1 / 3, here, mine)
        reference.reduce_shards(received, wanted, 1 / 3, here, theirs)
        assert_same_bits(shard, wanted, f"shard {rank}")


def test_no_slots(backend, memory):
    none, (mine, _) = SlotTable(np.array([], np.int64), np.array([], np.int64), 0), draws_on(memory)
    wire = memory.empty(0, torch.uint8)
    backend.quantize([], none, wire, 2, 128, None, None, None, INT8_FORMAT, mine)
    backend.reduce_quantized(wire.view(2, 0), wire, 0.5, 128, 0, None, None, INT8_FORMAT, none, mine)
    backend.flatten([], none, memory.empty(0, torch.bfloat16), 1.0, None, mine)
    empty = memory.empty(0, torch.bfloat16)
    backend.reduce_shards(empty.view(2, 0), empty, 0.5, none, mine)


# By the reference, whose bits are everybody's: what rounding promises

CPU = torch.device("cpu")


def rounded(tensor: Tensor, form: BlockFormat | None, block: int, step: int = 0) -> Tensor:
    """A tensor there and back."""
    slots, draws = keyed(slot_table([tensor.numel()], block)), Draws(9, 3, torch.tensor([step]))
    back = torch.empty(tensor.numel())
    if form is None:
        wire = torch.empty(slots.total, dtype=torch.bfloat16)
        reference.flatten([tensor], slots, wire, 1.0, None, draws)
        reference.unflatten(wire, slots, [back], 1.0)
    else:
        wire = torch.empty(wire_size(slots, 1, block, form), dtype=torch.uint8)
        reference.quantize([tensor], slots, wire, 1, block, None, None, None, form, draws)
        reference.dequantize(wire, 1, block, slots, [back], form=form)
    return back


# How often each of the numbers between two neighbours that can be sent should become the upper one.
CHANCES = torch.tensor([2.0**-10, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9])
# Of each format: the largest number of a block, the lower neighbour, the way to the upper one.
NEIGHBOURS = {
    INT8_FORMAT: (127.0, 3.0, 1.0),
    INT4_FORMAT: (7.0, 3.0, 1.0),  # its scale is BF16: 1 is one of them, and 7 sevenths are exactly that
    FP8_FORMAT: (448.0, 24.0, 2.0),
    None: (1.0, 1.0, 2.0**-7),
}


@pytest.mark.parametrize(("form", "block"), [*FORMATS, (None, 16)], ids=case_name)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_of_many_draws_is_exact(form, block, sign):
    """Each number becomes one of its two neighbours, the upper one as often as its mean wants.

    Of n trials with chance p, the count is off by at most 5 standard deviations, sqrt(n p (1 - p)), and by the bias of
    16 random bits and FP32's roundings, n times 2^-12 where a step is smallest beside its number. Seeds are fixed, so
    it always passes or never; a fair one fails in 1 of 1.7 million.
    """
    largest, low, way = NEIGHBOURS[form]
    tensor = torch.zeros(1 << 12, block)
    tensor[:, : len(CHANCES)] = sign * (low + way * CHANCES)
    tensor[:, len(CHANCES)] = largest
    counts, steps = torch.zeros(len(CHANCES)), 4
    for step in range(steps):
        back = rounded(tensor.flatten(), form, block, step).view(tensor.shape)
        found = (sign * back[:, : len(CHANCES)] - low) / way
        assert torch.allclose(found, found.round(), atol=1e-4), "no neighbour"
        assert set(found.round().unique().tolist()) == {0.0, 1.0}
        assert torch.allclose(back[:, len(CHANCES)], torch.tensor(largest), rtol=2.0**-22, atol=0)
        counts += found.round().sum(0)
    trials = steps * len(tensor)
    bound = 5 * (trials * CHANCES * (1 - CHANCES)).sqrt() + trials * 2**-12
    assert bool(((counts - trials * CHANCES).abs() <= bound).all())


@pytest.mark.parametrize(("form", "block"), [*FORMATS, (None, 16)], ids=case_name)
def test_what_can_be_sent_is_sent_as_it_is(form, block):
    whole = {INT8_FORMAT: 127, INT4_FORMAT: 7}.get(form, 16)
    tensor = torch.arange(-whole, whole + 1.0).repeat(9)[: 9 * whole]
    tensor[0::block] = whole if form is not FP8_FORMAT else 448.0
    back = rounded(tensor, form, block)
    assert bool((back == tensor).all() if form in (None, INT4_FORMAT) else torch.allclose(back, tensor, rtol=2.0**-21))
    assert not bool((back.view(torch.int32) == -(1 << 31)).any()), "-0"


@pytest.mark.parametrize(("form", "block"), FORMATS, ids=case_name)
def test_nothing_finite_becomes_infinite(form, block):
    tensor = torch.linspace(-1, 1, 2 * block) * torch.finfo(torch.float32).max
    assert bool(rounded(tensor, form, block).isfinite().all())
    tensor[block + 1] = torch.nan
    assert rounded(tensor, form, block).isnan().nonzero().flatten().tolist() == list(range(block, 2 * block))
    assert not bool(rounded(torch.full((block,), 2.0**-101), form, block).any())


def test_bits_follow_from_seed_rank_step_slot_and_element_and_look_independent():
    """No two streams agree by more than chance (5 deviations)."""
    count, half = 1 << 14, 1 << 13
    slots = SlotTable(np.array([0, half]), np.array([half, half]), count, np.array([11, 12]), np.zeros(2, np.int64))
    base = {"seed": 1, "who": 0, "step": torch.tensor([7])}
    others = [{}, {"seed": 2}, {"who": 1}, {"who": OF_AVERAGES}, {"step": torch.tensor([8])}]
    streams = [stream for other in others for stream in random_bits(slots, Draws(**(base | other)), CPU).split(half)]
    streams.append(streams[0].roll(1))
    for i, stream in enumerate(streams):
        mean = stream.double().mean() / 65536
        assert abs(mean - 0.5) < 5 * math.sqrt(1 / 12 / half)
        for other in streams[:i]:
            together = torch.corrcoef(torch.stack([stream, other]).double())[0, 1]
            assert abs(float(together)) < 5 / math.sqrt(half)


def test_two_elements_of_the_same_bits_round_apart():
    """Each is uniform, and two become the upper neighbour together as often as by themselves, within 2^-10.

    Where the 8 bits in front decide of both, which is all but always, they do so independently. Of the rest, 1/256
    each, the second's share has a covariance of at most 1/4 with the first's front, and the first's with the second's.
    """
    first, second = for_two(torch.arange(1 << 16)).unbind(-1)
    for bits in (first, second):
        assert torch.equal(bits.sort().values, torch.arange(1 << 16))
    assert int(((2 * first - 65535) * (2 * second - 65535)).sum()) == 0
    for one in (1, 1 << 8, 10_000, (1 << 15) + 1, 65_000):
        for other in (1, 1 << 8, 30_000, 1 << 15, 32_897, 65_500):
            both = ((first >= 65536 - one) & (second >= 65536 - other)).double().mean()
            assert abs(float(both) - one * other / 2**32) < 2.0**-10


@pytest.mark.parametrize(("form", "block"), FORMATS, ids=case_name)
def test_neither_shards_nor_neighbours_change_bits(form, block):
    numels = [1100, 300]
    tensors, draws = tensors_of(numels, torch.float32, False), Draws(9, 3, torch.tensor([1]))
    found = []
    for shards, order in ((1, [0, 1]), (3, [1, 0])):
        table = slot_table([numels[i] for i in order], block, gaps=(2, 1), shards=shards)
        slots = SlotTable(table.offsets, table.numels, table.total, KEYS[order], np.zeros(2, np.int64))
        wire = torch.empty(wire_size(slots, shards, block, form), dtype=torch.uint8)
        reference.quantize([tensors[i] for i in order], slots, wire, shards, block, None, None, None, form, draws)
        codes = split_wire(wire, shards, block, form)[0].flatten()
        places = dict(zip(order, slots.offsets.tolist(), strict=True))
        found.append([codes[places[i] : places[i] + numels[i]] for i in (0, 1)])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
