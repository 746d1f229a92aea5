"""Compiles the Triton kernels for real GPUs, without one, in a process without the interpreter (see test_aot.py)."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

TARGETS = (80, 90, 100)
MORE_TARGETS = (75, 120)  # of every sixth variant: Turing, which has no BF16, and Blackwell for desktops
THREADS = 128
POINTERS = {
    "addresses": "*i64",
    "tiles": "*i64",
    "residuals": "*fp32",
    "turn": "*i32",
    "finite": "*u8",
    "statistics": "*fp32",
    "keys": "*i64",
    "step": "*i64",
}


class Variant(NamedTuple):
    """One specialisation of a kernel, and the bytes that a full tile loads and stores 16 and more at a time.

    Of what it loads, `again` is loaded only where a sum is not finite, or where a tensor is not aligned. A tile has
    `elements`.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    wide: tuple[int, int] | None
    targets: tuple[int, ...] = TARGETS
    again: int = 0
    elements: int = 2048
    stochastic: bool = False

    def all_constants(self) -> dict[str, Any]:
        """Also what is not passed under rounding to nearest."""
        unused = ["keys", "step"] + ["tiles"] * ("received" in self.kernel.arg_names)
        left_out = {} if self.stochastic else {name: None for name in unused if name in self.kernel.arg_names}
        return {**self.constants, **left_out}


