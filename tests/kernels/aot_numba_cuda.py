"""Compiles the Numba CUDA kernels for real GPUs, without one, in a process without the simulator (see test_aot.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import types

from fastreduce.kernels import (
    numba_cuda_cast,
    numba_cuda_fp16,
    numba_cuda_int8,
    numba_cuda_statistics,
    numba_cuda_stochastic,
)

INT64, FP64, FP32, FP16, BF16 = types.int64, types.float64, types.float32, types.int16, types.uint16
INT8, INT4, FP8 = types.int8, types.uint32, types.uint8
QUANTIZED = [("int8", INT8, 16), ("int4", INT4, 0), ("fp8", FP8, 16)]  # of INT4 a thread has 8 bytes
RESIDUALS = [(FP32, 4), (INT8, 1), (BF16, 2)]  # tags, and bytes of an element


class Variant(NamedTuple):
    """One specialisation of a kernel, and the bytes that a thread loads and stores 16 at a time: every access once.

    Of what it loads, `again` is loaded only where a block or a sum is not finite. A thread has `elements`.
    """

    name: str
    kernel: Any
    types: tuple[Any, ...]
    wide: tuple[int, int]
    elements: int
    again: int = 0


def variants() -> list[Variant]:
    """What is compiled: every kernel, with the dtypes that take another path."""
    flatten, unflatten, reduce = numba_cuda_cast._flatten, numba_cuda_cast._unflatten, numba_cuda_cast._reduce
    found: list[Variant] = []
    arguments: tuple[Any, ...]
    for name, tag in [("fp16", FP16), ("bf16", BF16)]:
        arguments = (INT64, tag, INT64, INT64, FP32, FP32, INT64)
        found.append(Variant(f"flatten {name}", flatten, arguments, (32, 16), 8))
        found.append(Variant(f"unflatten {name}", unflatten, arguments, (16, 32), 8))
        # The first rank's shard and, in the loop, another's.
        arguments = (INT64, INT64, INT64, tag, INT64, *[FP32] * 3)
        found.append(Variant(f"reduce {name}", reduce, arguments, (32, 16), 8))
    found.append(Variant("flatten fp64", flatten, (INT64, BF16, INT64, INT64, FP64, FP64, INT64), (64, 16), 8))

    for name, tag, size in [("fp32", FP32, 4), ("bf16", BF16, 2)]:
        for form, code, payload in QUANTIZED:
            title = f"{name}, {form}"
            for kept, each in RESIDUALS if tag == FP32 else RESIDUALS[:1]:
                # The old residual is read in two places: once more where a block is not finite.
                arguments = (*[INT64] * 6, tag, *[INT64] * 5, kept, code)
                moved, again = (16 * (size + 2 * each), payload + 16 * each), 16 * each
                what = f"quantize {title}" + ("" if kept == FP32 else f", residual of {each} bytes")
                found.append(Variant(what, numba_cuda_int8._quantize, arguments, moved, 16, again))
            arguments, moved = (*[INT64] * 3, tag, *[INT64] * 5, FP32, code), (payload, 16 * size)
            found.append(Variant(f"dequantize {title}", numba_cuda_int8._dequantize, arguments, moved, 16))
    rule = [types.int32] * 4
    for name, tag, size in [("fp32", FP32, 4), ("bf16", BF16, 2)]:
        arguments = (*[INT64] * 3, tag, *[INT64] * 2, *rule, INT64)
        found.append(Variant(f"flatten_fp16 {name}", numba_cuda_fp16._flatten, arguments, (16 * size, 32), 16))
        arguments = (*[INT64] * 3, tag, *[INT64] * 2, FP32, INT64)
        found.append(Variant(f"unflatten_fp16 {name}", numba_cuda_fp16._unflatten, arguments, (16, 8 * size), 8))
        kernel = numba_cuda_statistics.unflatten_fp16_and_sum
        arguments = (*arguments, INT64, FP32)
        found.append(Variant(f"unflatten_fp16 {name} with statistics", kernel, arguments, (16, 8 * size), 8))
    arguments = (*[INT64] * 5, *[FP32] * 3, *rule)
    # The first rank's shard and, in the loop, another's; and both once more where the sum is not finite.
    found.append(Variant("reduce_fp16", numba_cuda_fp16._reduce, arguments, (4 * 32, 32), 16, 2 * 32))
    found.append(Variant("share_exponents", numba_cuda_fp16._share, (INT64,) * 5, (32, 32), 16))
    unflatten, dequantize = numba_cuda_statistics.unflatten_and_sum, numba_cuda_statistics.dequantize_and_sum
    for name, kernel, types_, moved, elements in [
        ("unflatten bf16", unflatten, (INT64, BF16, INT64, INT64, FP32, FP32, INT64, INT64, FP32), (16, 32), 8),
        ("unflatten fp64", unflatten, (INT64, FP32, INT64, INT64, FP64, FP64, INT64, INT64, FP64), (16, 32), 4),
        (
            "dequantize fp32, int8",
            dequantize,
            (*[INT64] * 3, FP32, *[INT64] * 5, FP32, INT8, INT64, FP32),
            (16, 64),
            16,
        ),
        ("dequantize fp32, int4", dequantize, (*[INT64] * 3, FP32, *[INT64] * 5, FP32, INT4, INT64, FP32), (0, 64), 16),
        ("dequantize fp32, fp8", dequantize, (*[INT64] * 3, FP32, *[INT64] * 5, FP32, FP8, INT64, FP32), (16, 64), 16),
    ]:
        found.append(Variant(f"{name} with statistics", kernel, types_, moved, elements))
    # As in reduce_fp16, and the old residual as in quantize.
    for form, code, payload in QUANTIZED:
        for kept, each in RESIDUALS:
            arguments, again = (*[INT64] * 10, *[FP32] * 3, kept, code), 2 * payload + 16 * each
            moved = (4 * payload + 16 * 2 * each, payload + 16 * each)
            what = f"reduce_quantized {form}" + ("" if kept == FP32 else f", residual of {each} bytes")
            found.append(Variant(what, numba_cuda_int8._reduce, arguments, moved, 16, again))
    arguments = (*[INT64] * 3, FP32, FP32, *[INT64] * 5)
    found.append(Variant("stochastic flatten bf16", numba_cuda_stochastic._flatten, arguments, (32, 16), 8))
    arguments = (*[INT64] * 4, *[FP32] * 3, *[INT64] * 5)
    kernel, moved = numba_cuda_stochastic._reduce, (4 * 16, 16)  # both shards once more where the sum is not finite
    found.append(Variant("stochastic reduce bf16", kernel, arguments, moved, 8, 2 * 16))
    for form, code, payload in QUANTIZED:
        arguments = (*[INT64] * 3, FP32, *[INT64] * 4, code, *[INT64] * 4)
        title, moved = f"stochastic quantize fp32, {form}", (16 * 4, payload)
        found.append(Variant(title, numba_cuda_stochastic._quantize, arguments, moved, 16))
        arguments = (*[INT64] * 7, *[FP32] * 3, code, *[INT64] * 5)
        title, moved = f"stochastic reduce_quantized {form}", (4 * payload, payload)
        kernel = numba_cuda_stochastic._reduce_quantized
        found.append(Variant(title, kernel, arguments, moved, 16, 2 * payload))
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


def compile_all(target: int) -> list[dict[str, Any]]:
    """Every variant, for GPUs of a compute capability: 90 is 9.0."""
    results = []
    for variant in variants():
        signature, capability = types.void(*variant.types), divmod(target, 10)
        ptx, _ = cuda.compile_ptx(variant.kernel.py_func, signature, cc=capability, device=False, abi="numba")
        of_thread = {"wide": variant.wide, "again": variant.again, "elements": variant.elements}
        entry = {"name": f"{variant.name}, sm_{target}", **of_thread, "log": resource_use(ptx, target)}
        results.append({**entry, "ptx": ptx})
    return results


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all(int(sys.argv[2]))))
