"""The code that only runs for CUDA tensors, on a device of CPU memory that watches the order of streams.

What this shows: that every read and write of memory on a stream is ordered with those on other streams, by events, by
streams that wait or by the host; that memory is not let go of while another stream uses it; that the host's code for
CUDA tensors goes the ways it should, and averages to the bits of CPU ranks.

What it does not show: anything of kernels on a GPU, of NCCL, or of time. Operations run at once, in the order in which
they are enqueued, by torch's kernels for CPUs; our kernels are the reference's. Nothing here is a result of a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import Done

from .build import SECONDS as BUILD_SECONDS
from .build import build, why_not
from .launching import run_module
from .orders import ORDERED, RACES
from .trainings import GROUPS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no simulated GPU: {why_not()}"),
]
SECONDS = 280.0  # of a group of cases
RANKS = 2


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The device, before anybody's time runs."""
    build()


def _answers(done: list[Done]) -> list[dict[str, list[str]]]:
    """The last line of each rank."""
    assert not any(each.returncode for each in done), "\n".join(f"{each.stdout}{each.stderr}" for each in done)
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


@pytest.fixture(scope="module")
def found(compiled: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The races in each of the tiny programs."""
    folder = tmp_path_factory.mktemp("orders")
    (answer,) = _answers(run_module("tests.simulated_gpu.orders", ranks=1, folder=folder, seconds=60))
    return answer


@pytest.mark.timeout(BUILD_SECONDS + 100)
@pytest.mark.parametrize("name", RACES)
def test_a_missing_order_is_found(found: dict[str, list[str]], name: str):
    _, expected = RACES[name]
    assert any(expected in race for race in found[name]), found[name]
    assert all("orders.py:" in race for race in found[name])  # it says where


@pytest.mark.parametrize("name", ORDERED)
def test_what_is_ordered_is_no_race(found: dict[str, list[str]], name: str):
    assert found[name] == []


@pytest.mark.parametrize(
    "group", [name if name == "short" else pytest.param(name, marks=pytest.mark.long) for name in GROUPS]
)
def test_training_has_no_race_and_the_bits_of_cpus(group: str, tmp_path: Path):
    done = run_module("tests.simulated_gpu.trainings", group, ranks=RANKS, folder=tmp_path, seconds=SECONDS)
    for rank, answer in enumerate(_answers(done)):
        wrong = {case: what for case, what in answer.items() if what}
        assert not wrong, f"rank {rank}\n" + "\n".join(f"{case}: {text}" for case in wrong for text in wrong[case])
        assert list(answer) == list(GROUPS[group])
