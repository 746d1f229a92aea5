"""Where the slots of one flat lie: the only description of a bucket that a kernel sees."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def shard_bytes(blocks: int, block: int) -> int:
    """Bytes of one quantized shard: `blocks` payloads of `block` bytes, an FP32 scale each, padded to 16."""
    return -(-blocks * (block + 4) // 16) * 16
