"""What decompression finds in the tiles of a bucket, and which gradients are still as their reduction left them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor

from .. import ops
from ..kernels.slots import tile_elements
from .buckets import Bucket


class Statistics:
    """Of each tile of a bucket, how many averages are not finite, and the sum of their squares (kernels/README.md).

    Args:
        bucket: whose averages.
        block: elements of the wire that share a scale; 0 without.

    Attributes:
        bucket: as given.
        rows: one for each tile, `[tiles, 2]`; kernels write them.
        made: whether the last reduction has.
    """

    def __init__(self, bucket: Bucket, block: int) -> None:
        self.bucket, self._first_rows = bucket, bucket.table.tile_rows(tile_elements(block))
        shape, dtype = ops.statistics_shape(bucket.table, block), ops.statistics_dtype(bucket.dtype)
        self.rows = torch.zeros(shape, dtype=dtype, device=bucket.device)
        self.made = False
        # By position of the slot, parameters, each with its gradient and the version of that.
        self._described: dict[int, tuple[Tensor, weakref.ref[Tensor], int]] = {}

    def begin(self, made: bool) -> None:
        """Averages are about to be written; `made`: their statistics, too."""
        self.made, self._described = made, {}

    def describe(self, parameters: Sequence[Tensor], left: Iterable[int]) -> None:
        """The averages that they are of have been stored, but at the positions `left`, and but for what was cast.

        The choice is the same on every rank.
        """
        if self.made:
            self._described = {
                position: (parameter, weakref.ref(grad), grad._version)
                for position, parameter in enumerate(parameters)
                if (grad := parameter.grad) is not None and grad.dtype.to_real() is self.bucket.dtype
            }
            for position in left:
                self._described.pop(position, None)

    def known(self, wanted: Set[int]) -> dict[int, Tensor]:
        """By position, the parameters among those with these identities whose gradients they describe now."""
        return {
            position: parameter
            for position, (parameter, noted, version) in self._described.items()
            if (grad := parameter.grad) is not None
            and grad is noted()
            and grad._version == version
            and id(parameter) in wanted
        }

    def of_slots(self, slots: Mapping[int, Tensor]) -> Tensor:
        """The rows of some slots, tile by tile."""
        count = len(self.bucket.slots)
        if len(slots) == count:
            return self.rows[: self._first_rows[count]]
        return torch.cat([self.of_slot(position) for position in sorted(slots)])

    def of_slot(self, position: int) -> Tensor:
        """The rows of one slot."""
        return self.rows[self._first_rows[position] : self._first_rows[position + 1]]
