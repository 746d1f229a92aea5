"""What formats lose of recorded gradients: the script runs, and int4 keeps its distance to others of its size."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.commands import ROOT

formats = pytest.importorskip("bench.kernels.formats")


@pytest.mark.long
def test_every_format_gets_a_row_and_every_goal_a_verdict() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.kernels.formats", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=350,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert all(name in run.stdout for name in (*formats.OURS, *formats.RIVALS, "CNN late"))
    assert run.stdout.count(": met") == len(formats.LIMITS)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("MXFP4", 0.011, 0.015), ("NF4", 0.007, 0.010), ("E3M0", 0.03, 0.04)]
)
def test_rivals_lose_what_they_must_of_normal_numbers(name: str, low: float, high: float) -> None:
    gradients = [torch.randn(100_000, generator=torch.Generator().manual_seed(0))]
    assert low < formats.lost(formats.RIVALS[name], gradients) < high


def test_a_rival_gives_the_nearest_of_its_numbers() -> None:
    row = torch.tensor([6.0, -4.9, 5.1, 0.26, 0.24, -0.3, 1.2, 3.6] + [0.0] * 24)
    found = formats.RIVALS["MXFP4"].rounded(torch.cat([row, row[:5] / 16]))
    assert found[:8].tolist() == [6.0, -4.0, 6.0, 0.5, 0.0, -0.5, 1.0, 4.0]
    assert found[32:].tolist() == [0.375, -0.25, 0.375, 0.03125, 0.0]
