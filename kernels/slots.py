"""Where the slots of one flat lie: the only description of a bucket that a kernel sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 2048


@dataclass(frozen=True, eq=False)
class SlotTable:
    """Offsets and lengths of a bucket's slots, in elements of its flat.

    Slots ascend and do not overlap. `total` counts padding too: the elements of the whole flat.
    `cache` is where a backend keeps what it derives from the table once, such as tile maps on a
    device, under its own name.
    """

    offsets: NDArray[np.int64]
    numels: NDArray[np.int64]
    total: int
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    def tile_rows(self, tile: int) -> NDArray[np.int64]:
        """The row of each slot's first tile, where slots are cut into tiles of `tile` elements; last, their number."""
        rows: dict[int, NDArray[np.int64]] = self.cache.setdefault("tile_rows", {})
        if tile not in rows:
            rows[tile] = np.concatenate(([0], np.cumsum(-(-self.numels // tile))))
        return rows[tile]


def tile_elements(block: int = 0) -> int:
    """Elements of a tile: 2048, or of an INT8 wire the whole blocks that fit once each is widened to a power of two."""
    return max(1, TILE // (1 << (block - 1).bit_length())) * block if block else TILE


def shard_bytes(blocks: int, block: int) -> int:
    """Bytes of one quantized shard: `blocks` payloads of `block` bytes, an FP32 scale each, padded to 16."""
    return -(-blocks * (block + 4) // 16) * 16
