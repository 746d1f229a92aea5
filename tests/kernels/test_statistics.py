"""Statistics beside what decompression writes: counts, sums of squares, and the order of the sum."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce import ops
from fastreduce.kernels import reference
from fastreduce.kernels.slots import FP16_BLOCK, SlotTable, tile_elements
from fastreduce.ops.backends import Backend
from tests.support import tolerances

from .cases import (
    DTYPES,
    GAPS,
    QUIET,
    STATISTICS_BLOCKS,
    STATISTICS_PAIRS,
    STATISTICS_SIZES,
    Memory,
    assert_same_bits,
    case_name,
    expected_wire,
    fp16_size,
    fp16_tensors,
    int8_tensors,
    memory_order,
    slot_table,
    values,
    wire_size,
)

pytestmark = QUIET


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


@pytest.mark.parametrize(
    ("dtype", "wire_dtype"),
    [*STATISTICS_PAIRS[:2], *(pytest.param(*pair, marks=pytest.mark.long) for pair in STATISTICS_PAIRS[2:])],
    ids=str,
)
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


@pytest.mark.parametrize(
    ("form", "block", "dtype"),
    [
        pytest.param(*blocks, dtype, marks=[pytest.mark.long] * (i % len(DTYPES) != j))
        for i, blocks in enumerate(STATISTICS_BLOCKS)
        for j, dtype in enumerate(DTYPES)
    ],
    ids=case_name,
)
def test_statistics_of_dequantize(backend, memory, dtype, form, block):
    slots = slot_table(STATISTICS_SIZES, block, [1, 0, 2], 2)
    tensors = int8_tensors(STATISTICS_SIZES, dtype)
    wire = torch.empty(wire_size(slots, 2, block, form), dtype=torch.uint8)
    reference.quantize(tensors, slots, wire, 2, block, None, None, form=form)
    wire, kept = memory.copy(wire), []
    for shift in (0, 1):
        targets = [memory.like(tensor, shift) for tensor in tensors]
        statistics = statistics_of(memory, slots, dtype, block)
        backend.dequantize(wire, 2, block, slots, targets, statistics, form=form)
        without = [memory.like(tensor) for tensor in tensors]
        backend.dequantize(wire, 2, block, slots, without, form=form)
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
