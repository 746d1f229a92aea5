"""Residuals in 8 bits, in plain torch: a code an element and a power of two a block (README.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference_stochastic import to_whole

INFINITY, NAN = 0x7F800000, 0x7FC00000  # bits of FP32
SMALLEST, LARGEST, NOT_FINITE = 7, 254, 255  # exponent bytes
ROOM = 0x1FFFF  # lifts the exponent of what is beyond 127/128 of a power of two
GOLDEN, FACTORS = 0x9E3779B1, (0x85EBCA6B, 0xC2B2AE35)
MASK = 0xFFFFFFFF


def units_of(exponents: Tensor) -> Tensor:
    """Exponent bytes → what codes are multiplied by, FP32."""
    byte = exponents.to(torch.int32)
    bits = torch.where(byte < SMALLEST, 0, byte - 6 << 23)
    return torch.where(byte == NOT_FINITE, NAN, bits).view(torch.float32)


def decode_residuals(codes: Tensor, exponents: Tensor, block: int) -> Tensor:
    """INT8 `[..., n]` and uint8 `[..., n / block]` → FP32 `[..., n]`."""
    blocks = codes.reshape(*exponents.shape, block).to(torch.float32)
    return (blocks * units_of(exponents)[..., None]).view(codes.shape)


def encode_residuals(values: Tensor, codes: Tensor, exponents: Tensor, block: int) -> None:
    """The other way, into `codes` and `exponents`; what `decode_residuals` gave stays what it was."""
    blocks = values.reshape(*exponents.shape, block)
    bits = blocks.view(torch.int32)
    largest = (bits & 0x7FFFFFFF).amax(-1, keepdim=True)
    finite = largest < INFINITY
    byte = torch.where(finite, largest + ROOM >> 23, 0).clamp(max=LARGEST)
    byte = torch.where(byte < SMALLEST, 0, byte)
    inverse = (260 - byte << 23).view(torch.float32)
    steps = torch.where(byte > 0, blocks * inverse, 0.0)
    place = torch.arange(block, device=values.device)
    found = to_whole(steps, scrambled(bits, largest.to(torch.int64) ^ place)).clamp_(-127, 127)
    codes.copy_(found.view(codes.shape))
    exponents.copy_(torch.where(finite, byte, NOT_FINITE)[..., 0])


def scrambled(bits: Tensor, salt: Tensor) -> Tensor:
    """16 bits of each number, as if drawn: `bits` plus `salt` times a constant through MurmurHash3's last steps."""
    words = bits + salt * GOLDEN & MASK
    for shift, factor in ((16, FACTORS[0]), (13, FACTORS[1])):
        words = (words ^ words >> shift) * factor & MASK  # of a product that overflows the lower half is right
    return (words ^ words >> 16) >> 16
