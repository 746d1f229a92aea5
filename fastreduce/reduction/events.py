"""Events: the moments of a backward at which logger, mixed precision, hooks and checks are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .bucketed import BucketJob


@dataclass
class Events:
    """What is called at the moments of a backward, in order; nothing that keeps the reducer alive.

    Attributes:
        launching: a bucket is about to be reduced; with its job.
        computed: the backward's own work has ended, and its reduction is about to.
        arrived: all averages have come, and are not stored yet.
        stored: they are.
        met: a reduction has ended on this rank as on all others, which may follow it with collectives; with its
            number, and the step.
        ended: a backward has ended, reduced or not.
        dropped: a backward that raised before its end is forgotten.
    """

    launching: list[Callable[[BucketJob], object]] = field(default_factory=list)
    computed: list[Callable[[], object]] = field(default_factory=list)
    arrived: list[Callable[[], object]] = field(default_factory=list)
    stored: list[Callable[[], object]] = field(default_factory=list)
    met: list[Callable[[int, int], object]] = field(default_factory=list)
    ended: list[Callable[[], object]] = field(default_factory=list)
    dropped: list[Callable[[], object]] = field(default_factory=list)


def call_all(functions: Iterable[Callable[..., object]], *given: object) -> None:
    """Call those of a moment, in order."""
    for function in functions:
        function(*given)
