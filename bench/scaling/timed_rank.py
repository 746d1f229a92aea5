"""What each rank runs in the check of the cost model: `timed_rank.py SIZES ROUNDS OUT`, with torch's variables."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import DistributedDataParallel

from ..paired import by_turns
from ..training.steps import set_up_process
from .model import SETTINGS

WARM_UP = 3  # steps: buckets are rebuilt, and connections made, after the first


class Given(nn.Module):
    """A model whose gradients are what one says, and whose backward takes next to no time."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return sum((value @ gradient for value, gradient in zip(self.values, gradients, strict=True)), torch.zeros(()))


def step(wrapper: DistributedDataParallel, gradients: list[Tensor]) -> float:
    """Seconds of a backward, which all ranks begin at once."""
    wrapper.zero_grad()
    loss = wrapper(gradients)
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def main() -> None:
    """Time steps of all settings by turns, flat and in two levels; rank 0 writes medians of the slowest rank."""
    sizes, rounds = [int(size) for size in sys.argv[1].split(",")], int(sys.argv[2])
    several = int(os.environ["LOCAL_WORLD_SIZE"]) > 1
    set_up_process()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrappers = {
        f"{setting}, {how}": DistributedDataParallel(Given(sizes), compression=setting, transport=transport)
        for setting in SETTINGS
        for how, transport in (("flat", "gloo"), *([("two levels", "two_level")] if several else []))
    }
    generator = torch.Generator().manual_seed(rank)
    gradients = [torch.randn(size, generator=generator) for size in sizes]
    steps = {name: partial(step, wrapper, gradients) for name, wrapper in wrappers.items()}
    by_turns(steps, WARM_UP)
    times = by_turns(steps, rounds)
    of_all: list[dict[str, list[float]]] = [{} for _ in range(world_size)]
    dist.all_gather_object(of_all, times)
    if rank == 0:
        slowest = {name: [max(step) for step in zip(*(of[name] for of in of_all), strict=True)] for name in times}
        medians = {name: statistics.median(steps) for name, steps in slowest.items()}
        Path(sys.argv[3]).write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
