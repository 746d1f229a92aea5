"""One process of `python -m bench.elastic`: it trains, and writes a line for each step.

`python -m bench.elastic.elastic_ranks STORE FOLDER NAME TRANSPORT SETTING TIMEOUT`, with RANK and WORLD_SIZE. A line of
NAME.steps has the step, the time, how many train, in which generation, a hash of the parameters, and the loss; one of
NAME.trained the step, and the samples that are in its averages, which a parameter of the model tells: its gradient is
1 for each sample. NAME.samples has what the sampler keeps at the end.
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
from torch import Tensor, nn

from fastreduce import DistributedDataParallel, elastic

SAMPLES, LAYERS, WIDTH, BATCH = 960, 6, 64, 8
MOMENTUM, RATE = 0.9, 0.01


class Model(nn.Module):
    """Layers, and a parameter whose gradient tells the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.trained = nn.Parameter(torch.zeros(SAMPLES))

    def forward(self, x: Tensor, samples: list[int]) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.trained[samples].sum()


def parameters_hash(model: nn.Module) -> str:
    """The same on ranks whose parameters have the same bits."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def averaged(grad: Tensor) -> list[int]:
    """The samples in an average of ones for each, of however many ranks; what error feedback adds is far less."""
    times = (grad / grad[grad > 0.01 * grad.max()].min()).round().int()
    return torch.arange(len(grad)).repeat_interleave(times).tolist()


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
    torch.manual_seed(int(os.environ["RANK"]))
    model = Model()
    ddp = DistributedDataParallel(
        model,
        elastic=True,
        bucket_cap_mb=0.03,
        transport=None if transport == "any" else transport,
        compression=setting,
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE, momentum=MOMENTUM)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
    sampler = elastic.BatchSampler(SAMPLES, BATCH)
    parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    members = elastic.join(ddp, store=store, timeout=float(timeout), **parts)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
    last, end = Path(folder, "last step"), None
    with (
        Path(folder, f"{name}.steps").open("a", buffering=1) as file,
        Path(folder, f"{name}.trained").open("a", buffering=1) as trained,
    ):
        for batch in sampler:
            if end is None and last.exists():
                end = int(last.read_text())
            if end is not None and members.step >= end:
                break
            x = data[batch]
            optimizer.zero_grad()
            out, ones = ddp(x, batch)
            loss = nn.functional.mse_loss(out, x.roll(1, dims=1) * 0.5)
            (loss + ones).backward()
            trained.write(" ".join(map(str, [members.step, *averaged(model.trained.grad)])) + "\n")
            optimizer.step()
            scheduler.step()
            told = members.step, time.time(), members.size, members.generation, parameters_hash(model), loss.item()
            file.write(" ".join(map(str, told)) + "\n")
            if members.step % 100 == 0:
                Path(folder, f"{name}.part").write_text(json.dumps(resources()))
                os.replace(Path(folder, f"{name}.part"), Path(folder, f"{name}.resources"))
    Path(folder, f"{name}.samples").write_text(json.dumps(sampler.state_dict()))


if __name__ == "__main__":
    main()
