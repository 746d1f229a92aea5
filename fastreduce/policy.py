"""Policy: which setting each parameter gets, by name, number of dimensions and size."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from .compression import ENVIRONMENT_VARIABLE, KINDS, Compression
from .environment.variables import check_environment
from .errors import SettingError, brief, listed

Chooser = Callable[[str, Tensor], Compression | str]
AnySetting = Compression | str | Mapping[str, Compression | str] | Chooser | None

NONE_FROZEN: Mapping[str, Tensor] = MappingProxyType({})

NAMED = {"auto4": "ndim<2|numel<4096: fp16; *: int4:error_feedback"}

_CONDITION = re.compile(r"(ndim|numel) *(<=|>=|<|>|=) *([0-9]+)")
_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq}


@dataclass(frozen=True)
class Policy:
    """Settings by rules, of which the first that matches a parameter holds.

    A rule's key is one or more alternatives, with `|` between them: a glob of the parameter's name (`*`, `?`, `[ab]`;
    upper and lower case differ), or a condition, `ndim<2`, `numel>=4096`, with `<`, `<=`, `>`, `>=` or `=`.
    `str()` gives the spec string, `key: setting; key: setting`, which `Policy.of` reads back.

    Args:
        rules: keys and settings, in order.
        chooser: in place of rules, a function of a parameter's name and the parameter.
        name: of one of ours.
    """

    rules: tuple[tuple[str, Compression], ...] = ()
    chooser: Chooser | None = field(default=None, hash=False)  # an object that is called may have no hash
    name: str = ""

    def __post_init__(self) -> None:
        for key, setting in self.rules:
            _check_key(key)
            _check(setting, f"the rule {key!r}")

    @staticmethod
    def of(setting: AnySetting | Policy) -> Compression | Policy:
        """A setting, or a policy out of a dict, a spec string or a function; None means FASTREDUCE_COMPRESSION's.

        Raises:
            SettingError: naming the rule that is wrong.
        """
        check_environment()
        if setting is None:
            return setting_asked_for()
        if isinstance(setting, str):
            return _parse(setting)
        if isinstance(setting, Mapping):
            return Policy(
                tuple((str(key).strip(), _read(value, f"the rule {key!r}")) for key, value in setting.items())
            )
        if isinstance(setting, (Compression, Policy)):
            return setting
        if callable(setting) and not isinstance(setting, type):
            return Policy(chooser=setting)
        raise SettingError(
            "compression must be a spec string, a Compression such as FP16(), a dict of rules or a function, got "
            f"{type(setting).__name__}: {brief(setting)}"
        )

    def assign(
        self, names: Sequence[str], parameters: Sequence[Tensor], frozen: Mapping[str, Tensor] = NONE_FROZEN
    ) -> list[Compression]:
        """The setting of each parameter.

        Args:
            names: theirs.
            parameters: that are averaged.
            frozen: others, by name, that may be averaged later: a key may match these alone.

        Raises:
            SettingError: naming a parameter that no key matches, or a key that matches none.
        """
        if self.chooser is not None:
            chosen = [self._ask(name, parameter) for name, parameter in zip(names, parameters, strict=True)]
            return [_read(found, f"{self} of {name!r}") for name, found in zip(names, chosen, strict=True)]
        matching = match([key for key, _ in self.rules], names, parameters)
        matched = {place for places in matching for place in places}
        for i, (key, setting) in enumerate(self.rules):
            if i not in matched and not self.name and not any(_matches(key, *each) for each in frozen.items()):
                raise SettingError(
                    f"the key {key!r} of the policy, for {str(setting)!r}, matches no parameter; there are: "
                    f"{listed([*names, *frozen], 6)}. One that is tied goes by the first of its names"
                )
        return [self.rules[places[0]][1] for places in matching]

    def _ask(self, name: str, parameter: Tensor) -> Compression | str:
        assert self.chooser is not None
        try:
            return self.chooser(name, parameter)
        except Exception as error:
            raise SettingError(f"{self} of {name!r}: {type(error).__name__}: {error}") from error

    def __str__(self) -> str:
        if self.chooser is not None:
            return f"callable {getattr(self.chooser, '__qualname__', type(self.chooser).__name__)}"
        text = "; ".join(f"{key}: {setting}" for key, setting in self.rules)
        return self.name or (text if _is_policy(text) else f"{text};")


def match(keys: Sequence[str], names: Sequence[str], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Of each parameter, the places of the keys that match it, in order.

    Raises:
        SettingError: if a key is none, or a parameter matches none.
    """
    for key in keys:
        _check_key(key)
    found = [[i for i, key in enumerate(keys) if _matches(key, *each)] for each in zip(names, parameters, strict=True)]
    for name, places in zip(names, found, strict=True):
        if not places:
            listed = ", ".join(map(repr, keys))
            raise SettingError(f"parameter {name!r} matches no key: {listed}; '*' matches all")
    return found


