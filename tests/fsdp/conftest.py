"""Four ranks: two replicas of two shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks that live as long as the test session."""
    with RankPool(4) as pool:
        yield pool
