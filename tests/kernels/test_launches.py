"""Launches through Triton's own launcher over a driver that does nothing: what is kept is what Triton would find."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from importlib.util import find_spec

import pytest

from tests.support.commands import run


@pytest.mark.skipif(not find_spec("triton") or not shutil.which("gcc"), reason="no triton, or no gcc for its launcher")
def test_a_kept_kernel_is_launched_as_triton_launched_it():
    code = "from tests.kernels.test_launches import check; check()"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run(sys.executable, "-c", code, env=env)
    assert done.returncode == 0, done.stdout + done.stderr


def check() -> None:
    """Each operation twice: found by Triton, and kept; once more with memory that is no multiple of 16."""
    from tests.support import cuda_stub

    library = cuda_stub.activate()
    from fastreduce.kernels import triton_tiles

    def launch(operation: Callable[[], None]) -> tuple[list[int], int]:
        count = ctypes.c_long.in_dll(library, "fastreduce_launches")
        before, known = count.value, len(triton_tiles._compiled)
        operation()
        assert count.value == before + 1
        return list((ctypes.c_uint * 5).in_dll(library, "fastreduce_last")), len(triton_tiles._compiled) - known

    for offset in (0, 8):
        for name, operation in _operations(offset).items():
            (found, compiled), (kept, again) = launch(operation), launch(operation)
            assert kept == found, (name, offset)
            assert (compiled, again) == (1, 0), f"{name}: what is a multiple of 16 is compiled for"


def _operations(offset: int) -> dict[str, Callable[[], None]]:
    """Every operation, with wires that begin so many bytes behind a multiple of 16."""
    import torch

    from fastreduce.kernels import triton_cast, triton_fp16, triton_int8
    from fastreduce.kernels.slots import fp16_shard_bytes, shard_bytes
    from tests.kernels.cases import slot_table

    def memory(count: int) -> torch.Tensor:
        return torch.zeros(count + offset, dtype=torch.uint8)[offset:]

    slots = slot_table([300, 128, 5], 128, shards=2)
    half = slots.total // 2
    fp16, int8 = fp16_shard_bytes(half // 128), shard_bytes(half // 128, 128)
    tensors = [torch.zeros(int(numel)) for numel in slots.numels]
    wire, received = memory(4 * half).view(torch.float16), memory(4 * half).view(torch.float16).view(2, -1)
    halves, halves_received = memory(2 * fp16), memory(2 * fp16).view(2, -1)
    quantized, quantized_received = memory(2 * int8), memory(2 * int8).view(2, -1)
    return {
        "flatten": lambda: triton_cast.flatten(tensors, slots, wire, 0.5),
        "unflatten": lambda: triton_cast.unflatten(wire, slots, tensors, 0.5),
        "reduce_shards": lambda: triton_cast.reduce_shards(received, wire[:half], 0.5),
        "flatten_fp16": lambda: triton_fp16.flatten_fp16(tensors, slots, halves, 2, 1),
        "unflatten_fp16": lambda: triton_fp16.unflatten_fp16(halves, 2, slots, tensors, 0.5),
        "reduce_fp16": lambda: triton_fp16.reduce_fp16(halves_received, halves[:fp16], 0.5),
        "share_exponents": lambda: triton_fp16.share_exponents(halves[:fp16], halves_received),
        "quantize": lambda: triton_int8.quantize(tensors, slots, quantized, 2, 128, None, None),
        "dequantize": lambda: triton_int8.dequantize(quantized, 2, 128, slots, tensors),
        "reduce_quantized": lambda: triton_int8.reduce_quantized(
            quantized_received, quantized[:int8], 0.5, 128, 0, None, None
        ),
    }
