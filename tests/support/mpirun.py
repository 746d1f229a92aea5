"""mpirun, where it is installed: with this tree, and without settings of the user's."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run

MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
SECONDS = 240
HAS_MPI4PY = importlib.util.find_spec("mpi4py") is not None


needs_mpirun = pytest.mark.skipif(MPIRUN is None or not HAS_MPI4PY, reason="no mpirun, or no mpi4py")


def environment(**more: str) -> dict[str, str]:
    """What ranks get: this tree, one thread, and no settings of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FASTREDUCE_", "OMPI_", "PMIX_"))}
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    crowded = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # other tests run, and an Allreduce of mpi4py's own spins
    return {**kept, **as_root, **crowded, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def mpirun(folder: Path, *arguments: str, seconds: float = SECONDS) -> tuple[int, str]:
    """Exit code and output of `mpirun ARGUMENTS`, run in `folder`; nothing of it is left afterwards."""
    done = run(MPIRUN, *arguments, cwd=folder, env=environment(), together=True, seconds=seconds)
    return done.returncode, done.stdout
