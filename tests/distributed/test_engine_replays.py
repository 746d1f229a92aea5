"""Processes with the environment that an engine gives them: they meet, or say why they cannot, and wait for nobody."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastreduce.distributed as dist
from fastreduce import SettingError
from fastreduce.environment.engines import SRUN_NAMES
from tests.support import engine_environments as engines
from tests.support import mpirun
from tests.support.commands import FASTREDUCE, PYTHON, ROOT, TORCHRUN, Done, Running, finish, free_port, run, started
from tests.support.ranks import RankPool

ENGINES = ("SLURM_", "OMPI_", "PMI", "PET_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "TORCHELASTIC_", "GLOO_")
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
SHOW = f"""
import os, sys
line = ["SEEN", *(os.environ.get(name) for name in {NAMES}), *sys.argv[1:]]
os.write(1, (" ".join(line) + chr(10)).encode())  # whole, though Kubeflow switches buffers off
"""

EPOCHS = 12

Environment = dict[str, str]


def without_engines(**more: str) -> Environment:
    """This process's environment without any engine's variables, and more."""
    return {**{name: value for name, value in os.environ.items() if not name.startswith(ENGINES)}, **more}


def _train(rank: int, world_size: int, environments: list[Environment]) -> dict[str, Any]:
    os.environ.update(kept := without_engines(**environments[rank]))
    for name in set(os.environ) - set(kept):
        del os.environ[name]
    dist.init_process_group("gloo")
    ddp = dist.DistributedDataParallel(nn.Linear(2, 1))
    ddp(torch.full((1, 2), rank + 1.0)).sum().backward()
    seen = {
        "numbers": (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()),
        "told": [os.environ.get(name) for name in NAMES],
        "average": ddp.module.weight.grad.tolist(),
    }
    dist.destroy_process_group()
    return seen


def two_tasks(rank: int) -> Environment:
    """One task on each of two nodes, whose names lead to loopback."""
    nodes = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    task = {"SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"}
    return engines.srun(rank, SLURM_JOB_ID=str(os.getpid()), **nodes, **task)


def pod(rank: int, port: int) -> Environment:
    """One of two pods whose master's name leads to loopback; each is a host of its own."""
    ports = {"MASTER_PORT": str(port), "PET_MASTER_PORT": str(port)}
    return {**engines.kubeflow(rank, address="127.0.0.1"), **ports, "FASTREDUCE_HOST": f"pod {rank}"}


def test_tasks_of_srun_meet_on_one_node_and_on_two(bare2: RankPool):
    job = str(os.getpid())
    one_node = [engines.srun_on_one_node(rank, SLURM_JOB_ID=job) for rank in range(2)]
    for rank, seen in enumerate(bare2.run(_train, one_node)):
        assert seen["numbers"] == (rank, 2, rank) and seen["average"] == [[1.5, 1.5]]
        assert seen["told"] == [str(rank), "2", str(rank), "2", "127.0.0.1"]
    for rank, seen in enumerate(bare2.run(_train, [two_tasks(rank) for rank in range(2)])):
        assert seen["numbers"] == (rank, 2, 0) and seen["average"] == [[1.5, 1.5]]
        assert seen["told"] == [str(rank), "2", "0", "1", "127.0.0.1"]


def test_ranks_of_mpirun_meet_over_gloo(bare2: RankPool):
    ranks = [{**engines.mpirun(rank, 2), "PMIX_NAMESPACE": str(os.getpid())} for rank in range(2)]
    for rank, seen in enumerate(bare2.run(_train, ranks)):
        assert seen["numbers"] == (rank, 2, rank) and seen["average"] == [[1.5, 1.5]]


def test_pods_of_kubeflow_meet_and_each_is_a_host(bare2: RankPool):
    port = free_port()
    for rank, seen in enumerate(bare2.run(_train, [pod(rank, port) for rank in range(2)])):
        assert seen["numbers"] == (rank, 2, 0) and seen["average"] == [[1.5, 1.5]]  # no variable says the local rank


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (engines.BATCH_SCRIPT, "or start the script with torchrun or fastreduce launch, or in a Slurm job with srun"),
        (engines.SALLOC_SHELL, "in a Slurm job with srun"),
        (engines.elastic_kubeflow(), "with torchrun or fastreduce launch, to which PET_NNODES and the other PET_"),
        (engines.kubeflow(1, per_pod="2"), "PET_NPROC_PER_NODE=2 asks for several ranks in this pod"),
    ],
    ids=["sbatch", "salloc", "elastic pod", "pod for several ranks"],
)
def test_one_process_waits_for_nobody_where_the_engine_has_started_no_ranks(
    environment: Environment, said: str, monkeypatch: pytest.MonkeyPatch
):
    for name in set(os.environ) - set(without_engines()):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError) as error:
        dist.init_process_group("gloo")
    assert said in str(error.value)


