"""`python -m bench.gpu` where a kernel breaks the GPU for its process, or the driver does not let a process go."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from bench.gpu import runner
from bench.gpu.lines import FILE, Lines, read, rows
from bench.gpu.phases import Suite


@pytest.fixture
def lines(tmp_path: Path) -> Lines:
    return Lines(tmp_path / FILE, {"commit": "abc", "run": "now", "rehearsal": True})


BREAKING = """
import os, pytest, torch
def synchronize(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
@pytest.mark.parametrize("i", range(6))
def test_of_the_gpu(i):
    if i == 2:  # not undone
        torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
"""


@pytest.mark.long
def test_what_breaks_the_gpu_for_its_process_is_one_failed_test(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("xdist")
    file, run = tmp_path / "test_some.py", runner.Run(tmp_path, lines, True, tmp_path)
    file.write_text(BREAKING)
    tests = Suite("some", ["-c", os.devnull, f"--rootdir={tmp_path}", str(file)], spread=True)
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # one worker has them all
    runner._run_tests(run, "tests", tests, time.time() + 60)
    found = {row.case[-3:]: row for row in rows(read(lines.path))}
    assert [row.status for row in found.values()] == ["done", "done", "failed", "done", "done", "done"]
    assert "illegal memory access" in found["[2]"].why


def test_a_process_that_cannot_be_killed_is_not_waited_for(
    tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(runner, "GONE", 0.1)
    start = time.monotonic()
    with runner._started(runner.Run(tmp_path, lines, True, tmp_path), ["sleep", "20"], dict(os.environ)) as process:
        pass
    assert time.monotonic() - start < 10
    process.kill()
    process.communicate()
