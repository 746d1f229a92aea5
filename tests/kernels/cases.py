"""What the kernel tests share: backends, difficult values, guarded memory, comparison by bits."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: its own functions look at it then

from fastreduce.kernels import reference
from fastreduce.kernels.slots import (
    FP8_FORMAT,
    FP16_BLOCK,
    INT4_FORMAT,
    INT8_FORMAT,
    BlockFormat,
    SlotTable,
    fp16_shard_bytes,
    shard_bytes,
)
from fastreduce.ops import backends

GPU_BACKENDS = ("triton", "numba_cuda")
# Numba's simulator takes the place of numba.cuda, so it has a process of its own: test_numba_cuda.py starts it.
SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPE_PAIRS = tuple((dtype, wire) for dtype in DTYPES for wire in DTYPES)
SIZES: tuple[int, ...] = (0, 1, 63, 127, 128, 129, 1000, 4099)
BLOCKS = [(INT8_FORMAT, 16), (INT8_FORMAT, 48), (INT8_FORMAT, 128), (INT8_FORMAT, 256)]
BLOCKS += [(INT4_FORMAT, 32), (INT4_FORMAT, 96), (FP8_FORMAT, 48), (FP8_FORMAT, 128)]
STATISTICS_SIZES: tuple[int, ...] = (0, 1, 129, 1100, 2048, 4099)  # tiles of 2048, 1536 and 4096, full and not
STATISTICS_PAIRS = tuple(zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True))
STATISTICS_BLOCKS = [(INT8_FORMAT, 48), (INT8_FORMAT, 128), (INT4_FORMAT, 96), (FP8_FORMAT, 128)]
EXAMPLES = 20
STRIDE = 1  # of what goes through all numbers of a format
GAPS = (3, 0, 1, 40)

# Triton's interpreter computes with numpy, which warns of every overflow.
QUIET = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make_shared_array_once() -> None:
    """Let one thread at a time ask for shared memory.

    Numba's simulator looks for the array and makes it if there is none, without a lock: two threads that ask at
    once get two arrays, and their block of threads no longer agrees on a maximum.
    """
    from numba.cuda.simulator import kernelapi

    lock, make = threading.Lock(), kernelapi.FakeCUDAShared.array

    def array(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return make(*args, **kwargs)

    kernelapi.FakeCUDAShared.array = array


if SIMULATOR:  # half a millisecond a thread: every path once, with tiles that are full and tiles that are not
    DTYPE_PAIRS = tuple(zip(DTYPES, (*DTYPES[1:], DTYPES[0]), strict=True))
    SIZES = (0, 1, 129, 1100)
    BLOCKS = [(INT8_FORMAT, 48), (INT8_FORMAT, 128), (INT4_FORMAT, 96), (FP8_FORMAT, 48)]
    STATISTICS_SIZES, STATISTICS_BLOCKS = (0, 1, 130, 2300), [(INT8_FORMAT, 48), (INT4_FORMAT, 96), (FP8_FORMAT, 48)]
    EXAMPLES = 3
    sys.setswitchinterval(5e-5)  # its threads wait for each other: half the time
    STRIDE = 61
    make_shared_array_once()


def _backends() -> list[Any]:
    if SIMULATOR:
        return ["numba_cuda"]
    if torch.cuda.is_available():
        return [pytest.param(name, marks=[pytest.mark.gpu] * (name in GPU_BACKENDS)) for name in backends.NAMES]
    return [name for name in backends.NAMES if name != "numba_cuda" and (name != "triton" or find_spec("triton"))]


BACKENDS = _backends()

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_POISON = 0xA5
_GUARD = 64

_SPECIAL = np.concatenate(
    [
        [0.0, -0.0, np.inf, -np.inf, np.nan],
        # The ends of FP16, of FP32 and of FP64; 65519.996 is the last FP32 that rounds to a finite FP16.
        [65504.0, 65519.0, 65519.996, 65520.0, -65520.0, 65536.0],
        [3.4028234663852886e38, -3.4028234663852886e38, 3.3895e38, 1e300, -1.7976931348623157e308],
        # Subnormal in FP16, BF16, FP32 and FP64, with ties and what lies beside them.
        [2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 3 * 2.0**-25, 1.5 * 2.0**-26, -(2.0**-20) * 1.37],
        [2.0**-126, 2.0**-133, 2.0**-134, 3 * 2.0**-134, 2.0**-149, -(2.0**-150), 1e-40, 5e-324, 1e-310],
        # Ties of FP16, BF16 and FP32 at one, to even on either side, and just off.
        [1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20],
        [1 + 2.0**-24, 1 + 3 * 2.0**-24, 1 + 2.0**-11 + 2.0**-40, -1 / 3],
    ]
)


def device_of(name: str) -> torch.device:
    """Where a backend's tensors live: a GPU if it needs one and there is one."""
    return torch.device("cuda" if name in GPU_BACKENDS and torch.cuda.is_available() and not SIMULATOR else "cpu")


