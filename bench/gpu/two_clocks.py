"""What work costs the GPU, and what it costs the host: two clocks, read in one round."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..paired import Seconds, turns

CYCLES = 2e9  # a second of a GPU that runs at 2 GHz; at less it sleeps longer
TRIES = 3
LONGEST = 0.25  # seconds of sleep


@dataclass(frozen=True)
class Work:
    """Something to time; `before` is done each time before the clocks start."""

    call: Callable[[], Any]
    before: Callable[[], Any] | None = None


@dataclass
class Clocks:
    """Seconds by contestant and round.

    `late` counts rounds in which the host was not ahead of the GPU, so that the GPU's time holds the host's too.
    """

    gpu: Seconds = field(default_factory=dict)
    host: Seconds = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)


def on_host(call: Callable[[], Any], _: float = 0.0) -> tuple[float, float, bool]:
    """Both times of a call that returns when its work is done, for rehearsals."""
    start = time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    return seconds, seconds, True


def on_gpu(call: Callable[[], Any], asleep: float) -> tuple[float, float, bool]:
    """The GPU's time of a call, the host's, and whether the host was ahead.

    The GPU sleeps for `asleep` seconds first, while the host enqueues the call's work; then the work runs from one
    event to another without waiting for launches.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(asleep * CYCLES))
    begin.record()
    start = time.perf_counter()
    call()
    host = time.perf_counter() - start
    end.record()
    ahead = not begin.query()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, host, ahead


def timed(contestants: Mapping[str, Work], device: str, seconds: float, least: int = 7, most: int = 201) -> Clocks:
    """Time contestants in turn (`turns`) for about `seconds`, in `least` to `most` rounds; on the CPU in two.

    After two rounds of warming up, the GPU sleeps for as long as the host needed, and half as long again. A round in
    which the host was late is repeated with a longer sleep, up to twice. Whoever is late in warming up too, because
    more launches are waiting than the GPU's queue holds, is timed without a sleep.
    """
    clock = on_gpu if device == "cuda" else on_host
    asleep, tries = dict.fromkeys(contestants, 0.0), dict.fromkeys(contestants, TRIES)

    def once(name: str) -> tuple[float, float, bool]:
        work = contestants[name]
        for attempt in range(tries[name]):
            if work.before is not None:
                work.before()
            gpu, host, ahead = clock(work.call, asleep[name] * 2**attempt)
            if ahead:
                break
        return gpu, host, ahead

    for warm in (False, True) if device == "cuda" else (True,):
        started = time.perf_counter()
        for name in contestants:
            _, host, ahead = once(name)
            asleep[name] = min(LONGEST, 1.5 * host + 50e-6)
            if warm and not ahead:
                asleep[name], tries[name] = 0.0, 1
        a_round = time.perf_counter() - started
    found = Clocks({n: [] for n in contestants}, {n: [] for n in contestants}, dict.fromkeys(contestants, 0))
    gc.collect()
    gc.disable()
    try:
        rounds = min(most, max(least, int(seconds / a_round))) if device == "cuda" else 2
        for name in turns(contestants, rounds):
            gpu, host, ahead = once(name)
            found.gpu[name].append(gpu)
            found.host[name].append(host)
            found.late[name] += not ahead
    finally:
        gc.enable()
    return found
