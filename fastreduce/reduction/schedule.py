"""Schedule: the setting of each step, the same on every rank."""

from __future__ import annotations

import itertools
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..compression import Compression, NoCompression
from ..errors import SettingError, brief
from ..policy import NONE_FROZEN, AnySetting, Policy, chooses_by_parameter

Setting = AnySetting | Policy | Callable[[int], Any]
Source = Compression | Policy | Callable[[int], Any]

_CALLABLE = "callable "
AHEAD = 1000  # steps for which a callable is asked at once

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stretch:
    """What holds from step `start` on: a setting, whose warm-up begins there, or a callable of the step.

    `bucket_bytes` is the size of its buckets; None means that of construction.
    """

    start: int
    source: Source
    bucket_bytes: int | None = None

    def at(self, step: int) -> Compression | Policy:
        """The setting of a step.

        Raises:
            SettingError: if a callable returns none, or one with a warm-up.
        """
        if isinstance(self.source, Policy):
            return self.source
        if isinstance(self.source, Compression):
            return (
                NoCompression(flat=self.source.flat)
                if step < self.start + self.source.warm_up
                else replace(self.source, warm_up=0)
            )
        try:
            found = Policy.of(self.source(step))
        except Exception as error:
            raise SettingError(f"{self} at step {step}: {type(error).__name__}: {error}") from error
        if isinstance(found, Compression) and found.warm_up:
            raise SettingError(f"{self} returned {str(found)!r} at step {step}; allowed: settings without warm_up")
        return found

    def changes(self, first: int, end: float) -> list[tuple[int, Compression | Policy]]:
        """The setting of step `first`, and those that begin after it and before step `end`; by step."""
        if isinstance(self.source, Policy):
            return [(first, self.source)]
        if isinstance(self.source, Compression):
            steps = [first] + [step for step in (self.start + self.source.warm_up,) if first < step < end]
            return [(step, self.at(step)) for step in steps]
        asked = [(step, self.at(step)) for step in range(first, int(min(end, first + AHEAD)))]
        return asked[:1] + [after for before, after in itertools.pairwise(asked) if before[1] != after[1]]

    def __str__(self) -> str:
        if isinstance(self.source, (Compression, Policy)):
            return str(self.source)
        return f"{_CALLABLE}{getattr(self.source, '__qualname__', type(self.source).__name__)}"


