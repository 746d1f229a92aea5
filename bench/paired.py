"""Contestants that take turns, and what is said about them: medians, and paired ratios with their intervals.

A machine's speed drifts, and who comes after whom finds other things in the caches: contestants take turns in an order
that changes (A B C, C B A, B C A, …) and are compared round by round. The ratio that is quoted is the median over the
rounds, its interval the 95 % interval of a median by order statistics.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastreduce.run.orders import order

Seconds = dict[str, list[float]]
T = TypeVar("T")


class Tape:
    """A timer for pytest-benchmark that plays durations back, because it cannot alternate contestants itself."""

    __name__ = "perf_counter"

    def __init__(self) -> None:
        self._ticks = iter(())

    def load(self, durations: Sequence[float]) -> None:
        """Play these next: the timer is read before and after each round."""
        self._ticks = iter([tick for duration in durations for tick in (0.0, duration)])

    def __call__(self) -> float:
        return next(self._ticks)


TAPE = Tape()


@dataclass(frozen=True)
class Contestant:
    """Something to time, and the bytes that it has to read and write."""

    call: Callable[[], Any]
    nbytes: int = 0


def seconds_of(call: Callable[[], Any]) -> float:
    """Time of a call that returns when its work is done."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def turns(contestants: Iterable[T], rounds: int) -> Iterator[T]:
    """Each of them once a round, in an order that changes from round to round."""
    listed = list(contestants)
    for number in range(rounds):
        yield from order(listed, number)


def by_turns(calls: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What each call returns, round by round; they take `turns`, and no garbage is collected between them."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for name in turns(calls, rounds):
            found[name].append(calls[name]())
    finally:
        gc.enable()
    return found


def alternate(contestants: Mapping[str, Contestant], seconds: float) -> Seconds:
    """Time contestants in turn, for about `seconds`, in 7 to 201 rounds."""
    for _ in range(2):
        a_round = sum(seconds_of(contestant.call) for contestant in contestants.values())
    timed = {name: partial(seconds_of, contestant.call) for name, contestant in contestants.items()}
    return by_turns(timed, min(201, max(7, int(seconds / a_round))))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval; below six values the interval is all that was seen.

    The same as `fastreduce.cli.compare.intervals` has by scipy, which machines of `make gpu` need not have.
    """
    ordered, n = sorted(values), len(values)
    outside, below = 0, 0.0  # how many values to leave out on each side, and the chance to miss on one side
    while (below := below + math.comb(n, outside) / 2**n) <= 0.025:
        outside += 1
    outside = max(1, outside)
    return statistics.median(ordered), ordered[outside - 1], ordered[-outside]


def _figure(values: Sequence[float]) -> list[float]:
    return list(median_interval(values))


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Median, lower and upper bound of `above / below`, round by round."""
    return _figure([a / b for a, b in zip(above, below, strict=True)])


def difference(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Median, lower and upper bound of `above - below`, round by round."""
    return _figure([a - b for a, b in zip(above, below, strict=True)])


def describe(times: Seconds, nbytes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Figures of every contestant, the first being held against the others.

    `ratio` is the first contestant's time over this one's: below 1 the first is faster. `of_copy` is this
    one's bytes a second over those of the contestant called "copy".
    """
    nbytes = nbytes or {}
    ours = next(iter(times))
    described: dict[str, Any] = {}
    for name, durations in times.items():
        quartiles = statistics.quantiles(durations, method="inclusive")
        row: dict[str, Any] = {"median_s": quartiles[1], "quartiles_s": quartiles, "rounds": len(durations)}
        if name != ours:
            row["ratio"] = ratio(times[ours], durations)
        if name in nbytes:
            row["bytes"] = nbytes[name]
            row["gb_per_s"] = nbytes[name] / row["median_s"] / 1e9
            work = nbytes[name] / nbytes["copy"]
            row["of_copy"] = [work * x for x in ratio(times["copy"], durations)]
        described[name] = row
    return described


def record(benchmark: Any, times: Seconds, nbytes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Give pytest-benchmark the first contestant's times, and describe all of them in its extra_info."""
    described = describe(times, nbytes)
    ours = next(iter(times))
    benchmark.extra_info.update(ours=ours, contestants=described)
    TAPE.load(times[ours])
    benchmark.pedantic(lambda: None, rounds=len(times[ours]))
    return described
