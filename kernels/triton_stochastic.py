"""Random bits in the Triton kernels, and what stochastic rounding makes of numbers with them."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .device_tables import device_keys
from .reference_stochastic import LARGEST_INT4_SCALE, MULTIPLIERS, RECIPROCAL_7, ROUNDS, WEYL
from .slots import DRAWN, Draws, SlotTable

PHILOX_ROUNDS = tl.constexpr(ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = (tl.constexpr(number) for number in MULTIPLIERS)
WEYL_0, WEYL_1 = (tl.constexpr(number) for number in WEYL)
PER_COUNTER = tl.constexpr(DRAWN)
SEVENTH, LARGEST_SCALE = tl.constexpr(RECIPROCAL_7), tl.constexpr(LARGEST_INT4_SCALE)
MAGIC, MAGIC_BITS = tl.constexpr(12582912.0), tl.constexpr(0x4B400000)  # 1.5 * 2^23: a sum with it has no fraction


@triton.jit
def random_bits(keys, tiles, step, seed, who, element):
    """16 random bits for each of 16 elements from each `element` of this program's tile on, 16 times as many a row."""
    tile = tiles + 5 * tl.program_id(0).to(tl.int64)
    slot, start = tl.load(tile), tl.load(tile + 1)
    key, first = tl.load(keys + 2 * slot), tl.load(keys + 2 * slot + 1)
    c0 = ((first + start + element) // PER_COUNTER).to(tl.uint32)
    c1 = tl.zeros_like(c0) + tl.cast(who, tl.int64).to(tl.uint32)
    c2 = tl.zeros_like(c0) + tl.load(step).to(tl.uint32)
    c3 = tl.zeros_like(c0) + tl.cast(seed, tl.int64).to(tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for number in tl.static_range(PHILOX_ROUNDS):
        a, b = c0.to(tl.uint64) * MULTIPLIER_0, c2.to(tl.uint64) * MULTIPLIER_1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ (k0.to(tl.uint64) + number * WEYL_0).to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ (k1.to(tl.uint64) + number * WEYL_1).to(tl.uint32)
        c1, c3 = b.to(tl.uint32), a.to(tl.uint32)
    words = tl.interleave(tl.interleave(c0, c2), tl.interleave(c1, c3))
    halves = tl.interleave(words & 0xFFFF, words >> 16).to(tl.int32)
    return tl.interleave(halves, ((halves & 0xFF) << 8 | halves >> 8) ^ 0xFF)


@triton.jit
def to_bf16(values, bits):
    """FP32 → the BF16 numbers that these bits choose, as FP32."""
    rounded = ((values.to(tl.int32, bitcast=True) + bits) & -65536).to(tl.float32, bitcast=True)
    return tl.where(values == values, rounded, values)


@triton.jit
def to_whole(steps, bits):
    """Numbers up to 127 → the whole ones that these bits choose."""
    fixed = (steps * 32768.0 + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    return ((fixed + (bits >> 1)) >> 15).to(tl.float32)


@triton.jit
def to_e4m3(steps, bits):
    """Numbers up to 448 → the numbers of E4M3 that these bits choose, never -0."""
    size = tl.abs(steps)
    base = tl.where(size < 0.015625, 0.015625, 0.0)
    summed = (size + base).to(tl.int32, bitcast=True) + (16 * bits + 8)
    rounded = (summed & -1048576).to(tl.float32, bitcast=True) - base
    return tl.where(steps < 0, 0.0 - rounded, rounded)


@triton.jit
def int4_scales(largest, normal):
    """Of blocks with these magnitudes, as bits: scales rounded up, so that no code is beyond 7, and inverses."""
    absmax = tl.where(normal, largest.to(tl.float32, bitcast=True), 1.0)
    seventh = (absmax * SEVENTH).to(tl.int32, bitcast=True)
    scale = ((seventh + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    large = scale > LARGEST_SCALE
    inverse = tl.div_rn(tl.where(large, 7.0, 1.0), tl.where(large, absmax, scale))
    return tl.where(large, LARGEST_SCALE, scale), inverse


def drawing(slots: SlotTable | None, draws: Draws | None, device: torch.device) -> tuple[Any, ...]:
    """What kernels take for random bits: keys, step, seed, who."""
    if slots is None or draws is None:
        return None, None, 0, 0
    return device_keys(slots, device), draws.step, draws.seed, draws.who
