"""Gradients of both kinds, on both numbers of ranks; and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.support.ranks import RankPool


@pytest.fixture(params=[False, True], ids=["own", "views"])
def views(request: pytest.FixtureRequest) -> bool:
    """Gradients of their own, then views of buckets."""
    return bool(request.param)


@pytest.fixture(
    params=[(2, False), pytest.param((3, True), marks=pytest.mark.long)], ids=["2 ranks", "3 ranks with views"]
)
def ranks_views(request: pytest.FixtureRequest) -> tuple[RankPool, bool]:
    """Both numbers of ranks and both kinds of gradients, in two cases."""
    world_size, views = request.param
    return request.getfixturevalue(f"ranks{world_size}"), views


@pytest.fixture(
    params=[(2, True), pytest.param((3, False), marks=pytest.mark.long)], ids=["2 ranks with views", "3 ranks"]
)
def ranks_views_crossed(request: pytest.FixtureRequest) -> tuple[RankPool, bool]:
    """The other two cases."""
    world_size, views = request.param
    return request.getfixturevalue(f"ranks{world_size}"), views


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of torch's, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
