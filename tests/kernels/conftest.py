"""What a kernel test gets: a backend and guarded memory on its device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastreduce.ops import backends
from fastreduce.ops.backends import Backend

from .cases import BACKENDS, Memory, device_of


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return backends.load(request.param)


@pytest.fixture
def memory(backend: Backend) -> Iterator[Memory]:
    """Poisoned memory that looks afterwards whether anything was written beside it."""
    memory = Memory(device_of(backend.name))
    yield memory
    memory.check()
