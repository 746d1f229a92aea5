"""Every tolerance of the tests, each with its reason. What is not here is compared bit for bit.

Bounds are analytic: elementwise, from the gradients of all ranks in FP64. u is the unit roundoff of a format
(half its epsilon): rounding to nearest changes x by at most u·|x|, or by half the smallest subnormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastreduce import Compression
from fastreduce.kernels.slots import FP8_FORMAT, FP16_BLOCK, INT4_FORMAT, INT8_FORMAT

U = {dtype: torch.finfo(dtype).eps / 2 for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
HALF_SUBNORMAL = {dtype: torch.finfo(dtype).tiny * U[dtype] for dtype in U}

SECOND_ORDER = 1.01
"""Products of roundoffs, which the bounds below leave out: less than 1 % of them for up to three ranks."""

INT8_STEP = 0.5 + 1e-4
"""INT8 rounds to half a step; value · inverse and q · scale are FP32: 127 · 4 · 2^-24 < 1e-4 of a step more."""

BLOCK_ERROR = {
    INT8_FORMAT: INT8_STEP / 127,
    INT4_FORMAT: 1 - 7 / 8 * (1 - 2.0**-7),
    FP8_FORMAT: 2.0**-10 / 448 + 2.0**-22,
}
"""How far an element may be off, relative to its block's largest magnitude. INT4 has a code less on one side, and a
scale of an eighth of the largest but for what BF16 cuts off: one as large and of the other sign becomes 7 scales.
FP8 is off by half of its smallest step, 2^-9 of 448, and by U_E4M3 of the element; the rest is FP32's, as in INT8."""

STOCHASTIC_INT4 = (1 + 2.0**-7) / 7 + 2.0**-16
"""A whole step of INT4 under stochastic rounding: a seventh of the block's largest magnitude, rounded up to BF16; and
what numbers are rounded to before the draw, beside FP32's rounding."""

U_E4M3 = 2.0**-4
"""Half a unit in the last of E4M3's 4 digits, relative to the element."""

LONG_RUN = 0.03
"""Of the error without feedback: with it the error of a mean over T steps is (residual now − residual then) / T,
with T = 200 and both residuals within a step or so, while a constant input without feedback repeats its error."""


APPLIED = 1e-5
"""Of the largest gradient applied: each of at most a dozen steps rounds gradient, residual and clipped value in FP32,
2^-24 of a value up to the largest each time, and clipping by torch is measured to 2^-23."""

IN_CHANGING_LISTS = 4e-5
"""Between sums of 30 averages and of 30 exact ones: each step rounds gradient and residual, and what is applied, to
FP32, 2^-24 of at most 8 each. In sums over ranks it is as much for each. A residual that goes lost is 0.01 or more."""

KEPT_IN_8_BITS = 1 / 63.5
"""Of a block's largest residual: a whole unit, up or down by chance, of which the largest is at least 63.5."""

LARGEST_RESIDUAL = {INT8_FORMAT: INT8_STEP / 127, INT4_FORMAT: BLOCK_ERROR[INT4_FORMAT], FP8_FORMAT: U_E4M3}
"""Of a block's largest magnitude, what rounding to a format may lose of an element: what a residual is at most."""

APPLIED_KEPT_IN = {"8bit": 13 * KEPT_IN_8_BITS, "bf16": 13 * U[torch.bfloat16]}
"""Of the largest residual that the largest gradient leaves, as APPLIED: up to a dozen steps store residuals of two
stages three times each, by the kernel, after clipping and where buckets change. Their errors vary in sign, so that 72
are as 8.5, which is 13 for a rank's gradient that is 1.5 times the largest average. A lost residual would be all."""

APPLIED_LOW_RANK = 1e-4
"""The same under PowerSGD: an element of basis · right sums up to 4 terms, each rounded in FP32, whose magnitudes are
no larger in all than the norm of a column of 20, so 4.5 of its largest; and so with what is kept. Some 14 roundings of
2^-24 of that a step, of what is up to a few times the largest gradient, in a dozen steps."""

OF_TORCHS_POWERSGD = 0.15
"""Of the loss on the way down, between PowerSGD here and in torch's hook: one algorithm, from other random factors, and
torch's begins two steps later. They differed by up to 6 %."""

LOW_RANK = 1e-4
"""Of the largest element, between a step of PowerSGD in FP32 and the method in FP64: products over up to 64 terms are
off by 64 · 2^-24 of them at most, and a basis is turned by that as often as the largest direction is larger than the
smallest: ten times, in the gradients of rank 4 with a little noise that tests take."""

MEAN_OF_THREE = 3 * U[torch.float32]
"""Relative, of the mean of three equal FP32 numbers: their sum and its third are rounded once each."""


CLIPPING = {dtype: 64 * (torch.finfo(dtype).eps / 2) for dtype in (torch.float64, torch.float32)}
CLIPPING |= {dtype: 4 * (torch.finfo(dtype).eps / 2) for dtype in (torch.float16, torch.bfloat16)}
"""Relative, between our norm and torch's, which sums squares in another order and rounds each parameter's norm to its
dtype: of parameters of at most 6,500 elements, with roots and one product. Of several dtypes the coarsest counts."""

SMALL_LOSS = 0.02
"""Of the loss after 60 steps of Adam, between fp16 and none: gradients are off by 2^-11 of themselves, and what Adam
makes of it is of that order a step. Where gradients became zero the loss was several times as large. Under fp8, after
1,000 steps, losses differ by 0.0002 of them."""

SYNC_BATCH_NORM = 64
"""Roundoffs of the statistics' dtype, relative to the largest magnitude, between SyncBatchNorm and one process: for
inputs whose mean is no larger than a few standard deviations, each of mean, scale, product and sum (over at most a
hundred values, in FP32, in another order) rounds a few times."""

