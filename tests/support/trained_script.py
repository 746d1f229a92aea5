"""A training for tests of `fastreduce compare`, in torch's own DDP: 127 weights are found by full batches, and one not.

trained_script.py STEPS [outlier | failing | hooked | helped]
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SAMPLES, WEIGHTS, NOISE = 512, 127, 1.0


class Regression(nn.Module):
    """All weights share one block of int8."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(1 + WEIGHTS))

    def forward(self, x: torch.Tensor, outlier: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions, and a term of a loss: 0, whose gradient by the first weight may be 1000.

        Then the other weights' are less than half of what int8 counts the block in.
        """
        return x @ self.weights[1:], 1000 * outlier * (self.weights[0] - self.weights[0].detach())


def main() -> None:
    steps, how = int(sys.argv[1]), sys.argv[2] if sys.argv[2:] else ""
    dist.init_process_group("gloo")
    if how == "helped":  # by a process that a handler at exit would end
        helper = subprocess.Popen(["sh", "-c", "sleep 1000; true"])
        atexit.register(helper.kill)
        print(f"helped by {helper.pid}", flush=True)
    numbers = torch.Generator().manual_seed(1000 * dist.get_rank() + torch.initial_seed())
    x = torch.randn(SAMPLES, WEIGHTS, generator=numbers)
    y = x @ torch.linspace(-1, 1, WEIGHTS) + NOISE * torch.randn(SAMPLES, generator=numbers)
    ddp = DDP(Regression())
    if how == "hooked":
        ddp.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        if how == "failing" and step == 3 and os.environ["FASTREDUCE_COMPRESSION"] == "int8":
            sys.exit(7)
        optimizer.zero_grad()
        found, nothing = ddp(x, how == "outlier")
        loss = (found - y).square().mean() + nothing
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"final accuracy {1 / (1 + loss.item()):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
