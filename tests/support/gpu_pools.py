"""Pools of ranks for tests on a real GPU: two and four ranks share it under NCCL_MULTI_RANK_GPU_ENABLE=1."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from fastreduce.transports.nccl import library

from .ranks import RankPool

HAS_GPU = torch.cuda.is_available()
SHARING = os.environ.get(library.SHARING_VARIABLE) == "1"
MANY = [2] if not HAS_GPU else [2, 4] if SHARING else []


@contextlib.contextmanager
def pools_by_size() -> Iterator[Callable[[int], RankPool]]:
    """Pools by number of ranks, made when they are first asked for."""
    made: dict[int, RankPool] = {}
    yield lambda size: made.setdefault(size, RankPool(size))
    for pool in made.values():
        pool.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """Of the tests of one module."""
    with pools_by_size() as of_size:
        yield of_size


def of_each(sizes: Sequence[int]) -> Any:
    """A fixture: the module's pool of each size in turn."""

    @pytest.fixture(params=sizes, ids=lambda size: f"{size} ranks")
    def ranks(request: pytest.FixtureRequest, pools: Callable[[int], RankPool]) -> RankPool:
        return pools(request.param)

    return ranks
