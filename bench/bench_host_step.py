"""What our class adds to a step on the host of a GPU, with Triton's launcher over a driver that does nothing."""

from __future__ import annotations

import shutil
import statistics
from importlib.util import find_spec
from typing import Any

import pytest

from .conftest import Size
from .host_step import LAUNCH, ROOT, compare
from .training.bench_steps import record_overhead


@pytest.mark.skipif(not find_spec("triton") or not shutil.which("gcc"), reason="no triton, or no gcc for its launcher")
def test_overhead_of_launches(benchmark: Any, size: Size) -> None:
    """300 parameters in 20 buckets: `fp16` on one rank beside other settings, two shots, and torch's class."""
    (seconds,) = compare([ROOT], 2 * size.rounds)
    benchmark.extra_info["launch_by_triton_s"] = statistics.median(seconds.pop(LAUNCH))
    record_overhead(benchmark, seconds)
