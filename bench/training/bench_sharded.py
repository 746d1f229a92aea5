"""Models that FSDP2 has sharded: reduce-scatters on one host, and steps between two nodes at 1 Gbit/s."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_nodes
from tests.support.ranks import RankPool

from ..conftest import Size
from ..paired import record
from .bench_steps import TIMEOUT, slowest
from .sharded_steps import ON_ONE_HOST, SHARDED, measure

LAUNCH = ["-c", "from fastreduce.cli import main; main()", "launch", "WHERE", "-m", "bench.training.sharded_steps"]


def _width(size: Size) -> int:
    return 512 if size.width > 512 else 64


@pytest.fixture(scope="module")
def scatters(ranks2: RankPool, size: Size) -> list[dict[str, Any]]:
    return ranks2.run(measure, ON_ONE_HOST, _width(size), min(size.rounds, 11), 1, True, timeout=TIMEOUT)


@pytest.fixture(scope="module")
def sharded(size: Size, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _between_nodes(size, tmp_path_factory.mktemp("sharded"), 1)


@pytest.fixture(scope="module")
def hybrid(size: Size, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _between_nodes(size, tmp_path_factory.mktemp("hybrid"), 2)


def _between_nodes(size: Size, out: Path, ranks: int) -> list[dict[str, Any]]:
    """By rank, of so many on each node."""
    with two_nodes.or_skip(), two_nodes.two_nodes(rate="1gbit") as names:
        command = [*LAUNCH, _width(size), min(size.rounds, 11), out]
        two_nodes.launch(names, command, timeout=TIMEOUT, ranks=(ranks, ranks))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2 * ranks)]


@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
def test_sharded_reduce_scatter(benchmark: Any, scatters: list[dict[str, Any]], compression: str) -> None:
    """All reduce-scatters of a step, 25 million parameters, two ranks on one host."""
    times = slowest(scatters)
    record(benchmark, {compression: times.pop(compression), **times})


@pytest.mark.parametrize("compression", [name for name in SHARDED if not name.startswith("torch")])
def test_sharded_step(benchmark: Any, sharded: list[dict[str, Any]], compression: str) -> None:
    """A step of 25 million parameters sharded over two nodes at 1 Gbit/s."""
    times = slowest(sharded)
    record(benchmark, {compression: times.pop(compression), **times})


@pytest.mark.parametrize("compression", ["none", "fp16", "int8", "int4"])
def test_hybrid_step(benchmark: Any, hybrid: list[dict[str, Any]], compression: str) -> None:
    """A step of 25 million parameters sharded over two ranks of a node, and averaged between two nodes at 1 Gbit/s."""
    times = slowest(hybrid)
    record(benchmark, {compression: times.pop(compression), **times})