@mpirun.needs_mpirun
@pytest.mark.parametrize("engine", ["srun", pytest.param("torchrun", marks=pytest.mark.long)])
def test_mpi_that_knows_nothing_of_the_ranks_is_an_error(engine: str):
    read = {*SRUN_NAMES, "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"}  # by more, Open MPI would end it without our word
    step = {name: value for name, value in engines.srun_on_one_node(1).items() if name in read}
    variables = step if engine == "srun" else engines.torchrun(1, 2)
    environment = {**mpirun.environment(), **without_engines(OMPI_MCA_ess_singleton_isolated="1", **variables)}
    code = "import fastreduce.distributed as dist; dist.init_process_group('mpi')"
    done = run(PYTHON, "-c", code, env=environment, together=True)
    other = "srun says rank 1 of 2" if engine == "srun" else "RANK=1 and WORLD_SIZE=2 say another"
    assert done.returncode == 1
    assert f"SettingError: init_process_group over MPI: MPI says rank 0 of 1, and {other}. Start" in done.stdout


@pytest.mark.parametrize(
    "command", ["fastreduce run", pytest.param("python -m fastreduce.run", marks=pytest.mark.long)]
)
def test_an_unedited_script_gets_what_torchrun_would_have_set(command: str, tmp_path: Path):
    (tmp_path / "train.py").write_text(SHOW)
    words = (FASTREDUCE, "run") if command == "fastreduce run" else (sys.executable, "-m", "fastreduce.run")
    environment = without_engines(**engines.srun(2), PYTHONPATH=str(ROOT))
    done = run(*words, "--compression", "fp16", tmp_path / "train.py", "--lr", "1", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "SEEN 2 4 2 3 alpha01 --lr 1"


@pytest.mark.long
@pytest.mark.parametrize("launcher", [(FASTREDUCE, "launch"), (TORCHRUN,)])
def test_launchers_take_their_numbers_from_kubeflow(launcher: tuple[str, ...], tmp_path: Path):
    (tmp_path / "train.py").write_text(SHOW)
    port = str(free_port())
    ports = {"MASTER_PORT": port, "PET_MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    with contextlib.ExitStack() as stack:
        pods = []
        for rank in range(2):
            environment = without_engines(**{**engines.kubeflow(rank, per_pod="2", address="127.0.0.1"), **ports})
            pods.append(stack.enter_context(started(*launcher, tmp_path / "train.py", env=environment)))
        ended: list[Done] = [finish(one, 100) for one in pods]
    assert [one.returncode for one in ended] == [0, 0], [one.stderr for one in ended]
    seen = [sorted(line for line in one.stdout.splitlines() if line.startswith("SEEN")) for one in ended]
    assert seen == [[f"SEEN {2 * node + rank} 4 {rank} 2 127.0.0.1" for rank in range(2)] for node in range(2)]


@pytest.mark.long
def test_pods_of_the_manifest_that_lose_one_start_again_and_go_on(tmp_path: Path):
    """The command of examples/pytorchjob.yaml in two pods, of which one is killed; both are started again, as there."""
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "examples" / "pytorchjob.yaml").read_text())["spec"]["pytorchReplicaSpecs"]
    (container,) = job["Worker"]["template"]["spec"]["containers"]
    assert job["Master"]["replicas"] == 1 and job["Master"]["template"] == job["Worker"]["template"]
    assert container["name"] == "pytorch" and container["command"] == ["sh", "-c"]
    script = container["args"][0].replace("/snapshots/", f"{tmp_path}/")
    snapshot, port = tmp_path / "digits.pt", free_port()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

    def start(stack: contextlib.ExitStack) -> list[Running]:
        environments = [without_engines(**pod(rank, port), PATH=path, PYTHONPATH=str(ROOT)) for rank in range(2)]
        words = ("sh", "-c", script, "sh", "--max_epochs", EPOCHS)
        return [stack.enter_context(started(*words, cwd=ROOT, env=one, together=True)) for one in environments]

    with contextlib.ExitStack() as stack:
        master, worker = start(stack)
        deadline = time.monotonic() + 200
        while not snapshot.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        worker.kill()
        first = finish(master, 100)
        assert first.returncode == 1, first.stdout  # it missed the other, and ended
        again = [finish(one, 100) for one in start(stack)]
    assert [one.returncode for one in again] == [0, 0], [one.stdout for one in again]
    epochs = [int(number) for one in (first, again[0]) for number in re.findall(r"epoch (\d+): loss", one.stdout)]
    # What was in a snapshot is not trained again; of one the line may be lost with the rank.
    assert epochs == sorted({*epochs}) and epochs[-1] == EPOCHS - 1 and len(epochs) >= EPOCHS - 1
