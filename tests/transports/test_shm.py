"""Shared memory: the same collectives, whole programs by bits, and what is left of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from fastreduce.transports.shm import ShmTransport
from tests.support.models import assert_same_bits
from tests.support.ranks import run_ranks
from tests.support.transport_cases import collect, expected


def world() -> Any:
    return dist.group.WORLD


def _over_shm(rank: int, world_size: int) -> list[Any]:
    return collect(ShmTransport(world()))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_shared_memory_moves_what_it_should(world_size: int):
    for rank, (name, at, size, *seen) in enumerate(run_ranks(_over_shm, world_size)):
        assert (name, at, size) == ("shm", rank, world_size)
        assert_same_bits(seen, expected(rank, size), f"rank {rank}")