def chooses_by_parameter(function: Any) -> bool:
    """Whether a function is one of a name and a parameter; else of a step."""
    try:
        taken = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in taken) == 2


def single(setting: Any, where: str) -> Compression:
    """One setting, for what knows neither names nor steps.

    Raises:
        SettingError: if it is none, or a policy, or has a warm-up.
    """
    found = Policy.of(setting) if setting is None or isinstance(setting, str) else Compression.resolve(setting)
    if isinstance(found, Policy):
        raise SettingError(f"{str(found)!r}: {where} knows no names of parameters, so it takes no policy")
    if found.warm_up:
        raise SettingError(f"{str(found)!r}: {where} counts no steps, so it takes no warm_up")
    return found


def assigned(
    setting: Compression | Policy,
    names: Sequence[str],
    parameters: Sequence[Tensor],
    frozen: Mapping[str, Tensor] = NONE_FROZEN,
) -> list[Compression]:
    """The setting of each parameter, as `Policy.assign`."""
    if isinstance(setting, Policy):
        return setting.assign(names, parameters, frozen)
    return [setting] * len(names)


def setting_asked_for() -> Compression | Policy:
    """What FASTREDUCE_COMPRESSION says, or none.

    Raises:
        SettingError: if that is no setting and no policy.
    """
    try:
        return _parse(os.environ.get(ENVIRONMENT_VARIABLE) or "none")
    except SettingError as error:
        raise SettingError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


def _parse(spec: str) -> Compression | Policy:
    name, *arguments = re.split("[:,]", spec.strip(), maxsplit=1)
    if name in NAMED and not arguments:
        return Policy(_rules(NAMED[name]), name=name)
    if name in NAMED and ";" not in spec:
        raise SettingError(
            f"{brief(spec)}: {name} is a policy, and takes no arguments. For others write its rules, {NAMED[name]!r}; "
            "for a warm-up give a callable of the step, or call set_compression"
        )
    if _is_policy(spec):
        return Policy(_rules(spec))
    try:
        return Compression.parse(spec)
    except SettingError as error:
        if name.strip() in KINDS:
            raise
        close = difflib.get_close_matches(name.strip().lower(), NAMED, 1, cutoff=0.8)
        meant = f", did you mean {close[0]!r}?" if close else ""
        raise SettingError(f"{error}; or a policy, {', '.join(NAMED)} or 'key: setting; key: setting'{meant}") from None


def _is_policy(spec: str) -> bool:
    """Whether there are several rules, or what stands before the colon is no name of a setting.

    A setting and a comma, as in `int8,warm_up=2`, is one written wrongly, of which `Compression.parse` says how.
    """
    key = spec.partition(":")[0]
    named = key.partition(",")[0].strip() in KINDS
    return ";" in spec or (not named and any(character in key for character in "*?[|<>="))


def _rules(spec: str) -> tuple[tuple[str, Compression], ...]:
    rules = []
    for piece in filter(None, (piece.strip() for piece in spec.split(";"))):
        key, colon, setting = piece.partition(":")
        if not colon:
            raise SettingError(f"{brief(piece)} in {brief(spec)} is no rule; write key: setting, with ; between rules")
        rules.append((key.strip(), _read(setting.strip(), f"the rule {key.strip()!r}")))
    return tuple(rules)


def _read(setting: Any, where: str) -> Compression:
    try:
        found = Compression.parse(setting) if isinstance(setting, str) else setting
    except SettingError as error:
        raise SettingError(f"{where}: {error}") from error
    return _check(found, where)


def _check(setting: Any, where: str) -> Compression:
    if not isinstance(setting, Compression):
        raise SettingError(f"{where}: {brief(setting)} is no setting; allowed: spec strings and Compressions")
    if setting.warm_up:
        raise SettingError(
            f"{where}: warm_up in a policy's rule {str(setting)!r}: all parameters have one schedule; give a callable "
            "of the step, or call set_compression"
        )
    return setting


def _check_key(key: str) -> None:
    for part in key.split("|"):
        text = part.strip()
        if not text or ";" in text or ":" in text:
            raise SettingError(f"the key {key!r} of a policy; allowed: globs of names, and conditions, | between them")
        if re.match(r"(ndim|numel)\b|.*[<>=]", text) and not _CONDITION.fullmatch(text):
            raise SettingError(
                f"{text!r} in the key {key!r} of a policy is no condition; allowed: ndim or numel, one of "
                f"{', '.join(_OPERATORS)}, and a whole number"
            )


def _matches(key: str, name: str, parameter: Tensor) -> bool:
    for text in (part.strip() for part in key.split("|")):
        condition = _CONDITION.fullmatch(text)
        if condition is None:
            if fnmatch.fnmatchcase(name, text):
                return True
            continue
        what, comparison, number = condition.groups()
        value = parameter.dim() if what == "ndim" else parameter.numel()
        if _OPERATORS[comparison](value, int(number)):
            return True
    return False