def slot_table(numels: Sequence[int], align: int = 1, gaps: Sequence[int] = (0,), shards: int = 1) -> SlotTable:
    """Slots at multiples of `align`, `gaps` times `align` apart: before the first, after each, in turn."""
    offsets, end = [], gaps[0] * align
    for i, numel in enumerate(numels):
        offsets.append(end)
        end += -(-numel // align) * align + gaps[(i + 1) % len(gaps)] * align
    total = -(-end // (align * shards)) * align * shards
    return SlotTable(np.array(offsets, np.int64), np.array(numels, np.int64), total)


def values(numel: int, dtype: torch.dtype, seed: int, special: bool = True) -> Tensor:
    """Numbers of many magnitudes; with `special`, every third is one that conversions tend to get wrong."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal(numel) * 2.0 ** random.integers(-24, 17, numel)
    if special:
        numbers[::3] = random.permutation(np.resize(_SPECIAL, numel))[: len(numbers[::3])]
    return torch.from_numpy(numbers).to(dtype)


@dataclass
class Memory:
    """Poisoned tensors on a device between guard bytes that a kernel must not touch."""

    device: torch.device
    _buffers: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def empty(self, numel: int, dtype: torch.dtype, shift: int = 0) -> Tensor:
        """A tensor of poison, `shift` elements off a 16-byte boundary."""
        size = numel * dtype.itemsize
        start = _GUARD + shift * dtype.itemsize
        buffer = torch.full((start + size + _GUARD,), _POISON, dtype=torch.uint8, device=self.device)
        self._buffers.append((buffer, start, start + size))
        return buffer[start : start + size].view(dtype)

    def like(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """Poison in the shape and memory order of a dense tensor."""
        return self.empty(tensor.numel(), tensor.dtype, shift).as_strided(tensor.shape, tensor.stride())

    def copy(self, tensor: Tensor, shift: int = 0) -> Tensor:
        """A dense tensor's twin, in the same memory order."""
        return self.like(tensor, shift).copy_(tensor)

    def check(self) -> None:
        """Fails if anything was written outside the tensors."""
        for buffer, start, end in self._buffers:
            outside = torch.cat([buffer[:start], buffer[end:]])
            assert bool((outside == _POISON).all()), "a kernel wrote outside its tensors"


def memory_order(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory, on the CPU."""
    return tensor.as_strided((tensor.numel(),), (1,)).cpu()


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal bit by bit, except that a NaN equals any NaN."""
    actual, expected = memory_order(actual), memory_order(expected)
    assert actual.dtype == expected.dtype and actual.numel() == expected.numel()
    integer = _INTEGERS[actual.element_size()]
    if torch.equal(actual.view(integer), expected.view(integer)):
        return
    different = actual.view(integer) != expected.view(integer)
    if actual.is_floating_point():
        different &= ~(actual.isnan() & expected.isnan())
    where = different.nonzero().flatten()
    i = int(where[0]) if len(where) else 0
    assert not len(where), f"{what}: {len(where)} differ, first [{i}]: {actual[i]!r} is not {expected[i]!r}"


def case_name(value: object) -> str:
    """A format by its name, in the name of a test."""
    return value.name if isinstance(value, BlockFormat) else str(value)


def split_wire(wire: Tensor, shards: int, block: int, form: BlockFormat = INT8_FORMAT) -> tuple[Tensor, Tensor, Tensor]:
    """Codes `[shards, blocks, block]`, scales `[shards, blocks]` and padding of a quantized wire."""
    rows = wire.cpu().view(shards, wire.numel() // shards)
    blocks, width = form.blocks(rows.shape[1], block), form.payload_bytes(block)
    payload, scales, padding = rows.tensor_split([blocks * width, blocks * (width + form.scale_bytes)], dim=1)
    codes = payload.flatten().view(torch.int8)
    if form is INT4_FORMAT:
        codes = torch.stack([(codes << 4) >> 4, codes >> 4], dim=1)
    return (
        codes.reshape(shards, blocks, block),
        scales.flatten().view(torch.bfloat16 if form is INT4_FORMAT else torch.float32).view(shards, blocks),
        padding.flatten(),
    )


def assert_same_wire(
    actual: Tensor, expected: Tensor, shards: int, block: int, form: BlockFormat = INT8_FORMAT
) -> None:
    """Two quantized wires that are equal by bits, part for part."""
    parts = zip(split_wire(actual, shards, block, form), split_wire(expected, shards, block, form), strict=True)
    for what, (mine, theirs) in zip(("payload", "scales", "padding"), parts, strict=True):
        assert_same_bits(mine, theirs, what)


def wire_size(slots: SlotTable, shards: int, block: int, form: BlockFormat = INT8_FORMAT) -> int:
    """Bytes of a quantized wire."""
    return shards * shard_bytes(slots.total // shards // block, block, form)


def tensors_of(numels, dtype: torch.dtype, special: bool = True) -> list[Tensor]:
    return [values(numel, dtype, seed, special) for seed, numel in enumerate(numels)]


def expected_wire(tensors: list[Tensor], slots: SlotTable, dtype: torch.dtype, scale: float) -> Tensor:
    wire = torch.empty(slots.total, dtype=dtype)
    reference.flatten(tensors, slots, wire, scale)
    return wire


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