def variants() -> list[Variant]:
    """What is compiled: every kernel, with the dtypes and blocks that take another path."""
    import triton.language as tl

    from fastreduce.kernels import triton_cast, triton_fp16, triton_int8
    from fastreduce.kernels.slots import FP8_FORMAT, FP16_BLOCK_BYTES, INT4_FORMAT, INT8_FORMAT

    dtypes = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
    tile, found = triton_cast.TILE, []
    for wire in ("fp16", "bf16"):
        for name, to_wire, off, wide in [
            ("flatten", True, {"statistics": None}, (4, 2)),
            ("unflatten", False, {"statistics": None}, (2, 4)),
            ("unflatten with statistics", False, {}, (2, 4)),
        ]:
            constants: dict[str, Any] = {**off, "dtype": dtypes["fp32"], "TO_WIRE": to_wire, "TILE": tile}
            moved = (tile * wide[0], tile * wide[1])
            if wire == "bf16" or "statistics" not in name:
                found.append(Variant(f"{name} {wire}", triton_cast._move, {"wire": f"*{wire}"}, constants, moved))
        types = {"received": f"*{wire}", "shard": f"*{wire}", "numel": "i32"}
        constants = {"RANKS": 2, "SPARE": 2.0, "TILE": tile}
        moved = (2 * tile * 2, tile * 2)
        found.append(Variant(f"reduce {wire}", triton_cast._reduce, types, constants, moved))
    types = {"received": "*fp64", "shard": "*fp64", "numel": "i64"}
    constants = {"RANKS": 1000, "SPARE": 1024.0, "TILE": tile}
    found.append(Variant("reduce of many", triton_cast._reduce, types, constants, None, (90,)))

    types = {"wire": "*u8", "received": "*u8", "shard": "*u8", "blocks": "i32", "shard_size": "i32"}
    halves = types | dict.fromkeys(("low", "high", "ordinary", "lift", "gathered_size"), "i32") | {"gathered": "*u8"}
    block_bytes = {"BLOCK_BYTES": FP16_BLOCK_BYTES}
    for dtype, size in [("fp32", 4), ("bf16", 2)]:
        constants = {**triton_fp16.SHAPE, **block_bytes, "dtype": dtypes[dtype]}
        moved = (tile * size, tile * 2)
        found.append(Variant(f"flatten_fp16 {dtype}", triton_fp16._flatten, halves, constants, moved))
        for what, off in [("", {"statistics": None}), (" with statistics", {})]:
            constants = {**triton_fp16.SHAPE, **off, "dtype": dtypes[dtype]}
            again = tile * 2 if off else 0
            moved = (tile * 2 + again, tile * size)
            title = f"unflatten_fp16 {dtype}{what}"
            found.append(Variant(title, triton_fp16._unflatten, halves, constants, moved, again=again))
    constants = {**triton_fp16.SHAPE, **block_bytes, "RANKS": 2, "SPARE": 2.0}
    # A sum that is not finite reads every rank's shard once more.
    again = 2 * tile * 2
    moved = (2 * again, tile * 2)
    found.append(Variant("reduce_fp16", triton_fp16._reduce, halves, constants, moved, again=again))
    constants = {**triton_fp16.SHAPE, "RANKS": 2}
    found.append(Variant("share_exponents", triton_fp16._share, halves, constants, (tile * 2, tile * 2)))

    types |= {"flag_block": "i32", "size": "i64"}
    for form, block, feedback, targets in [
        (INT8_FORMAT, 128, True, TARGETS),
        (INT8_FORMAT, 128, False, TARGETS),
        (INT8_FORMAT, 48, True, (80,)),
        (INT8_FORMAT, 4096, True, (90,)),
        (INT4_FORMAT, 32, True, TARGETS),
        (INT4_FORMAT, 32, False, TARGETS),
        (INT4_FORMAT, 96, True, (80,)),
        (FP8_FORMAT, 128, True, TARGETS),
        (FP8_FORMAT, 128, False, TARGETS),
    ]:
        shape: dict[str, Any] = triton_int8._tile_shape(block, form)
        lanes = shape["ROWS"] * shape["WIDTH"]
        residual: dict[str, Any] = {} if feedback else {"residuals": None, "turn": None}
        more = 4 * lanes if feedback else 0
        # Of INT4 a thread has 8 bytes.
        payload = 0 if form is INT4_FORMAT else lanes
        name = f"{form.name}, blocks of {block}, {'' if feedback else 'no '}residual"
        for dtype, size in [("fp32", 4), ("bf16", 2)]:
            constants = {**shape, **residual, "dtype": dtypes[dtype]}
            moved = (lanes * size + more, payload + more)
            title = f"quantize {dtype}, {name}"
            found.append(Variant(title, triton_int8._quantize, types, constants, moved, targets, elements=lanes))
            if not feedback:
                for what, off in [("", {"statistics": None}), (" with statistics", {})]:
                    constants = {**shape, **off, "dtype": dtypes[dtype], "TOP": form.largest}
                    again = payload if off else 0
                    moved = (payload + again, lanes * size)
                    if dtype == "bf16" or not what:
                        title = f"dequantize {dtype}{what}, {form.name}"
                        found.append(Variant(title, triton_int8._dequantize, types, constants, moved, again=again))
        constants = {**shape, **residual, "RANKS": 2, "SPARE": 2.0}
        again = 2 * payload  # where a sum is not finite
        moved = (2 * again + more, payload + more)
        title = f"reduce_quantized, {name}"
        found.append(Variant(title, triton_int8._reduce, types, constants, moved, targets, again, lanes))
    for form, block, kept, each in [
        (INT8_FORMAT, 128, "u8", 1),
        (INT4_FORMAT, 32, "u8", 1),
        (FP8_FORMAT, 128, "u8", 1),
        (INT8_FORMAT, 128, "bf16", 2),
    ]:
        shape = triton_int8._tile_shape(block, form)
        lanes, payload = shape["ROWS"] * shape["WIDTH"], 0 if form is INT4_FORMAT else shape["ROWS"] * shape["WIDTH"]
        its, name = {**types, "residuals": f"*{kept}"}, f"{form.name}, blocks of {block}, residual in {kept}"
        constants, moved = {**shape, "dtype": tl.float32}, (lanes * (4 + each), payload + lanes * each)
        found.append(Variant(f"quantize fp32, {name}", triton_int8._quantize, its, constants, moved, (90,), 0, lanes))
        constants, again = {**shape, "RANKS": 2, "SPARE": 2.0}, 2 * payload
        moved = (2 * again + lanes * each, payload + lanes * each)
        found.append(
            Variant(f"reduce_quantized, {name}", triton_int8._reduce, its, constants, moved, (90,), again, lanes)
        )
    types |= {"wire": "*u8", "received": "*u8", "shard": "*u8"}
    of_bf16 = {"wire": "*bf16", "received": "*bf16", "shard": "*bf16", "numel": "i32"}
    constants = {"statistics": None, "dtype": tl.float32, "TO_WIRE": True, "TILE": tile}
    chance: list[tuple[str, Any, dict[str, str], dict[str, Any], tuple[int, int], int, int]]
    chance = [("flatten bf16", triton_cast._move, of_bf16, constants, (tile * 4, tile * 2), 0, tile)]
    constants = {"RANKS": 2, "SPARE": 2.0, "TILE": tile}
    chance.append(("reduce bf16", triton_cast._reduce, of_bf16, constants, (2 * tile * 2, tile * 2), 0, tile))
    for form, block in [(INT8_FORMAT, 128), (INT4_FORMAT, 32), (FP8_FORMAT, 128)]:
        shape = {**triton_int8._tile_shape(block, form), "residuals": None, "turn": None}
        lanes, payload = shape["ROWS"] * shape["WIDTH"], 0 if form is INT4_FORMAT else shape["ROWS"] * shape["WIDTH"]
        constants = {**shape, "dtype": tl.float32}
        moved = (lanes * 4, payload)
        chance.append((f"quantize fp32, {form.name}", triton_int8._quantize, types, constants, moved, 0, lanes))
        constants, moved = {**shape, "RANKS": 2, "SPARE": 2.0}, (4 * payload, payload)
        title = f"reduce_quantized, {form.name}"
        chance.append((title, triton_int8._reduce, types, constants, moved, 2 * payload, lanes))
    for title, kernel, its, constants, moved, again, lanes in chance:
        found.append(Variant(f"stochastic {title}", kernel, its, constants, moved, (90,), again, lanes, True))
    return found


