"""One thread, pytest-benchmark's timer and machine figures, and the sizes of a quick run."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in child processes

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil
import pytest
import torch

from tests.support.ranks import RankPool

from .kernels import shapes
from .paired import TAPE

torch.set_num_threads(1)


@dataclass(frozen=True)
class Size:
    """How much a run measures."""

    elements: int  # of a model's gradients in a kernel benchmark
    seconds: float  # for one kernel benchmark
    rounds: int  # of steps on ranks
    width: int  # of the model in a step


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="small sizes, few rounds: does it run?")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        items[:] = [item for item in items if not any(f"-{name}" in item.name for name in ("bert", "gpt2"))]
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=TAPE))
        item.add_marker(pytest.mark.timeout(300))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["versions"] = {name: version(name) for name in ("torch", "numba", "numpy")}
    machine_info["load"] = os.getloadavg()[0]
    machine_info["cores"] = psutil.cpu_count()
    machine_info["quick"] = config.getoption("--quick")


@pytest.fixture(scope="session")
def size(pytestconfig: pytest.Config) -> Size:
    if pytestconfig.getoption("--quick"):
        return Size(elements=100_000, seconds=0.05, rounds=3, width=96)
    return Size(elements=shapes.MOST_ELEMENTS, seconds=2.0, rounds=21, width=1440)


@pytest.fixture(scope="session")
def ranks1() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
