"""16 residuals of a block for the Numba CUDA kernels, as they are kept: in FP32, BF16 or 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .numba_cuda_tiles import (
    FP32,
    INFINITY_BITS,
    INT8,
    LANES,
    LARGEST_INT8,
    MINUS_ONE,
    ROUNDER,
    ZERO,
    add,
    at_most,
    fetch_byte,
    fetch_int32,
    from_bits,
    function,
    load,
    multiply,
    size_of,
    store,
    store_byte,
    whole_by_own_bits,
)
from .torch_residuals import ROOM

# Tags of rows: 8 bits are known by INT8's, that of their codes.
KEPT: dict[torch.dtype, Any] = {torch.float32: FP32, torch.bfloat16: np.uint16(0), torch.uint8: INT8}
NAN_BITS = np.int32(0x7FC00000)
FIXED = np.float32(2**15)


@function
def rows_of(residuals, turn, row_bytes):
    """The addresses of the row to read and of the other, which is to be written; without residuals all are 0."""
    old = (fetch_int32(turn) if residuals else 0) * row_bytes
    return residuals + old, residuals + row_bytes - old


@function
def _unit_of(address):
    byte = fetch_byte(address)
    bits = np.int32(0)
    if byte == 255:
        bits = NAN_BITS
    elif byte >= 7:
        bits = np.int32((byte - 6) << 23)
    return from_bits(bits)


@function
def load_residuals(row, element, number, elements, count, kept):
    """16 of block `number`, from `element` of the row on; those from `count` on are zero, as all are without a row."""
    found = load(row + element * size_of(kept), kept, INT8, count if row else 0)
    if size_of(kept) == 1:
        found = multiply(found, _unit_of(row + elements + number) if row and count > 0 else ZERO)
    return found


@function
def exponent_of(largest):
    """A block's exponent byte, by its largest magnitude's bits."""
    byte = 255
    if largest < INFINITY_BITS:
        byte = min((np.int64(largest) + ROOM) >> 23, 254)
        if byte < 7:
            byte = 0
    return byte


@function
def store_residuals(row, element, number, elements, lost, largest, first, kept):
    """Keep what was lost of 16 elements, the `first` one and others of a block whose largest magnitude's bits are told.

    The first ones of a block keep its exponent too.
    """
    if size_of(kept) == 1:
        byte = exponent_of(largest)
        if byte == 255 or byte == 0:
            codes = load(row, INT8, INT8, 0)
        else:
            steps = multiply(multiply(lost, from_bits(np.int32((260 - byte) << 23))), FIXED)
            codes = whole_by_own_bits(add(steps, ROUNDER), lost, largest, first)
            codes = at_most(codes, LARGEST_INT8)
            codes = multiply(at_most(multiply(codes, MINUS_ONE), LARGEST_INT8), MINUS_ONE)
        store(row + element, INT8, codes, LANES, LANES)
        if first == 0:
            store_byte(row + elements + number, byte)
    else:
        store(row + element * size_of(kept), kept, lost, LANES, LANES)
