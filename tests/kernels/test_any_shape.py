"""Any sizes, gaps, blocks, shards and dtypes: every backend by bits against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastreduce.kernels import reference
from fastreduce.kernels.slots import FP8_FORMAT, FP16_BLOCK, INT4_FORMAT, INT8_FORMAT
from fastreduce.ops import backends

from .cases import (
    BACKENDS,
    DTYPES,
    EXAMPLES,
    QUIET,
    Memory,
    assert_same_bits,
    assert_same_fp16_wire,
    assert_same_wire,
    device_of,
    expected_wire,
    fp16_size,
    residual_of,
    residuals_of,
    slot_table,
    tensors_of,
    wire_size,
)

pytestmark = QUIET


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data())
def test_any_shape(name, data):
    backend, memory = backends.load(name), Memory(device_of(name))
    draw = data.draw
    numels = draw(st.lists(st.integers(0, 400), max_size=6), label="numels")
    gaps = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3), label="gaps")
    blocks = [(INT8_FORMAT, block) for block in (16, 32, 48, 112, 128)] + [(INT4_FORMAT, block) for block in (32, 96)]
    blocks += [(FP8_FORMAT, block) for block in (16, 128)]
    form, block = draw(st.sampled_from(blocks), label="block")
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
    size = wire_size(slots, shards, block, form)
    quantized, expected = memory.empty(size, torch.uint8), torch.empty(size, dtype=torch.uint8)
    copies = [memory.copy(tensor) for tensor in tensors]
    backend.quantize(copies, slots, quantized, shards, block, *mine, form=form)
    reference.quantize(tensors, slots, expected, shards, block, *theirs, form=form)
    assert_same_wire(quantized, expected, shards, block, form)
    assert_same_bits(mine[0], theirs[0], "residuals")
    memory.check()
