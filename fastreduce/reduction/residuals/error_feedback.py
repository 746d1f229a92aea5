"""What quantization loses of one bucket, kept on the device until the next step adds it back."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from copy import copy

import torch
from torch import Tensor

from ...errors import ReducerError
from ..buckets import Bucket
from .applied import Applied, Fate
from .bucket_residuals import BucketResiduals, Share, SlotResiduals
from .factors import Factor, known_to_be, stack, to_device
from .notices import is_optimized, notice
from .rows import GO_ON, KEEP, reads_late

LEAST, MOST = 2.0**-126, 2.0**127  # what FP32 holds with all its digits


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
       is known. As they come back f times as large (clipped, or brought by some of the ranks alone): Q + f·(R − Q).

    Since an average is the exact one + Q − R, in ranks' mean, the sum of what was applied then differs from the exact
    sum by u·Q, whatever f was: no history of clipping, skipped steps and loss scales adds up.

    In 8 bits and BF16 what is kept is rounded, each time it is stored: by 1/127 of the largest residual of a block at
    most, or 2^-8 of itself. That is lost, and small beside what would be lost without error feedback.

    Args:
        bucket, share, block, rows, dtype: as of `BucketResiduals`.

    Attributes:
        residuals: `[2, elements of share.first]`, of this rank's gradients, or in two levels of its node's; with `rows`
            `[2, rows, elements]`; in 8 bits `[2, bytes]`.
        shard_residuals: `[2, elements of share.second]`, of the average of this rank's shard.
        turn: INT32 `[1]`.
        finite: whether every average of the step was: the same on every rank, set by who knows the step.
        stored: whether the averages of the last reduction are, or never will be; asked under PowerSGD, which says when
            one begins.
        comes_back: how often averages that are in `.grad` still are in the next ones, where all ranks bring them: once
            in a mean, and in a sum as often as there are ranks.
    """

    def __init__(
        self, bucket: Bucket, share: Share, block: int, rows: int | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        notice()  # of optimizers that step before the first of these averages, as under warm_up, too
        self._bucket = bucket
        self._kept = BucketResiduals(bucket, share, block, rows, dtype)
        self.turn = self._kept.turn
        self.residuals, self.shard_residuals = self._kept.first.rows, self._kept.second.rows
        self.finite = torch.ones((), dtype=torch.bool, device=bucket.device)
        self.stored = True
        self._applied: Applied | None = None
        self._last: Applied | None = None
        self._read: object = None  # the verdict and the units that were read last
        self._turned = False  # whether the last reduction has changed `turn` already
        self._scale = 1.0  # what residuals are to be multiplied by once it is known what was applied
        self._divided = 1.0  # and that beside it, by which averages are not
        self._average_scale: float | None = None  # as `set_average_scale` was told last
        self.comes_back = 1.0
        self._brought = self._growth = 1.0  # as `expect` was told of the next reduction
        self._brought_last = 1.0  # what was taken to come back to the last one
        self._lock = threading.RLock()  # which tells whether this thread holds it
        self._idle: set[int] = set()  # carried slots that the last reduction left alone

    @property
    def residual(self) -> Tensor:
        """What is kept of this rank's gradients, FP32: in FP32 a view, which makes the host wait for `turn`."""
        self.commit()
        return self._kept.read()[0]

    @property
    def shard_residual(self) -> Tensor:
        """What is kept of the own shard's average, likewise."""
        self.commit()
        return self._kept.read()[1]

    def zeros(self) -> Tensor:
        """FP32 as `residual`."""
        return self._kept.first.zeros()

    def replace(self, residual: Tensor | None, shard_residual: Tensor, units: Sequence[float] | None = None) -> None:
        """Go on with other residuals, FP32, and units; None leaves those of gradients, or units, as they are."""
        self.commit()
        self._kept.write(residual, shard_residual)
        if units is not None:
            self._kept.units = list(units)

    def units_now(self) -> list[float]:
        """`BucketResiduals.units` as numbers on the host."""
        self.commit()
        return self._kept.units_now()

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

    def expect(self, brought: float, growth: float = 1.0) -> None:
        """Before a reduction to which not all ranks bring gradients.

        Args:
            brought: the part that does: so much of averages that are in `.grad` still comes back.
            growth: what its averages are multiplied by behind it, over that of the last reduction. Units grow with it,
                and what is kept becomes as much smaller, since it is owed the same.
        """
        self._brought, self._growth = brought, growth

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
            twin._kept = self._kept.clone()
            twin.turn = twin._kept.turn
            twin._lock = threading.RLock()
            if self.turn.is_cuda:
                torch.cuda.synchronize(self.turn.device)  # nor may it go on before the copies are made
        twin.commit(final=True)
        return twin.residual, twin.shard_residual, twin.units_now()

    def added_to(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the slots' gradients, 1-D, with what is kept added: the way of a setting without error feedback.

        Of these nothing is lost (R is 0), so that what has not been applied is kept, and nothing else. In FP32.
        """
        self.commit()
        return self._kept.added_to(grads)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept of this rank's gradients; the host waits."""
        return self._kept.is_empty

    def take(self, i: int) -> SlotResiduals:
        """Remove what is kept of slot `i` on this rank, and return it."""
        self.look()
        self.commit()
        return self._kept.take(i)

    def spread(self, gather: Callable[[Tensor], None]) -> None:
        """Move what is kept of all shards into the first stage (`BucketResiduals.spread`)."""
        self.look()
        self.commit()
        self._kept.spread(gather)

    def put(self, i: int, parts: SlotResiduals) -> None:
        """Go on with what was taken of a slot elsewhere; in two levels, with the node's sum of it over `share.unit`."""
        self.commit()
        self._kept.put(i, parts)

    def folded(self, i: int, residual: Tensor, shard_residual: Tensor) -> Tensor:
        """What is kept of a slot, of what `settled` told (`BucketResiduals.folded`)."""
        return self._kept.folded(i, residual, shard_residual)

    # What became of the averages

    def follow(
        self,
        parameters: Sequence[Tensor],
        left: Collection[int],
        magnitudes: Callable[[], Tensor],
        scale: float = 1.0,
        watched: bool = True,
        find: Sequence[Callable[[], Tensor | None]] | None = None,
    ) -> None:
        """Watch what becomes of the averages, which have been stored (arguments: `Applied`)."""
        self._idle, self.stored = self._kept.carried.intersection(left), True
        older = dict.fromkeys(self._idle, 1.0 / self._brought_last)  # they have not come back, as they were taken to
        left = set(left) - self._idle
        self._applied = Applied(parameters, left, magnitudes, scale, watched, older, find)

    def follow_on(
        self,
        parameters: Sequence[Tensor],
        watched: bool = True,
        find: Sequence[Callable[[], Tensor | None]] | None = None,
    ) -> None:
        """Watch what becomes of averages that are in `.grad` still, behind a `take` amid them, which has ended that.

        Also where that was elsewhere, and `put` has brought what is kept (arguments: `Applied`).
        """
        if self._applied is None:
            self._idle = set(self._kept.carried)
            left = set(range(len(parameters))) - self._idle
            older = dict.fromkeys(self._idle, 1.0 / self._brought_last)
            self._applied = Applied(parameters, left, self._unmeasured, 1.0, watched, older, find)
            # What this rank has thrown away before is not there, though the others of its node may have theirs still.
            grads = {i: parameters[i].grad for i in self._idle if watched and find is None}
            self.throw_away([i for i, grad in grads.items() if grad is None or not bool(grad.any())])

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
        return not self._kept.carried and (self._applied is None or self._applied.is_known)

    def fates(self) -> Tensor | None:
        """What this rank knows of the averages that are followed (`Applied.fates`), FP64 `[2, slots]` on the device."""
        if self._applied is None:
            return None
        return torch.stack([stack(row, self.turn.device) for row in self._applied.fates()])

    def told(self, joined: bool) -> list[Fate] | None:
        """What this rank knows of the averages that are followed, by slot; None if they are not, or were not here."""
        return None if self._applied is None or not self._applied.watched else self._applied.told(joined)

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

    def look(self, parameters: Sequence[Tensor] = (), others_follow: bool = True, copies: bool = False) -> None:
        """See whether gradients that nobody has applied are still there (`Applied.look`).

        `parameters` are those of the slots: they tell where nothing is followed, since the last reduction's averages
        were not stored.
        """
        if self._applied is not None:
            self._applied.look(others_follow, copies)
        elif self._kept.carried and parameters:
            self.commit()
            with self.changing():
                self._kept.restore_base({i for i in self._kept.carried if _is_gone(parameters[i])})

    def changing(self) -> AbstractContextManager[object]:
        """Around what a snapshot must not come between: `turn`, and what the host knows of it, do not agree.

        Raises:
            ReducerError: where this thread does that already, and a signal handler has come between.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise ReducerError(
                "a signal handler asks for residuals that the thread which it has interrupted is changing: let it set "
                "a flag, and save between two steps"
            )
        return self._lock

    def turned(self) -> None:
        """A kernel has changed `turn`, as is right where all averages are applied; the caller is `changing`."""
        self._turned = True

    def commit(self, final: bool = False) -> None:
        """Make row `turn` what the next reduction starts from.

        Nothing changes with a reduction whose averages were not stored: its backward raised. `final`: gradients that
        have not been applied never will be.

        Raises:
            ReducerError: while a CUDA graph is captured, where anything but the usual is to be done: every replay would
                do it again.
        """
        if is_captured(self.turn):
            self._commit_in_graph()
            return
        with self.changing():
            self._commit(final)
            factor, divided, self._scale, self._divided = self._scale, self._divided, 1.0, 1.0
            self._brought_last, self._brought = self._brought * self.comes_back, 1.0
            growth, self._growth = self._growth, 1.0
            self._kept.scale(factor * divided / growth, of_units=factor / growth)

    def _commit_in_graph(self) -> None:
        """`commit` where all averages were applied, as those of every replay are taken to be."""
        applied, units = self._applied, self._units_if_usual()
        if applied is None or units is None:
            raise ReducerError(
                f"{self._bucket}: error feedback in a CUDA graph, captured behind a step of which it is not known that "
                "its averages were applied as they were, and as those of the step before (clipped, changed, left out, "
                "thrown away, under another loss scale, rescaled since, or applied by no torch optimizer): replays "
                "would go by that step for ever. Capture behind two steps that a torch optimizer has applied whole, or "
                "call fastreduce.note_applied behind them; where gradients are clipped, leave reduction out of the "
                "graph"
            )
        with self.changing():
            self._kept.units = units
            self._last, self._applied = applied, None
            applied.end()
            turned, self._turned = self._turned, False
            if not turned:
                self.turn.bitwise_xor_(1)

    def _units_if_usual(self) -> list[float] | None:
        """The next units, where of every slot R is what the next reduction starts from, as is known here; else None."""
        applied, units = self._applied, self._kept.units
        if applied is None or isinstance(units, Tensor) or self._kept.carried or applied.carried():
            return None
        if self._scale != 1.0 or self._divided != 1.0:
            return None
        stays, found = applied.relative(), []
        for i, told in enumerate(zip(units, applied.factors(math.nan), applied.expected, strict=True)):
            unit, factor, expected = told
            if isinstance(factor, Tensor) or isinstance(expected, Tensor):
                return None
            mix, after = _mix(unit, factor, expected, i in stays)
            if mix != GO_ON:
                return None
            found.append(after)
        return found

    def _commit(self, final: bool) -> None:
        applied, self._applied = self._applied, None
        turned, self._turned = self._turned, False
        if applied is None:
            if turned:
                self.turn.bitwise_xor_(1)
            if final and self._last is not None:
                self._kept.restore_base(set(filter(self._last.is_optimized, self._kept.carried)))
            return
        self._last = applied  # a device may read its numbers until the next one comes
        if not final:
            applied.end()
        common = applied.common()
        mixes: list[tuple[float, float]] = []
        flip: int | Tensor = 1
        units = self._kept.units
        if common is not None and not self._kept.carried and isinstance(units, list) and len(set(units)) == 1:
            mixes = [self._mix(0, *common, stays=False)] * len(units)
            self._kept.units = units[:1] * len(units)
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
        self._kept.blend(mixes)
        self.turn.bitwise_xor_(flip)

    def _mix_each(self, applied: Applied, final: bool) -> tuple[list[tuple[float, float]], int | Tensor] | None:
        """What `_mix` says of each slot, and whether row `turn` changes; None where only a device knows and does it."""
        carried = set() if final else applied.carried()
        self._part_with(carried)
        stays = carried | applied.relative()  # where the unit stays as it is
        # A device may read these until the next ones come: their memory may be another stream's.
        self._read = self.finite, self._kept.units
        finite: Factor = self.finite.double() if reads_late(self.finite) else float(self.finite)
        factors, expected = applied.factors(finite, final), applied.expected
        comes_back = self._brought * self.comes_back * self._growth
        for i in carried if comes_back != 1.0 else ():
            factors[i] = factors[i] * comes_back
        flip: int | Tensor = 1
        if isinstance(finite, Tensor) and all(each is finite or known_to_be(each, 0.0) for each in factors):
            factors, flip = [1.0 if each is finite else 0.0 for each in factors], self.finite
        if isinstance(self._kept.units, Tensor) or any(isinstance(each, Tensor) for each in (*factors, *expected)):
            self._commit_late(factors, expected, stays)
            for i, gone in applied.gone_late().items() if carried else ():
                self._kept.keep_base(i, gone)  # it counts as applied
            return None
        mixes = [
            self._mix(i, factor, expect, i in stays)  # type: ignore[arg-type]
            for i, (factor, expect) in enumerate(zip(factors, expected, strict=True))
        ]
        return mixes, flip

    def _part_with(self, carried: set[int]) -> None:
        """Bring back the Q of slots whose averages are in `.grad` no more, and keep that of those that are."""
        self._kept.drop_last(self._kept.carried & self._idle)  # the last R is that of the reduction before
        self._kept.restore_base(set(self._kept.carried))
        self._idle = set()
        for i in carried:
            self._kept.keep_base(i)

    def _mix(self, i: int, factor: float, expected: float, stays: bool) -> tuple[float, float]:
        """What the old and the new residual of a slot are multiplied by; sets the slot's next unit."""
        units = self._kept.units
        assert isinstance(units, list)
        mix, units[i] = _mix(units[i], factor, expected, stays)
        return mix

    def _commit_late(self, factors: Sequence[Factor], expected: Sequence[Factor], stays: set[int]) -> None:
        """`commit`, where only the device knows the factors: a blend of all blocks with weights of their own."""
        device = self.turn.device
        units = self._kept.units if isinstance(self._kept.units, Tensor) else stack(self._kept.units, device)
        factor, unit = stack(factors, device).nan_to_num(0.0, 0.0, 0.0), stack(expected, device)
        same = to_device(torch.tensor([i in stays for i in range(len(factors))], device="cpu"), device)
        unit = torch.where(same, 1.0, torch.maximum(unit, factor))
        before = torch.where(same | units.isnan(), unit, units)
        applied = factor != 0
        self._kept.units = torch.where(applied & ~same, unit, units)
        old = torch.where(applied, (before - factor) / unit, 1.0)
        self._kept.blend_late(old, torch.where(applied, factor / unit, 0.0))
        self.turn.bitwise_xor_(1)


def _mix(before: float, factor: float, expected: float, stays: bool) -> tuple[tuple[float, float], float]:
    """What the old and the new residual of a slot are multiplied by, and its unit, which was `before`."""
    if not factor or not math.isfinite(factor):
        return KEEP, before
    if stays:
        return (1.0 - factor, factor), before
    unit = max(expected, factor)
    return (((unit if math.isnan(before) else before) - factor) / unit, factor / unit), unit


def is_captured(tensor: Tensor) -> bool:
    """Whether what the current stream does with `tensor` is captured in a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


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
        verdict = torch.stack([other.to(device, non_blocking=device.type == "cuda") for other in verdicts]).all()
        for feedback in each:
            feedback.finite = verdict
