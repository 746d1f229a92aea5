"""Steps whose averages are not finite are counted on every rank, and reported once."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastreduce.reduction.telemetry import nonfinite
from tests.support.each_setting import EACH_COMPRESSION
from tests.support.models import Constant, spread, wrap
from tests.support.ranks import RankPool


def _counted(rank: int, world_size: int, setting: str, bad: float) -> tuple[list[int], list[str], bool]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep()
    logging.getLogger("fastreduce.reduction.telemetry.nonfinite").addHandler(handler)
    try:
        model: Any = wrap("ours", Constant(1000, 64), compression=setting, bucket_cap_mb=1e-6)
        counts = []
        for step in range(5):
            gradients = spread(rank, 1000, 64)
            if step in (1, 3) and rank == world_size - 1:
                gradients[1][7] = bad
            model.zero_grad()
            model(gradients).backward()
            counts.append(model.reducer.nonfinite_steps)
        finite = all(bool(p.grad.isfinite().all()) for p in model.module.parameters())
    finally:
        logging.getLogger("fastreduce.reduction.telemetry.nonfinite").removeHandler(handler)
    return counts, said, finite


@pytest.mark.parametrize("bad", [pytest.param(torch.nan, marks=pytest.mark.long), torch.inf])
@pytest.mark.parametrize("setting", EACH_COMPRESSION)
def test_a_gradient_that_is_not_finite_is_counted_on_every_rank_and_reported_once(
    ranks: RankPool, setting: str, bad: float
):
    for rank, (counts, said, finite) in enumerate(ranks.run(_counted, setting, bad)):
        assert counts == [0, 1, 1, 2, 2]
        assert len(said) == 1 and said[0].startswith(f"rank {rank}: ") and "values.1" in said[0], said
        assert finite, "the steps after it are not concerned"


def test_large_and_small_gradients_are_finite_and_under_none_nobody_looks(ranks2: RankPool):
    assert [counts for counts, _, _ in ranks2.run(_counted, "fp16", 3e38)] == [[0] * 5] * 2
    assert [counts for counts, _, _ in ranks2.run(_counted, "none", torch.nan)] == [[0] * 5] * 2


def test_a_step_counts_once_whichever_devices_have_seen_it():
    """One bucket's verdict is read on the host, the others' wait on a device, of which this is a stand-in."""
    host, late = (torch.ones(1, dtype=torch.uint8) for _ in range(2))
    buckets: list[Any] = [SimpleNamespace(verdicts=verdicts, about="bucket", finite=True) for verdicts in (host, late)]
    counted = nonfinite.NonFiniteSteps()
    with patch.object(nonfinite, "reads_late", lambda verdicts: verdicts is late):
        for of_host, of_device, total in ((1, 1, 0), (0, 1, 1), (1, 1, 1), (1, 0, 2), (0, 0, 3), (1, 1, 3)):
            host.fill_(of_host)
            late.fill_(of_device)
            buckets[0].finite = bool(of_host)
            counted.count(buckets, rank=0)
            assert counted.total == total
