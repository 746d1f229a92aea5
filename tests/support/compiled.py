"""The kernels of most settings, compiled once: else all ranks of the first tests would compile the same ones."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fastreduce import DistributedDataParallel
from tests.support.fork_server import server

PARTS = (
    ("int8", "fp16"),
    ("int4", "bf16", "bf16:rounding=stochastic"),
    ("fp8:error_feedback", "none", "int4:rounding=stochastic"),
)
SECONDS = 180.0


def compile_kernels(folder: Path, worker: int, workers: int, wait: bool = True) -> None:
    """Compile the part of one of so many workers of pytest-xdist's, and wait for the others', which share `folder`.

    Without `wait` they are compiled beside the tests.
    """
    compiling = [server().fork(_wrap, settings) for settings in PARTS[worker::workers]]
    if not wait:
        return
    deadline = time.monotonic() + SECONDS
    for process in compiling:
        process.poll(SECONDS)
        process.kill()
    folder.joinpath(f"{worker}.compiled").touch()
    while len(list(folder.glob("*.compiled"))) < workers and time.monotonic() < deadline:
        time.sleep(0.05)


def _wrap(pipe: object, settings: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for setting in settings:
        DistributedDataParallel(nn.Linear(3, 2), compression=setting).reducer.close()
