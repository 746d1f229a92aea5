"""Averaging a model's gradients in an MPI job, from gradients to averaged gradients, against mpi4py's own Allreduce."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.mpirun import mpirun, needs_mpirun

from ..conftest import Size
from ..paired import record
from ..training.bench_steps import TIMEOUT, slowest


@needs_mpirun
def test_mpi(benchmark: Any, size: Size, tmp_path: Path) -> None:
    """25 million FP32 gradients of ResNet-50 on two ranks; mpi4py sums one array of them, and divides."""
    options = ("--oversubscribe", "-n", "2", sys.executable, "-m", "bench.transports.mpi_ranks")
    code, output = mpirun(tmp_path, *options, ".", str(size.elements), str(size.rounds), seconds=TIMEOUT)
    assert code == 0, output
    results = [json.loads(tmp_path.joinpath(f"{rank}.json").read_text()) for rank in range(2)]
    record(benchmark, slowest(results))
