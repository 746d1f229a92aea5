"""Scripts for `fastreduce run`, and what the command says of them."""

from __future__ import annotations

import sys
from pathlib import Path

from fastreduce.run import replacement
from tests.support.commands import FASTREDUCE, Done, run, with_environment

RUN = [FASTREDUCE, "run"]
MODULE = [sys.executable, "-m", "fastreduce.run"]
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from neighbour import value

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(3, 2))
ddp(torch.ones(1, 3) * dist.get_rank()).sum().backward()
if dist.get_rank() == 0:
    print("CLASS", type(ddp).__module__, ddp.compression, ddp.module.weight.grad[0, 0].item(), sys.argv[1:], value)
dist.destroy_process_group()
"""
ALONE = """
import os, tempfile, torch, torch.distributed as dist

def alone():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
"""


def said(done: Done) -> list[str]:
    """What we wrote, without the warnings of others."""
    return [line for line in done.stderr.splitlines() if line.startswith("fastreduce")]


def child(code: str, tmp_path: Path, python: str = sys.executable, **env: str) -> Done:
    """A Python that a script of a run starts."""
    record = tmp_path / "record"
    record.touch()
    return run(python, "-c", code, env={**with_environment(), **replacement.environment(str(record)), **env})
