"""Residuals in BF16 and in 8 bits: every backend by bits against the reference, and the format by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce.kernels import reference
from fastreduce.kernels.slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT, BlockFormat, residual_bytes
from fastreduce.kernels.torch_residuals import decode_residuals, encode_residuals

from .cases import (
    QUIET,
    SIMULATOR,
    Memory,
    assert_same_bits,
    assert_same_wire,
    case_name,
    int8_tensors,
    residual_of,
    slot_table,
    values,
    wire_size,
)
from .test_int8 import received_of

pytestmark = QUIET

SIZES = (0, 1, 129, 1100)
PICKED = [(INT8_FORMAT, 128, torch.uint8), (INT4_FORMAT, 32, torch.bfloat16)]
FORMS = [
    (INT8_FORMAT, 128),
    (INT4_FORMAT, 32),
    (FP8_FORMAT, 48),
    (INT8_FORMAT, 16),
    (INT8_FORMAT, 48),
    (INT4_FORMAT, 96),
]
CASES = [
    case if case in PICKED else pytest.param(*case, marks=pytest.mark.long)
    for case in ((*form, dtype) for form in FORMS for dtype in (torch.uint8, torch.bfloat16))
]


def encoded(values: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """A row of residuals in a dtype."""
    if dtype is torch.bfloat16:
        return values.to(dtype)
    row = torch.zeros(residual_bytes(len(values), block), dtype=torch.uint8)
    codes, exponents, _ = row.tensor_split([len(values), len(values) + len(values) // block])
    encode_residuals(values, codes.view(torch.int8), exponents, block)
    return row


def decoded(row: Tensor, elements: int, block: int) -> Tensor:
    """What a row keeps, FP32."""
    if row.dtype is not torch.uint8:
        return row.float()
    codes, exponents, _ = row.tensor_split([elements, elements + elements // block])
    return decode_residuals(codes.view(torch.int8), exponents, block)


def _rows(
    memory: Memory, old: Tensor, dtype: torch.dtype, block: int, turn: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    row = encoded(old, dtype, block)
    residuals = torch.zeros(2, len(row), dtype=dtype)
    residuals[turn] = row
    turns = torch.tensor([turn], dtype=torch.int32)
    return (memory.copy(residuals), memory.copy(turns)), (residuals, turns)


def _lost_everywhere(slots, block: int) -> Tensor:
    """Old residuals of many sizes: blocks of zeros, ones below what 8 bits have, and infinitely many times larger."""
    old = residual_of(slots)
    for place, factor in ((0, 0.0), (1, 2.0**-110), (2, 2.0**100)):
        old[place * block : (place + 1) * block] *= factor
    return old


@pytest.mark.parametrize(("form", "block", "dtype"), CASES, ids=case_name)
def test_quantize_keeps_what_was_lost(backend, memory, form: BlockFormat, block: int, dtype: torch.dtype):
    for turn, shards in enumerate((1, 2)):
        slots = slot_table(SIZES, block, [1, 0, 2], shards)
        tensors = int8_tensors(SIZES, torch.float32)
        mine, theirs = _rows(memory, _lost_everywhere(slots, block), dtype, block, turn)
        size = wire_size(slots, shards, block, form)
        wire, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
        backend.quantize([memory.copy(t, turn) for t in tensors], slots, wire, shards, block, *mine, form=form)
        reference.quantize(tensors, slots, expected, shards, block, *theirs, form=form)
        assert_same_wire(wire, expected, shards, block, form)
        assert_same_bits(mine[0], theirs[0], "residuals")
        kept = decoded(theirs[0][1 - turn], slots.total, block)
        assert bool(kept.isfinite().all() and kept.any())


@pytest.mark.parametrize(("form", "block", "dtype"), CASES, ids=case_name)
def test_reduce_quantized_keeps_what_was_lost(backend, memory, form: BlockFormat, block: int, dtype: torch.dtype):
    blocks = (300 if SIMULATOR else 2051) // block + 1
    received = received_of(2, blocks * block, form, block)
    old = values(blocks * block, torch.float32, 77, special=False)
    for turn, flag_block in enumerate((blocks // 2, blocks + 5)):
        mine, theirs = _rows(memory, old, dtype, block, turn)
        shard, expected = (
            memory.empty(received.shape[1], torch.uint8),
            torch.empty(received.shape[1], dtype=torch.uint8),
        )
        backend.reduce_quantized(memory.copy(received), shard, 0.5, block, flag_block, *mine, form=form)
        reference.reduce_quantized(received, expected, 0.5, block, flag_block, *theirs, form=form)
        assert_same_wire(shard, expected, 1, block, form)
        assert_same_bits(mine[0], theirs[0], "residuals")
        kept = decoded(theirs[0][1 - turn], blocks * block, block)
        assert not bool(kept[flag_block * block :].any()), "of flags nothing is kept"


@pytest.mark.parametrize("dtype", [torch.uint8, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
def test_a_block_that_is_not_finite_keeps_what_it_has(backend, memory, dtype: torch.dtype):
    slots = slot_table([256], 128)
    mine, _ = _rows(memory, values(256, torch.float32, 3, special=False), dtype, 128, 0)
    tensor = values(256, torch.float32, 4, special=False)
    tensor[5] = torch.nan
    wire = memory.empty(wire_size(slots, 1, 128), torch.uint8)
    backend.quantize([memory.copy(tensor)], slots, wire, 1, 128, *mine)
    old, new = (decoded(row, 256, 128) for row in mine[0].cpu())
    assert_same_bits(new[:128], old[:128], "the first block")
    assert not torch.equal(new[128:], old[128:])


# 8 bits by hand


def _scrambled(bits: np.ndarray, salt: np.ndarray) -> np.ndarray:
    """MurmurHash3's last steps, in words of 32 bits."""
    word = bits + salt * np.uint32(0x9E3779B1)
    word = (word ^ word >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    word = (word ^ word >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return (word ^ word >> np.uint32(16)) >> np.uint32(16)


def _by_hand(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents in FP64: of the least power of two of which the largest is at most 127."""
    exponents, codes = np.zeros(len(blocks), np.uint8), np.zeros(blocks.shape, np.int8)
    for index, block in enumerate(blocks):
        largest = np.abs(block).max()
        byte = next((b for b in range(255) if float(largest) <= 127 * 2.0 ** (b - 133)), 254)
        if byte >= 7:
            salt = largest.view(np.uint32) ^ np.arange(len(block), dtype=np.uint32)
            units = block.astype(np.float64) / 2.0 ** (byte - 133)
            chosen = np.floor(np.rint(units * 2**15) / 2**15 + _scrambled(block.view(np.uint32), salt) / 2**16)
            exponents[index], codes[index] = byte, np.clip(chosen, -127, 127)
    return codes, exponents


def test_8_bits_by_hand():
    random = np.random.default_rng(0)
    blocks = (random.standard_normal((300, 16)) * 2.0 ** random.integers(-125, 120, (300, 1))).astype(np.float32)
    blocks[0] = 0
    # The largest lies where its code is 127 or, of the next power of two, 63.5; then at the ends of what there is.
    for row, peak in enumerate(
        [127.0, 127.00001, 127.9, 63.5, 63.4999, 3.4028234663852886e38, 2.0**-121, 2.0**-120], 1
    ):
        blocks[row] = np.float32(peak) * np.linspace(-1, 1, 16, dtype=np.float32)
    codes, exponents = torch.empty(300 * 16, dtype=torch.int8), torch.empty(300, dtype=torch.uint8)
    given = torch.from_numpy(blocks.flatten())
    encode_residuals(given, codes, exponents, 16)
    expected = _by_hand(blocks)
    assert_same_bits(exponents, torch.from_numpy(expected[1]), "exponents")
    assert_same_bits(codes, torch.from_numpy(expected[0].flatten()), "codes")
    back = decode_residuals(codes, exponents, 16)
    lost = (back.double() - given.double()).abs().view(300, 16).amax(1)
    bound = given.double().abs().view(300, 16).amax(1) / 63.5 + 2.0**-120
    assert bool((lost <= bound).all()) and bool(back.isfinite().all())


def test_8_bits_are_right_in_the_mean():
    """Numbers far below a unit come through: of many blocks, whose largest differ, each has its mean."""
    largest = torch.linspace(1, 1.9, 20_000)
    blocks = torch.tensor([1.0, 0.001, -0.0003, 0.4321])[None, :] * largest[:, None]
    blocks[:, 1:] /= largest[:, None]
    codes, exponents = torch.empty(80_000, dtype=torch.int8), torch.empty(20_000, dtype=torch.uint8)
    encode_residuals(blocks.flatten(), codes, exponents, 4)
    found = decode_residuals(codes, exponents, 4).view(-1, 4)[:, 1:].double().mean(0)
    # Six deviations of a mean, each number of which is off by half a unit at most, 2^-7: of 20,000.
    assert float((found - torch.tensor([0.001, -0.0003, 0.4321])).abs().max()) <= 6 * 2.0**-7 / 20_000**0.5


def test_what_8_bits_hold_stays_what_it_is():
    """Every code that there is, under every exponent."""
    codes = torch.arange(-127, 128, dtype=torch.int8).repeat_interleave(248)
    exponents = torch.arange(7, 255, dtype=torch.uint8).repeat(255)
    finite = decode_residuals(codes, exponents, 1)
    again, byte = torch.empty_like(codes), torch.empty_like(exponents)
    encode_residuals(finite, again, byte, 1)
    held = finite.abs() >= 2.0**-120  # what is less than the smallest block's may be lost
    assert_same_bits(decode_residuals(again, byte, 1)[held], finite[held])


def test_what_is_not_finite_is_nan_in_8_bits():
    codes, exponents = torch.empty(32, dtype=torch.int8), torch.empty(2, dtype=torch.uint8)
    encode_residuals(torch.tensor([torch.inf, *[1.0] * 31]), codes, exponents, 16)
    back = decode_residuals(codes, exponents, 16)
    assert back[:16].isnan().all() and torch.equal(back[16:], torch.ones(16))
