"""The Triton kernels compiled for real GPUs, without one: what their PTX and ptxas's log say."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

TARGETS = (80, 90, 100)
THREADS = 128
POINTERS = {
    "addresses": "*i64",
    "tiles": "*i64",
    "residual": "*fp32",
    "new_residual": "*fp32",
}
BYTES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)


def variants() -> list[tuple[str, Any, dict[str, str], dict[str, Any], tuple[int, int] | None]]:
    """Name, kernel, types of arguments, constants, and the bytes a full tile loads and stores 16 at a time."""
    import triton.language as tl

    from fastreduce.kernels import triton_cast, triton_int8

    types = {"fp64": tl.float64, "fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
    tile, found = triton_cast.TILE, []
    for tensor, wire in [("fp32", "fp16"), ("fp32", "bf16"), ("bf16", "bf16")]:
        for to_wire in (True, False):
            moved = (tile * BYTES[tensor], tile * BYTES[wire])
            constants = {"dtype": types[tensor], "TO_WIRE": to_wire, "TILE": tile}
            name = f"flatten {tensor} to {wire}" if to_wire else f"unflatten {wire} to {tensor}"
            wide = moved if to_wire else moved[::-1]
            found.append((name, triton_cast._move, {"wire": f"*{wire}"}, constants, wide))
    for wire in ("bf16", "fp32"):
        arguments = {"received": f"*{wire}", "shard": f"*{wire}", "numel": "i32"}
        size = tile * BYTES[wire]
        constants = {"RANKS": 2, "TILE": tile}
        found.append((f"reduce {wire}", triton_cast._reduce, arguments, constants, (2 * size, size)))
    arguments = {"received": "*bf16", "shard": "*bf16", "numel": "i64"}
    found.append(("reduce, many", triton_cast._reduce, arguments, {"RANKS": 1000, "TILE": tile}, None))

    quantized = {"wire": "*u8", "received": "*u8", "shard": "*u8", "blocks": "i32", "shard_size": "i32"}
    quantized["flag_block"] = "i32"
    for block, tensor in [(128, "fp32"), (128, "bf16"), (48, "fp32"), (4096, "fp32")]:
        shape: dict[str, Any] = triton_int8._tile_shape(block)
        lanes, size = shape["ROWS"] * shape["WIDTH"], BYTES[tensor]
        for feedback in (True, False) if block == 128 else (True,):
            no_residual = {} if feedback else {"residual": None, "new_residual": None}
            more = 4 * lanes if feedback else 0
            name = f"{tensor}, blocks of {block}{', residual' if feedback else ''}"
            constants = {**shape, **no_residual, "dtype": types[tensor]}
            wide = (lanes * size + more, lanes + more)
            found.append((f"quantize {name}", triton_int8._quantize, quantized, constants, wide))
            if tensor == "fp32":
                constants = {**shape, **no_residual, "RANKS": 2}
                wide = (2 * lanes + more, lanes + more)
                found.append((f"reduce_quantized {name}", triton_int8._reduce, quantized, constants, wide))
        constants = {**shape, "dtype": types[tensor]}
        wide = (lanes, lanes * size)
        found.append((f"dequantize {name}", triton_int8._dequantize, quantized, constants, wide))
    return found


def compile_all() -> list[dict[str, Any]]:
    """Every variant for every target, compiled as a launch with 16-byte aligned tensors would compile it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    results = []
    for name, kernel, arguments, constants, wide in variants():
        types = {**POINTERS, "scale_bits": "i64", **arguments}
        signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
        aligned = [arg for arg in kernel.arg_names if arg in ("numel", "shard_size") or "*" in signature[arg]]
        attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
        values = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
        for target in TARGETS:
            with redirect_stdout(io.StringIO()) as log:
                compiled = triton.compile(
                    ASTSource(kernel, signature, values, attributes),
                    target=GPUTarget("cuda", target, 32),
                    options={"num_warps": THREADS // 32, "enable_fp_fusion": False},
                )
            entry = {"name": f"{name}, sm_{target}", "wide": wide, "log": log.getvalue()}
            results.append({**entry, "ptx": compiled.asm["ptx"]})
    return results


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"}
    command = [sys.executable, "-m", "tests.test_triton_aot", str(folder / "kernels.json")]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    results: list[dict[str, Any]] = json.loads((folder / "kernels.json").read_text())
    return results


def wide_bytes(ptx: str, instruction: str) -> int:
    """Bytes that one thread moves in accesses of 16 bytes and more."""
    accesses = re.findall(rf"\b{instruction}\.global[\w.:]*\.v(\d)\.b(\d+)", ptx)
    sizes = [int(count) * int(bits) // 8 for count, bits in accesses]
    return sum(size for size in sizes if size >= 16)


def test_full_tiles_move_16_bytes_at_a_time(kernels):
    for kernel in kernels:
        if kernel["wide"] is not None:
            moved = [THREADS * wide_bytes(kernel["ptx"], instruction) for instruction in ("ld", "st")]
            assert moved == kernel["wide"], kernel["name"]


def test_arithmetic_is_rounded_as_written(kernels):
    # Without .rn ptxas may contract a product and a sum; .ftz flushes subnormals.
    inexact = re.compile(r"\bfma\b|\bmad\.(?:rn\.)?f|\bdiv\.(?:full|approx)|\.ftz|\b(?:add|sub|mul)\.f\d")
    for kernel in kernels:
        assert not inexact.findall(kernel["ptx"]), kernel["name"]


def test_rounding_by_a_magic_sum_survives_the_compiler(kernels):
    for kernel in kernels:
        if "quantize " in kernel["name"] and "dequantize" not in kernel["name"]:
            for number in ("0f4B400000", "0fCB400000"):
                assert number in kernel["ptx"], kernel["name"]


def test_registers_do_not_spill(kernels):
    for kernel in kernels:
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", kernel["log"])
        assert len(spills) >= 2 and not any(map(int, spills)), kernel["name"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all()))
