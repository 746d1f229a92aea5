"""Processes that a script starts under `fastreduce run`: those that are reached train with our class."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from fastreduce.run import replacement
from tests.support.commands import free_port, run, with_environment
from tests.support.run_scripts import ALONE, RUN, child, said

CHILDREN = """
import multiprocessing, subprocess, sys

def child(kind):
    alone()
    from torch.nn.parallel import DistributedDataParallel
    ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
    os.write(1, f"{kind} {type(ddp).__module__}\\n".encode())
    if kind == "fork":
        os.kill(os.getpid(), 9)

if __name__ == "__main__":
    kinds = ["spawn", "fork", "forkserver"]
    started = [multiprocessing.get_context(kind).Process(target=child, args=(kind,)) for kind in kinds]
    for process in started:
        process.start()
    code = "import sys; sys.path.insert(0, sys.argv[2]); import train; train.child(sys.argv[1])"
    here = os.path.dirname(__file__)
    commands = [[sys.executable, "-c", code, "subprocess", here], [sys.executable, "-I", "-c", code, "isolated", here]]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait() == 0
    for process in started:
        process.join()
    sys.exit(5)
"""


REACHED = """
import multiprocessing, subprocess, sys

def child(kind):
    hooked = [finder for finder in sys.meta_path if type(finder).__module__ == "fastreduce.run.replacement"]
    print(kind, len(hooked), "torch" in sys.modules, flush=True)

if __name__ == "__main__":
    for kind in ("spawn", "fork", "forkserver"):
        process = multiprocessing.get_context(kind).Process(target=child, args=(kind,))
        process.start()
        process.join()
    code = "import sys, runpy; runpy.run_path(sys.argv[1])['child']('subprocess' + str(sys.flags.isolated))"
    for options in ([], ["-I"]):
        subprocess.run([sys.executable, *options, "-c", code, __file__], check=True)
"""


def test_children_are_reached_however_they_start(tmp_path: Path):
    path = tmp_path / "start.py"
    path.write_text(REACHED)
    record = tmp_path / "record"
    record.touch()
    done = run(sys.executable, path, env={**with_environment(), **replacement.environment(str(record))})
    kinds = ["spawn 1", "fork 1", "forkserver 1", "subprocess0 1", "subprocess1 0"]
    assert (done.stdout.splitlines(), done.stderr) == ([f"{kind} False" for kind in kinds], "")


@pytest.mark.long  # five times torch and Dynamo
@pytest.mark.timeout(400)
def test_children_get_our_class_however_they_start_and_only_those_reached_are_claimed(tmp_path: Path):
    """One of them is killed once it has wrapped; the exit code is the script's."""
    path = tmp_path / "train.py"
    path.write_text(ALONE + CHILDREN)
    done = run(*RUN, "--compression", "int8", path, seconds=360)
    assert done.returncode == 5, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "fork fastreduce.ddp",
        "forkserver fastreduce.ddp",
        "isolated torch.nn.parallel.distributed",
        "spawn fastreduce.ddp",
        "subprocess fastreduce.ddp",
    ]
    assert said(done)[-1] == "fastreduce run: 4 modules in 4 processes wrapped by fastreduce, compression int8"


SPAWN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def worker(rank):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(40, 1))
    ddp(torch.linspace(0.1, 0.9, 40)[None] + rank).sum().backward()
    if rank == 0:
        error = ddp.module.weight.grad[0] - torch.linspace(0.6, 1.4, 40)
        print(type(ddp).__module__, error.abs().max().item())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(worker, nprocs=2)
"""


@pytest.mark.long
def test_mp_spawn_trains_compressed(tmp_path: Path):
    """torch's tutorial, which chooses an address for itself."""
    path = tmp_path / "train.py"
    path.write_text(SPAWN)
    done = run(*RUN, "--compression", "int8", path, free_port())
    assert done.returncode == 0, done.stderr
    kind, error = done.stdout.split()
    assert kind == "fastreduce.ddp" and 1e-4 < float(error) < 2e-2  # int8 is at work
    assert said(done)[-1] == "fastreduce run: 2 modules in 2 processes wrapped by fastreduce, compression int8"


def test_a_child_that_does_not_train_pays_nothing_and_has_its_own_sitecustomize(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = __name__, __file__\n")
    path = os.pathsep.join([replacement.STARTUP, str(tmp_path)])
    show = "import sys; print([n for n in ('torch', 'numpy', 'fastreduce') if n in sys.modules], sys.theirs)"
    done = child(show, tmp_path, PYTHONPATH=path)
    assert (done.stdout, done.stderr) == (f"[] ('sitecustomize', '{tmp_path}/sitecustomize.py')\n", "")
    done = child("import sitecustomize; print(sitecustomize.__file__)", tmp_path, PYTHONPATH=path)
    assert done.stdout == f"{tmp_path}/sitecustomize.py\n"


def test_another_interpreter_is_left_alone(tmp_path: Path):
    code = "import sys; print('fastreduce.run.replacement' in sys.modules, sys.meta_path[0].__class__.__name__)"
    run_ = json.loads(replacement.environment("x")[replacement.RUN])
    done = child(code, tmp_path, **{replacement.RUN: json.dumps({**run_, "prefix": "/another"})})
    assert done.returncode == 0 and "_Finder" not in done.stdout and done.stderr == ""
    system = Path("/usr/bin/python3")
    if system.exists():
        done = child("print('up')", tmp_path, str(system))
        assert (done.stdout, done.stderr) == ("up\n", "")
