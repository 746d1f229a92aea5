"""Two ranks that make and leave process groups themselves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def bare2() -> Iterator[RankPool]:
    """Two ranks without a process group, which must exit cleanly."""
    with RankPool(2) as pool:
        pool.run(_leave)
        yield pool


def _leave(rank: int, world_size: int) -> None:
    dist.destroy_process_group()
