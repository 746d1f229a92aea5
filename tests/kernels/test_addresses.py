"""Memory of others lies anywhere: addresses that are no multiple of the element size, for whatever a kernel touches.

Kernels run in a process of their own, so that a crash is a failed test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce import TensorError, ops
from fastreduce.kernels import device_tables
from fastreduce.kernels.device_tables import device_table
from fastreduce.kernels.slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT, BlockFormat, SlotTable
from fastreduce.ops import backends
from tests.support.commands import PYTHON, run

from .cases import GPU_BACKENDS, assert_same_bits, slot_table, values, wire_size

SMALL, LARGE = 1000, (1 << 18) + 5  # elements: outputs of the larger ones bypass the cache
BLOCK = 128


def at(offset: int, like: Tensor) -> Tensor:
    """A copy that begins `offset` bytes behind a cache line."""
    memory = bytearray(like.numel() * like.itemsize + 128)
    line = -np.frombuffer(memory, np.uint8).ctypes.data % 64
    tensor = torch.frombuffer(memory, dtype=like.dtype, offset=line + offset, count=like.numel())
    assert tensor.data_ptr() % 64 == offset
    return tensor.view(like.shape).copy_(like)


Place = Callable[[Tensor], Tensor]
Case = Callable[[Any, Tensor, SlotTable, Place], list[Tensor]]


def flatten(kernels: Any, tensor: Tensor, slots: SlotTable, place: Place) -> list[Tensor]:
    wires = [place(torch.full((slots.total,), torch.nan, dtype=dtype)) for dtype in (torch.float16, tensor.dtype)]
    for wire in wires:
        kernels.flatten([place(tensor)], slots, wire, 0.5)
    return wires


def unflatten(kernels: Any, tensor: Tensor, slots: SlotTable, place: Place) -> list[Tensor]:
    wire = place(torch.zeros(slots.total, dtype=torch.bfloat16))
    wire[: tensor.numel()] = tensor
    target, same = place(torch.full_like(tensor, torch.nan)), place(torch.full_like(tensor, torch.nan))
    statistics = place(torch.zeros(ops.statistics_shape(slots), dtype=ops.statistics_dtype(tensor.dtype)))
    kernels.unflatten(wire, slots, [target], 0.5)
    kernels.unflatten(wire, slots, [same], 0.5, statistics)
    return [target, same, statistics]


def quantize(
    kernels: Any, tensor: Tensor, slots: SlotTable, place: Place, form: BlockFormat = INT8_FORMAT
) -> list[Tensor]:
    wire = place(torch.full((wire_size(slots, 1, BLOCK, form),), 7, dtype=torch.uint8))
    residuals = place(torch.stack([values(slots.total, torch.float32, 3, special=False), torch.zeros(slots.total)]))
    turn = place(torch.zeros(1, dtype=torch.int32))
    kernels.quantize([place(tensor)], slots, wire, 1, BLOCK, residuals, turn, form=form)
    return [wire, residuals]


def dequantize(
    kernels: Any, tensor: Tensor, slots: SlotTable, place: Place, form: BlockFormat = INT8_FORMAT
) -> list[Tensor]:
    wire = torch.empty(wire_size(slots, 1, BLOCK, form), dtype=torch.uint8)
    kernels.quantize([tensor], slots, wire, 1, BLOCK, None, None, form=form)
    target, same = place(torch.full_like(tensor, torch.nan)), place(torch.full_like(tensor, torch.nan))
    statistics = place(torch.zeros(ops.statistics_shape(slots, BLOCK), dtype=ops.statistics_dtype(tensor.dtype)))
    kernels.dequantize(place(wire), 1, BLOCK, slots, [target], form=form)
    kernels.dequantize(place(wire), 1, BLOCK, slots, [same], statistics, form=form)
    return [target, same, statistics]


def reduce_shards(kernels: Any, tensor: Tensor, slots: SlotTable, place: Place) -> list[Tensor]:
    shard = place(torch.full_like(tensor, torch.nan))
    kernels.reduce_shards(place(torch.stack([tensor, tensor.flip(0)])), shard, 0.5)
    return [shard]


def reduce_quantized(
    kernels: Any, tensor: Tensor, slots: SlotTable, place: Place, form: BlockFormat = INT8_FORMAT
) -> list[Tensor]:
    wire = torch.empty(wire_size(slots, 1, BLOCK, form), dtype=torch.uint8)
    kernels.quantize([tensor], slots, wire, 1, BLOCK, None, None, form=form)
    shard = place(torch.full_like(wire, 7))
    residuals = place(torch.stack([values(slots.total, torch.float32, 3, special=False), torch.zeros(slots.total)]))
    turn = place(torch.zeros(1, dtype=torch.int32))
    kernels.reduce_quantized(place(torch.stack([wire, wire])), shard, 0.5, BLOCK, 1, residuals, turn, form=form)
    return [shard, residuals]


def fp16_blocks(kernels: Any, tensor: Tensor, slots: SlotTable, place: Place) -> list[Tensor]:
    wire = place(torch.full((ops.fp16_wire_numel(slots.total, 1),), 7, dtype=torch.uint8))
    kernels.flatten_fp16([place(tensor)], slots, wire, 1, 1)
    target, same = place(torch.full_like(tensor, torch.nan)), place(torch.full_like(tensor, torch.nan))
    statistics = place(torch.zeros(ops.statistics_shape(slots), dtype=ops.statistics_dtype(tensor.dtype)))
    kernels.unflatten_fp16(wire, 1, slots, [target], 0.5)
    kernels.unflatten_fp16(wire, 1, slots, [same], 0.5, statistics)
    small = torch.zeros_like(wire)
    kernels.flatten_fp16([tensor * 1e-9], slots, small, 1, 1)
    shard = place(torch.full_like(wire, 7))
    kernels.reduce_fp16(place(torch.stack([wire, small])), shard, 0.5)
    small = place(small)
    kernels.share_exponents(small, place(wire[2 * slots.total :][None]))
    return [wire, target, same, statistics, shard, small]


CASES: dict[str, Case] = {
    **{case.__name__: case for case in (flatten, unflatten, reduce_shards, fp16_blocks)},
    **{
        f"{case.__name__} {form.name}": partial(case, form=form)
        for case in (quantize, dequantize, reduce_quantized)
        for form in (INT8_FORMAT, INT4_FORMAT, FP8_FORMAT)
    },
}
DTYPES = {SMALL: (torch.float64, torch.float32, torch.float16, torch.bfloat16), LARGE: (torch.float64, torch.float32)}


def inputs() -> Iterator[tuple[Tensor, SlotTable]]:
    for numel, dtypes in DTYPES.items():
        for dtype in dtypes:
            yield values(numel, dtype, 1, special=False), slot_table([numel], BLOCK)


FEW = {SMALL: range(1, 16), LARGE: (1, 4, 8)}  # bytes: odd, and multiples of an element's size


def check(name: str, few: bool) -> None:
    """Every kernel's results, wherever all of its memory lies, beside those at the beginning of a line."""
    kernels = backends.load(name)
    for tensor, slots in inputs():
        for title, case in CASES.items():
            wanted = case(kernels, tensor, slots, lambda tensor: at(0, tensor))
            for offset in FEW[tensor.numel()] if few else range(1, 16):
                found = case(kernels, tensor, slots, lambda tensor, offset=offset: at(offset, tensor))
                for mine, theirs in zip(found, wanted, strict=True):
                    what = f"{title} of {tensor.numel()} {tensor.dtype}, {offset} bytes off"
                    assert_same_bits(mine.flatten(), theirs.flatten(), what)


