"""Triton's launch settings changed from outside, in a process that has not imported the kernels yet.

Tile, warps and the conversion to BF16 can be; cache hints stand in the kernels' own text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

from fastreduce.kernels import slots

from .worker_cases import NotHere

KERNELS = ("triton_cast", "triton_fp16", "triton_int8")


@triton.jit
def by_integers(values, dtype: tl.constexpr):
    """`convert` with BF16 rounded in integer arithmetic, as in the interpreter."""
    if dtype != tl.float64:
        values = values.to(tl.float32)
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(values == values, rounded, (bits >> 16) | 0x40)
        values = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


def change(tile: int | None = None, warps: int | None = None, bf16: str | None = None) -> Callable[[], None]:
    """Change settings; returns what checks, after some launches, that they were used.

    Raises:
        NotHere: if the kernels cannot be changed so.
    """
    if any(f"fastreduce.kernels.{name}" in sys.modules for name in KERNELS):
        raise RuntimeError("the kernels have been imported already")
    from fastreduce.kernels import triton_tiles

    launches = []
    if tile is not None:
        slots.TILE = tile
    if bf16 == "by integers":
        _replace(triton_tiles, "convert", by_integers)
    elif bf16 is not None and triton.knobs.runtime.interpret:
        raise NotHere("Triton's interpreter truncates where a GPU rounds")
    if warps is not None:

        def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
            launches.append(programs)
            if programs:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)

        _replace(triton_tiles, "launch", launch)

    def check() -> None:
        if warps is not None and not launches:
            raise NotHere("the kernels are launched by another way than `triton_tiles.launch`")
        if tile is not None and slots.tile_elements() != tile:
            raise NotHere("the tile is not `slots.TILE`")

    return check


def _replace(module: Any, name: str, value: object) -> None:
    if not hasattr(module, name):
        raise NotHere(f"{module.__name__} has no {name} that could be changed from outside")
    setattr(module, name, value)
