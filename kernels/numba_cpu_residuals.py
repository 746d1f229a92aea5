"""A block of residuals for the `numba_cpu` kernels: as they are kept, in FP32, BF16 or 8 bits, and as FP32 in L1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from .numba_cpu_elements import ANYWHERE, convert_block, element, inlined, load_byte, size_of, splat, stage, store
from .numba_cpu_elements import BLOCK_LANES as LANES
from .numba_cpu_stochastic_vectors import largest_of_block
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
ROUNDER, ROUNDER_BITS = 1.5 * 2**23, 0x4B400000  # a sum with it has no bits behind the point
FIXED = 2.0**15
ROOM = np.int32(ROOM_)
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_INTEGERS = ir.VectorType(_I32, LANES)
GROUP = 512  # elements whose residuals are stored at once: the work on a block need not wait for that on another


def _all(number: int) -> ir.Constant:
    return ir.Constant(_INTEGERS, [number] * LANES)


@intrinsic
def _encode_block(
    _typing: Any, codes: types.Type, source: types.Type, block: types.Type, inverse: types.Type, largest: types.Type
) -> tuple[Any, Any]:
    """The codes of an FP32 block, times `inverse`: the upper or the lower ones by the numbers' bits."""

    def emit(target: Any, builder: ir.IRBuilder, _signature: Any, args: Sequence[ir.Value]) -> ir.Value:
        codes, source, block, inverse, largest = args
        floats, lanes = ir.VectorType(ir.FloatType(), LANES), ir.Constant(_INTEGERS, list(range(LANES)))
        with cgutils.for_range(builder, builder.sdiv(block, _I64(LANES))) as loop:
            index = builder.mul(loop.index, _I64(LANES))
            value = builder.load(element(builder, source, index, types.float32), typ=floats, align=ANYWHERE)
            place = builder.add(splat(builder, builder.trunc(index, _I32), LANES), lanes)
            salt = builder.xor(splat(builder, largest, LANES), place)
            word = builder.add(builder.bitcast(value, _INTEGERS), builder.mul(salt, _all(GOLDEN)))
            for shift, factor in ((16, FACTORS[0]), (13, FACTORS[1])):
                word = builder.mul(builder.xor(word, builder.lshr(word, _all(shift))), _all(factor))
            word = builder.xor(word, builder.lshr(word, _all(16)))
            steps = builder.fmul(value, splat(builder, inverse, LANES))
            fixed = builder.fmul(steps, ir.Constant(floats, [FIXED] * LANES))
            rounded = builder.bitcast(builder.fadd(fixed, ir.Constant(floats, [ROUNDER] * LANES)), _INTEGERS)
            number = builder.sub(rounded, _all(ROUNDER_BITS))
            code = builder.ashr(builder.add(number, builder.lshr(word, _all(17))), _all(15))
            code = builder.select(builder.icmp_signed("<", code, _all(127)), code, _all(127))
            code = builder.select(builder.icmp_signed(">", code, _all(-127)), code, _all(-127))
            at = element(builder, codes, index, types.int8)
            builder.store(builder.trunc(code, ir.VectorType(ir.IntType(8), LANES)), at, align=ANYWHERE)
        return target.get_dummy_value()

    return types.void(*[types.int64] * 3, types.float32, types.int32), emit


@inlined
def _unit_of(byte):
    bits = np.int32(0)
    if byte == 255:
        bits = NAN_BITS
    elif byte >= 7:
        bits = np.int32((byte - 6) << 23)
    return np.int32(bits).view(np.float32)


@inlined
def old_residuals(row, number, blocks, block, elements, scratch, kept):
    """Where the residuals of blocks of a row are as FP32: there, or in scratch; 0 of no row."""
    if not row:
        return 0
    start = number * block
    if size_of(kept) == 4:
        return row + start * 4
    if size_of(kept) == 2:
        convert_block(scratch, FP32, row + start * 2, BF16, blocks * block, ONE)
    else:
        for index in range(blocks):
            unit = _unit_of(load_byte(row + elements, number + index))
            convert_block(scratch + index * block * 4, FP32, row + start + index * block, INT8, block, unit)
    return scratch


@inlined
def new_residuals(row, number, block, scratch, kept):
    """Where those that `keep_residuals` stores are to be put as FP32."""
    if not row:
        return 0
    return row + number * block * 4 if size_of(kept) == 4 else scratch


@inlined
def keep_residuals(row, number, blocks, block, elements, lost, kept):
    """Store what was lost of blocks from `number` on, unless it lies in the row already."""
    if not row or size_of(kept) == 4:
        return
    if size_of(kept) == 2:
        convert_block(row + number * block * 2, BF16, lost, FP32, blocks * block, ONE)
        return
    for _ in range(blocks):
        _keep_codes(row + number * block, row + elements + number, lost, block)
        lost += block * 4
        number += 1


@inlined
def _keep_codes(codes, exponent, lost, block):
    largest = largest_of_block(lost, FP32, ONE, block)
    byte = np.int32(255)
    inverse = ZERO
    if largest < INFINITY_BITS:
        byte = min((largest + ROOM) >> 23, np.int32(254))
        if byte < 7:
            byte = np.int32(0)
        else:
            inverse = np.int32((260 - byte) << 23).view(np.float32)
    store(exponent, 0, INT8, np.int32(byte))
    if inverse == ZERO:
        zero(codes, codes + block)
    else:
        _encode_block(codes, lost, block, inverse, largest)


@inlined
def group_of(block):
    """Blocks whose residuals are stored at once."""
    return max(1, GROUP // block)


def scratch_for(block: int) -> Tensor:
    """Scratch for four groups of FP32 blocks."""
    return stage(4 * max(1, GROUP // block) * block // 2)


def rows_of(residuals: Tensor | None, turn: Tensor | None) -> tuple[int, int, Any]:
    """The addresses of the row to read and of the other, which is to be written, 0 of none; and the tag of both."""
    if residuals is None or turn is None:
        return 0, 0, FP32
    row, size = int(turn), residuals.shape[1] * residuals.element_size()
    return residuals.data_ptr() + row * size, residuals.data_ptr() + (1 - row) * size, KEPT[residuals.dtype]
