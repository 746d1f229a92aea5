"""`fastreduce run` and `python -m fastreduce.run`: unedited scripts get our class, and hear what was wrapped."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from fastreduce.cli import main
from fastreduce.run import replacement
from tests.support.commands import FASTREDUCE, TORCHRUN, Done, finish, free_port, run, started, with_environment

RUN = [*FASTREDUCE, "run"]
MODULE = [sys.executable, "-m", "fastreduce.run"]
SCRIPT = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from neighbour import value

dist.init_process_group("gloo")
ddp = DDP(torch.nn.Linear(3, 2))
ddp(torch.ones(1, 3) * dist.get_rank()).sum().backward()
if dist.get_rank() == 0:
    print("CLASS", type(ddp).__module__, ddp.compression, ddp.module.weight.grad[0, 0].item(), sys.argv[1:], value)
dist.destroy_process_group()
"""
ALONE = """
import os, tempfile, torch, torch.distributed as dist

def alone():
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
"""


def _said(done: Done) -> list[str]:
    """What we wrote, without the warnings of others."""
    return [line for line in done.stderr.splitlines() if line.startswith("fastreduce")]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """As it was, since the commands change their process's."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("value = 7\n")
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("launcher", ["fastreduce run", "torchrun -m fastreduce.run"])
def test_an_unedited_script_gets_our_class_and_its_own_options(script: Path, launcher: str):
    """Two of them are named as ours are."""
    torchrun = ["--standalone", "--nproc_per_node=2"]
    own = ["--compression", "int8", "--", "--help"]
    if launcher == "fastreduce run":
        done = run(*RUN, "--compression", "bf16", *torchrun, script, *own)
    else:
        done = run(*TORCHRUN, *torchrun, "-m", "fastreduce.run", "--compression", "bf16", script, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"CLASS fastreduce.ddp bf16 0.5 {own} 7" in done.stdout
    processes = "2 modules in 2 processes" if launcher == "fastreduce run" else "1 module in 1 process"
    assert _said(done) == [
        "fastreduce: Linear is wrapped by fastreduce, compression bf16",
        f"fastreduce run: {processes} wrapped by fastreduce, compression bf16",
    ]


@pytest.mark.parametrize("command", [RUN, MODULE], ids=["run", "-m"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compression", "fp17", "SCRIPT"], "unknown compression 'fp17'"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "missing.module"], "there is no module 'missing.module'"),
        ([], "usage:"),
        (["--compresion", "fp16", "SCRIPT"], "usage:"),
    ],
)
def test_bad_input_is_an_error_before_anything_starts(
    script: Path, command: list[str], arguments: list[str], message: str
):
    arguments = [str(script) if a == "SCRIPT" else a for a in arguments]
    if command is RUN:
        ended = CliRunner().invoke(main, ["run", *arguments])
        code, out, err = ended.exit_code, ended.stdout, ended.stderr
    else:
        done = run(*command, *arguments)
        code, out, err = done.returncode, done.stdout, done.stderr
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err


def test_a_setting_in_the_environment_is_checked_too(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_COMPRESSION", "fp17")
    done = CliRunner().invoke(main, ["run", str(script)])
    assert done.exit_code == 2 and done.stderr.startswith(
        "fastreduce run: FASTREDUCE_COMPRESSION: unknown compression 'fp17'"
    )


def test_help_says_it_all_in_words_that_hold_here():
    done = CliRunner().invoke(main, ["run", "--help"])
    text = " ".join(done.stdout.split())
    assert "fastreduce run [--compression SPEC] [options of torchrun] [--gpus N] script.py [arguments of the" in text
    assert "--shutdown-timeout" in text and "without it 2." in text
    assert "Ranks on this machine; without it one." in text
    other = " ".join(CliRunner().invoke(main, ["launch", "--help"]).stdout.split())
    assert "fastreduce launch [options of torchrun] [--gpus N] script.py" in other and "without it 2." in other
    for wrong in ("30 seconds", "sub-directory", "job-level"):
        assert wrong not in text and wrong not in other


# As Python does it


SHOW = """
import json, os, sys
os.chdir("/")
spec = __spec__ and [__spec__.name, __spec__.origin]
print(json.dumps([__file__, sys.argv, sys.path, __name__, __package__, spec, sorted(vars()), str(type(__loader__))]))
"""


@pytest.mark.parametrize(
    "words", ["show.py", "./show.py", "sub/../show.py", "sub/link.py", "folder", "-m pkg.show", "-m pkg"]
)
def test_a_script_sees_what_plain_python_shows_it(tmp_path: Path, words: str):
    """File, arguments, whole path, module: the worker by itself, under which both ways of a run start a script."""
    for name in ("show.py", "folder/__main__.py", "pkg/show.py", "pkg/__main__.py", "pkg/__init__.py", "sub/x"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if "init" in name else SHOW)
    (tmp_path / "sub" / "link.py").symlink_to("../show.py")
    record = tmp_path / "record"
    record.touch()
    plain = {name: value for name, value in os.environ.items() if not name.startswith("_FASTREDUCE")}
    ours = {**plain, **replacement.environment(str(record))}
    expected = run(sys.executable, *words.split(), "--lr", "1", cwd=tmp_path, env=plain)
    kind = ["module" if words.startswith("-m") else "script", words.split()[-1]]
    worker = Path(replacement.__file__).parent / "worker.py"
    done = run(sys.executable, worker, *kind, "--lr", "1", cwd=tmp_path, env=ours)
    assert json.loads(done.stdout) == json.loads(expected.stdout), done.stderr
    assert done.stderr == expected.stderr == ""


@pytest.mark.parametrize("command", [RUN, MODULE], ids=["run", "-m"])
def test_both_ways_run_modules_and_relative_scripts(tmp_path: Path, command: list[str]):
    (tmp_path / "show.py").write_text("import os, sys; os.chdir('/'); print(__file__, *sys.argv, sys.path[0])")
    done = run(*command, "show.py", "--help", cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/show.py show.py --help {tmp_path}\n", done.stderr
    assert _said(done) == [
        "fastreduce run: no module was wrapped: "
        "no Python process of this run that we reached made a DistributedDataParallel"
    ]
    done = run(*command, "-m", "show", "--", "1", cwd=tmp_path)
    assert done.stdout == f"{tmp_path}/show.py {tmp_path}/show.py -- 1 {tmp_path}\n", done.stderr


@pytest.mark.parametrize("command", [RUN, MODULE], ids=["run", "-m"])
def test_an_error_shows_the_scripts_frames_only_and_an_exit_code_is_one_line(tmp_path: Path, command: list[str]):
    path = tmp_path / "fails.py"
    path.write_text("import sys\nif sys.argv[1:]:\n    sys.exit(int(sys.argv[1]))\nraise ValueError('boom')\n")
    done = run(*command, path)
    assert done.returncode == 1
    trace = f'Traceback (most recent call last):\n  File "{path}", line 4, in <module>\n    raise ValueError('
    assert trace in done.stderr and done.stderr.count("File ") == 1
    done = run(*command, path, "3")
    assert done.returncode == 3
    if command is RUN:
        assert done.stderr == "fastreduce run: rank 0 failed with exit code 3\n"


def test_ctrl_c_is_one_line_and_130(tmp_path: Path):
    path = tmp_path / "waits.py"
    path.write_text("import os, threading; os.write(1, b'up\\n'); threading.Event().wait()")
    with started(*RUN, "--nproc-per-node", "2", path) as launcher:
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        os.killpg(launcher.pid, signal.SIGINT)
        done = finish(launcher, 30)
    assert (done.returncode, done.stderr) == (130, "fastreduce run: SIGINT: all ranks were ended\n")


@pytest.mark.parametrize("name", ["FASTREDUCE_LAUNCHER", "FASTREDUCE_ONE_GPU", "FASTREDUCE_NODE_SECONDS"])
def test_rubbish_in_the_launchers_variables_is_one_line(script: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "rubbish")
    for command in ("run", "launch"):
        done = CliRunner().invoke(main, [command, "--nproc-per-node", "1", str(script)])
        assert done.exit_code == 2 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"fastreduce {command}: {name}=rubbish: ")


# Processes that a script starts

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
    assert _said(done)[-1] == "fastreduce run: 4 modules in 4 processes wrapped by fastreduce, compression int8"


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


def test_mp_spawn_trains_compressed(tmp_path: Path):
    """torch's tutorial, which chooses an address for itself."""
    path = tmp_path / "train.py"
    path.write_text(SPAWN)
    done = run(*RUN, "--compression", "int8", path, free_port(), seconds=170)
    assert done.returncode == 0, done.stderr
    kind, error = done.stdout.split()
    assert kind == "fastreduce.ddp" and 1e-4 < float(error) < 2e-2  # int8 is at work
    assert _said(done)[-1] == "fastreduce run: 2 modules in 2 processes wrapped by fastreduce, compression int8"


