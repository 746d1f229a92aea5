"""What quantization loses of one bucket, kept on the device until the next step adds it back."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ReducerError
from ..buckets import Bucket
from .applied import Applied, Fate
from .factors import Factor, known_to_be, stack, to_device
from .notices import is_optimized, notice
from .rows import BASE, GO_ON, KEEP, Rows, reads_late

LEAST, MOST = 2.0**-126, 2.0**127  # what FP32 holds with all its digits


class Share(NamedTuple):
    """Which elements of a bucket a rank keeps residuals of, and what they count.

    Args:
        first: of gradients: all, or in two levels the rank's column.
        second: of averages: the rank's shard.
        ranks: among which gradients are averaged.
        unit: what a residual of `first` would be, times this, in the gradients of this rank alone.
        shared: what a residual that each rank has alike makes of `first`.
    """

    first: slice
    second: slice
    ranks: int
    unit: float = 1.0
    shared: float = 1.0


class ErrorFeedback:
    """The residuals of one bucket on one rank, kept in FP32, BF16 or 8 bits.

    Which of two rows is kept only the device knows, so that the host need not wait to learn whether a step was
    finite: kernels read row `turn` and write the other one.

    What the next reduction starts from is known when the optimizer has done its work. With Q what was added to the last
    gradients, R what was lost of them, and f what the averages were multiplied by before they were applied:

    1. All of an average was applied, as usual (f is the unit u that was expected): R.
    2. Nothing was (f = 0: the step was skipped, or no rank used the slot): Q.
    3. In general, ((u − f)·Q + f·R) / u', with the unit u' of the next step.
    4. Averages that are still in `.grad`, and will be averaged again: R, but Q is kept for the time when their fate
       is known.

    Since an average is the exact one + Q − R, in ranks' mean, the sum of what was applied then differs from the exact
    sum by u·Q, whatever f was: no history of clipping, skipped steps and loss scales adds up.

    In 8 bits and BF16 what is kept is rounded, each time it is stored: by 1/127 of the largest residual of a block at
    most, or 2^-9 of itself. That is lost, and small beside what would be lost without error feedback.

    Args:
        bucket: whose gradients.
        share: which elements are kept.
        block: elements of a block.
        rows: where the bucket is one row of so many alike, one for each rank, whose sums nobody compresses: there is
            no second stage.
        dtype: what residuals are kept in (`Rows`); uint8 for 8 bits.

    Attributes:
        residuals: `[2, elements of share.first]`, of this rank's gradients, or in two levels of its node's; with `rows`
            `[2, rows, elements]`; in 8 bits `[2, bytes]`.
        shard_residuals: `[2, elements of share.second]`, of the average of this rank's shard.
        turn: INT32 `[1]`.
        units: by slot, the factor between an average and what will be applied of it, clipping aside: a loss scale's
            inverse. NaN before the first step; FP64 `[slots]` on the device once only that knows.
        finite: whether every average of the step was: the same on every rank, set by who knows the step.
        stored: whether the averages of the last reduction are, or never will be; asked under PowerSGD, which says when
            one begins.
    """

    def __init__(
        self, bucket: Bucket, share: Share, block: int, rows: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        notice()  # of optimizers that step before the first of these averages, as under warm_up, too
        self._bucket, self._share, self._block = bucket, share, block
        self._starts = [*(slot.offset for slot in bucket.slots), bucket.flags_offset]
        self.turn = torch.zeros(1, dtype=torch.int32, device=bucket.device)
        numels = [part.stop - part.start for part in (share.first, share.second)]
        shape = () if rows is None else (rows,)
        self._first = Rows(share.first.start, numels[0], self.turn, block, dtype, shape)
        self._second = Rows(share.second.start, numels[1], self.turn, block, dtype)
        self.residuals, self.shard_residuals = self._first.rows, self._second.rows
        self.units: list[float] | Tensor = [math.nan] * len(bucket.slots)
        self.finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self.stored = True
        self._applied: Applied | None = None
        self._last: Applied | None = None
        self._read: object = None  # the verdict and the units that were read last
        self._turned = False  # whether the last reduction has changed `turn` already
        self._scale = 1.0  # what residuals are to be multiplied by once it is known what was applied
        self._divided = 1.0  # and that beside it, by which averages are not
        self._average_scale: float | None = None  # as `set_average_scale` was told last
        self._lock, self._changed_by = threading.Lock(), 0  # and the thread that holds it
        self._carried: set[int] = set()  # slots whose averages are in `.grad` still, and whose Q is kept
        self._idle: set[int] = set()  # those of them that the last reduction left alone

    @property
    def residual(self) -> Tensor:
        """What is kept of this rank's gradients, FP32: in FP32 a view, which makes the host wait for `turn`."""
        self.commit()
        return self._first.read(int(self.turn))

    @property
    def shard_residual(self) -> Tensor:
        """What is kept of the own shard's average, likewise."""
        self.commit()
        return self._second.read(int(self.turn))

    def zeros(self) -> Tensor:
        """FP32 as `residual`."""
        return self._first.zeros()

    def replace(self, residual: Tensor | None, shard_residual: Tensor) -> None:
        """Go on with other residuals, FP32; None leaves those of gradients as they are."""
        self.commit()
        if residual is not None:
            self._first.write(int(self.turn), residual)
        self._second.write(int(self.turn), shard_residual)

    def units_now(self) -> list[float]:
        """`units` as numbers on the host."""
        self.commit()
        return self.units.tolist() if isinstance(self.units, Tensor) else list(self.units)

    def factors_that_fit(self) -> tuple[float, float]:
        """The least and the largest factor for `rescale` by which nothing kept is lost, or infinite, in FP32; waits."""
        kept = [part.abs() for part in self.settled()[:2] if part.numel()]
        largest = max((float(part.where(part.isfinite(), 0).max()) for part in kept), default=0.0)
        held = [self._scale, largest or self._scale]
        return min(1.0, LEAST / min(held)), max(1.0, MOST / max(held))

    def rescale(self, factor: float) -> None:
        """Go on with residuals for gradients that are multiplied by `factor` from the next reduction on.

        What became of the last averages may not be known yet: it is by then.
        """
        self._scale *= factor
        if self._applied is None:
            self.commit()

    def set_average_scale(self, scale: float) -> None:
        """From the next reduction on, averages are the sum of gradients times `scale`.

        Where it was another before, the same average is made of gradients that are as much larger or smaller, and what
        is kept of them becomes so.
        """
        if self._average_scale is not None and self._average_scale != scale:
            self._divided *= self._average_scale / scale
            if self._applied is None:
                self.commit()
        self._average_scale = scale

    # By slot, for other buckets, shards or ranks

    def settled(self) -> tuple[Tensor, Tensor, list[float]]:
        """Copies of the kept row of both residuals, and of the units, for training without `.grad`.

        What no optimizer has applied until now will not be. Nothing changes here. During a reduction, on whatever
        thread, it is what that one starts from.
        """
        with self.changing():
            if self.turn.is_cuda:
                torch.cuda.synchronize(self.turn.device)  # the reduction is on another stream
            twin = copy(self)
            twin.turn, twin._carried = self.turn.clone(), set(self._carried)
            twin._first, twin._second = (rows.clone(twin.turn) for rows in (self._first, self._second))
            twin.units = self.units.clone() if isinstance(self.units, Tensor) else list(self.units)
            twin._lock, twin._changed_by = threading.Lock(), 0
            if self.turn.is_cuda:
                torch.cuda.synchronize(self.turn.device)  # nor may it go on before the copies are made
        twin.commit(final=True)
        return twin.residual, twin.shard_residual, twin.units_now()

    def added_to(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the slots' gradients, 1-D, with what is kept added: the way of a setting without error feedback.

        Of these nothing is lost (R is 0), so that what has not been applied is kept, and nothing else. In FP32.
        """
        self.commit()
        counts = [self.turn == row for row in (0, 1)]
        first, second = self.residuals
        residual = torch.where(counts[0], first, second)
        for row, kept in zip(self.residuals, counts, strict=True):
            row.masked_fill_(~kept, 0)
        starts = zip(grads, self._bucket.slots, strict=True)
        flats = [(grad.as_strided((slot.numel,), (1,)), residual[slot.offset :][: slot.numel]) for grad, slot in starts]
        return [(flat + part).to(flat.dtype) for flat, part in flats]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of this rank's gradients; the host waits."""
        return not self._carried and not bool(self.residuals.any())

    def take(self, i: int) -> SlotResiduals:
        """Remove what is kept of slot `i` on this rank, and return it."""
        self.look()
        self.commit()
        turn = int(self.turn)
        found, base = self._folded(i, lambda rows, part: rows.read(turn, part)), None
        if i in self._carried and self._first.base is not None and self._second.base is not None:
            base = self._folded(i, lambda rows, part: rows.read(BASE, part))
            self._carried.discard(i)
        for rows in (self._first, self._second):
            rows.clear(turn, rows.part(*self._place(i)))
        return SlotResiduals(found, base, self.units_now()[i])

    def spread(self, gather: Callable[[Tensor], None]) -> None:
        """Move what is kept of all shards into the first stage, on every rank alike: no shard's place tells in it.

        Args:
            gather: makes a `[total]` tensor whole, of which each rank has its shard; every rank calls it.
        """
        self.look()
        self.commit()
        turn = int(self.turn)
        applied = self._second.read(turn)
        thrown_away = applied.clone()
        for i in self._carried:
            part = self._second.part(*self._place(i))
            thrown_away[..., part] = self._second.read(BASE, part)
        gathered = []
        for own in (applied, thrown_away):
            whole = torch.zeros(self._bucket.total, dtype=torch.float32, device=self.turn.device)
            whole[self._share.second] = own
            gather(whole)
            gathered.append(whole)
        applied, thrown_away = gathered
        for row in (turn, BASE) if self._second.base is not None else (turn,):
            self._second.clear(row)
        if self._first.base is not None:
            with self._first.changing(BASE) as values:
                values.add_(thrown_away[self._share.first], alpha=self._share.shared)
        # Other ranks' averages may be in `.grad` still, where this one's were thrown away: nobody has applied these.
        here = thrown_away
        for i in self._carried:
            start, end = self._place(i)
            here[start:end] = applied[start:end]
        with self._first.changing(turn) as values:
            values.add_(here[self._share.first], alpha=self._share.shared)

    def put(self, i: int, parts: SlotResiduals) -> None:
        """Go on with what was taken of a slot elsewhere; in two levels, with the node's sum of it over `share.unit`."""
        self.commit()
        start, turn = self._place(i)[0], int(self.turn)
        place = self._first.part(start, start + self._bucket.slots[i].numel)
        here = slice(place.start + self._first.first - start, place.stop + self._first.first - start)
        if parts.base is not None:
            self._first.write(turn, parts.base[..., here], place)
            self._keep_base(i)
        self._first.write(turn, parts.residual[..., here], place)
        units = self.units_now()
        units[i] = parts.unit
        self.units = units

    def folded(self, i: int, residual: Tensor, shard_residual: Tensor) -> Tensor:
        """Of whole residuals a slot's, with what is kept of the own shard in it, `[numel]`.

        The first is averaged over the ranks and the second is not, so it counts `share.ranks` times. In two levels this
        rank has both to itself: elsewhere in the slot it keeps nothing.
        """
        return self._folded(i, lambda rows, part: (residual if rows is self._first else shard_residual)[..., part])

    def _folded(self, i: int, read: Callable[[Rows, slice], Tensor]) -> Tensor:
        start, slot = self._place(i)[0], self._bucket.slots[i]
        found = torch.zeros(*self._first.shape[:-1], slot.numel, dtype=torch.float32, device=self.turn.device)
        for rows, count in ((self._first, self._share.unit), (self._second, self._share.ranks)):
            part = rows.part(start, start + slot.numel)
            offset = part.start + rows.first - start
            found[..., offset : offset + part.stop - part.start].add_(read(rows, part), alpha=count)
        return found

    def _place(self, i: int) -> tuple[int, int]:
        return self._starts[i], self._starts[i + 1]

    # What became of the averages

    def follow(
        self,
        parameters: Sequence[Tensor],
        left: Collection[int],
        magnitudes: Callable[[], Tensor],
        scale: float = 1.0,
        watched: bool = True,
        counted: bool = True,
    ) -> None:
        """Watch what becomes of the averages, which have been stored (arguments: `Applied`)."""
        self._idle, self.stored = self._carried.intersection(left), True
        self._applied = Applied(parameters, set(left) - self._idle, magnitudes, scale, watched, self._idle, counted)

    def follow_on(self, parameters: Sequence[Tensor], watched: bool = True, counted: bool = True) -> None:
        """Watch what becomes of averages that are in `.grad` still, behind a `take` amid them, which has ended that.

        Also where that was elsewhere, and `put` has brought what is kept (arguments: `Applied`).
        """
        if self._applied is None:
            self._idle = set(self._carried)
            left = set(range(len(parameters))) - self._idle
            self._applied = Applied(parameters, left, self._unmeasured, 1.0, watched, self._idle, counted)

    def _unmeasured(self) -> Tensor:
        """The magnitudes of averages of which no reduction here has told."""
        return torch.zeros(2, len(self._bucket.slots), dtype=torch.float64, device=self.turn.device)

    @property
    def followed(self) -> list[Tensor]:
        """The parameters whose averages were watched until the last `commit` (`Applied.parameters`)."""
        return [] if self._last is None else self._last.parameters

    @property
    def is_settled(self) -> bool:
        """Whether what became of all averages is known: then `settled` is what the next reduction starts from."""
        return not self._carried and (self._applied is None or self._applied.is_known)

    def fates(self) -> Tensor | None:
        """What this rank knows of the averages that are followed (`Applied.fates`), FP64 `[2, slots]` on the device."""
        if self._applied is None:
            return None
        return torch.stack([stack(row, self.turn.device) for row in self._applied.fates()])

    def told(self) -> list[Fate] | None:
        """What this rank knows of the averages that are followed, by slot; None if they are not, or were not here."""
        return None if self._applied is None or not self._applied.watched else self._applied.told()

    def hear(self, fates: Sequence[Fate]) -> None:
        """Go by what another rank knows of them (`Applied.hear`)."""
        if self._applied is not None:
            self._applied.hear(fates)

    def throw_away(self, positions: Iterable[int]) -> None:
        """Averages that are followed were zeroed before (`Applied.throw_away`)."""
        if self._applied is not None:
            self._applied.throw_away(positions)

    def put_fates(self, fates: Tensor) -> None:
        """Go by what others know of them, as far as they do; NaN elsewhere."""
        if self._applied is not None:
            rest, carried = (list(row.unbind()) if reads_late(row) else row.tolist() for row in fates)
            self._applied.put_fates(rest, carried)

    def look(self, parameters: Sequence[Tensor] = (), others_follow: bool = True) -> None:
        """See whether gradients that nobody has applied are still there (`Applied.look`).

        `parameters` are those of the slots: they tell where nothing is followed, since the last reduction's averages
        were not stored.
        """
        if self._applied is not None:
            self._applied.look(others_follow)
        elif self._carried and parameters:
            self.commit()
            with self.changing():
                self._restore({i for i in self._carried if _is_gone(parameters[i])})

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what a snapshot must not come between: `turn`, and what the host knows of it, do not agree.

        Raises:
            ReducerError: where this thread does that already, and a signal handler has come between.
        """
        here = threading.get_ident()
        if self._changed_by == here:
            raise ReducerError(
                "a signal handler asks for residuals that the thread which it has interrupted is changing: let it set "
                "a flag, and save between two steps"
            )
        with self._lock:
            self._changed_by = here
            try:
                yield
            finally:
                self._changed_by = 0

    @contextmanager
    def turning(self) -> Iterator[Tensor]:
        """Around a kernel that changes `turn`, as is right where all averages are applied."""
        with self.changing():
            yield self.turn
            self._turned = True

    def commit(self, final: bool = False) -> None:
        """Make row `turn` what the next reduction starts from.

        Nothing changes with a reduction whose averages were not stored: its backward raised. `final`: gradients that
        have not been applied never will be.

        Raises:
            ReducerError: while a CUDA graph is captured, where only the device knows what the last averages became.
        """
        if is_captured(self.turn) and not self._is_known_on_host:
            raise ReducerError(
                f"{self._bucket}: error feedback in a CUDA graph, captured behind a step of which only the device "
                "knows what became of its averages (clipped, changed, left out, or applied by no torch optimizer): "
                "replays would go by that step for ever. Capture behind a step that a torch optimizer has applied "
                "whole, or call fastreduce.note_applied behind it; where gradients are clipped, leave reduction out "
                "of the graph"
            )
        with self.changing():
            self._commit(final)
            factor, divided, self._scale, self._divided = self._scale, self._divided, 1.0, 1.0
            if factor * divided != 1.0:
                for rows in (self._first, self._second):
                    rows.scale(factor * divided)
            if factor != 1.0:
                units = self.units
                self.units = units / factor if isinstance(units, Tensor) else [unit / factor for unit in units]

    @property
    def _is_known_on_host(self) -> bool:
        """Whether `commit` goes by numbers that the host has: what a graph reads of others may be freed, or stale."""
        if self._applied is None:
            return True
        factors = *self._applied.factors(math.nan), *self._applied.expected
        return isinstance(self.units, list) and all(isinstance(f, float) and math.isfinite(f) for f in factors)

    def _commit(self, final: bool) -> None:
        applied, self._applied = self._applied, None
        turned, self._turned = self._turned, False
        if applied is None:
            if turned:
                self.turn.bitwise_xor_(1)
            if final and self._last is not None:
                self._restore(set(filter(self._last.is_optimized, self._carried)))
            return
        self._last = applied  # a device may read its numbers until the next one comes
        if not final:
            applied.end()
        common = applied.common()
        mixes: list[tuple[float, float]] = []
        flip: int | Tensor = 1
        if common is not None and not self._carried and isinstance(self.units, list) and len(set(self.units)) == 1:
            mixes = [self._mix(0, *common, stays=False)] * len(self.units)
            self.units = self.units[:1] * len(self.units)
            if turned and mixes[0] == GO_ON:  # as is usual
                return
        if turned:
            self.turn.bitwise_xor_(1)
        if not mixes:
            found = self._mix_each(applied, final)
            if found is None:
                return
            mixes, flip = found
        if all(mix == KEEP for mix in mixes):
            return
        for mix, same in itertools.groupby(range(len(mixes)), mixes.__getitem__):
            slots = list(same)
            if mix != GO_ON:
                for rows in (self._first, self._second):
                    rows.blend(self._starts[slots[0]], self._starts[slots[-1] + 1], *mix)
        self.turn.bitwise_xor_(flip)

    def _mix_each(self, applied: Applied, final: bool) -> tuple[list[tuple[float, float]], int | Tensor] | None:
        """What `_mix` says of each slot, and whether row `turn` changes; None where only a device knows and does it."""
        carried = set() if final else applied.carried()
        self._part_with(carried)
        stays = carried | applied.relative()  # where the unit stays as it is
        # A device may read these until the next ones come: their memory may be another stream's.
        self._read = self.finite, self.units
        finite: Factor = self.finite.double() if reads_late(self.finite) else float(self.finite)
        factors, expected = applied.factors(finite, final), applied.expected
        flip: int | Tensor = 1
        if isinstance(finite, Tensor) and all(each is finite or known_to_be(each, 0.0) for each in factors):
            factors, flip = [1.0 if each is finite else 0.0 for each in factors], self.finite
        if isinstance(self.units, Tensor) or any(isinstance(each, Tensor) for each in (*factors, *expected)):
            self._commit_late(factors, expected, stays)
            return None
        mixes = [
            self._mix(i, factor, expect, i in stays)  # type: ignore[arg-type]
            for i, (factor, expect) in enumerate(zip(factors, expected, strict=True))
        ]
        return mixes, flip

    def _part_with(self, carried: set[int]) -> None:
        """Bring back the Q of slots whose averages are in `.grad` no more, and keep that of those that are."""
        for i in self._carried & self._idle:
            for rows in (self._first, self._second):
                rows.blend(*self._place(i), *KEEP)  # the last R is that of the reduction before
        self._restore(set(self._carried))
        self._idle = set()
        for i in carried:
            self._keep_base(i)

    def _restore(self, gone: set[int]) -> None:
        """Bring back the Q of slots whose averages are in `.grad` no more, and were not applied."""
        for i in gone:
            for rows in (self._first, self._second):
                rows.restore_base(*self._place(i))
        self._carried -= gone

    def _keep_base(self, i: int) -> None:
        self._carried.add(i)
        for rows in (self._first, self._second):
            rows.keep_base(*self._place(i))

    def _mix(self, i: int, factor: float, expected: float, stays: bool) -> tuple[float, float]:
        """What the old and the new residual of a slot are multiplied by; sets the slot's next unit."""
        assert isinstance(self.units, list)
        if not factor or not math.isfinite(factor):
            return KEEP
        if stays:
            return 1.0 - factor, factor
        unit = max(expected, factor)
        before = unit if math.isnan(self.units[i]) else self.units[i]
        self.units[i] = unit
        return (before - factor) / unit, factor / unit

    def _commit_late(self, factors: Sequence[Factor], expected: Sequence[Factor], stays: set[int]) -> None:
        """`commit`, where only the device knows the factors: a blend of all blocks with weights of their own."""
        device = self.turn.device
        units = self.units if isinstance(self.units, Tensor) else stack(self.units, device)
        factor, unit = stack(factors, device).nan_to_num(0.0, 0.0, 0.0), stack(expected, device)
        same = to_device(torch.tensor([i in stays for i in range(len(factors))], device="cpu"), device)
        unit = torch.where(same, 1.0, torch.maximum(unit, factor))
        before = torch.where(same | units.isnan(), unit, units)
        applied = factor != 0
        self.units = torch.where(applied & ~same, unit, units)
        old = self._by_block(torch.where(applied, (before - factor) / unit, 1.0), 0.0)
        new = self._by_block(torch.where(applied, factor / unit, 0.0), 1.0)
        for rows in (self._first, self._second):
            rows.blend_blocks(old, new, self._block)
        self.turn.bitwise_xor_(1)

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


def is_captured(tensor: Tensor) -> bool:
    """Whether what the current stream does with `tensor` is captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


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


def _is_gone(parameter: Tensor) -> bool:
    """Whether an average was thrown away, which no optimizer has applied; what is zeroed on a device counts as there.

    Else the host would wait. Without an optimizer that tells, averages count as applied.
    """
    grad = parameter.grad
    return is_optimized(parameter) and (grad is None or (not reads_late(grad) and not bool(grad.any())))


def agree_that_finite(feedbacks: Iterable[ErrorFeedback], others: Iterable[Tensor] = ()) -> None:
    """One verdict for all buckets of a step: residuals of a step that was not finite do not count.

    `others`: whether averages without error feedback are, where that is known.
    """
    by_device: dict[torch.device, list[ErrorFeedback]] = {}
    for feedback in feedbacks:
        by_device.setdefault(feedback.turn.device, []).append(feedback)
    verdicts = [torch.stack([feedback.finite for feedback in each]).all() for each in by_device.values()]
    verdicts += others if by_device else ()
    for device, each in by_device.items():
        verdict = torch.stack([other.to(device, non_blocking=True) for other in verdicts]).all()
        for feedback in each:
            feedback.finite = verdict
