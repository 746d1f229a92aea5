"""A program's tile in the Triton kernels, the conversion of its numbers, and the launch of all programs."""

from __future__ import annotations

import struct
from typing import Any

import torch
import triton
import triton.language as tl

DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def widen(values, compute: tl.constexpr):
    """Any wire or tensor dtype → the compute type; BF16 by its bits, for the interpreter's sake."""
    if values.dtype == tl.bfloat16:
        values = (values.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return values.to(compute)


@triton.jit
def convert(values, dtype: tl.constexpr):
    """The compute type → any wire or tensor dtype, to nearest even; FP64 reaches 16 bits through FP32."""
    if dtype != tl.float64:
        values = values.to(tl.float32)
    if dtype == tl.bfloat16:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        half = tl.where(values == values, rounded, (bits >> 16) | 0x40)
        values = half.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return values.to(dtype)


@triton.jit
def any_not_finite(values):
    """Whether some number is infinite or NaN, as one answer for the whole tile."""
    return tl.max(tl.where(tl.abs(values) < float("inf"), 0, 1)) > 0


def double_bits(value: float) -> int:
    """A float as the integer of its 64 bits: Triton would pass a float argument as FP32."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit
def load_tile(tiles, addresses, dtype: tl.constexpr):
    """This program's tile: its address, its place in the flat, its elements without and with the padding."""
    tiles += 5 * tl.program_id(0).to(tl.int64)
    tensor, start = tl.load(addresses + tl.load(tiles)), tl.load(tiles + 1)
    count, extent = tl.load(tiles + 3).to(tl.int32), tl.load(tiles + 4).to(tl.int32)
    return tensor + start * (dtype.primitive_bitwidth // 8), tl.load(tiles + 2), count, extent


@triton.jit
def store_statistics(statistics, values, inside):
    """Write this program's row: how many of the values `inside` are not finite, and the sum of their squares."""
    dtype: tl.constexpr = statistics.dtype.element_ty
    values = tl.where(inside, widen(values, dtype), 0.0)
    row = statistics + 2 * tl.program_id(0).to(tl.int64)
    tl.store(row, tl.sum(tl.where(tl.abs(values) < float("inf"), 0, 1)).to(dtype))
    tl.store(row + 1, tl.sum(values * values))


_compiled: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs of a kernel on a device, multiplications and additions rounded one by one.

    In every launch Triton looks anew for what it has compiled, which takes the host several times as long as the launch
    itself. So it is kept here, by all that it was compiled for: dtypes, which addresses are multiples of 16, numbers.
    """
    if not programs:
        return
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, device, *arguments, **constants)
    key = (id(kernel), device, *map(_compiled_for, arguments), *constants.values())
    kept = _compiled.get(key)
    if kept is None:
        compiled = kernel[(programs,)](*arguments, **constants, num_warps=4, enable_fp_fusion=False)
        if compiled is not None:  # as it is by the interpreter
            _compiled[key] = compiled, [constants[name] for name in kernel.arg_names[len(arguments) :]]
    else:
        compiled, of_signature = kept
        compiled[(programs, 1, 1)](*arguments, *of_signature)


def _compiled_for(argument: Any) -> Any:
    return (argument.dtype, argument.data_ptr() & 15) if isinstance(argument, torch.Tensor) else argument
