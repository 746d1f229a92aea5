"""Stochastic rounding in plain torch: random bits by counter, and what they make of numbers (see README.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from .slots import DRAWN, Draws, SlotTable

# Philox4x32 by J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
ROUNDS = 7
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF

RECIPROCAL_7 = 1 / 7
LARGEST_INT4_SCALE = 1.140625 * 2.0**125  # seven times as much is finite still


def philox(counter: tuple[Tensor, int, int, int], key: tuple[int, int]) -> list[Tensor]:
    """The four 32-bit words of Philox4x32 for each first word of a counter, as int64."""
    words = [counter[0], *(torch.full_like(counter[0], word) for word in counter[1:])]
    for number in range(ROUNDS):
        k0, k1 = ((k + number * weyl) & MASK for k, weyl in zip(key, WEYL, strict=True))
        (high0, low0), (high1, low1) = (_multiply(words[2 * i], MULTIPLIERS[i]) for i in (0, 1))
        words = [high1 ^ words[1] ^ k0, low1, high0 ^ words[3] ^ k1, low0]
    return words


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower half of a product; int64 would overflow, but for 16 bits at a time."""
    upper, lower = (words >> 16) * factor, (words & 0xFFFF) * factor
    return (upper + (lower >> 16)) >> 16, ((upper << 16) + lower) & MASK


def for_two(halves: Tensor) -> Tensor:
    """16 random bits each → 16 for each of two elements, in a last dimension, of which neither tells the other.

    Bytes are exchanged for the second, so that each has its own in front, and one of them turned around, so that
    together they have no covariance. Both are uniform.
    """
    return torch.stack([halves, ((halves & 0xFF) << 8 | halves >> 8) ^ 0xFF], dim=-1)


def random_bits(slots: SlotTable, draws: Draws, device: torch.device) -> Tensor:
    """16 random bits for each element of the flat, as int32; zeros in padding."""
    bits = torch.zeros(slots.total, dtype=torch.int32, device=device)
    rows = zip(slots.offsets.tolist(), slots.numels.tolist(), slots.keys.tolist(), slots.firsts.tolist(), strict=True)
    step = int(draws.step) & MASK
    for offset, numel, key, first in rows:
        count = -(-numel // DRAWN)
        counters = torch.arange(first // DRAWN, first // DRAWN + count, device=device)
        words = philox((counters, draws.who, step, draws.seed), (key & MASK, key >> 32 & MASK))
        halves = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=1)
        bits[offset : offset + numel] = for_two(halves).flatten()[:numel].to(torch.int32)
    return bits


def to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """FP32 → BF16."""
    summed = values.view(torch.int32).to(torch.int64) + bits  # of a negative number: two's complement is as good
    rounded = (summed & -(1 << 16)).to(torch.int32).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


def to_whole(steps: Tensor, bits: Tensor) -> Tensor:
    """FP32 numbers up to 127 → whole numbers."""
    fixed = (steps * 2.0**15).round().to(torch.int32)
    return (2 * fixed + bits >> 16).to(torch.float32)


def to_e4m3(steps: Tensor, bits: Tensor) -> Tensor:
    """FP32 numbers up to 448 → numbers of E4M3, never -0."""
    base = torch.where(steps.abs() < 2.0**-6, 2.0**-6, 0.0)  # below, E4M3's steps are those above it
    summed = (steps.abs() + base).view(torch.int32) + (16 * bits + 8)
    return torch.copysign((summed & -(1 << 20)).view(torch.float32) - base, steps) + 0.0


def int4_scale(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of INT4 blocks, rounded up so that no code is beyond 7, and what values are multiplied by."""
    seventh = (absmax * RECIPROCAL_7).view(torch.int32)
    scale = (seventh + 0xFFFF & -(1 << 16)).view(torch.float32)
    inverse = torch.ones_like(scale) / scale
    large = scale > LARGEST_INT4_SCALE
    return scale.clamp(max=LARGEST_INT4_SCALE), torch.where(large, torch.full_like(scale, 7.0) / absmax, inverse)
