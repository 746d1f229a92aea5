"""Whether averages are finite, as `unflatten`, `unflatten_fp16` and `dequantize` tell by a byte."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fastreduce import ops
from fastreduce.kernels.slots import FP8_FORMAT, FP16_BLOCK, INT4_FORMAT, INT8_FORMAT, Draws, SlotTable
from fastreduce.ops.backends import Backend

from .cases import QUIET, Memory, fp16_size, slot_table, tensors_of, values, wire_size

pytestmark = QUIET

NUMELS = [300, 128, 2500, 5]
LARGEST = torch.finfo(torch.float32).max
FORMATS = [INT8_FORMAT, INT4_FORMAT, FP8_FORMAT]
SHORT = [
    (INT8_FORMAT, torch.float16, False, True),
    (INT4_FORMAT, torch.bfloat16, True, False),
    (FP8_FORMAT, torch.float32, False, False),
]


class Way:
    """Tensors to a wire and back, which may be statistics' too."""

    def __init__(self, backend: Backend, memory: Memory, wire_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
        self.backend, self.memory, self.wire_dtype = backend, memory, wire_dtype
        self.slots: SlotTable = slot_table(NUMELS, FP16_BLOCK, shards=2)
        count, kind = (self.slots.total, wire_dtype) if wire_dtype else (fp16_size(self.slots, 2), torch.uint8)
        self.wire, self.finite = memory.empty(count, kind), memory.copy(torch.zeros(1, dtype=torch.uint8))
        shape = ops.statistics_shape(self.slots, 0 if wire_dtype else FP16_BLOCK)
        self.statistics = memory.copy(torch.zeros(shape, dtype=ops.statistics_dtype(dtype)))

    def there(self, tensors: list[Tensor], finite: Tensor | None) -> None:
        if self.wire_dtype is None:
            self.backend.flatten_fp16(tensors, self.slots, self.wire, 2, 1, finite)
        else:
            self.backend.flatten(tensors, self.slots, self.wire, 1.0, finite)

    def back(self, tensors: list[Tensor], scale: float, statistics: Tensor | None, finite: Tensor | None) -> None:
        if self.wire_dtype is None:
            self.backend.unflatten_fp16(self.wire, 2, self.slots, tensors, scale, statistics, finite)
        else:
            self.backend.unflatten(self.wire, self.slots, tensors, scale, statistics, finite)

    def told(self, tensors: list[Tensor], scale: float, summed: bool) -> bool:
        copies = [self.memory.copy(tensor) for tensor in tensors]
        self.there(copies, self.finite)
        assert int(self.finite) == 1
        self.back(copies, scale, self.statistics if summed else None, self.finite)
        found = bool(int(self.finite))
        self.back(copies, scale, self.statistics if summed else None, None)
        self.memory.check()
        return found


WIRES = [None, torch.float16, torch.bfloat16, torch.float32]


def name_of(value: object) -> str:
    """`summed` by what is made of a tensor."""
    return ("statistics" if value else "plain") if isinstance(value, bool) else str(value)


MADE = Callable[[torch.dtype | None, torch.dtype], Way]


@pytest.fixture
def way(backend: Backend, memory: Memory) -> MADE:
    return lambda wire_dtype, dtype: Way(backend, memory, wire_dtype, dtype)


@pytest.mark.parametrize(
    ("wire_dtype", "summed"),
    [
        pytest.param(wire_dtype, summed, marks=[pytest.mark.long] * (summed == i % 2))
        for i, wire_dtype in enumerate(WIRES)
        for summed in (False, True)
    ],
    ids=name_of,
)
def test_one_element_that_is_not_finite_is_told(way: MADE, wire_dtype: torch.dtype | None, summed: bool):
    tensors = [values(numel, torch.float32, i, special=False).clamp_(-6e4, 6e4) for i, numel in enumerate(NUMELS)]
    assert way(wire_dtype, torch.float32).told(tensors, 0.5, summed)
    for number, tensor, place in [(torch.inf, 0, 0), (-torch.inf, 1, 3), (torch.nan, 2, 2499), (torch.inf, 3, 4)]:
        kept = float(tensors[tensor][place])
        tensors[tensor][place] = number
        assert not way(wire_dtype, torch.float32).told(tensors, 0.5, summed), (tensor, place)
        tensors[tensor][place] = kept


@pytest.mark.parametrize(
    ("wire_dtype", "dtype"),
    [
        pytest.param(wire_dtype, dtype, marks=[pytest.mark.long] * ((i + j) % 3 > 0))
        for i, wire_dtype in enumerate(WIRES)
        for j, dtype in enumerate((torch.float64, torch.bfloat16, torch.float16))
    ],
    ids=str,
)
def test_tensors_of_each_dtype(way: MADE, wire_dtype: torch.dtype | None, dtype: torch.dtype):
    tensors = tensors_of(NUMELS, dtype)
    for tensor in tensors:
        tensor.nan_to_num_(0.0, 0.0, 0.0).clamp_(-6e4, 6e4)
    assert way(wire_dtype, dtype).told(tensors, 1.0, False)
    tensors[2][77] = torch.nan
    assert not way(wire_dtype, dtype).told(tensors, 1.0, False)


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_a_wire_that_is_finite_may_hold_averages_that_are_not(way: MADE, wire_dtype: torch.dtype | None):
    tensors = [torch.zeros(numel) for numel in NUMELS]
    tensors[2][2400] = 2.0**127
    assert way(wire_dtype, torch.float32).told(tensors, 1.0, False)
    assert not way(wire_dtype, torch.float32).told(tensors, 2.0, False)


# A wire; tensors; a number in the wire, and the least scale by which they hold it as infinity.
ENDS = [
    *((wire, torch.float16, 2.0**15, 65520 / 2**15) for wire in WIRES),
    *((wire, torch.bfloat16, 2.0**127, 2 - 2.0**-8) for wire in WIRES if wire is not torch.float16),
    (torch.float64, torch.float32, 2.0**127, 2 - 2.0**-24),
]


@pytest.mark.parametrize(
    ("wire_dtype", "dtype", "number", "scale", "summed"),
    [
        pytest.param(*end, summed, marks=[pytest.mark.long] * (summed != i % 2))
        for i, end in enumerate(ENDS)
        for summed in (False, True)
    ],
    ids=name_of,
)
def test_what_tensors_hold_as_infinity_is_told(way: MADE, wire_dtype, dtype, number, scale, summed):
    made = way(wire_dtype, dtype)
    full = [
        torch.zeros(numel, dtype=torch.float64 if wire_dtype is torch.float64 else torch.float32) for numel in NUMELS
    ]
    full[2][2400] = -number
    least = float(torch.tensor(scale, dtype=full[0].dtype).nextafter(torch.zeros((), dtype=full[0].dtype)))
    for by, is_finite in ((least, True), (scale, False)):
        made.there([made.memory.copy(tensor) for tensor in full], made.finite)
        tensors = [made.memory.copy(torch.zeros(numel, dtype=dtype)) for numel in NUMELS]
        made.back(tensors, by, made.statistics if summed else None, made.finite)
        assert all(bool(tensor.isfinite().all()) for tensor in tensors) is is_finite
        assert bool(int(made.finite)) is is_finite
    made.memory.check()


# Of each format, and of tensors of each dtype, one way stays in `make test`.
ROUNDED = [
    pytest.param(
        form,
        dtype,
        by_chance,
        summed,
        id=f"{form.name}-{dtype}-{'by chance' if by_chance else 'nearest'}-{'statistics' if summed else 'plain'}",
        marks=[] if (form, dtype, by_chance, summed) in SHORT else pytest.mark.long,
    )
    for form in FORMATS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for by_chance in (False, True)
    for summed in (False, True)
]


@pytest.mark.parametrize(("form", "dtype", "by_chance", "summed"), ROUNDED)
def test_what_tensors_hold_as_infinity_is_told_of_blocks(backend, memory, form, dtype, by_chance, summed):
    table, finite = slot_table(NUMELS, 128, shards=2), memory.copy(torch.zeros(1, dtype=torch.uint8))
    keys = np.arange(len(NUMELS))
    slots = SlotTable(table.offsets, table.numels, table.total, keys, np.zeros_like(keys))
    wire = memory.copy(torch.zeros(wire_size(slots, 2, 128, form), dtype=torch.uint8))
    statistics = memory.copy(torch.zeros(ops.statistics_shape(slots, 128))) if summed else None
    draws = Draws(7, 0, memory.copy(torch.zeros(1, dtype=torch.int64))) if by_chance else None
    most = torch.finfo(dtype).max
    for largest in (most / 2, most * 0.9, most * (1 - 2.0**-7), most * (1 + 2.0**-6), most * 1.07, LARGEST):
        tensors = [values(numel, torch.float32, i, special=False).clamp_(-1, 1) for i, numel in enumerate(NUMELS)]
        tensors[2][2400] = -min(largest, LARGEST)
        given = [memory.copy(each) for each in tensors]
        backend.quantize(given, slots, wire, 2, 128, None, None, finite, form, draws)
        averages = [memory.copy(torch.zeros(numel, dtype=dtype)) for numel in NUMELS]
        backend.dequantize(wire, 2, 128, slots, averages, statistics, finite, None, form, by_chance)
        assert bool(int(finite)) is all(bool(each.isfinite().all()) for each in averages), largest
    assert not int(finite) or dtype is not torch.float16
    memory.check()


def test_padding_tells_nothing(way: MADE):
    made = way(torch.float16, torch.float32)
    tensors = [made.memory.copy(torch.zeros(numel)) for numel in NUMELS]
    made.there(tensors, made.finite)
    made.wire[300:384] = torch.inf
    made.back(tensors, 1.0, None, made.finite)
    assert int(made.finite) == 1