class Schedule:
    """The setting of each step; steps are reduced backwards, counted from 0.

    Ranks that found different settings for one step would wait for each other. So they compare what is to come
    (`description`) where it is set, and a callable is asked for 1000 steps at once.

    Args:
        setting: a setting or its spec string, a callable of the step that returns one, or None for what
            FASTREDUCE_COMPRESSION says.

    Attributes:
        given: what it was made of, as text.
        step: how many have been reduced.

    Raises:
        SettingError: if it is no setting.
    """

    def __init__(self, setting: Setting) -> None:
        source = _as_source(setting)
        self._source: Source | None = source
        self.step = 0
        self._plan([Stretch(0, source)])
        self.given = str(self._stretches[0])

    @staticmethod
    def of(setting: Schedule | Setting) -> Schedule:
        """A schedule itself, or a new one."""
        return setting if isinstance(setting, Schedule) else Schedule(setting)

    def _plan(self, stretches: list[Stretch]) -> None:
        """Go on with these, and ask what is to come; those that are over are left out."""
        self._stretches = stretches[_last(stretches, self.step) :]
        self._changes: list[tuple[int, Compression | Policy, int | None]] = []
        for stretch, following in itertools.zip_longest(self._stretches, self._stretches[1:]):
            end = math.inf if following is None else following.start
            changes = stretch.changes(max(stretch.start, self.step), end)
            self._changes += [(step, setting, stretch.bucket_bytes) for step, setting in changes]
        is_asked = any(_is_of_steps(stretch.source) for stretch in self._stretches)
        self._asked = self.step + AHEAD if is_asked else math.inf

    @property
    def _now(self) -> tuple[int, Compression | Policy, int | None]:
        return [change for change in self._changes if change[0] <= self.step][-1]

    @property
    def setting(self) -> Compression | Policy:
        """The setting of the next step."""
        return self._now[1]

    @property
    def bucket_bytes(self) -> int | None:
        """The size of buckets in the next step; None means that of construction."""
        return self._now[2]

    @property
    def settings(self) -> list[Compression | Policy]:
        """Those of the next step and of later ones."""
        return list(dict.fromkeys(setting for step, setting, _ in self._changes if step >= self._now[0]))

    @property
    def due(self) -> float:
        """The step before which a setting changes, or ranks must compare again."""
        return min([self._asked, *(step for step, _, _ in self._changes if step > self.step)])

    @property
    def must_compare(self) -> bool:
        """Whether ranks must compare what is to come, once `ask` has found it."""
        return self.step >= self._asked

    def ask(self) -> None:
        """Ask callables anew."""
        self._plan(self._stretches)

    def description(
        self, names: Sequence[str], parameters: Sequence[Tensor], frozen: Mapping[str, Tensor] = NONE_FROZEN
    ) -> dict[str, str]:
        """What must be equal on every rank, by what it is called in an error: of policies, each parameter's setting.

        `frozen` are as in `Policy.assign`.

        Raises:
            SettingError: if a policy does not fit the parameters.
        """
        told = [
            (f"from step {step} on " if i else "") + str(setting) + ("" if size is None else f" in buckets of {size} B")
            for i, (step, setting, size) in enumerate(change for change in self._changes if change[0] >= self._now[0])
        ]
        found = {"compression": ", ".join(told)}
        policies = [setting for setting in self.settings if isinstance(setting, Policy)]
        by_parameter = [setting.assign(names, parameters, frozen) for setting in policies]
        for name, *settings in zip(names, *by_parameter, strict=True) if policies else ():
            found[f"compression of {name!r}"] = ", ".join(map(str, settings))
        return found

    def with_setting(self, at: int, setting: Setting, bucket_bytes: float | None) -> Schedule:
        """One that has another setting from step `at` on, in place of what was to come there.

        Args:
            at: the step.
            setting: the setting.
            bucket_bytes: the size of buckets from there on; None leaves it as it is.

        Raises:
            SettingError: if it is no setting, or no size, or the step has been already.
        """
        if isinstance(at, bool) or not isinstance(at, numbers.Integral) or at < self.step:
            raise SettingError(
                f"at={brief(at)}: {self.step} steps have been reduced; allowed: whole numbers from {self.step} on"
            )
        at = int(at)
        before = [stretch for stretch in self._stretches if stretch.start < at]
        if bucket_bytes is None:
            size = [None, *(stretch.bucket_bytes for stretch in self._stretches if stretch.start <= at)][-1]
        elif isinstance(bucket_bytes, numbers.Real) and 0 <= bucket_bytes < math.inf:
            size = int(bucket_bytes)
        else:
            raise SettingError(f"buckets of {brief(bucket_bytes)} bytes; allowed: finite numbers from 0 on")
        (stretch,) = Schedule(setting)._stretches
        return self._copy([*before, replace(stretch, start=at, bucket_bytes=size)])

    def _copy(self, stretches: list[Stretch], step: int | None = None) -> Schedule:
        made = Schedule.__new__(Schedule)
        made._source, made.given, made.step = self._source, self.given, self.step if step is None else step
        made._plan(stretches)
        return made

    # Saved and restored

    def state(self) -> dict[str, Any]:
        """Plain data; of a callable, its name."""
        last = _last(self._stretches, self.step)
        stretches = [[each.start, self._name(each), each.bucket_bytes] for each in self._stretches[last:]]
        return {"given": self.given, "step": self.step, "stretches": stretches}

    def __getstate__(self) -> dict[str, Any]:
        """Without what was given at construction, where it is over: a lambda cannot be pickled."""
        is_over = all(each.source is not self._source for each in self._stretches)
        return {**self.__dict__, "_source": None if is_over else self._source}

    def _name(self, stretch: Stretch) -> str:
        """What a state calls a stretch's source: another of the name of the one given at construction is no other."""
        name = str(stretch)
        is_another = name == self.given and name.startswith(_CALLABLE) and stretch.source != self._source
        return f"{name} of set_compression" if is_another else name

    def resumed(self, state: Mapping[str, Any]) -> Schedule:
        """One that goes on where `state` stopped.

        What was to come there comes, if it began with what this one did; else, what is to come here.

        Raises:
            SettingError: if that is a callable which is not here, or callables of one name cannot be told apart.
        """
        step: int = state["step"]
        if state["given"] == self.given:
            names = [name for _, name, _ in state["stretches"]]
            stretches = [
                Stretch(start, self._find(name, start, names.count(name)), size)
                for start, name, size in state["stretches"]
            ]
        else:
            stretches = [replace(stretch, start=max(stretch.start, step)) for stretch in self._stretches]
        resumed = self._copy(stretches, step)
        resumed._asked = min(resumed._asked, step) if resumed._asked < math.inf else math.inf
        return resumed

    def _find(self, name: str, start: int, count: int) -> Source:
        """The source that a state, where it has so many of the name, calls `name`."""
        if name == self.given and self._source is not None:
            return self._source
        if not name.startswith(_CALLABLE):
            return Policy.of(name)
        own = {each.start: each.source for each in self._stretches if self._name(each) == name}
        if start in own:
            return own[start]
        if not own:
            raise SettingError(
                f"the {name}, which a snapshot holds by name, was set by set_compression before it was saved: set it "
                "again, before loading"
            )
        first, *others = own.values()
        if count > 1 or any(other != first for other in others):
            raise SettingError(
                f"the {name}, which a snapshot holds by name, was set more than once by set_compression before it was "
                f"saved: set each again for its step, before loading, this one with at={start}"
            )
        return first


def _as_source(setting: Any) -> Source:
    return setting if _is_of_steps(setting) else Policy.of(setting)


def _is_of_steps(setting: object) -> bool:
    return callable(setting) and not isinstance(setting, (Policy, type)) and not chooses_by_parameter(setting)


def _last(stretches: Sequence[Stretch], step: int) -> int:
    """The position of the one in which a step lies."""
    return [i for i, stretch in enumerate(stretches) if stretch.start <= step][-1]
