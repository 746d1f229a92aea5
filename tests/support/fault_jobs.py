"""What ranks do in test_faults.py: they train, and the victim stops or kills itself in some stage of a step.

`python -m tests.support.fault_jobs FOLDER WRAPPER BACKEND SETTING VICTIM SIGNAL STAGE SECONDS`, with torch's
environment variables, or under mpirun. The victim writes the time of its end into FOLDER/event.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

STEPS = 1_000_000
STAGES = ("construction", "first step", "rebuild", "forward", "backward", "collective", "between", "exit")


class Victim:
    """Ends this process when it comes to the stage, if it is the one."""

    def __init__(self, folder: Path, chosen: bool, what: signal.Signals, stage: str) -> None:
        self.folder, self.chosen, self.what, self.stage = folder, chosen, what, stage

    def __call__(self, stage: str) -> None:
        if self.chosen and stage == self.stage:
            self.folder.joinpath("event.part").write_text(str(time.time()))
            os.replace(self.folder / "event.part", self.folder / "event")
            os.kill(os.getpid(), self.what)


class Model(nn.Module):
    """Some layers, in several buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        self.inside: Callable[[], None] = lambda: None

    def forward(self, x: Any) -> Any:
        x = self.layers[:3](x)
        self.inside()
        return self.layers[3:](x)


def main() -> None:
    folder, wrapper, backend, setting, victim, what, stage, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    timeout = timedelta(seconds=60)  # until all is imported and compiled, on a busy machine
    if backend == "mpi":
        from fastreduce.distributed.mpi import init_mpi

        init_mpi(timeout)
    elif backend == "ours":
        import fastreduce.distributed

        fastreduce.distributed.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    rank = dist.get_rank()
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    end = Victim(Path(folder), rank == int(victim), signal.Signals[what], stage)
    torch.manual_seed(0)
    model = Model()
    if wrapper == "ours":
        from fastreduce import DistributedDataParallel

        options: Any = {"compression": setting}
    else:
        from torch.nn.parallel import DistributedDataParallel  # type: ignore[assignment]

        options = {}
    warm = DistributedDataParallel(Model(), bucket_cap_mb=0.03, **options)
    for _ in range(2):
        warm(torch.randn(8, 64)).sum().backward()
    group = dist.new_group(timeout=timedelta(seconds=float(seconds)))
    dist.barrier()
    end("construction")
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03, process_group=group, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    end("first step")
    late = False

    def watch_collectives() -> None:
        from fastreduce.transports import TwoLevelTransport

        transport, names = ddp._transport, ["late_all_gather", "all_gather", "two_shot"]
        if isinstance(transport, TwoLevelTransport):
            level = transport.levels.gathers
            transport = level.within if setting == "none" or level.between.world_size == 1 else level.between
        elif setting == "none":
            names = ["all_reduce", "all_reduce_slots"]

        def in_a_collective(started: Callable[..., Any], *arguments: Any) -> Any:
            work = started(*arguments)
            if callable(work):  # what begins it
                return partial(in_a_collective, work)
            if work is not None:
                end("collective")
            return work

        for name in names:
            if hasattr(transport, name):
                setattr(transport, name, partial(in_a_collective, getattr(transport, name)))

    for step in range(STEPS):
        late = step >= 3
        if step == 3 and rank == 0:
            Path(folder, "going").touch()
        if step == 1:
            end("rebuild")
        if step == 3 and wrapper == "ours" and end.chosen and stage == "collective":
            watch_collectives()
        if late:
            model.inside = lambda: end("forward")
        out = ddp(torch.randn(8, 64))
        if step == 3:
            model.layers[2].weight.register_hook(lambda _: end("backward"))
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if late:
            end("between")
        if stage == "exit" and step == 4:
            break
    print("trained", flush=True)
    end("exit")
    if stage != "exit":
        raise AssertionError("the victim did not end")


if __name__ == "__main__":
    atexit.register(lambda: print(f"left at {time.time()}", flush=True))  # called last
    try:
        main()
    except Exception:
        print(f"raised at {time.time()}", flush=True)
        raise
