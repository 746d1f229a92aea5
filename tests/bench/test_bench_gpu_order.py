"""Tests on which a goal stands come first in the half hour on a GPU, on two ranks and on four."""

from __future__ import annotations

import os
import time
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

pytest.importorskip("pytest_benchmark")

from bench.gpu import phases, runner
from bench.gpu.gpu_goals import SHOWN
from bench.gpu.lines import FILE, Lines, read, rows
from bench.gpu.phases import Suite

TESTS = """
import pytest
def test_other(): pass
@pytest.mark.parametrize("ranks", [2, 4])
def test_averages_have_the_bits(ranks): pass
@pytest.mark.parametrize("several", [4])
def test_other_of_ranks(several): pass
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("of_goals", "names"),
    [
        (None, None),
        (True, {"averages_have_the_bits[4]"}),
        (False, {"other_of_ranks[4]"}),
    ],
)
def test_a_run_has_the_tests_of_goals_or_the_others(of_goals: bool | None, names: set[str] | None, tmp_path: Path):
    lines = Lines(tmp_path / FILE, {"commit": "abc", "run": "now", "rehearsal": True})
    file, run = tmp_path / "test_gpu.py", runner.Run(tmp_path, lines, True, tmp_path)
    file.write_text(TESTS)
    suite = Suite("4 ranks", ["-c", os.devnull, f"--rootdir={tmp_path}", str(file)], ranks=4, of_goals=of_goals)
    runner._run_tests(run, "ranks", suite, time.time() + 60)
    ended = {row.case.partition("::test_")[2] for row in rows(read(lines.path)) if row.status == "done"}
    assert ended == (names or {"averages_have_the_bits[4]", "other_of_ranks[4]"})


def test_each_goals_tests_come_before_others_on_ranks():
    for phase in ("tests", "ranks"):
        of_ranks = [suite for suite in phases.tests_of(phase, rehearsal=False) if suite.ranks is not None]
        order = [suite.of_goals for suite in of_ranks]
        assert order == [True] * (len(order) // 2) + [False] * (len(order) // 2)
        for suite in of_ranks:
            assert any(fnmatchcase(f"{suite.name}: ", pattern.partition(": ")[0] + ": ") for pattern in SHOWN.values())


def test_tests_of_kernels_leave_whole_steps_some_of_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those hold one goal, in 300 tests that compile; whole steps, which come behind them, seven."""
    left: dict[str, float] = {}
    begins = time.time()
    monkeypatch.setattr(runner, "cases_of", lambda *_: [])
    monkeypatch.setattr(runner, "_run_tests", lambda _, phase, suite, end: left.setdefault(suite.name, end - begins))
    lines = Lines(tmp_path / FILE, {"commit": "abc", "run": "now", "rehearsal": True})
    runner.run_phase(runner.Run(tmp_path, lines, False, tmp_path), "tests", 1000)
    assert left == {"kernels": pytest.approx(600, abs=20), "one rank": pytest.approx(1000, abs=20)}
