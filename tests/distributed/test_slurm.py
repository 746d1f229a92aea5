"""Slurm itself, where it is installed: a controller and two nodes on this machine, `srun`, `salloc` and `sbatch`."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastreduce.environment.engines import expand_hosts
from tests.support import mpirun
from tests.support.commands import ROOT
from tests.support.slurm import Cluster, cluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.timeout(300)]

EPOCHS = 12
TRAIN = r"""
import os, sys, torch
import fastreduce.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = dist.DistributedDataParallel(torch.nn.Linear(4, 4))
ddp(torch.full((2, 4), rank + 1.0)).sum().backward()
average = ddp.module.weight.grad[0, 0].item()
line = f"RANK {rank} {dist.get_world_size()} {dist.get_local_rank()} {os.environ['MASTER_ADDR']} {average}"
os.write(1, f"{line}\n".encode())  # whole: mpirun's ranks write to a terminal, piece by piece
if rank == 1 and sys.argv[1:]:
    sys.exit(int(sys.argv[1]))
for _ in range(3):
    ddp(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm"), nodes=2) as made:
        yield made


@pytest.fixture
def train(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


@pytest.mark.long
def test_srun_finds_ranks_hosts_and_address(slurm: Cluster, train: Path):
    done = slurm.run("srun", "-N", 2, "-n", 3, sys.executable, train)
    assert done.returncode == 0, done.stdout
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("RANK"))
    locals_ = [0, 1, 0]  # two tasks on the first node, one on the second
    assert lines == [f"RANK {rank} 3 {locals_[rank]} 127.0.0.1 4.0" for rank in range(3)]


@pytest.mark.long
def test_a_failing_rank_ends_the_step_with_its_exit_code(slurm: Cluster, train: Path):
    done = slurm.run("srun", "-N", 1, "-n", 2, sys.executable, train, 3)
    assert done.returncode == 3, done.stdout
    assert "rank 0 of 2" in done.stdout and "No word from rank 1" in done.stdout


@pytest.mark.parametrize("command", [("salloc", "-n", 3), ("sbatch",)])
@pytest.mark.long
def test_a_plain_process_in_an_allocation_waits_for_nobody(
    slurm: Cluster, train: Path, tmp_path: Path, command: tuple[Any, ...]
):
    python: tuple[object, ...] = (sys.executable, train)
    if command == ("sbatch",):
        job = tmp_path / "job"
        job.write_text(f"#!/bin/sh\n#SBATCH -n 3\n{sys.executable} {train}\n")
        command, python = ("sbatch", "--wait", "--output=out"), (job,)
    done = slurm.run(*command, *python, cwd=tmp_path)
    output = done.stdout + (tmp_path / "out").read_text() if python == (tmp_path / "job",) else done.stdout
    assert done.returncode == 1
    assert "WORLD_SIZE not set" in output and "or in a Slurm job with srun" in output


@pytest.mark.long
@mpirun.needs_mpirun
def test_mpirun_in_a_job(slurm: Cluster, train: Path):
    """mpirun asks Slurm for hosts; its ranks are its own, whatever Slurm's variables say of mpirun itself."""
    command = (mpirun.MPIRUN, "-n", 2, sys.executable, train)
    settings = {name: value for name, value in mpirun.environment().items() if name.startswith("OMPI_")}
    done = slurm.run("salloc", "-N", 1, "-n", 2, *command, **settings)
    assert done.returncode == 0, done.stdout
    assert sorted(re.findall("RANK .*", done.stdout)) == [f"RANK {rank} 2 {rank} 127.0.0.1 3.0" for rank in range(2)]


@pytest.mark.parametrize("text", ["gpu[08-10,12],login", "r[1-2]n[099-100]", "b2,a[3],b1", "127.0.0.[1-2]"])
def test_lists_of_nodes_are_read_as_slurm_reads_them(slurm: Cluster, text: str):
    assert expand_hosts(text) == slurm.run("scontrol", "show", "hostnames", text).stdout.split()


@pytest.mark.long
def test_a_batch_job_that_loses_a_rank_is_requeued_and_goes_on_to_the_same_end(slurm: Cluster, tmp_path: Path):
    """examples/slurm_train.sbatch, in which a rank is killed, and an undisturbed run of the same script under srun."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    options = ("--max_epochs", EPOCHS)
    submit = ("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "examples/slurm_train.sbatch", *options)
    job = slurm.run(*submit, cwd=tmp_path).stdout.strip()
    snapshot, log = tmp_path / f"digits-{job}.pt", tmp_path / f"digits-{job}.log"
    until(snapshot.exists, slurm, log)
    (victim,) = tasks(job, 1)
    victim.kill()
    until(lambda: "JobState=PENDING" in (state := show(slurm, job)) and "Restarts=1" in state, slurm, log)
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")  # of itself Slurm lets it wait for two minutes
    until(lambda: re.search("JobState=(COMPLETED|FAILED)", show(slurm, job)), slurm, log)
    said = log.read_text()
    assert "JobState=COMPLETED" in show(slurm, job), said
    assert "exit code 137: requeued" in said
    epochs = [int(number) for number in re.findall(r"^epoch (\d+): loss", said, re.MULTILINE)]
    # What was in a snapshot is not trained again; of one the line may be lost with the rank.
    assert epochs == sorted({*epochs}) and epochs[-1] == EPOCHS - 1 and len(epochs) >= EPOCHS - 1, said

    alone = ("examples/snapshot_train.py", "--snapshot_path", "alone.pt", *options)
    done = slurm.run("srun", "-N", 2, "-n", 2, sys.executable, *alone, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    ours, alones = (torch.load(path, weights_only=False)["model"] for path in (snapshot, tmp_path / "alone.pt"))
    assert ours.keys() == alones.keys() and all(torch.equal(ours[name], alones[name]) for name in ours)


def until(done: Any, slurm: Cluster, log: Path) -> None:
    """Wait until `done()`, or fail with what the job and the daemons have written."""
    deadline = time.monotonic() + 150
    while not done():
        if time.monotonic() > deadline:
            pytest.fail(f"not within 150 s\n{log.read_text() if log.exists() else ''}\n{slurm.logs()}")
        time.sleep(0.02)


def show(slurm: Cluster, job: str) -> str:
    """What Slurm says of a job, among it `JobState` and `Restarts`."""
    return slurm.run("scontrol", "show", "job", job).stdout


def tasks(job: str, rank: int) -> list[psutil.Process]:
    """The process that is that rank of a job's step."""
    mine = {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_STEP_ID": "0"}
    found = []
    for process in psutil.process_iter():
        try:
            if "snapshot_train.py" in " ".join(process.cmdline()) and mine.items() <= process.environ().items():
                found.append(process)
        except (psutil.Error, subprocess.SubprocessError):
            continue
    return found
