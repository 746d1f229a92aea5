"""`make gpu`: on a machine with a GPU, is everything right, and then, how fast is it? About eight minutes.

It runs from the source tree, with what a CUDA image commonly holds: torch, Triton, CuPy with NCCL, numba-cuda,
pytest, pytest-benchmark, typer, rich, psutil and matplotlib. With NCCL_MULTI_RANK_GPU_ENABLE=1 and an NCCL 2.30 or
later, two and four ranks share the GPU in the tests. `--rehearse` does the same without a GPU, with interpreted
kernels, a stand-in for NCCL and tiny sizes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fastreduce.transports.nccl_library import SHARING_VARIABLE

ROOT = Path(__file__).parents[1]
TESTS = ["test_kernels.py", "test_nccl_gpu.py", "test_gpu.py"]


def main(
    rehearse: Annotated[bool, typer.Option(help="Without a GPU: interpreted kernels, tiny sizes.")] = False,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("out/gpu"),
    anyway: Annotated[bool, typer.Option(help="Benchmark after failed tests too.")] = False,
) -> None:
    """Test, then measure."""
    # Tests fill new memory with NaN, in a mode in which torch asks for cuBLAS's workspace to be of a fixed size.
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **os.environ, "PYTHONPATH": str(ROOT)}
    start = time.monotonic()

    def run(*words: str) -> int:
        print(f"\n[{time.monotonic() - start:.0f} s] {' '.join(words)}", flush=True)
        return subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=environment, check=False).returncode

    if not rehearse and os.environ.get(SHARING_VARIABLE) != "1":
        print(f"One rank only: several on this GPU need {SHARING_VARIABLE}=1 and NCCL 2.30 or later.")
    # In the rehearsal the kernels' own tests are left to `make test`, where they are interpreted too.
    chosen = [f"tests/{name}" for name in TESTS if not rehearse or name == "test_gpu.py"]
    # Compiling takes most of the time, on the host: one process a core, up to eight.
    workers = min(8, os.cpu_count() or 1) if find_spec("xdist") and not rehearse else 0
    spread = ["-n", str(workers), "--dist", "worksteal"] if workers else []
    code = run("pytest", *chosen, "-q", "-m", "not gpu" if rehearse else "gpu", *spread)
    if code != 0 and not anyway:
        print("tests failed: nothing is measured (--anyway measures)")
        sys.exit(code)
    code = run("bench", "--rehearse" if rehearse else "--gpu", "--out", str(out)) or code
    print(f"{time.monotonic() - start:.0f} s")
    sys.exit(code)


if __name__ == "__main__":
    typer.run(main)
