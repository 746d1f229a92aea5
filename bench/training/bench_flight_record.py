"""What the flight record, counters and a trace add to a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankPool

from ..conftest import Size
from ..paired import record
from .bench_steps import TIMEOUT, slowest
from .steps import Setting, measure


@pytest.mark.parametrize("model", ["linear", "tiny"])
def test_recording(benchmark: Any, ranks2: RankPool, size: Size, model: str) -> None:
    """25 million parameters in several buckets, and a thousand of 64 elements: a step of milliseconds.

    The ratio of each row is the unrecorded step's time over its own: 0.99 is 1 % more. "not recorded, again" is the
    control: what it differs by, the machine does.
    """
    settings = {
        name: Setting("fastreduce", {"compression": "none"}, recording=recording)
        for name, recording in (
            ("not recorded", "nothing"),
            ("recorded", "record"),
            ("counted", "count"),
            ("traced", "trace"),
            ("not recorded, again", "nothing"),
        )
    }
    rounds = size.rounds if size.rounds < 10 else 101 if model == "linear" else 1001
    results = ranks2.run(measure, settings, model, size.width, rounds, {}, timeout=TIMEOUT)
    record(benchmark, slowest(results))
