"""Points in time of one bucket's reduction: on the host's clock, or on that of a CUDA stream."""

from __future__ import annotations

import time
from array import array
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

now = time.perf_counter
"""Seconds on the host's monotonic clock, which all of a process's records go by."""


class Point(IntEnum):
    """The points in time of a reduction; a plain all-reduce passes neither EXCHANGED nor SUMMED.

    Those two are passed before STARTED, or between SUMMING and GATHERING, where what sums is a part of its own.
    """

    START = 0
    COMPRESSED = 1
    EXCHANGED = 2  # the all-to-all of a two-shot has ended, or the sum of left factors
    SUMMED = 3  # and this rank's shard is summed, or its right factors are there
    STARTED = 4  # the last collective is under way, or the first one of such a reduction
    SUMMING = 5  # which is waited for
    GATHERING = 6  # its last one is under way
    RESUMED = 7  # the last one is waited for
    REDUCED = 8
    END = 9


class Seconds(NamedTuple):
    """Time that one bucket's last reduction took, by stage."""

    compress: float
    reduce: float
    decompress: float


class Clock(Protocol):
    """Remembers when each of a few points was passed last, beginning with point 0.

    A point that was passed before point 0 belongs to an earlier pass.
    """

    def mark(self, point: int) -> None:
        """Pass a point now."""

    def between(self, start: int, end: int) -> float:
        """Seconds from one point to another; 0 where they have not been passed."""

    def times(self, wait: bool = False) -> array[float]:
        """Of each point, `now()` when it was passed last; 0 where that is not known. `wait`: also for a device."""


class HostClock:
    """For work that is done when its call returns."""

    def __init__(self, points: int) -> None:
        self._times = array("d", [0.0] * points)

    def mark(self, point: int) -> None:
        """Read the host's clock."""
        self._times[point] = now()

    def between(self, start: int, end: int) -> float:
        """Seconds on the host; none where a pass has come to `start` alone, with the end of an earlier one."""
        return max(0.0, self._times[end] - self._times[start])

    def times(self, wait: bool = False) -> array[float]:
        """All of them; nobody waits."""
        return self._times


class CudaClock:
    """For work that a CUDA stream does later: each point is an event.

    Events cost time, so a reading asks for the next pass, from point 0 on, to be timed: whoever reads after every pass
    has all of them, and what nobody reads is not timed. Nothing is, nor read, while a CUDA graph is captured: a capture
    ends where a host waits.
    """

    def __init__(self, points: int, device: torch.device) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(points)]
        self._now = torch.cuda.Event(enable_timing=True)
        self._unknown = array("d", [0.0] * points)
        self._passed = [False] * points
        self._asked = self._runs = False

    def mark(self, point: int) -> None:
        """Record the event on the device's current stream; the current device may be another one."""
        if not (self._asked or self._runs) or torch.cuda.is_current_stream_capturing():
            return
        if point == 0:
            self._runs, self._asked = self._asked, False
            if self._runs:
                self._passed[:] = [False] * len(self._passed)
        if self._runs:
            self._events[point].record(torch.cuda.current_stream(self._device))
            self._passed[point] = True

    def between(self, start: int, end: int) -> float:
        """Seconds on the device in the last pass that was timed; waits until it has come to `end`."""
        self._asked = True
        if not (self._passed[start] and self._passed[end]) or torch.cuda.is_current_stream_capturing():
            return 0.0
        self._events[end].synchronize()
        milliseconds: float = self._events[start].elapsed_time(self._events[end])
        return milliseconds / 1e3

    def times(self, wait: bool = False) -> array[float]:
        """With `wait`, those of the last pass that was timed, once the device has ended it; else none is known.

        They are counted back, on the host's clock, from an event of this moment.
        """
        if not wait:
            return self._unknown
        self._asked = True
        found = array("d", self._unknown)
        if not self._passed[-1] or torch.cuda.is_current_stream_capturing():
            return found
        self._events[-1].synchronize()
        self._now.record(torch.cuda.current_stream(self._device))
        self._now.synchronize()
        moment = now()
        for point, event in enumerate(self._events):
            if self._passed[point]:
                found[point] = moment - event.elapsed_time(self._now) / 1e3
        return found


def make_clock(device: torch.device, points: int) -> Clock:
    """The clock that work on `device` goes by."""
    return CudaClock(points, device) if device.type == "cuda" else HostClock(points)
