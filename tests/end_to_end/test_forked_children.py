"""A child that a training process forks, by `os.fork` or `multiprocessing`, ends as Python does and touches nothing.

What it cannot do there is an error at once.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import TORCHRUN, run, with_environment

TRAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from fastreduce import DistributedDataParallel

dist.init_process_group("gloo")
trained = [
    DistributedDataParallel(nn.Linear(64, 64), compression="int8:error_feedback", transport=name)
    for name in ("gloo", "shm")
]

def step():
    for ddp in trained:
        ddp(torch.ones(4, 64)).sum().backward()

step()
if not (child := os.fork()):
    sys.exit(3)
deadline = time.monotonic() + 100
while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
    time.sleep(0.05)
print("child:", os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", flush=True)
if not ended[0]:
    os.kill(child, 9)
step()
"""


def test_it_ends_at_once_and_training_goes_on(tmp_path: Path):
    script, traces = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(TRAIN)
    traces.mkdir()
    env = with_environment(GLOO_SOCKET_IFNAME="lo", FASTREDUCE_TRACE=str(traces))
    done = run(TORCHRUN, "--nproc-per-node", "2", script, env=env)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "child: 3", "child: 3"]
    assert all(json.loads(path.read_text()) for path in traces.glob("rank*.json"))  # whole, once


REDUCE = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from fastreduce import DistributedDataParallel
from fastreduce.errors import TransportError

dist.init_process_group("gloo")
rank = dist.get_rank()
trained = [
    DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), transport=name, bucket_cap_mb=cap)
    for name in ("gloo", "shm") for cap in (25, 1e-5)
]

def step(ddp):
    ddp.zero_grad()
    (ddp(torch.ones(4, 64)).sum() * (rank + 1)).backward()

def told(call):
    start = time.monotonic()
    try:
        call()
    except TransportError as error:
        return "a fork of process" in str(error) and time.monotonic() - start < 20
    return False

for ddp in trained:
    for _ in range(3):
        step(ddp)
if rank == 0 and not (child := os.fork()):
    found = [told(lambda: step(ddp)) for ddp in trained]
    found.append(told(lambda: DistributedDataParallel(nn.Linear(4, 4))))
    print("child:", found, flush=True)
    sys.exit(3)
if rank == 0:
    deadline = time.monotonic() + 100
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    if not ended[0]:
        print("child hangs", flush=True)
        os.kill(child, 9)
for ddp in trained:
    step(ddp)
    assert (ddp.module[1].bias.grad == 4 * 1.5).all()
"""


@pytest.mark.long
def test_one_that_reduces_or_asks_the_store_is_told_at_once(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(REDUCE)
    done = run(TORCHRUN, "--nproc-per-node", "2", script, env=with_environment(GLOO_SOCKET_IFNAME="lo"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == [f"child: {[True] * 5}", ""]


CALL = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
import fastreduce
import fastreduce.distributed as ours
from fastreduce.errors import TransportError

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
model, tensor = torch.nn.Linear(4, 4), torch.ones(4)
ours.all_reduce(tensor)
calls = {
    "all_reduce": lambda: ours.all_reduce(tensor),
    "send": lambda: ours.send(tensor, 1),
    "all_gather": lambda: ours.functional.all_gather(tensor),
    "remote_recv": lambda: ours.remote_recv(1),
    "barrier": lambda: ours.barrier(async_op=True),
    "new_group": lambda: ours.new_group([0, 1]),
    "save_checkpoint": lambda: fastreduce.save_checkpoint(sys.argv[1], model=model),
    "load_checkpoint": lambda: fastreduce.load_checkpoint(sys.argv[1], model=model),
}
fastreduce.save_checkpoint(sys.argv[1], model=model)
if dist.get_rank() == 0:
    for name, call in calls.items():
        if not (child := os.fork()):
            assert ours.get_rank() == 0 and ours.get_world_size() == 2 and ours.get_backend() == "gloo"
            try:
                call()
            except TransportError as error:
                os._exit(3 if "a fork of process" in str(error) else 4)
            os._exit(5)
        deadline = time.monotonic() + 15
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.05)
        if not ended[0]:
            os.kill(child, 9)
            os.waitpid(child, 0)
        print(name, os.waitstatus_to_exitcode(ended[1]) if ended[0] else "hangs", flush=True)
ours.all_reduce(tensor)
assert tensor[0] == 4
"""


@pytest.mark.long
def test_one_that_calls_a_collective_of_the_parents_group_is_told_at_once(tmp_path: Path):
    script = tmp_path / "call.py"
    script.write_text(CALL)
    env = with_environment(GLOO_SOCKET_IFNAME="lo")
    done = run(TORCHRUN, "--nproc-per-node", "2", script, tmp_path / "snapshot.pt", env=env)
    assert done.returncode == 0, done.stderr
    calls = [
        "all_reduce",
        "send",
        "all_gather",
        "remote_recv",
        "barrier",
        "new_group",
        "save_checkpoint",
        "load_checkpoint",
    ]
    assert done.stdout.split("\n") == [*(f"{call} 3" for call in calls), ""]
