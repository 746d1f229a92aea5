"""BucketResiduals: what is kept of one bucket on one rank, by row and by slot."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..buckets import Bucket
from .factors import to_device
from .rows import BASE, GO_ON, KEEP, Rows


class Share(NamedTuple):
    """Which elements of a bucket a rank keeps residuals of, and what they count.

    Args:
        first: of gradients: all, or in two levels the rank's column.
        second: of averages: the rank's shard.
        divisor: what sums of gradients are divided by.
        unit: what a residual of `first` would be, times this, in the gradients of this rank alone.
        shared: what a residual that each rank has alike makes of `first`.
    """

    first: slice
    second: slice
    divisor: float
    unit: float = 1.0
    shared: float = 1.0


class SlotResiduals(NamedTuple):
    """What is kept of one slot on one rank: FP32 `[numel]`.

    `base` is Q where its average is in `.grad` still (`ErrorFeedback`), `factor` what `LowRank` begins its next
    factors from.
    """

    residual: Tensor
    base: Tensor | None
    unit: float
    factor: Tensor | None = None

    @property
    def holds_any(self) -> bool:
        """Whether anything is kept; the host waits."""
        return bool(self.residual.any()) or (self.base is not None and bool(self.base.any()))


class BucketResiduals:
    """Residuals of both stages, in two rows each, of which row `turn` counts, and Q where that is kept.

    Args:
        bucket: whose gradients.
        share: which elements are kept.
        block: elements of a block.
        rows: where the bucket is one row of so many alike, one for each rank, whose sums nobody compresses: there is
            no second stage.
        dtype: what residuals are kept in (`Rows`); uint8 for 8 bits.

    Attributes:
        turn: INT32 `[1]`.
        first: of gradients.
        second: of averages.
        units: by slot, the factor between an average and what will be applied of it, clipping aside: a loss scale's
            inverse. NaN before the first step; FP64 `[slots]` on the device once only that knows.
        carried: slots whose averages are in `.grad` still, and whose Q is kept.
    """

    def __init__(self, bucket: Bucket, share: Share, block: int, rows: int | None, dtype: torch.dtype) -> None:
        self._bucket, self.share, self._block = bucket, share, block
        self._starts = [*(slot.offset for slot in bucket.slots), bucket.flags_offset]
        self.turn = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        numels = [part.stop - part.start for part in (share.first, share.second)]
        shape = () if rows is None else (rows,)
        self.first = Rows(share.first.start, numels[0], self.turn, block, dtype, shape)
        self.second = Rows(share.second.start, numels[1], self.turn, block, dtype)
        self.units: list[float] | Tensor = [math.nan] * len(bucket.slots)
        self.carried: set[int] = set()

    @property
    def _both(self) -> tuple[Rows, Rows]:
        return self.first, self.second

    # All slots at once

    def read(self) -> tuple[Tensor, Tensor]:
        """Row `turn` of both stages, FP32: in FP32 views, which make the host wait for `turn`."""
        turn = int(self.turn)
        return self.first.read(turn), self.second.read(turn)

    def write(self, residual: Tensor | None, shard_residual: Tensor) -> None:
        """Other residuals in row `turn`, FP32; None leaves those of gradients as they are."""
        turn = int(self.turn)
        if residual is not None:
            self.first.write(turn, residual)
        self.second.write(turn, shard_residual)

    def units_now(self) -> list[float]:
        """`units` as numbers on the host."""
        return self.units.tolist() if isinstance(self.units, Tensor) else list(self.units)

    def clone(self) -> BucketResiduals:
        """A copy."""
        cloned = copy(self)
        cloned.turn, cloned.carried = self.turn.clone(), set(self.carried)
        cloned.first, cloned.second = (rows.clone(cloned.turn) for rows in self._both)
        cloned.units = self.units.clone() if isinstance(self.units, Tensor) else list(self.units)
        return cloned

    def scale(self, factor: float, of_units: float) -> None:
        """Multiply all that is kept; units become as much smaller as `of_units` tells."""
        if factor != 1.0:
            for rows in self._both:
                rows.scale(factor)
        if of_units != 1.0:
            units = self.units
            self.units = units / of_units if isinstance(units, Tensor) else [unit / of_units for unit in units]

    def added_to(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the slots' gradients, 1-D, with what is kept in row `turn` added; the other row becomes zeros."""
        counts = [self.turn == row for row in (0, 1)]
        first, second = self.first.rows
        residual = torch.where(counts[0], first, second)
        for row, kept in zip(self.first.rows, counts, strict=True):
            row.masked_fill_(~kept, 0)
        starts = zip(grads, self._bucket.slots, strict=True)
        flats = [(grad.as_strided((slot.numel,), (1,)), residual[slot.offset :][: slot.numel]) for grad, slot in starts]
        return [(flat + part).to(flat.dtype) for flat, part in flats]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of this rank's gradients; the host waits."""
        return not self.carried and not bool(self.first.rows.any())

    # By slot, for other buckets, shards or ranks

    def take(self, i: int) -> SlotResiduals:
        """Remove what is kept of slot `i` on this rank, and return it."""
        turn = int(self.turn)
        found, base = self._folded(i, lambda rows, part: rows.read(turn, part)), None
        if i in self.carried and self.first.base is not None and self.second.base is not None:
            base = self._folded(i, lambda rows, part: rows.read(BASE, part))
            self.carried.discard(i)
        for rows in self._both:
            rows.clear(turn, rows.part(*self._place(i)))
        return SlotResiduals(found, base, self.units_now()[i])

    def put(self, i: int, parts: SlotResiduals) -> None:
        """Go on with what was taken of a slot elsewhere; in two levels, with the node's sum of it over `share.unit`."""
        start, turn = self._place(i)[0], int(self.turn)
        place = self.first.part(start, start + self._bucket.slots[i].numel)
        here = slice(place.start + self.first.first - start, place.stop + self.first.first - start)
        if parts.base is not None:
            self.first.write(turn, parts.base[..., here], place)
            self.keep_base(i)
        self.first.write(turn, parts.residual[..., here], place)
        units = self.units_now()
        units[i] = parts.unit
        self.units = units

    def spread(self, gather: Callable[[Tensor], None]) -> None:
        """Move what is kept of all shards into the first stage, on every rank alike: no shard's place tells in it.

        Args:
            gather: makes a `[total]` tensor whole, of which each rank has its shard; every rank calls it.
        """
        turn = int(self.turn)
        applied = self.second.read(turn)
        thrown_away = applied.clone()
        for i in self.carried:
            part = self.second.part(*self._place(i))
            thrown_away[..., part] = self.second.read(BASE, part)
        gathered = []
        for own in (applied, thrown_away):
            whole = torch.zeros(self._bucket.total, dtype=torch.float32, device=self.turn.device)
            whole[self.share.second] = own
            gather(whole)
            gathered.append(whole)
        applied, thrown_away = gathered
        for row in (turn, BASE) if self.second.base is not None else (turn,):
            self.second.clear(row)
        if self.first.base is not None:
            with self.first.changing(BASE) as values:
                values.add_(thrown_away[self.share.first], alpha=self.share.shared)
        # Other ranks' averages may be in `.grad` still, where this one's were thrown away: nobody has applied these.
        here = thrown_away
        for i in self.carried:
            start, end = self._place(i)
            here[start:end] = applied[start:end]
        with self.first.changing(turn) as values:
            values.add_(here[self.share.first], alpha=self.share.shared)

    def folded(self, i: int, residual: Tensor, shard_residual: Tensor) -> Tensor:
        """Of whole residuals a slot's, with what is kept of the own shard in it, `[numel]`.

        The first is divided by `share.divisor` and the second is not, so it counts so many times. In two levels this
        rank has both to itself: elsewhere in the slot it keeps nothing.
        """
        return self._folded(i, lambda rows, part: (residual if rows is self.first else shard_residual)[..., part])

    def _folded(self, i: int, read: Callable[[Rows, slice], Tensor]) -> Tensor:
        start, slot = self._place(i)[0], self._bucket.slots[i]
        found = torch.zeros(*self.first.shape[:-1], slot.numel, dtype=torch.float32, device=self.turn.device)
        for rows, count in ((self.first, self.share.unit), (self.second, self.share.divisor)):
            part = rows.part(start, start + slot.numel)
            offset = part.start + rows.first - start
            found[..., offset : offset + part.stop - part.start].add_(read(rows, part), alpha=count)
        return found

    def _place(self, i: int) -> tuple[int, int]:
        return self._starts[i], self._starts[i + 1]

    # The row that was written last, row `turn`, and Q

    def blend(self, mixes: Sequence[tuple[float, float]]) -> None:
        """The row that was written last → by slot, the sum of row `turn` and itself, with these weights."""
        for mix, same in itertools.groupby(range(len(mixes)), mixes.__getitem__):
            slots = list(same)
            if mix != GO_ON:
                for rows in self._both:
                    rows.blend(self._starts[slots[0]], self._starts[slots[-1] + 1], *mix)

    def blend_late(self, old: Tensor, new: Tensor) -> None:
        """The same with weights `[slots]` on the device: a blend of all blocks with weights of their own."""
        by_block = self._by_block(old, 0.0), self._by_block(new, 1.0)
        for rows in self._both:
            rows.blend_blocks(*by_block, self._block)

    def _by_block(self, by_slot: Tensor, elsewhere: float) -> Tensor:
        """`[slots]` → FP32 `[blocks, 1]`; used-flags and padding get `elsewhere`."""
        padded = torch.nn.functional.pad(by_slot.float(), (0, 1), value=elsewhere)
        return padded[self._slot_of_block][:, None]

    @cached_property
    def _slot_of_block(self) -> Tensor:
        """`[blocks]`; the number of slots for used-flags and padding."""
        ends = [-(-(slot.offset + slot.numel) // self._block) for slot in self._bucket.slots]
        bounds = [0, *ends, self._bucket.total // self._block]
        counts = [end - start for start, end in itertools.pairwise(bounds)]
        return to_device(
            torch.arange(len(counts), device="cpu").repeat_interleave(torch.tensor(counts, device="cpu")),
            self.turn.device,
        )

    def keep_base(self, i: int, where: Tensor | None = None) -> None:
        """Keep row `turn` of a slot as its Q, unless a device says not to."""
        self.carried.add(i)
        for rows in self._both:
            rows.keep_base(*self._place(i), where)

    def restore_base(self, slots: Iterable[int]) -> None:
        """Bring back the Q of slots whose averages are in `.grad` no more, and were not applied."""
        for i in slots:
            for rows in self._both:
                rows.restore_base(*self._place(i))
        self.carried.difference_update(slots)

    def drop_last(self, slots: Iterable[int]) -> None:
        """Let the row that was written last be row `turn` in these slots."""
        for i in slots:
            for rows in self._both:
                rows.blend(*self._place(i), *KEEP)
