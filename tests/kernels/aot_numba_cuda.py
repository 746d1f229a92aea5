"""Compiles the Numba CUDA kernels for real GPUs, without one, in a process without the simulator (see test_aot.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import types

from fastreduce.kernels import numba_cuda_cast, numba_cuda_fp16, numba_cuda_int8, numba_cuda_statistics

TARGETS = (80, 90, 100)
INT64, FP64, FP32, FP16, BF16 = types.int64, types.float64, types.float32, types.int16, types.uint16

# Name, kernel, types of its arguments, and the bytes that a thread loads and stores 16 at a time: every access once.
Variant = tuple[str, Any, tuple[Any, ...], tuple[int, int] | None]


def variants() -> list[Variant]:
    """What is compiled: every kernel, with the dtypes that take another path."""
    flatten, unflatten, reduce = numba_cuda_cast._flatten, numba_cuda_cast._unflatten, numba_cuda_cast._reduce
    found: list[Variant] = []
    arguments: tuple[Any, ...]
    for name, tag in [("fp16", FP16), ("bf16", BF16)]:
        arguments = (INT64, tag, INT64, INT64, FP32, FP32)
        found.append((f"flatten {name}", flatten, arguments, (32, 16)))
        found.append((f"unflatten {name}", unflatten, arguments, (16, 32)))
        # The first rank's shard and, in the loop, another's.
        found.append((f"reduce {name}", reduce, (INT64, INT64, INT64, tag, INT64, *[FP32] * 3), (32, 16)))
    found.append(("flatten fp64", flatten, (INT64, BF16, INT64, INT64, FP64, FP64), (64, 16)))

    for name, tag, size in [("fp32", FP32, 4), ("bf16", BF16, 2)]:
        # The old residual is read in two places: once more where a block is not finite.
        arguments = (*[INT64] * 6, tag, *[INT64] * 3)
        found.append((f"quantize {name}", numba_cuda_int8._quantize, arguments, (16 * (size + 8), 16 * 5)))
        arguments = (*[INT64] * 3, tag, *[INT64] * 3)
        found.append((f"dequantize {name}", numba_cuda_int8._dequantize, arguments, (16, 16 * size)))
    rule = [types.int32] * 4
    for name, tag, size in [("fp32", FP32, 4), ("bf16", BF16, 2)]:
        arguments = (*[INT64] * 3, tag, *[INT64] * 2, *rule)
        found.append((f"flatten_fp16 {name}", numba_cuda_fp16._flatten, arguments, (16 * size, 32)))
        arguments = (*[INT64] * 3, tag, *[INT64] * 2, FP32)
        found.append((f"unflatten_fp16 {name}", numba_cuda_fp16._unflatten, arguments, (16, 8 * size)))
        kernel = numba_cuda_statistics.unflatten_fp16_and_sum
        arguments = (*arguments, INT64, FP32)
        found.append((f"unflatten_fp16 {name} with statistics", kernel, arguments, (16, 8 * size)))
    arguments = (*[INT64] * 5, *[FP32] * 3, *rule)
    # The first rank's shard and, in the loop, another's; and both once more where the sum is not finite.
    found.append(("reduce_fp16", numba_cuda_fp16._reduce, arguments, (4 * 32, 32)))
    found.append(("share_exponents", numba_cuda_fp16._share, (INT64,) * 5, (32, 32)))
    unflatten, dequantize = numba_cuda_statistics.unflatten_and_sum, numba_cuda_statistics.dequantize_and_sum
    for name, kernel, types_, wide in [
        ("unflatten bf16", unflatten, (INT64, BF16, INT64, INT64, FP32, FP32, INT64, FP32), (16, 32)),
        ("unflatten fp64", unflatten, (INT64, FP32, INT64, INT64, FP64, FP64, INT64, FP64), (16, 32)),
        ("dequantize fp32", dequantize, (*[INT64] * 3, FP32, *[INT64] * 4, FP32), (16, 64)),
    ]:
        found.append((f"{name} with statistics", kernel, types_, wide))
    arguments = (*[INT64] * 10, *[FP32] * 3)
    found.append(("reduce_quantized", numba_cuda_int8._reduce, arguments, (16 * (4 + 8), 16 * 5)))
    return found


def resource_use(ptx: str, target: int) -> str:
    """What ptxas says about registers and spills."""
    options = [f"-arch=sm_{target}", "-verbose"]
    linker = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx.encode(), len(ptx.encode()), "kernel")
        nvjitlink.complete(linker)
        log = bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_info_log(linker, log)
    finally:
        nvjitlink.destroy(linker)
    return log.decode()


def compile_all() -> list[dict[str, Any]]:
    """Every variant for every target."""
    results = []
    for name, kernel, arguments, wide in variants():
        for target in TARGETS:
            signature, capability = types.void(*arguments), divmod(target, 10)
            ptx, _ = cuda.compile_ptx(kernel.py_func, signature, cc=capability, device=False, abi="numba")
            entry = {"name": f"{name}, sm_{target}", "wide": wide, "log": resource_use(ptx, target)}
            results.append({**entry, "ptx": ptx})
    return results


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all()))
