"""Training steps between two nodes with a slow link between them: network namespaces, and a cable that tc shapes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import two_nodes

from ..conftest import Size
from ..paired import record
from ..training.bench_steps import slowest

SLOWER = (
    "topk",
    "powersgd",
    "torch powersgd hook",
    "int4, error feedback",
)  # at 100 Mbit/s; a step of the others takes seconds
LAUNCH = ["-c", "from fastreduce.cli import main; main()", "launch", "WHERE", "-m", "bench.transports.node"]


@pytest.fixture(scope="module")
def steps(size: Size, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _measured(size, tmp_path_factory.mktemp("two-nodes"), 1)


@pytest.fixture(scope="module")
def steps_of_four(size: Size, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _measured(size, tmp_path_factory.mktemp("two-levels"), 2)


@pytest.fixture(scope="module")
def steps_at_100(size: Size, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _measured(size, tmp_path_factory.mktemp("slower"), 1, "100mbit", SLOWER)


def _measured(
    size: Size, out: Path, ranks: int, rate: str = "1gbit", contestants: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """By rank, of so many on each node."""
    with two_nodes.or_skip(), two_nodes.two_nodes(rate=rate) as names:
        command = [*LAUNCH, size.width, min(size.rounds, 11), out, *contestants]
        two_nodes.launch(names, command, timeout=280 * ranks, ranks=(ranks, ranks))
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2 * ranks)]


@pytest.mark.parametrize("compression", ["fp16", "int8", "int4", "auto4", "powersgd", "topk"])
def test_two_nodes(benchmark: Any, steps: list[dict[str, Any]], compression: str) -> None:
    """25 million parameters at 1 Gbit/s."""
    times = slowest(steps)
    rows = record(benchmark, {compression: times.pop(compression), **times})
    for name, row in rows.items():
        row["stages_s"] = steps[0]["stages"].get(name)


def test_two_nodes_at_100_mbit(benchmark: Any, steps_at_100: list[dict[str, Any]]) -> None:
    """25 million parameters at 100 Mbit/s."""
    rows = record(benchmark, slowest(steps_at_100))
    for name, row in rows.items():
        row["stages_s"] = steps_at_100[0]["stages"].get(name)


@pytest.mark.parametrize("compression", ["none", "fp16", "int8"])
def test_two_levels(benchmark: Any, steps_of_four: list[dict[str, Any]], compression: str) -> None:
    """25 million parameters at 1 Gbit/s, two ranks on each node."""
    times, ours = slowest(steps_of_four), f"{compression}, two levels"
    rows = record(benchmark, {ours: times.pop(ours), **times})
    for name, row in rows.items():
        row["stages_s"] = steps_of_four[0]["stages"].get(name)
