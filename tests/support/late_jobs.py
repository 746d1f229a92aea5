"""What ranks do in test_who_is_late.py: `python -m tests.support.late_jobs WHAT SECONDS` with torch's variables.

Rank 1 trains until step 20, or raises soon, before the first one. By WHAT it then loads data for ever, stops or kills
itself, raises or comes to its end, raises and saves or loads, hangs in its own hook in backward, calls another
collective, or reduces another module than the others; or it leaves out a reduction, or the backward of one, or runs it
in no_sync alone, and when it has run all steps the others lack one. The others may wait for it in a collective of
torch's: for buffers, or in a snapshot.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, LATE, SOON = 30, 20, 0
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL, "snapshot": signal.SIGKILL}


def load_batch(what: str) -> Tensor:
    if what in ("loader", "buffers"):
        time.sleep(1000)
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
    if what in ("raised", "soon", "saved", "loaded"):
        raise ValueError("no such file")
    if what == "exited":
        sys.exit(0)
    if what == "collective":
        dist.all_reduce(torch.ones(4))
    return torch.randn(8, 64)


def hang_in_backward(_: Tensor) -> None:
    time.sleep(1000)


def evaluate() -> None:
    time.sleep(1000)


def main() -> None:
    what, seconds = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    from fastreduce import DistributedDataParallel, load_checkpoint, save_checkpoint

    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    if what == "buffers":
        model.register_buffer("count", torch.zeros(1))
    group = dist.new_group(timeout=timedelta(seconds=float(seconds)))
    ddp = DistributedDataParallel(model, compression="int8", bucket_cap_mb=0.03, process_group=group)
    if what == "other":
        other = DistributedDataParallel(nn.Linear(4, 4), compression="int8", process_group=group)
        other(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    for step in range(STEPS):
        late = dist.get_rank() == 1 and step == (SOON if what == "soon" else LATE)
        if step == LATE:
            time.sleep(min(4.0, float(seconds) / 4))  # until ranks have introduced themselves
        try:
            batch = load_batch(what if late else "")
        except ValueError:
            if what in ("saved", "loaded"):
                print(f"calls at {time.time()}", flush=True)
                call = save_checkpoint if what == "saved" else load_checkpoint
                call(os.environ["SNAPSHOT"], model=ddp, optimizer=optimizer)
            raise
        if what == "snapshot" and step == LATE:
            save_checkpoint(os.environ["SNAPSHOT"], model=ddp, optimizer=optimizer)
        if late and what == "backward":
            model[2].weight.register_hook(hang_in_backward)
        if late and what == "other":
            other(torch.ones(2, 4)).sum().backward()
        if late and what == "forward":
            ddp(batch)
        if late and what in ("skipped", "forward"):
            continue
        with ddp.no_sync() if late and what == "no_sync" else nullcontext():
            ddp(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate()


if __name__ == "__main__":
    main()
