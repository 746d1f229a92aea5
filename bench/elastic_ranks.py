"""One process of `python -m bench.elastic`: it trains, and writes a line for each step.

`python -m bench.elastic_ranks STORE FOLDER NAME TRANSPORT SETTING TIMEOUT`, with RANK and WORLD_SIZE. A line has the
step, the time, how many train, in which generation, a hash of the parameters, and the loss.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastreduce import DistributedDataParallel, elastic

LAYERS, WIDTH, BATCH = 6, 64, 8
MOMENTUM, RATE = 0.9, 0.01


def parameters_hash(model: nn.Module) -> str:
    """The same on ranks whose parameters have the same bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one process in one step."""
    generator = torch.Generator().manual_seed(1000 * step + seed)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.roll(1, dims=1) * 0.5


def resources() -> dict[str, Any]:
    """What a process holds: threads, descriptors, and pages of memory that are its own."""
    pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "megabytes": round((pages[1] - pages[2]) * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
    }


def main() -> None:
    store, folder, name, transport, setting, timeout = sys.argv[1:]
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    ddp = DistributedDataParallel(
        model,
        elastic=True,
        bucket_cap_mb=0.03,
        transport=None if transport == "any" else transport,
        compression=setting,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    members = elastic.join(ddp, store=store, timeout=float(timeout), optimizer=optimizer, scheduler=scheduler)
    last, end = Path(folder, "last step"), None
    with Path(folder, f"{name}.steps").open("a", buffering=1) as file:
        while end is None or members.step < end:
            if end is None and last.exists():
                end = int(last.read_text())
            x, y = batch(rank, members.step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(ddp(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            told = members.step, time.time(), members.size, members.generation, parameters_hash(model), loss.item()
            file.write(" ".join(map(str, told)) + "\n")
            if members.step % 100 == 0:
                Path(folder, f"{name}.part").write_text(json.dumps(resources()))
                os.replace(Path(folder, f"{name}.part"), Path(folder, f"{name}.resources"))


if __name__ == "__main__":
    main()