def compile_all(quick: bool) -> list[dict[str, Any]]:
    """Variants for their targets, compiled as a launch with 16-byte aligned tensors would do it.

    `quick` are every sixth of them, and what writes over what it reads, each for one target; else every sixth is
    compiled for more of them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastreduce.kernels import triton_fp16

    results = []
    for number, variant in enumerate(variants()):
        is_sixth = number % 6 == 0
        if quick and not is_sixth and variant.kernel is not triton_fp16._share:
            continue
        kernel, constants = variant.kernel, variant.all_constants()
        types = {**POINTERS, "scale_bits": "i64", "seed": "i32", "who": "i64", **variant.types}
        signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
        sizes = ("numel", "shard_size", "gathered_size")
        anywhere = [each.name for each in kernel.params if each.do_not_specialize_on_alignment]
        aligned = [arg for arg in kernel.arg_names if arg in sizes or ("*" in signature[arg] and arg not in anywhere)]
        attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in aligned}
        values = {(kernel.arg_names.index(arg),): value for arg, value in constants.items()}
        for target in variant.targets[:1] if quick else variant.targets + MORE_TARGETS * is_sixth:
            with redirect_stdout(io.StringIO()) as log:
                compiled = triton.compile(
                    ASTSource(kernel, signature, values, attributes),
                    target=GPUTarget("cuda", target, 32),
                    options={"num_warps": THREADS // 32, "enable_fp_fusion": False},
                )
            wide = variant.wide and [moved // THREADS for moved in variant.wide]
            of_thread = {"wide": wide, "again": variant.again // THREADS, "elements": variant.elements // THREADS}
            entry = {"name": f"{variant.name}, sm_{target}", **of_thread, "log": log.getvalue()}
            results.append({**entry, "ptx": compiled.asm["ptx"]})
    return results


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(compile_all("quick" in sys.argv)))
