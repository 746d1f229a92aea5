"""A block of residuals for the `numba_cpu` kernels: as they are kept, in FP32, BF16 or 8 bits, and as FP32 in L1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from .numba_cpu_elements import convert, inlined, load, load_byte, size_of, store
from .numba_cpu_sums import zero
from .torch_residuals import FACTORS, GOLDEN
from .torch_residuals import ROOM as ROOM_

# Tags of rows: 8 bits are known by INT8's, that of their codes.
KEPT: dict[torch.dtype, Any] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.uint8: np.int8(0),
}
INT8, FP32, BF16 = np.int8(0), np.float32(0), np.uint16(0)
ZERO, ONE = np.float32(0), np.float32(1)
INFINITY_BITS, NAN_BITS = np.int32(0x7F800000), np.int32(0x7FC00000)
ROUNDER, ROUNDER_BITS = np.float32(1.5 * 2**23), 0x4B400000  # a sum with it has no bits behind the point
FIXED = np.float32(2**15)
ROOM = np.int32(ROOM_)
_I32 = ir.IntType(32)


@intrinsic
def _chosen(
    _typing: Any, fixed: types.Type, bits: types.Type, largest: types.Type, index: types.Type
) -> tuple[Any, Any]:
    """The code of a number times 2^15, to which `ROUNDER` has been added: the upper or the lower one by its bits."""

    def emit(_target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        fixed, bits, largest, index = args
        salt = builder.xor(largest, builder.trunc(index, _I32))
        word = builder.add(bits, builder.mul(salt, _I32(GOLDEN)))
        for shift, factor in ((16, FACTORS[0]), (13, FACTORS[1])):
            word = builder.mul(builder.xor(word, builder.lshr(word, _I32(shift))), _I32(factor))
        word = builder.xor(word, builder.lshr(word, _I32(16)))
        number = builder.sub(fixed, _I32(ROUNDER_BITS))
        code = builder.ashr(builder.add(number, builder.lshr(word, _I32(17))), _I32(15))
        code = builder.select(builder.icmp_signed("<", code, _I32(127)), code, _I32(127))
        return builder.select(builder.icmp_signed(">", code, _I32(-127)), code, _I32(-127))

    return types.int32(types.int32, types.int32, types.int32, types.int64), emit


@inlined
def _unit_of(byte):
    bits = np.int32(0)
    if byte == 255:
        bits = NAN_BITS
    elif byte >= 7:
        bits = np.int32((byte - 6) << 23)
    return np.int32(bits).view(np.float32)


@inlined
def old_residuals(row, start, block, elements, scratch, kept):
    """Where the residuals of the block at element `start` of a row are as FP32: there, or in scratch; 0 of no row."""
    if not row:
        return 0
    if size_of(kept) == 4:
        return row + start * 4
    if size_of(kept) == 2:
        convert(scratch, FP32, row + start * 2, BF16, block, ONE, False)
    else:
        unit = _unit_of(load_byte(row + elements, start // block))
        convert(scratch, FP32, row + start, INT8, block, unit, False)
    return scratch


@inlined
def new_residuals(row, start, scratch, kept):
    """Where those that `keep_residuals` stores are to be put as FP32."""
    if not row:
        return 0
    return row + start * 4 if size_of(kept) == 4 else scratch


@inlined
def keep_residuals(row, start, block, elements, lost, kept):
    """Store what was lost of a block, unless it lies in the row already."""
    if not row or size_of(kept) == 4:
        return
    if size_of(kept) == 2:
        convert(row + start * 2, BF16, lost, FP32, block, ONE, False)
        return
    largest = np.int32(0)
    for index in range(block):
        largest = max(largest, np.float32(abs(load(lost, index, FP32))).view(np.int32))
    byte = np.int32(255)
    inverse = ZERO
    if largest < INFINITY_BITS:
        byte = min((largest + ROOM) >> 23, np.int32(254))
        if byte < 7:
            byte = np.int32(0)
        else:
            inverse = np.int32((260 - byte) << 23).view(np.float32)
    store(row + elements, start // block, INT8, np.int32(byte))
    if inverse == ZERO:
        zero(row + start, row + start + block)
        return
    for index in range(block):
        value = load(lost, index, FP32)
        fixed = np.float32((value * inverse) * FIXED + ROUNDER).view(np.int32)
        store(row + start, index, INT8, _chosen(fixed, np.float32(value).view(np.int32), largest, index))


@inlined
def clear_residuals(row, start, block, elements, kept):
    """Let nothing be kept of a block."""
    if not row:
        return
    zero(row + start * size_of(kept), row + (start + block) * size_of(kept))
    if size_of(kept) == 1:
        store(row + elements, start // block, INT8, np.int32(0))


def rows_of(residuals: Tensor | None, turn: Tensor | None) -> tuple[int, int, Any]:
    """The addresses of the row to read and of the other, which is to be written, 0 of none; and the tag of both."""
    if residuals is None or turn is None:
        return 0, 0, FP32
    row, size = int(turn), residuals.shape[1] * residuals.element_size()
    return residuals.data_ptr() + row * size, residuals.data_ptr() + (1 - row) * size, KEPT[residuals.dtype]