def _child(code: str, tmp_path: Path, python: str = sys.executable, **env: str) -> Done:
    """A Python that a script of a run starts."""
    record = tmp_path / "record"
    record.touch()
    return run(python, "-c", code, env={**with_environment(), **replacement.environment(str(record)), **env})


def test_a_child_that_does_not_train_pays_nothing_and_has_its_own_sitecustomize(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.theirs = __name__, __file__\n")
    path = os.pathsep.join([replacement.STARTUP, str(tmp_path)])
    show = "import sys; print([n for n in ('torch', 'numpy', 'fastreduce') if n in sys.modules], sys.theirs)"
    done = _child(show, tmp_path, PYTHONPATH=path)
    assert (done.stdout, done.stderr) == (f"[] ('sitecustomize', '{tmp_path}/sitecustomize.py')\n", "")
    done = _child("import sitecustomize; print(sitecustomize.__file__)", tmp_path, PYTHONPATH=path)
    assert done.stdout == f"{tmp_path}/sitecustomize.py\n"


def test_another_interpreter_is_left_alone(tmp_path: Path):
    code = "import sys; print('fastreduce.run.replacement' in sys.modules, sys.meta_path[0].__class__.__name__)"
    run_ = json.loads(replacement.environment("x")[replacement.RUN])
    done = _child(code, tmp_path, **{replacement.RUN: json.dumps({**run_, "prefix": "/another"})})
    assert done.returncode == 0 and "_Finder" not in done.stdout and done.stderr == ""
    system = Path("/usr/bin/python3")
    if system.exists():
        done = _child("print('up')", tmp_path, str(system))
        assert (done.stdout, done.stderr) == ("up\n", "")


# Names and subclasses

NAMES = """
from torch.nn.parallel import DistributedDataParallel as Early
from torch.nn.parallel.distributed import DistributedDataParallel as Direct

class Framework(Direct):  # as mmengine's
    def __init__(self, module, flag, **kwargs):
        super().__init__(module=module, **kwargs)
        self.flag = flag

class OldStyle(Framework):
    def __init__(self, module):
        Direct.__init__(self, module)

class Own(Direct):  # a reducer of its own
    def _ddp_init_helper(self, *args):
        self.reducer = None

alone()
for kind in (Early, Direct, lambda m: Framework(m, 1), OldStyle):
    ddp = kind(torch.nn.Linear(1, 1))
    assert all(isinstance(ddp, known) for known in (Early, Direct, torch.nn.parallel.DistributedDataParallel))
    assert type(ddp.reducer).__module__ == "fastreduce.ddp.reducer", type(ddp)
assert type(Early(torch.nn.Linear(1, 1))) in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
import fastreduce, inspect
assert isinstance(ddp, fastreduce.DistributedDataParallel)
assert list(inspect.signature(Direct).parameters)[:2] == ["module", "device_ids"]
"""


def test_every_name_and_subclass_of_torchs_class_is_ours(tmp_path: Path):
    done = _child(ALONE + NAMES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert replacement.summary(tmp_path / "record") == "5 modules in 1 process wrapped by fastreduce, compression none"


def test_what_stays_torchs_is_said_when_it_is_made_and_at_the_end(tmp_path: Path):
    more = """
Own(torch.nn.Linear(1, 1))
torch._dynamo.config.optimize_ddp = "python_reducer"
Early(torch.nn.Linear(1, 1))
"""
    done = _child(ALONE + NAMES + more, tmp_path)
    assert done.returncode == 0, done.stderr
    own = "Own makes a reducer of its own"
    dynamo = 'torch._dynamo.config.optimize_ddp is "python_reducer", which reduces by itself'
    assert f"torch's own DistributedDataParallel reduces the gradients of this Own: {own}" in done.stderr
    assert replacement.summary(tmp_path / "record") == (
        "5 modules in 1 process wrapped by fastreduce, compression none; "
        f"1 module wrapped by torch's class: Own(Linear), because {own}; "
        f"1 module wrapped by torch's class: DistributedDataParallel(Linear), because {dynamo}"
    )


def test_a_wrapper_that_was_pickled_without_a_run_is_torchs_and_said_to_be(tmp_path: Path):
    save = """
alone()
torch.save(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)), PATH)
"""
    load = """
alone()
torch.load(PATH, weights_only=False)(torch.ones(1, 1)).sum().backward()
"""
    name = f"PATH = {str(tmp_path / 'model')!r}"
    assert run(sys.executable, "-c", ALONE + name + save).returncode == 0
    done = _child(ALONE + name + load, tmp_path)
    assert done.returncode == 0, done.stderr
    assert replacement.summary(tmp_path / "record") == (
        "1 module wrapped by torch's class: DistributedDataParallel(Linear), because it was unpickled, not constructed"
    )


def test_a_record_that_is_gone_or_torn_fails_nobody(tmp_path: Path):
    record = tmp_path / "record"
    done = run(sys.executable, "-c", ALONE + NAMES, env={**with_environment(), **replacement.environment(str(record))})
    assert done.returncode == 0, done.stderr
    assert replacement.summary(record).startswith("what was wrapped is not known: ")
    record.write_text('{"pid": 1, "what": "DDP(Net)", "setting": "int8", "why": ""}\n{"pid": 2, "wh')
    assert replacement.summary(record) == "1 module in 1 process wrapped by fastreduce, compression int8"


def test_where_fastreduce_cannot_be_imported_torchs_class_trains_and_it_is_said(tmp_path: Path):
    code = """
import sys
sys.modules["fastreduce.ddp"] = None
alone()
torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
"""
    done = _child(ALONE + code, tmp_path)
    assert done.returncode == 0, done.stderr
    said = replacement.summary(tmp_path / "record")
    assert said.startswith("1 module wrapped by torch's class: DistributedDataParallel(Linear), because fastreduce ")
    assert "cannot be imported by" in said and "fastreduce.ddp" in said and "UserWarning: torch's own" in done.stderr


REPLICATE = """
from torch.distributed._composable.replicate import replicate
from torch._dynamo.backends.distributed import DDPOptimizer

alone()
splits = []
compile_fn = DDPOptimizer.compile_fn
def count(self, graph, inputs):
    compiled = compile_fn(self, graph, inputs)
    splits.append(len(self.buckets))
    return compiled
DDPOptimizer.compile_fn = count

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class Framework(torch.nn.parallel.distributed.DistributedDataParallel):
    pass

for kind in ("plain", "subclass", "replicate"):
    torch._dynamo.reset()
    splits.clear()
    if kind == "replicate":
        model = torch.compile(replicate(Net(), bucket_cap_mb=1.1), backend="eager")
    else:
        kinds = {"plain": torch.nn.parallel.DistributedDataParallel, "subclass": Framework}
        model = torch.compile(kinds[kind](Net(), bucket_cap_mb=1.1), backend="eager")
    for _ in range(2):
        model(torch.ones(2, 300)).sum().backward()
    assert splits and splits[0] > 1, (kind, splits)
    print(kind, splits[0])
"""


def test_dynamo_splits_graphs_at_our_buckets_and_replicate_is_ours(tmp_path: Path):
    """Held against torch's own class: the same script without a run."""
    done = _child(ALONE + REPLICATE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert replacement.summary(tmp_path / "record") == "3 modules in 1 process wrapped by fastreduce, compression none"
    assert done.stdout == run(sys.executable, "-c", ALONE + REPLICATE).stdout


TENSOR_PARALLEL = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
ddp = torch.nn.parallel.DistributedDataParallel(net, device_mesh=mesh["dp"])
parameters = list(net.parameters())  # as torch.distributed.tensor.parallel.ddp has made them
ddp(torch.ones(3, 4) * (1 + dist.get_rank())).sum().backward()
if dist.get_rank() == 0:
    print([parameter.grad.flatten().tolist() for parameter in parameters])
dist.destroy_process_group()
"""


@pytest.mark.long
def test_beside_tensor_parallelism_ours_gives_torchs_gradients(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(TENSOR_PARALLEL)
    ours, torchs = (run(*FASTREDUCE, command, "--nproc-per-node", 2, path) for command in ("run", "launch"))
    assert ours.returncode == 0, ours.stderr
    assert _said(ours)[-1] == "fastreduce run: 2 modules in 2 processes wrapped by fastreduce, compression none"
    assert ours.stdout == torchs.stdout and len(json.loads(ours.stdout)) == 4
