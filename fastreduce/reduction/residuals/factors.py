"""Factors between averages and what was applied of them: numbers, some of which only a device knows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

Factor = float | Tensor  # a number that only a device knows is an FP64 tensor without dimensions
ONE: Factor = 1.0


def number_in(value: Tensor) -> Factor:
    """A number on the host as a float, one on a device as an FP64 tensor, for which the host does not wait."""
    return value.detach().double().reshape(()) if value.is_cuda else float(value)


def finite_number(given: object) -> float | None:
    """What a user gave as a factor; None if it is no finite number, nor a tensor with one."""
    one = isinstance(given, Real) or (isinstance(given, Tensor) and given.numel() == 1 and not given.is_complex())
    try:
        number = float(given) if one else math.nan  # type: ignore[arg-type]
    except OverflowError:  # of a whole number
        return None
    return number if math.isfinite(number) else None


def known_to_be(factor: Factor, number: float) -> bool:
    """Whether the host knows that a factor is this number."""
    return isinstance(factor, float) and factor == number


def products(first: Sequence[Factor], second: Sequence[Factor]) -> list[Factor]:
    """Pairwise; what is multiplied by 1 stays the object that it is.

    Most slots share one object, and on a device every product costs a launch: each is made once.
    """
    made: dict[tuple[int, int], Factor] = {}
    for a, b in zip(first, second, strict=True):
        if (id(a), id(b)) not in made:
            nothing = known_to_be(a, 0.0) or known_to_be(b, 0.0)
            made[id(a), id(b)] = b if known_to_be(a, 1.0) else a if known_to_be(b, 1.0) else 0.0 if nothing else a * b
    return [made[id(a), id(b)] for a, b in zip(first, second, strict=True)]


def stack(numbers: Sequence[Factor], device: torch.device) -> Tensor:
    """Numbers, many of them the same objects, as FP64 `[n]` on a device, for which no host waits."""
    known = {id(number): number for number in numbers}
    place = {identity: i for i, identity in enumerate(known)}
    floats = [number if isinstance(number, float) else 0.0 for number in known.values()]
    stacked = to_device(torch.tensor(floats, dtype=torch.float64, device="cpu"), device)
    for i, number in enumerate(known.values()):
        if isinstance(number, Tensor):
            stacked[i] = number
    return stacked[to_device(torch.tensor([place[id(number)] for number in numbers], device="cpu"), device)]


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A copy, for which no host waits."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
