"""The GPU kernels compiled for real GPUs, without one: what their PTX and ptxas's log say."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

import pytest
import torch

from bench.kernels.aot import compiled
from fastreduce.ops import backends

# Numba takes a minute and more for each of its targets.
OTHERS = (["triton"], ["numba_cuda", "80"], ["numba_cuda", "90"], ["numba_cuda", "100"])


@pytest.fixture(
    scope="module",
    params=[["triton", "quick"], *(pytest.param(other, marks=pytest.mark.long) for other in OTHERS)],
    ids=", ".join,
)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each kernel's name, PTX, ptxas log, and the bytes that a thread must load and store 16 and more at a time."""
    name, *how = request.param
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "numba_cuda" and (why := backends.why_not(name, torch.device("cuda", 0))):
        pytest.skip(why)
    return compiled(name, tmp_path_factory.mktemp(name), *how)


def wide_bytes(ptx: str, instruction: str) -> int:
    """Bytes that one thread moves in accesses of 16 bytes and more."""
    accesses = re.findall(rf"\b{instruction}\.global[\w.:]*\.v(\d)\.[buf](\d+)", ptx)
    sizes = [int(count) * int(bits) // 8 for count, bits in accesses]
    return sum(size for size in sizes if size >= 16)


def test_full_tiles_move_16_bytes_at_a_time(kernels):
    for kernel in kernels:
        if kernel["wide"] is not None:
            moved = [wide_bytes(kernel["ptx"], instruction) for instruction in ("ld", "st")]
            if kernel["name"].startswith(
                ("reduce ", "stochastic reduce ")
            ):  # whose loop over ranks the compiler may unroll
                moved = [min(pair) for pair in zip(moved, kernel["wide"], strict=True)]
            assert moved == kernel["wide"], kernel["name"]


def test_arithmetic_is_rounded_as_written(kernels):
    # Without .rn ptxas may contract a product and a sum; .ftz flushes subnormals, which the one division (in
    # which Triton 3.5 says it) never meets: absmax is at least 2^-100.
    inexact = re.compile(r"\bfma\b|\bmad\.(?:rn\.)?f|\bdiv\.(?:full|approx)|(?<!\bdiv\.rn)\.ftz|\b(?:add|sub|mul)\.f\d")
    for kernel in kernels:
        assert not inexact.findall(kernel["ptx"]), kernel["name"]


def test_rounding_by_a_magic_sum_survives_the_compiler(kernels):
    for kernel in kernels:
        if kernel["name"].startswith(("quantize", "reduce_quantized")):
            # What is added and taken away again: 1.5 * 2^23, or for FP8 a power of two made from each value's exponent.
            fp8 = "fp8" in kernel["name"]
            for number in [str((20 << 23) + (1 << 22))] if fp8 else ["0f4B400000", "0fCB400000"]:
                assert number in kernel["ptx"], kernel["name"]


def test_triton_rounds_to_bf16_by_the_gpus_own_conversion(kernels, request):
    if request.node.callspec.params["kernels"] == ["triton"]:
        rounded = [
            kernel for kernel in kernels if re.match(r"(flatten|reduce|unflatten_fp16|dequantize) bf16", kernel["name"])
        ]
        assert len(rounded) >= 6
        for kernel in rounded:
            if not kernel["name"].endswith("sm_75"):  # which has no such conversion
                assert "cvt.rn.bf16" in kernel["ptx"], kernel["name"]


def test_all_warps_have_read_what_one_of_them_writes_over(kernels, request):
    if request.node.callspec.params["kernels"][0] == "triton":
        shared = [kernel for kernel in kernels if kernel["name"].startswith("share_exponents")]
        assert shared
        for kernel in shared:
            read, written = (re.split(rf"\b{what}\.global\.b8\b", kernel["ptx"]) for what in ("ld", "st"))
            assert len(read) > 2 and len(written) == 2, kernel["name"]
            between = read[-1][: -len(written[-1])]
            assert "bar.sync" in between, kernel["name"]


def test_registers_do_not_spill(kernels):
    for kernel in kernels:
        spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", kernel["log"])
        assert len(spills) >= 3 and not any(map(int, spills)), kernel["name"]
