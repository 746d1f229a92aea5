"""The residuals of a tile for the Triton kernels, as they are kept: in FP32, BF16 or 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from . import torch_residuals
from .triton_stochastic import to_whole
from .triton_tiles import convert, widen

ROOM = tl.constexpr(torch_residuals.ROOM)
GOLDEN = tl.constexpr(torch_residuals.GOLDEN)
FACTOR_0, FACTOR_1 = (tl.constexpr(factor) for factor in torch_residuals.FACTORS)


@triton.jit
def rows_of(residuals, turn, elements, BLOCK: tl.constexpr):
    """The row of residuals to read and the one to write: `turn` and the other; rows begin at multiples of 16."""
    which, size = tl.load(turn).to(tl.int64), tl.cast(elements, tl.int64)
    if residuals.dtype.element_ty == tl.uint8:
        size = (size + size // BLOCK + 15) & -16
    return residuals + tl.multiple_of(which * size, 16), residuals + tl.multiple_of((1 - which) * size, 16)


@triton.jit
def load_residuals(row, start, element, block, elements, owned, inside):
    """What a row keeps as FP32: of elements, `start` further on, of one block of the flat a row of the tile."""
    if row.dtype.element_ty == tl.uint8:
        codes = tl.load((row + start).to(tl.pointer_type(tl.int8)) + element, mask=owned, other=0)
        byte = tl.load(row + elements + block, mask=inside, other=0).to(tl.int32)
        bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte < 7, 0, (byte - 6) << 23))
        found = codes.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    else:
        found = widen(tl.load(row + start + element, mask=owned, other=0.0), tl.float32)
    return found


@triton.jit
def _scrambled(bits, salt):
    """16 bits of each number, as if drawn (torch_residuals.py)."""
    words = bits.to(tl.uint32, bitcast=True) + _product(salt.to(tl.uint32, bitcast=True), GOLDEN)
    words = _product(words ^ (words >> 16), FACTOR_0)
    words = _product(words ^ (words >> 13), FACTOR_1)
    return ((words ^ (words >> 16)) >> 16).to(tl.int32)


@triton.jit
def _product(words, factor: tl.constexpr):
    """Modulo 2^32."""
    return (words.to(tl.uint64) * factor).to(tl.uint32)


@triton.jit
def store_residuals(row, start, element, block, elements, lost, owned, inside):
    """Keep what was lost, FP32; likewise."""
    if row.dtype.element_ty == tl.uint8:
        bits = lost.to(tl.int32, bitcast=True)
        largest = tl.max(bits & 0x7FFFFFFF, axis=1)
        byte = tl.minimum((tl.minimum(largest, 0x7F7FFFFF) + ROOM) >> 23, 254)
        byte = tl.where((byte < 7) | (largest >= 0x7F800000), 0, byte)
        inverse = ((260 - byte) << 23).to(tl.float32, bitcast=True)
        steps = tl.where((byte > 0)[:, None], lost * inverse[:, None], 0.0)
        place = tl.arange(0, lost.shape[1])
        codes = to_whole(steps, _scrambled(bits, largest[:, None] ^ place))
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
        tl.store((row + start).to(tl.pointer_type(tl.int8)) + element, codes, mask=owned)
        byte = tl.where(largest < 0x7F800000, byte, 255).to(tl.uint8)
        tl.store(row + elements + block, byte, mask=inside)
    else:
        tl.store(row + start + element, convert(lost, row.dtype.element_ty), mask=owned)
