"""Processes on the simulated device: their environment, and ranks of a script that end together."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from tests.support.commands import ROOT, Done, finish, free_port, started

from .build import build

SITE = Path(__file__).parent / "site"


def environment(**more: str) -> dict[str, str]:
    """This process's, and the simulated device for all Python processes; compiles it if that has not been done."""
    path = os.pathsep.join([str(SITE), str(ROOT)])
    return {**os.environ, "SIMULATED_GPU": str(build()), "PYTHONPATH": path, **more}


def run_module(module: str, *arguments: str, ranks: int, folder: Path, seconds: float) -> list[Done]:
    """The ends of ranks of `python -m module`, each within `seconds`; `folder` is for their files.

    Rank r has GPU r, and as its second one GPU `ranks` + r.

    The kernels are the reference's: torch's operations alone, each of which the detector sees.
    """
    env = environment(
        FASTREDUCE_KERNELS="reference",
        GLOO_SOCKET_IFNAME="lo",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        SIMULATED_GPUS=str(2 * ranks),
        TMPDIR=str(folder),
        WORLD_SIZE=str(ranks),
    )
    env.pop("TRITON_INTERPRET", None)  # triton would be imported for it
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(sys.executable, "-m", module, *arguments, env={**env, "RANK": str(rank)}))
            for rank in range(ranks)
        ]
        return [finish(process, seconds) for process in processes]
