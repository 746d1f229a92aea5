"""What a stream's clock records: nothing, until somebody reads it; and what the host's tells amid a pass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fastreduce.reduction.clocks import CudaClock, HostClock

DEVICE = torch.device("cuda", 1)


@dataclass
class Stream:
    """The current stream of a device, of which this process has several."""

    device: torch.device


class Event:
    """Stands for a CUDA event: its time is how many have been recorded.

    The device of the clock need not be the current one: a rank that brings NaN or zeros works on its own stream.
    """

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream | None = None) -> None:
        assert stream == Stream(DEVICE)
        Event.recorded += 1
        self.time = Event.recorded

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.time - self.time)


def test_a_stream_is_timed_in_the_pass_after_a_reading_only(monkeypatch: pytest.MonkeyPatch):
    capturing = False
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = CudaClock(3, DEVICE)

    def marked() -> int:
        before = Event.recorded
        for point in range(3):
            clock.mark(point)
        return Event.recorded - before

    assert marked() == 0
    assert clock.between(0, 2) == 0.0
    assert clock.between(1, 2) == 0.0  # one reading, of several spans
    assert [marked() for _ in range(4)] == [3, 0, 0, 0]
    assert clock.between(0, 2) == 2.0
    capturing = True
    assert marked() == 0
    capturing = False
    assert [marked(), marked()] == [3, 0]
    for _ in range(3):  # whoever reads after every pass has all of them
        assert clock.between(0, 1) == 1.0
        assert marked() == 3


def test_a_reading_in_the_middle_counts_from_the_next_pass(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = CudaClock(2, DEVICE)
    clock.mark(0)
    assert clock.between(0, 1) == 0.0
    clock.mark(1)
    assert Event.recorded == 0
    clock.mark(0)
    clock.mark(1)
    assert clock.between(0, 1) == 1.0


def test_nobody_waits_for_a_span_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = CudaClock(2, DEVICE)
    clock.between(0, 1)
    clock.mark(0)
    clock.mark(1)
    assert clock.between(0, 1) == 1.0
    capturing = True
    assert clock.between(0, 1) == 0.0


def test_times_on_the_hosts_clock_are_read_on_the_clocks_device_and_not_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
):
    capturing = False
    monkeypatch.setattr(Event, "recorded", 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = CudaClock(2, DEVICE)

    def read(wait: bool) -> list[float]:
        return list(clock.times(wait))

    assert read(True) == [0.0, 0.0]
    clock.mark(0)
    clock.mark(1)
    first, last = read(True)
    assert last - first == pytest.approx(1.0)  # they are 2 and 1 before the reading
    assert read(False) == [0.0, 0.0]
    capturing = True
    before = Event.recorded
    assert read(True) == [0.0, 0.0] and Event.recorded == before


def test_a_pass_that_has_failed_on_the_host_took_no_negative_time():
    clock = HostClock(3)
    for point in (0, 1, 2, 0, 1):
        clock.mark(point)
    assert clock.between(0, 1) > 0 and clock.between(1, 2) == 0