SYNC_BATCH_NORM_HALF = 4
"""Roundoffs of a half-precision input's dtype more: its output and its gradient are rounded to it, and what they are
multiplied with is of the size of a few."""


def sum_of_squares(exact: Tensor, tile: int, dtype: torch.dtype) -> Tensor:
    """How far a tile's sum of squares in `dtype` may be from the exact one, on any backend.

    Each square is rounded once, and goes through no more additions than in the longest order there is: one lane of 16
    (8 for FP64) in turn, then lanes by halves.
    """
    lanes = 64 // dtype.itemsize
    return SECOND_ORDER * (tile // lanes + lanes.bit_length()) * U[dtype] * exact + tile * HALF_SUBNORMAL[dtype]


def _memory_order(tensor: Tensor) -> Tensor:
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def _absmax_by_block(values: Tensor, block: int) -> Tensor:
    """For every element of `[ranks, n]` the largest magnitude in its block."""
    n = values.shape[1]
    padded = torch.nn.functional.pad(values.abs(), (0, -n % block)).view(len(values), -1, block)
    largest = padded.amax(dim=2, keepdim=True) if n else padded
    return largest.expand_as(padded).reshape(len(values), -1)[:, :n]


def error_bound(setting: str, grads: list[Tensor], two_levels: bool = False) -> Tensor:
    """How far one reduction under `setting` may be from the exact average of the ranks' gradients.

    Elementwise, in memory order. Error feedback: with residuals of zero, so for a first step. In two levels a
    wire holds sums of nodes, which are rounded even where it has the dtype of gradients; else the bound is the same: a
    sum of a node is no larger than that of the magnitudes, and there are as many additions.
    """
    compression = Compression.parse(setting)
    dtype = grads[0].dtype
    ranks = len(grads)
    if dtype.is_complex:
        grads = [torch.view_as_real(g.resolve_conj()) for g in grads]
        dtype = grads[0].dtype
    values = torch.stack([_memory_order(g).double() for g in grads])
    mean = values.mean(0).abs()
    size = values.abs().mean(0)  # mean of magnitudes: what errors of single ranks are relative to
    own, fp32 = U[dtype], U[torch.float32] if dtype is not torch.float64 else U[torch.float64]
    by_chance = 1 if compression.random_seed is None else 2  # a whole step instead of half of one
    if compression.block:
        # Each rank is off by a share of its own block's largest, or of itself; then the average by that of its block.
        share, relative = BLOCK_ERROR[compression.format], U_E4M3 if compression.format is FP8_FORMAT else 0.0
        if by_chance == 2:
            share, relative = STOCHASTIC_INT4 if compression.format is INT4_FORMAT else 2 * share, 2 * relative
        fp32 = U[torch.float32]
        first = (_absmax_by_block(values, compression.block) * share).mean(0) + relative * size
        largest = _absmax_by_block((mean + first)[None], compression.block)[0]
        second = largest * share + relative * (mean + first)
        error = first + second + (ranks + 2) * fp32 * size + own * (mean + first + 2 * second)
        return SECOND_ORDER * error + HALF_SUBNORMAL[dtype]
    wire = compression.wire_dtype(dtype)
    if wire is torch.uint8:
        wire = torch.float16
        largest = _absmax_by_block(values, FP16_BLOCK).amax(0)
        # Of a block with an exponent what is lost lies below 2^-38 of its largest magnitude, less the sum's room.
        tiny = HALF_SUBNORMAL[wire] + largest * 2.0**-38 * (1 if compression.two_shot else 2 * ranks)
    else:
        tiny = torch.tensor(HALF_SUBNORMAL[wire])
    u = by_chance * U[wire]
    if compression.two_shot:
        # Into the wire format, N−1 additions and a product in FP32, into the wire format, into the gradient's.
        error = (
            (0 if wire is dtype and not two_levels else u) * size + (ranks + 2) * fp32 * size + u * mean + own * mean
        )
        return SECOND_ORDER * error + 2 * tiny + HALF_SUBNORMAL[dtype]
    if wire is dtype:
        # 1/N and its product are rounded, then N−1 sums, all in the gradient's dtype.
        return SECOND_ORDER * (ranks + 1) * u * size + ranks * tiny
    # Scaled by a power of two, into the wire format, N−1 sums there, a product in FP32, into the gradient's dtype.
    return SECOND_ORDER * (ranks * u * size + 2 * fp32 * size + own * mean) + 2 * ranks * tiny + HALF_SUBNORMAL[dtype]


def error_bound_with_feedback(
    setting: str, grads: list[Tensor], kept: list[Tensor], two_levels: bool = False
) -> Tensor:
    """How far one reduction may be from the exact average of gradients plus what error feedback kept of earlier ones.

    `kept`: of each rank, in memory order, both stages' residuals. The bound grows with magnitudes only, and no
    magnitude that is quantized exceeds the sum of the two.
    """
    reals = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in grads]
    sizes = [_memory_order(g).double().abs() + k.abs() for g, k in zip(reals, kept, strict=True)]
    dtype = reals[0].dtype
    return error_bound(setting, [size.to(dtype) for size in sizes], two_levels)


def order_of_summation(grads: list[Tensor], two_levels: bool = False) -> Tensor:
    """How far two averages over three or more ranks in the gradients' dtype may be apart.

    torch multiplies by 1/N or divides (views), and a ring adds in an order that depends on the place in the
    bucket: both are within the bound of `none` of the exact average.
    """
    return error_bound("none", grads) + error_bound("none", grads, two_levels)


SHADOW = 2e-3
"""Relative, of a sum of squares of rounding errors: FP32's arithmetic moves each of them by 1e-4 of a step (INT8_STEP),
where their root mean square is 0.29 of one."""
