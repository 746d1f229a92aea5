"""What each rank runs on two nodes: `two_level_job.py OUT`, which writes what it saw to OUT/RANK.json."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import DistributedDataParallel
from tests.support import tolerances
from tests.support.two_nodes import INTERFACE

SIZES = (200_000, 7, 100_003)
SETTINGS = ("none", "int8:error_feedback")
STEPS = 2


class Given(nn.Module):
    """A model whose gradients are what one says."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((value * gradient).sum() for value, gradient in zip(self.values, gradients, strict=True)) * 1.0


def _gradients(rank: int, step: int) -> list[Tensor]:
    return [torch.randn(n, generator=torch.Generator().manual_seed(97 * step + 7 * rank + n)) for n in SIZES]


def sent() -> int:
    """Bytes that have left this node."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _train(setting: str, cap: float) -> dict[str, Any]:
    """A digest of all averages, how far the first ones are from exact ones over what they may be, and bytes sent."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(Given(), compression=setting, bucket_cap_mb=cap)
    digest, before, worst = hashlib.sha256(), 0, 0.0
    for step in range(2 + STEPS):  # buckets are laid out anew before the second
        if step == 2:
            dist.barrier()
            before = sent()
            dist.barrier()  # before anybody sends more
        ddp.zero_grad()
        ddp(_gradients(rank, step)).backward()
        averages = [value.grad for value in ddp.module.values]
        for average in averages:
            digest.update(average.numpy().tobytes())
        if step == 0:
            of_ranks = [_gradients(r, step) for r in range(world_size)]
            for average, grads in zip(averages, map(list, zip(*of_ranks, strict=True)), strict=True):
                off = (average.double() - torch.stack(grads).double().mean(0)).abs()
                worst = max(worst, float((off / tolerances.error_bound(setting, grads, two_levels=True)).max()))
    dist.barrier()
    found = {
        "digest": digest.hexdigest(),
        "worst": worst,
        "bytes": sent() - before,
        "name": ddp.reducer.transport.name,
    }
    ddp.reducer.close()
    return found


def main() -> None:
    """Train under every setting, with two sizes of buckets, and flat."""
    dist.init_process_group("gloo")
    found = {}
    for setting in SETTINGS:
        flat = f"{setting}{',' if ':' in setting else ':'}flat"
        found[setting] = {
            "runs": [_train(setting, 25), _train(setting, 0.1)],
            "flat": _train(flat, 25),
        }
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
