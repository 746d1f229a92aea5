"""What a stream's clock records: nothing, until somebody reads it."""

from __future__ import annotations

import pytest
import torch

from fastreduce.reduction.clocks import CudaClock


class Event:
    """Stands for a CUDA event: its time is how many have been recorded."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    clock = CudaClock(3)

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
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clock = CudaClock(2)
    clock.mark(0)
    assert clock.between(0, 1) == 0.0
    clock.mark(1)
    assert Event.recorded == 0
    clock.mark(0)
    clock.mark(1)
    assert clock.between(0, 1) == 1.0
