"""Whether averages are finite, as `unflatten` and `unflatten_fp16` tell by a byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastreduce import ops
from fastreduce.kernels.slots import FP16_BLOCK, SlotTable
from fastreduce.ops.backends import Backend

from .cases import QUIET, Memory, fp16_size, slot_table, tensors_of, values

pytestmark = QUIET

NUMELS = [300, 128, 2500, 5]
LARGEST = torch.finfo(torch.float32).max


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
MADE = Callable[[torch.dtype | None, torch.dtype], Way]


@pytest.fixture
def way(backend: Backend, memory: Memory) -> MADE:
    return lambda wire_dtype, dtype: Way(backend, memory, wire_dtype, dtype)


@pytest.mark.parametrize("summed", [False, True], ids=["plain", "statistics"])
@pytest.mark.parametrize("wire_dtype", WIRES, ids=str)
def test_one_element_that_is_not_finite_is_told(way: MADE, wire_dtype: torch.dtype | None, summed: bool):
    tensors = [values(numel, torch.float32, i, special=False).clamp_(-6e4, 6e4) for i, numel in enumerate(NUMELS)]
    assert way(wire_dtype, torch.float32).told(tensors, 0.5, summed)
    for number, tensor, place in [(torch.inf, 0, 0), (-torch.inf, 1, 3), (torch.nan, 2, 2499), (torch.inf, 3, 4)]:
        kept = float(tensors[tensor][place])
        tensors[tensor][place] = number
        assert not way(wire_dtype, torch.float32).told(tensors, 0.5, summed), (tensor, place)
        tensors[tensor][place] = kept


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("wire_dtype", WIRES, ids=str)
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


def test_padding_tells_nothing(way: MADE):
    made = way(torch.float16, torch.float32)
    tensors = [made.memory.copy(torch.zeros(numel)) for numel in NUMELS]
    made.there(tensors, made.finite)
    made.wire[300:384] = torch.inf
    made.back(tensors, 1.0, None, made.finite)
    assert int(made.finite) == 1
