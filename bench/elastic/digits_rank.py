"""One process of `python -m bench.elastic.loss`: it trains on scikit-learn's digits, of which it holds some out.

`python -m bench.elastic.digits_rank STORE FOLDER NAME SEED STEPS`, with RANK and WORLD_SIZE. NAME.steps is as that of
bench.elastic_ranks, with the loss on what is held out, and the share of it that is told rightly in NAME.right.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from fastreduce import DistributedDataParallel, elastic

from .elastic_ranks import parameters_hash

BATCH, RATE, TIMEOUT = 16, 3e-3, 5.0
PAUSE_SECONDS = 0.01  # as if a step were longer: so that kills and those who come in again fall into the training


def main() -> None:
    store, folder, name, seed, steps = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(1000 * int(seed) + int(os.environ["RANK"]))
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(x)) % 5 == 0
    x, y, test, truth = x[~held_out], y[~held_out], x[held_out], y[held_out]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model, elastic=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=20 * RATE, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, int(steps))
    sampler = elastic.BatchSampler(len(x), BATCH, seed=int(seed))
    parts = {"optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
    members = elastic.join(ddp, store=store, timeout=TIMEOUT, **parts)
    with Path(folder, f"{name}.steps").open("a", buffering=1) as file:
        for batch in sampler:
            if members.step >= int(steps):
                break
            optimizer.zero_grad()
            cross_entropy(ddp(x[batch]), y[batch]).backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                loss = cross_entropy(model(test), truth).item()
            told = members.step, time.time(), members.size, members.generation, parameters_hash(model), loss
            file.write(" ".join(map(str, told)) + "\n")
            time.sleep(PAUSE_SECONDS)
    right = (model(test).argmax(1) == truth).float().mean().item()
    Path(folder, f"{name}.right").write_text(str(right))


if __name__ == "__main__":
    main()
