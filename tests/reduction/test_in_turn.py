"""A rank that reduces buckets in turn, each to its end, beside ranks that begin one while others are under way."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastreduce import DistributedDataParallel
from fastreduce.reduction.pipeline import BucketPipeline
from tests.support.models import Grads, assert_same_bits, batch, grads_of, mlp, one_by_one, wrap
from tests.support.ranks import RankPool

STEPS = 3  # those of rank 0 are fewer: it has joined, and brings zeros to one bucket after the other
TIMEOUT = 60.0


def _joined(rank: int, world_size: int, setting: str, transport: str, at_end: bool, in_turn: bool) -> list[Grads]:
    torch.manual_seed(0)
    found = []
    with (
        patch.object(DistributedDataParallel, "_meets_elsewhere", lambda _: at_end),
        one_by_one() if in_turn else nullcontext(),
    ):
        ddp = wrap("ours", mlp(), compression=setting, transport=transport, bucket_cap_mb=1e-4)
        with ddp.join():
            for step in range(STEPS if rank else 1):
                ddp.zero_grad()
                ddp(batch(rank, step, 4, 20)).square().mean().backward()
                found.append(grads_of(ddp.module))
    return found


@pytest.mark.parametrize(
    ("setting", "at_end"),
    [
        pytest.param(setting, at_end, id=f"{setting}-{when}", marks=[pytest.mark.long] * (at_end != of_short))
        for setting, of_short in (
            ("int8", True),
            ("*.bias: int8; *: none:flat", False),
            ("*.bias: int8; *: powersgd:rank=1", False),
        )
        for at_end, when in ((False, "during backward"), (True, "at its end"))
    ],
)
def test_in_two_levels(ranks21: RankPool, setting: str, at_end: bool):
    expected = ranks21.run(_joined, setting, "two_level", at_end, True, timeout=TIMEOUT)
    assert_same_bits(ranks21.run(_joined, setting, "two_level", at_end, False, timeout=TIMEOUT), expected)


@pytest.mark.parametrize(
    "at_end", [False, pytest.param(True, marks=pytest.mark.long)], ids=["during backward", "at its end"]
)
def test_over_gloo(ranks2: RankPool, at_end: bool):
    """Ranks gather exponents of `fp16:accumulate=wire` before they send: they wait for each other there."""
    setting = "*.bias: int8; *: fp16:accumulate=wire"
    expected = ranks2.run(_joined, setting, "gloo", at_end, True, timeout=TIMEOUT)
    assert_same_bits(ranks2.run(_joined, setting, "gloo", at_end, False, timeout=TIMEOUT), expected)


def _joined_beside_a_slow_rank(rank: int, world_size: int, in_turn: bool) -> list[Grads]:
    """Rank 2 sums late, and so finds another bucket to sum whenever it has done one; rank 3 waits for it in gathers."""
    function = BucketPipeline._sum

    def late(*args: Any) -> Any:
        time.sleep(0.02)
        return function(*args)

    with patch.object(BucketPipeline, "_sum", late) if rank == 2 else nullcontext():
        return _joined(rank, world_size, "int8", "two_level", False, in_turn)


@pytest.mark.long
def test_beside_a_node_of_which_one_rank_is_late():
    with RankPool(4, hosts="aabb") as pool:
        expected = pool.run(_joined_beside_a_slow_rank, True, timeout=TIMEOUT)
        assert_same_bits(pool.run(_joined_beside_a_slow_rank, False, timeout=TIMEOUT), expected)