@pytest.mark.parametrize(
    ("name", "few"),
    [("numba_cpu", True), *(pytest.param(name, False, marks=pytest.mark.long) for name in ("numba_cpu", "reference"))],
)
def test_kernels_on_a_cpu_take_any_address(tmp_path: Path, name: str, few: bool):
    script = tmp_path / "check.py"
    script.write_text(f"from tests.kernels.test_addresses import check; check({name!r}, {few})")
    done = run(PYTHON, script)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.parametrize("name", [name for name in GPU_BACKENDS if backends.why_not(name, torch.device("cpu")) is None])
def test_kernels_on_a_gpu_refuse_what_a_gpu_cannot_access(name: str):
    kernels, slots = backends.load(name), slot_table([4, 40])
    tensors = [torch.ones(4), at(6, torch.ones(5, 8))]
    with pytest.raises(TensorError, match=r"flatten: tensor 1 of 2, .*\(5, 8\).* is 2 more than .*size 4.*clone\(\)"):
        kernels.flatten(tensors, slots, torch.empty(slots.total), 1.0)
    kernels.flatten([tensors[0], at(4, tensors[1])], slots, torch.empty(slots.total), 1.0)


def test_addresses_on_a_device_are_checked_when_they_are_new(monkeypatch: pytest.MonkeyPatch):
    tensors = [torch.ones(4), torch.ones(5)]
    table = device_table(slot_table([4, 5]), 2048, torch.device("cpu"))
    table.addresses("flatten", tensors)
    monkeypatch.setattr(device_tables, "_check_alignment", lambda *_: pytest.fail("checked again"))
    table.addresses("flatten", tensors)
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        table.addresses("flatten", [tensors[0], torch.ones(5)])


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
