"""Where the slots of one flat lie, which is all that a kernel is told of a bucket, and the sizes of a wire's parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TILE = 2048
# The least magnitude that a dtype rounds to infinity: half a step beyond its largest number.
INFINITE_FROM = {torch.float16: 65520.0, torch.bfloat16: float.fromhex("0x1.ffp+127")}


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Offsets and lengths of a bucket's slots, in elements of its flat.

    Slots ascend and do not overlap. `total` counts padding too: the elements of the whole flat.
    `keys` and `firsts` are for stochastic rounding alone: what each slot's random bits follow from, and
    the element of its parameter that it begins with, which is not 0 where the flat is a shard.
    `cache` is where a backend keeps what it derives from the table once, such as tile maps on a
    device, under its own name.
    """

    offsets: NDArray[np.int64]
    numels: NDArray[np.int64]
    total: int
    keys: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    firsts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def tile_rows(self, tile: int) -> NDArray[np.int64]:
        """The row of each slot's first tile, where slots are cut into tiles of `tile` elements; last, their number."""
        rows: dict[int, NDArray[np.int64]] = self.cache.setdefault("tile_rows", {})
        if tile not in rows:
            rows[tile] = np.concatenate(([0], np.cumsum(-(-self.numels // tile))))
        return rows[tile]

    def shard(self, start: int, stop: int) -> SlotTable:
        """What of the slots lies in elements `start` to `stop`, as a table of its own; slots may be empty there."""
        begins, ends = self.offsets.clip(start, stop), (self.offsets + self.numels).clip(start, stop)
        firsts = self.firsts + (begins - self.offsets).clip(0)
        return SlotTable(begins - start, ends - begins, stop - start, self.keys, firsts)


class Draws(NamedTuple):
    """What random bits follow from, beside a slot's key and the element in it (README.md)."""

    seed: int
    who: int  # the rank, of gradients; `OF_AVERAGES` of averages
    step: Tensor  # int64 `[1]`, on the device of the wire


OF_AVERAGES = 0xFFFFFFFF
DRAWN = 16  # elements whose bits come at once


def tile_elements(block: int = 0) -> int:
    """Elements of a tile: 2048, or of a quantized wire the whole blocks that fit, each widened to a power of two."""
    return max(1, TILE // (1 << (block - 1).bit_length())) * block if block else TILE


class BlockFormat(NamedTuple):
    """How a quantized wire holds an element and its block's scale (README.md)."""

    name: str
    bits: int  # of an element
    scale_bytes: int
    largest: int  # the magnitude of a block's largest element, in units of the scale's

    def top(self, by_chance: bool) -> int:
        """The largest code of a block that was rounded to nearest, or by chance, where INT4 has no -8."""
        return 7 if by_chance and self.bits == 4 else self.largest

    def payload_bytes(self, block: int) -> int:
        """Bytes of `block` elements."""
        return block * self.bits // 8

    def blocks(self, shard: int, block: int) -> int:
        """The number of blocks in a shard of so many bytes."""
        return shard // (self.payload_bytes(block) + self.scale_bytes)


INT8_FORMAT = BlockFormat("int8", 8, 4, 127)
INT4_FORMAT = BlockFormat("int4", 4, 2, 8)
FP8_FORMAT = BlockFormat("fp8", 8, 4, 448)


def shard_bytes(blocks: int, block: int, form: BlockFormat = INT8_FORMAT) -> int:
    """Bytes of one quantized shard: `blocks` payloads of `block` elements and as many scales, padded to 16."""
    return -(-blocks * (form.payload_bytes(block) + form.scale_bytes) // 16) * 16


def residual_bytes(elements: int, block: int) -> int:
    """Bytes of a row of residuals in 8 bits: a code an element, an exponent byte a block, padded to 16."""
    return -(-(elements + elements // block) // 16) * 16


def spare(ranks: int) -> float:
    """The power of two by which terms are divided so that the sum of so many cannot overflow."""
    return 2.0 ** (ranks - 1).bit_length()


FP16_BLOCK = 128
FP16_BLOCK_BYTES = 2 * FP16_BLOCK + 1


def fp16_shard_bytes(blocks: int) -> int:
    """Bytes of one shard of FP16 blocks: the payloads, a byte for each block's exponent, padded to 64."""
    return -(-blocks * FP16_BLOCK_BYTES // 64) * 64


class ExponentRule(NamedTuple):
    """How a block's exponent byte follows from the bits of its largest magnitude (README.md).

    It is `ordinary` from `low` to before `high`, and where a number is not finite; elsewhere the number's own exponent
    field plus `lift`, and at least 1.
    """

    low: int
    high: int
    ordinary: int
    lift: int


def exponent_rule(summed: int) -> ExponentRule:
    """The rule where a transport will add up the FP16 payloads of `summed` ranks, or of one: none are added."""
    if summed == 1:
        return ExponentRule(113 << 23, 0x477FF000, 127, -14)  # from 2^-14 to what rounds to infinity, 65520
    whole = (summed - 1).bit_length()  # the sum of so many is at most 2^whole times the largest
    half = (whole + 1) // 2
    return ExponentRule(113 + half << 23, 142 + half - whole << 23, 127 + half, min(whole, 13) - 14)


class PlacesError(ValueError):
    """A rank's places of elements do not ascend within the gradient."""

    def __init__(self, rank: int, numel: int) -> None:
        super().__init__(f"the places that rank {rank} has sent do not ascend within {numel} elements")


class Pieces(NamedTuple):
    """How a two-shot averages, or a reduce-scatter sums, in pieces of some blocks of a shard: three compiled functions.

    Each is a C function of five 64-bit integers, the first of which is `told`:

        encode(told, shard, first, count, to)        gradients → blocks of a shard from `first` on, to an address
        average(told, first, count, terms, to)       blocks of the own shard as all ranks have encoded them, of which
                                                     the addresses are at `terms` → their averages, encoded
        decode(told, shard, first, count, source)    averages of blocks of a shard → where they belong
    """

    encode: int
    average: int
    decode: int
    told: int
    blocks: int  # of a shard
    block_bytes: int  # of a piece, for each block
    keep: object  # what must live as long
