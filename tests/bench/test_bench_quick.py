"""The benchmarks run, hold their results against the reference, and leave JSON, rows and a plot."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT

pytest.importorskip("pytest_benchmark")


@pytest.mark.long
@pytest.mark.timeout(500)
def test_quick_run(tmp_path: Path) -> None:
    kept = sorted((ROOT / "bench" / "results").glob("*"))
    before = [path.read_bytes() for path in kept]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FASTREDUCE_", "PYTEST_"))}
    chosen = "resnet50 or overhead or (step and not sharded and not hybrid)"
    command = [sys.executable, "-m", "bench", "--quick", "-k", chosen, "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=450)
    assert run.returncode == 0, run.stdout + run.stderr

    document = json.loads((tmp_path / "benchmarks.json").read_text())
    names = {each["name"] for each in document["benchmarks"]}
    assert "test_kernel[flatten-resnet50-dtype=fp16-scale=0.5-numba_cpu]" in names
    assert {"test_step[none]", "test_step[fp16]", "test_overhead[1]", "test_overhead[2]"} <= names
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(row["commit"] and row["torch"] and float(row["median_s"]) > 0 for row in rows)
    assert {row["contestant"] for row in rows} >= {"numba_cpu", "reference", "copy", "torch", "unwrapped"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    for goal in ("a copy's", "host overhead", "gradient-sized allocations"):
        assert goal in run.stdout

    assert sorted((ROOT / "bench" / "results").glob("*")) == kept
    assert [path.read_bytes() for path in kept] == before
