"""Meetings of ranks in a store."""

from __future__ import annotations

import random
import time

import torch.distributed as dist

from fastreduce.transports.meeting import clear, meet, notes, until_cleared
from fastreduce.transports.store_client import client_of
from tests.support.ranks import RankPool


def _meet_often(rank: int, world_size: int, times: int) -> list[list[str]]:
    """One after the other under one name; a rank may be slow to read."""
    group = dist.new_group()
    store, ranks, found = client_of(group).at("often"), range(world_size), []
    slow = random.Random(rank)
    for number in range(times):
        until_cleared(store, 20.0)
        meet(store, rank, ranks, 20.0, f"{number} of {rank}")
        time.sleep(slow.choice([0.0, 0.0, 0.003]))
        found.append(notes(store, ranks))
        clear(store, ranks)
    return found


def test_the_next_meeting_begins_when_everybody_has_read_what_the_last_one_brought(ranks3: RankPool):
    expected = [[f"{number} of {rank}" for rank in range(3)] for number in range(100)]
    assert ranks3.run(_meet_often, len(expected)) == [expected] * 3
