"""What torch's gloo takes for a deadline."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from fastreduce.transports.gloo import _Works


def test_what_is_waited_for_last_has_a_deadline_when_the_time_is_over():
    """torch cuts off what is less than a millisecond, and takes 0 for the group's whole timeout."""
    waited = list[timedelta]()
    over: Any = SimpleNamespace(seconds=0.0, under_way=set(), call=lambda operation, wait, left, doing: wait(left))
    _Works(over, "all_gather", [("", SimpleNamespace(wait=waited.append))]).wait()
    assert waited == [timedelta(milliseconds=1)]
