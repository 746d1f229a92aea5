"""One rank of `python -m bench.faults`: it trains, and from some step on one of the ranks does what is wrong.

`python -m bench.faults.fault_ranks JOB`, a `Job` as JSON, with torch's environment variables. The rank that does it
writes the time into FOLDER/event; all write when, and what, they were told.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3000  # at most
CLEAN_STEPS = 500
LEFT = 30  # steps to the end of the training, where a batch less is noticed
LATER = 0.3  # of a backward, or of a step
WIDTH, LAYERS, BATCH = 256, 6, 64
HEAP, GC_EVERY = 400_000, 5  # objects, and steps from one collection to the next
AT_WRAPPING = ("shape", "dtype", "order", "setting", "frozen")


@dataclass(frozen=True)
class Job:
    """What happens to whom.

    Attributes:
        folder: for files.
        kind: the name of a kind in `bench/faults.py`; "clean" for none.
        victim: the rank; -1 for none.
        step: in which it begins.
        where: in which part of the step: "data", "forward", "backward" or "optimizer".
        seconds: the group's timeout.
        transport: a name, or "" for the one that is chosen.
        setting: a compression.
        disk: a folder on a disk that is too small.
    """

    folder: str
    kind: str
    victim: int
    step: int
    where: str
    seconds: float
    transport: str
    setting: str
    disk: str


def take_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def bad_batch() -> None:
    raise RuntimeError("a bad batch")


def torch_collective() -> None:
    dist.all_reduce(torch.ones(4))


def our_collective() -> None:
    from fastreduce import distributed

    distributed.all_reduce(torch.ones(4))


def evaluate() -> None:
    time.sleep(1000)


ONCE: dict[str, Callable[[], object]] = {
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exception": bad_batch,
    "exit": lambda: sys.exit(0),
    "lock": take_lock,
    "torch collective": torch_collective,
    "our collective": our_collective,
}
"""What a rank does once."""


class Fault:
    """Does what is wrong, on the rank that does it, in the part of the step where that belongs."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._mine = job, rank == job.victim
        self.step, self._seconds, self._begun = -1, 0.0, False
        self._heap: list[Any] = []

    @property
    def now(self) -> bool:
        """Whether this is the step in which it begins."""
        return self._mine and self.step == self._job.step

    @property
    def on(self) -> bool:
        """Whether it has begun."""
        return self._mine and self.step >= self._job.step

    def begin(self) -> None:
        """Write the time."""
        path = Path(self._job.folder, "event")
        path.with_suffix(".part").write_text(str(time.time()))
        os.replace(path.with_suffix(".part"), path)

    def get_ready(self, reducer: Any) -> None:
        """Before the step in which it begins: how long is an undisturbed step, or its backward?"""
        steps = [step for step in reducer.flight_record().steps if step.seconds and "backward" in step.took]
        seconds = [step.took["backward"] if self._job.kind == "backward" else step.seconds for step in steps]
        self._seconds = LATER * statistics.median(seconds)
        if self._job.kind == "gc":
            self._heap = [[i] for i in range(HEAP)]
        self.begin()

    def __call__(self, where: str) -> None:
        """This rank is in a part of a step."""
        kind = self._job.kind
        if not self.on or where != self._job.where:
            return
        if kind in ONCE:
            if not self._begun:
                self._begun = True
                self.begin()
                ONCE[kind]()
        elif kind in ("backward", "loader", "optimizer"):
            time.sleep(self._seconds)
        elif kind == "gc" and self.step % GC_EVERY == 0:
            gc.collect()


def make_model(kind: str) -> nn.Sequential:
    """The same on every rank but one."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    if kind == "shape":
        model[3] = nn.Linear(WIDTH, WIDTH + 8)
    if kind == "dtype":
        model[3].to(torch.float64)
    if kind == "order":
        bias = model[3]._parameters.pop("bias")
        weight = model[3]._parameters.pop("weight")
        model[3].register_parameter("bias", bias)
        model[3].register_parameter("weight", weight)
    if kind == "frozen":
        model[3].weight.requires_grad_(False)
    return model


def train(job: Job) -> None:
    """Until there is something to tell."""
    from fastreduce import DistributedDataParallel
    from fastreduce.checkpoint import save_checkpoint

    rank, kind = dist.get_rank(), job.kind
    fault, other = Fault(job, rank), rank == job.victim and kind in AT_WRAPPING
    model = make_model(kind if other else "")
    group = dist.new_group(timeout=timedelta(seconds=job.seconds))
    dist.barrier()
    if other:
        fault.begin()
    setting = "bf16" if other and kind == "setting" else job.setting
    ddp = DistributedDataParallel(
        model, compression=setting, transport=job.transport or None, process_group=group, bucket_cap_mb=0.5
    )
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    model[1].register_forward_pre_hook(lambda *_: fault("forward"))
    model[3].weight.register_hook(lambda _: fault("backward"))
    optimizer.register_step_pre_hook(lambda *_: fault("optimizer"))
    last = CLEAN_STEPS if kind == "clean" else job.step + LEFT if kind == "batch" else STEPS

    def step(accumulated: int) -> bool:
        """Whether this rank was told something, as all are in the same backward."""
        for _ in range(accumulated):
            ddp(torch.randn(BATCH, WIDTH)).square().mean().backward()
            found = ddp.reducer.stragglers()
            if found is not None and (found.late or found.notes):
                print(f"told at {time.time()}: {'; '.join([*map(str, found.late), *found.notes])}", flush=True)
                return True
        optimizer.step()
        optimizer.zero_grad()
        return False

    for fault.step in range(last):
        if fault.now and kind not in ONCE:
            fault.get_ready(ddp.reducer)
        if fault.step == job.step and rank == 0:
            Path(job.folder, "going").touch()
        fault("data")
        if fault.now and kind == "batch":
            continue
        if fault.now and kind == "missing":
            ddp(torch.randn(BATCH, WIDTH)).square().mean()
            continue
        if fault.now and kind == "frozen later":
            model[3].weight.requires_grad_(False)
        if fault.step == job.step and kind == "disk":
            save_checkpoint(Path(job.disk, "snapshot"), model=ddp, optimizer=optimizer)
        with ddp.no_sync() if fault.now and kind == "no_sync" else nullcontext():
            if step(1 if kind != "backwards" else 3 if fault.on else 2):
                return
    if kind == "batch":
        evaluate()
    print(f"trained {last} steps", flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    Path(job.folder, f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    try:
        train(job)
    except Exception:
        print(f"raised at {time.time()}", flush=True)
        raise


if __name__ == "__main__":
    main()
