"""What became of averaged gradients: multiplied by what, applied by an optimizer, or thrown away."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import Tensor

from .factors import ONE, Factor, known_to_be, products, to_device
from .notices import Read, held, is_optimized, leave, listen

# Of one average: the expected factor, that beside it, what `look` has seen, whether it was stepped, whether a user told
# of it, and whether an optimizer tells.
Fate = tuple[float, float, float | None, bool, bool, bool]

MEASURED = 0.02  # by how much two ways to measure one factor may differ: BF16 rounds each element by up to 2^-8


def norms_of(grads: Sequence[Tensor]) -> Tensor:
    """Of each gradient, all on one device and of one dtype, the largest magnitude and the sum of all, FP64 `[2, n]`.

    Of a sharded one it is what lies on this rank.
    """
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in map(_here, grads)]
    real = [grad if grad.numel() else grad.new_zeros(1) for grad in real]
    wide = torch.float64 if real[0].dtype is torch.float64 else torch.float32
    norms = [torch._foreach_norm(real, order, dtype=wide) for order in (math.inf, 1)]
    return torch.stack([torch.stack(each).double() for each in norms])


def _here(grad: Tensor) -> Tensor:
    """What lies on this rank of a gradient: all of it, or of a DTensor its local part."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local


class Applied:
    """By slot of one bucket: the factor between the average that a reduction left in `.grad` and what was applied.

    1. Made when the averages have been stored, it notes gradients and their versions.
    2. `GradScaler.unscale_` and `ddp.clip_grad_norm_` tell what they multiply by (`multiplied`).
    3. `look`, before a forward and before other gradients accumulate, sees whether gradients are still there, what they
       have been multiplied by, or that they were thrown away.
    4. An optimizer's step says that they were applied. What has changed since without a word, by torch's own clipping
       or a user's code, is measured: the slot's largest magnitude and the sum of all, now and then.
    5. `factors` tells the result.

    Only the first step after a reduction counts: later ones apply other gradients.

    Args:
        parameters: those of the slots, of which weak references are kept.
        left: positions of slots that no rank used.
        magnitudes: a method that tells the largest magnitude of each slot's average, and the sum of all, FP64
            `[2, slots]`; called while the next reduction has not begun.
        scale: what the average was multiplied by before it was stored.
        watched: whether this rank's optimizer and gradients tell; else the averages count as applied.
        older: positions of slots whose gradients an earlier reduction has left, and what these are multiplied by in
            place of `scale`: no average of this one is theirs.
        find: of DTensors, what tells the parameter of each slot, in place of weak references: `Module.to` swaps them,
            and refuses those that have any. Their gradients do not count changes (`Tensor._version`): each is measured.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        left: Collection[int],
        magnitudes: Callable[[], Tensor],
        scale: float,
        watched: bool,
        older: Mapping[int, float],
        find: Sequence[Callable[[], Tensor | None]] | None = None,
    ) -> None:
        count = len(parameters)
        grads = [parameter.grad for parameter in parameters]
        # Made for every bucket in every step: no loop in Python where a call does.
        self._parameters = list(map(weakref.ref, parameters)) if find is None else list(find)
        self._identities = list(map(id, parameters))
        self._counted = find is None
        parts = grads if self._counted else [grad if grad is None else held(grad) for grad in grads]
        self._grads = [_nothing if part is None else weakref.ref(part) for part in parts]
        self._held = [] if self._counted else [weakref.ref(held(parameter)) for parameter in parameters]
        # Where `load_state_dict(assign=True)` puts others in their place, optimizers have told of these until then.
        self._optimized = [False] * count if self._counted else list(map(is_optimized, parameters))
        self._versions = [0 if grad is None else grad._version for grad in grads]
        # Weakly: the pipeline whose method it is holds this.
        self._left, self._magnitudes, self._watched = frozenset(left), weakref.WeakMethod(magnitudes), watched
        self._device = parameters[0].device
        self.expected: list[Factor] = [scale] * count
        self._rest: list[Factor] = [1.0] * count
        self._stepped = [False] * count
        self._told: set[int] = set()
        self._carried: list[Factor | None] = [None] * count  # 1 where it was there, 0 where it was gone
        self._others = False  # whether others may have accumulated
        self._heard: list[bool] | None = None  # by slot, whether an optimizer tells of it where `hear` has told
        self._older: dict[int, Tensor] = {}  # what `magnitudes` would tell of them
        self._older_than = {i: of_older / scale for i, of_older in older.items()}  # by what they are larger than these
        for i, scale_of_older in older.items():
            self.expected[i] = scale_of_older
            if (grad := grads[i]) is not None:
                self._older[i] = norms_of([grad])[:, 0] / scale_of_older
        listen(self)

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the slots, an empty tensor in the place of one that is gone."""
        gone = torch.empty(0, device="cpu")
        return [gone if (alive := parameter()) is None else alive for parameter in self._parameters]

    def end(self) -> None:
        """Be told no more: `factors` has been asked for the last time."""
        leave(self)

    def _replace(self, factors: list[Any], i: int, by: Factor) -> None:
        """`by` is made of what it replaces, on the current stream: nobody may write to that before this has read it."""
        if isinstance(replaced := factors[i], Tensor) and replaced.is_cuda:
            replaced.record_stream(torch.cuda.current_stream(replaced.device))
        factors[i] = by

    def _state(self, i: int) -> tuple[Tensor | None, bool]:
        """The gradient of slot `i`, and whether it is as it was left, but for what is known."""
        parameter = self._parameters[i]()
        grad = None if parameter is None else parameter.grad
        return grad, grad is not None and self._is_left(i, grad) and grad._version == self._versions[i]

    def _is_left(self, i: int, grad: Tensor) -> bool:
        """Whether it is the tensor that was in `.grad` of slot `i`, or what a move has made of it."""
        if self._counted:
            return grad is self._grads[i]()
        return held(grad) is self._grads[i]() or (not self._stepped[i] and self._is_moved(i))

    def _is_moved(self, i: int) -> bool:
        """Whether the parameter of slot `i` holds other memory: then `Module.to` has moved its gradient along."""
        parameter = self._parameters[i]()
        return parameter is not None and held(parameter) is not self._held[i]()

    def _is_gone(self, i: int) -> bool:
        """Whether it is known of slot `i` that its average was thrown away."""
        carried = self._carried[i]
        return carried is not None and known_to_be(carried, 0.0)

    def intact(self) -> dict[int, int]:
        """Identities of the gradients that are as they were left, by the positions of their slots."""
        states = ((i, *self._state(i)) for i in range(len(self._grads)))
        return {i: id(grad) for i, grad, intact in states if intact}

    def refresh(self, positions: Iterable[int]) -> None:
        """Take the gradients of slots as they are now; views of one tensor share their versions."""
        for i in positions:
            grad = self._state(i)[0]
            self._versions[i] = 0 if grad is None else grad._version

    def multiply(self, positions: Iterable[int], by: Factor, expected: bool) -> None:
        """Take note that gradients have been multiplied; `expected`: those of the next step will be, too."""
        positions, factors = list(positions), self.expected if expected else self._rest
        if isinstance(by, Tensor):  # one for the gradients of several GPUs lies on one of them
            by = by.to(self._device, non_blocking=self._device.type == "cuda")
        made = products([factors[i] for i in positions], [by] * len(positions))
        for i, factor in zip(positions, made, strict=True):
            factors[i] = factor
        self.refresh(positions)

    def step(self, parameters: Set[int], expected: Factor, applies: Factor, read: Read) -> None:
        """An optimizer applies the gradients of the parameters with these identities.

        Args:
            parameters: identities.
            expected: what it multiplies them by, as it will the next ones.
            applies: 1, or 0 where it leaves the step out.
            read: what was read of devices at this step.
        """
        if not self._watched:
            return
        if all(map(parameters.__contains__, self._identities)) and self._is_untouched():
            chosen: Sequence[int] = range(len(self._stepped))
            self._stepped = [True] * len(self._stepped)
        else:
            chosen = self._step_each(parameters)
        if not chosen:
            return
        if applies is ONE:  # a GradScaler that took the loss scale out has just waited for the device
            self._read_expected(chosen, read)
        if expected is not ONE:
            self.multiply(chosen, expected, expected=True)
        if applies is not ONE:
            self.multiply(chosen, applies, expected=False)

    def _is_untouched(self) -> bool:
        """Whether nothing has become of any average: what `_step_each` finds out slot by slot."""
        if not self._counted or any(self._stepped) or any(carried is not None for carried in self._carried):
            return False
        try:
            grads: list[Any] = [parameter().grad for parameter in self._parameters]  # type: ignore[union-attr]
            intact = all(map(is_, grads, [grad() for grad in self._grads]))
            return intact and [grad._version for grad in grads] == self._versions
        except AttributeError:  # a parameter or a gradient is None
            return False

    def _step_each(self, parameters: Set[int]) -> list[int]:
        """Slots of these parameters that are stepped now; where gradients were written to, it is measured."""
        # Where `look` has seen that an average is gone, other gradients are applied.
        stepped, carried = self._stepped, self._carried
        places = self._places_of(parameters)
        chosen = [i for i in places if not stepped[i] and (carried[i] is None or not self._is_gone(i))]
        written = []
        for i in chosen:
            grad, intact = self._state(i)
            if grad is None:
                self._carried[i] = 0.0  # it leaves parameters without a gradient alone
            else:
                self._stepped[i] = True
                if not (intact and self._counted):
                    written.append(i)
        for i, factor in zip(written, self._measure(written), strict=True):
            self._replace(self._rest, i, self._rest[i] * factor)
        return chosen

    def _read_expected(self, positions: Iterable[int], read: Read) -> None:
        for i in positions:
            factor = self.expected[i]
            if isinstance(factor, Tensor):
                if id(factor) not in read:
                    read[id(factor)] = factor, float(factor)
                self.expected[i] = read[id(factor)][1]

    def tell(self, parameters: Set[int], factor: float) -> None:
        """A user says what became of the gradients of the parameters with these identities."""
        for i in self._places_of(parameters):
            self._stepped[i], self.expected[i], self._rest[i] = True, 1.0, factor * self._older_than.get(i, 1.0)
            self._told.add(i)

    def _places_of(self, parameters: Set[int]) -> list[int]:
        places = sorted(self._places[identity] for identity in parameters & self._places.keys())
        return [i for i in places if self._parameters[i]() is not None]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {identity: i for i, identity in enumerate(self._identities)}

    def look(self, others_follow: bool = True, copies: bool = False) -> None:
        """See what is left of gradients that nobody has applied.

        Args:
            others_follow: others accumulate behind it, where what is measured later is not of these alone.
            copies: what is in `.grad` in the place of an average may be a copy of it; else it is something else.
        """
        if all(self._stepped):  # as is usual, and nothing takes it back but `hear`, which ends all looks
            return
        written, replaced = [], set()
        for i, stepped in enumerate(self._stepped):
            if stepped or i in self._left or not self._watched or self._is_gone(i):
                continue
            grad, intact = self._state(i)
            if grad is None or not (copies or self._is_left(i, grad)):
                self._carried[i] = 0.0
            elif not (intact and self._counted):
                written.append(i)
                if not self._is_left(i, grad):
                    self._grads[i] = weakref.ref(grad if self._counted else held(grad))
                    replaced.add(i)
            elif self._carried[i] is None:
                self._carried[i] = 1.0
        for i, factor in zip(written, self._measure(written, replaced), strict=True):
            known, there = self._carried[i], _where(factor != 0, 1.0, 0.0)
            self._replace(self._carried, i, there if known is None else known * there)
            by = _where(factor != 0, factor, 1.0)
            if not (self._others or known_to_be(by, 1.0)):
                self._replace(self._rest, i, self._rest[i] * by)
        self.refresh(written)
        self._others |= others_follow

    def is_optimized(self, i: int) -> bool:
        """Whether an optimizer tells of the parameter of slot `i`."""
        if self._heard is not None:
            return self._heard[i]
        return self._watched and (self._optimized[i] or is_optimized(self._parameters[i]()))

    def _measure(self, positions: Sequence[int], replaced: Set[int] = frozenset()) -> list[Factor]:
        """What the gradients of slots were multiplied by, beside what is known.

        Where the largest magnitude and the sum of all tell different factors, it was something else: clipping of single
        elements, or an addition. Then nothing of it is followed. In `replaced` slots there is another tensor: a copy,
        as torch's DDP makes where it lays its buckets out anew, or something else (0).
        """
        if not positions:
            return []
        grads = [grad for i in positions if (grad := self._state(i)[0]) is not None]
        magnitudes = self._magnitudes()
        if not grads or magnitudes is None:
            return [1.0 for _ in positions]
        then = magnitudes()
        if len(positions) < len(self._parameters):
            then = then.index_select(1, to_device(torch.tensor(list(positions), device="cpu"), then.device))
        for column, i in enumerate(positions):
            if i in self._older:
                then[:, column] = self._older[i]
        now = norms_of(grads).to(then.device)
        stored = torch.view_as_real(grads[0]).dtype if grads[0].is_complex() else grads[0].dtype
        then[0] = then[0].to(stored).double()
        thrown_away = ~now.isfinite() | (now == 0)
        ratios = torch.where(then == 0, 1.0, torch.where(thrown_away, 0.0, now / then))
        same = (then[0] != 0) & ((ratios[0] - ratios[1]).abs() <= MEASURED * ratios[0])
        nothing = (then[0] == 0) & (now[0] == 0)
        known = products([self.expected[i] for i in positions], [self._rest[i] for i in positions])
        found: list[list[Any]] = [
            list(row.unbind()) if ratios.is_cuda else row.tolist() for row in (ratios[0], same, nothing)
        ]
        factors: list[Factor] = []
        for i, old, total, whole, empty in zip(positions, known, *found, strict=True):
            if known_to_be(old, 0.0):
                factors.append(0.0)
            else:
                other = _where(empty, 1.0, 0.0) if i in replaced else 1.0
                factors.append(_where(whole, total / old, other))
        return factors

    def common(self) -> tuple[float, float] | None:
        """What `factors` and `expected` are for all slots, where optimizers have applied all alike; else None.

        As they mostly have: what holds for each slot takes the host a microsecond for each.
        """
        if self._left or self._told or not all(self._stepped):
            return None
        if len(set(map(id, self.expected))) != 1 or len(set(map(id, self._rest))) != 1:
            return None
        expected, rest = self.expected[0], self._rest[0]
        if isinstance(expected, Tensor) or isinstance(rest, Tensor):
            return None
        return expected * rest if expected and rest else 0.0, expected

    @property
    def is_known(self) -> bool:
        """Whether it is known of each average that it was applied, or that it never will be."""
        return all(stepped or i in self._left or self._is_gone(i) for i, stepped in enumerate(self._stepped))

    def fates(self) -> tuple[list[Factor], list[Factor]]:
        """By slot, what was measured beside what was expected, and what `look` has seen; NaN where it saw nothing."""
        return list(self._rest), [math.nan if carried is None else carried for carried in self._carried]

    @property
    def watched(self) -> bool:
        """Whether this rank's optimizer and gradients tell."""
        return self._watched

    def told(self, joined: bool) -> list[Fate]:
        """By slot, all that is known; waits for devices.

        `joined`: averages that are in this rank's `.grad` still come back in no sum, as if they were thrown away.
        """
        if joined:
            self.look(others_follow=False)
        optimized = [self.is_optimized(i) for i in range(len(self._parameters))]
        said = [i in self._told for i in range(len(self._parameters))]
        expected, rest = ([float(factor) for factor in each] for each in (self.expected, self._rest))
        carried = [None if factor is None else 0.0 if joined else float(factor) for factor in self._carried]
        return list(zip(expected, rest, carried, self._stepped, said, optimized, strict=True))

    def hear(self, fates: Sequence[Fate]) -> None:
        """Go by what another rank knows, in place of what this one does."""
        for i, (expected, rest, carried, stepped, _, _) in enumerate(fates):
            self.expected[i], self._rest[i], self._carried[i], self._stepped[i] = expected, rest, carried, stepped
        self._told = {i for i, fate in enumerate(fates) if fate[4]}
        self._heard, self._watched = [fate[5] for fate in fates], False

    def throw_away(self, positions: Iterable[int]) -> None:
        """Gradients of these slots were zeroed before anybody looked, unless `put_fates` tells better."""
        for i in positions:
            self._carried[i] = 0.0

    def put_fates(self, rest: Sequence[Factor], carried: Sequence[Factor]) -> None:
        """Go by what others have measured and seen, but for NaN."""
        for mine, told in ((self._rest, rest), (self._carried, carried)):
            for i, (own, factor) in enumerate(zip(mine, told, strict=True)):
                if own is None:
                    continue
                if isinstance(factor, Tensor):
                    self._replace(mine, i, torch.where(factor.isnan(), own, factor))
                elif not math.isnan(factor) and factor != own:
                    self._replace(mine, i, factor)

    def carried(self) -> set[int]:
        """Positions of the slots whose averages nobody has applied, and are in `.grad` still."""
        return {
            i
            for i, carried in enumerate(self._carried)
            if carried is not None and not known_to_be(carried, 0.0) and not self._stepped[i] and i not in self._left
        }

    def gone_late(self) -> dict[int, Tensor]:
        """Of these, where no optimizer tells of the slot and a device alone knows: whether the average is gone."""
        seen = {i: self._carried[i] for i in self.carried() if not self.is_optimized(i)}
        return {i: carried == 0.0 for i, carried in seen.items() if isinstance(carried, Tensor)}

    def relative(self) -> set[int]:
        """Positions of the slots whose factor is in units of what was expected: nothing was seen, or a user told it."""
        return self._told | {
            i
            for i, stepped in enumerate(self._stepped)
            if not stepped
            and known_to_be(self.expected[i], self._older_than.get(i, 1.0))
            and known_to_be(self._rest[i], 1.0)
            and not self.is_optimized(i)
        }

    def factors(self, finite: Factor, final: bool = False) -> list[Factor]:
        """By slot, what averages were multiplied by in all before they were applied; 0 if they were not.

        Args:
            finite: 1 if all averages of the step were, else 0: without a torch optimizer that tells, those of a step
                that was not finite count as thrown away.
            final: whether what no optimizer has applied until now never will be.
        """
        outcomes: list[Factor] = []
        for i, stepped in enumerate(self._stepped):
            carried = self._carried[i]
            if stepped or i in self._left:
                outcomes.append(float(stepped and i not in self._left))
            elif carried is not None and not known_to_be(carried, 0.0) and not final:
                # A device may know that none is there any more.
                outcomes.append(carried if self.is_optimized(i) else _where(carried != 0.0, carried, finite))
            elif self.is_optimized(i):
                outcomes.append(1.0 if carried is None and not final else 0.0)
            else:
                outcomes.append(finite)
        return products(products(self.expected, self._rest), outcomes)


def _where(condition: bool | Tensor, then: Factor, other: Factor) -> Factor:
    """`then` where a condition holds that only a device may know."""
    if isinstance(condition, Tensor):
        return torch.where(condition, then, other).double()
    return then if condition else other


def _nothing() -> None:
    return None
