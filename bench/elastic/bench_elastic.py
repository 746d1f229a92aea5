"""What `elastic=True` costs a step while nobody is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks import RankPool

from ..conftest import Size
from ..paired import record
from ..training.bench_steps import TIMEOUT, slowest
from ..training.steps import Setting, measure


@pytest.mark.parametrize(("model", "transport"), [("linear", "shm"), ("linear", "gloo"), ("tiny", "shm")])
def test_elastic(benchmark: Any, ranks2: RankPool, size: Size, model: str, transport: str) -> None:
    """The same reducer by turns, with and without: 25 million parameters, and a thousand of 64 elements.

    The ratio of each row is the elastic step's time over its own: 1.1 is 10 % more. "fixed ranks, again" is the
    control: what it differs from "fixed ranks" by, the machine does. The thread that looks for the lost runs during all
    of them.
    """

    def ours(elastic: bool) -> Setting:
        return Setting("fastreduce", {"compression": "none"}, transport=transport, elastic=elastic)

    settings = {
        "elastic": ours(True),
        "fixed ranks": ours(False),
        "fixed ranks, again": ours(False),
        "torch": Setting("torch"),
    }
    rounds = size.rounds if size.rounds < 10 else 61 if model == "linear" else 601
    tolerances = {"elastic": 0.0, "fixed ranks": 0.0}
    results = ranks2.run(measure, settings, model, size.width, rounds, tolerances, timeout=TIMEOUT)
    record(benchmark, slowest(results))
