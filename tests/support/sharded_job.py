"""What each rank runs on two nodes: `sharded_job.py OUT`, which writes what a backward sends to OUT/RANK.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fastreduce.fsdp
from tests.support.sharded import shard
from tests.support.two_level_job import sent

SETTINGS = ("torch", "none", "fp16", "bf16", "int8", "int4")
WIDTH = 1024


def _bytes_of_a_backward(setting: str) -> int:
    """Its reduce-scatters alone, since it gathers no parameters again. The least of four: TCP may send parts twice."""
    torch.manual_seed(0)
    model: Any = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    model.set_reshard_after_forward(False)
    if setting != "torch":
        fastreduce.fsdp.compress(model, setting)
    least = sys.maxsize
    for _ in range(4):  # connections are made in the first
        loss = model(torch.ones(2, WIDTH)).square().mean()
        dist.barrier()
        before = sent()
        dist.barrier()  # before anybody sends more
        loss.backward()
        dist.barrier()
        least = min(least, sent() - before)
    return least


def main() -> None:
    """Train a step under every setting."""
    dist.init_process_group("gloo")
    found = {setting: _bytes_of_a_backward(setting) for setting in SETTINGS}
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
