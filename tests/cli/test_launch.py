"""`fastreduce launch`, and torch's own launchers with our class: real processes, real signals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from fastreduce.cli import main
from fastreduce.cli.launch import launch, make_parser, parse
from tests.support.commands import (
    FASTREDUCE,
    INSTALLED,
    ROOT,
    Done,
    Running,
    end,
    finish,
    free_port,
    run,
    started,
    with_environment,
)

LAUNCH = [FASTREDUCE, "launch"]
WORKER = ROOT / "fastreduce" / "run" / "worker.py"
TRAIN = """
import argparse, os, sys
import torch, torch.distributed as dist
from fastreduce import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--local-rank", "--local_rank", type=int)
parser.add_argument("--lr", type=float, default=0.0)
args = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DDP(torch.nn.Linear(3, 2))
ddp(torch.ones(1, 3) * dist.get_rank()).sum().backward()
env = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
assert set(os.environ.get("EXPECTED", "").split()) <= {"=".join(item) for item in os.environ.items()}
line = f"{'|'.join(env)} lr {args.lr} local {args.local_rank} grad {ddp.module.weight.grad[0, 0].item()}\\n"
os.write(1, line.encode())  # whole, however the ranks share the pipe
dist.destroy_process_group()
"""
FAILS = """
import sys, torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("boom on one")
dist.barrier()
"""
EXITS = """
import os, sys, threading
if os.environ["RANK"] == "1":
    {end}
threading.Event().wait()
"""


def _run(*command: object, **env: str) -> Done:
    return run(*command, env=with_environment(**env))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param([INSTALLED, "--nproc-per-node", "2", "SCRIPT", "--lr", "0.5"], [], marks=pytest.mark.long),
        ([FASTREDUCE, "--gpus", "2", "--script", "SCRIPT", "--lr", "0.5"], ["starts CPU ranks"]),
    ],
)
def test_a_script_runs_on_every_rank(script: Path, before: list[Any], after: list[str]):
    nccl = {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"}  # as users set them: they reach every rank
    command, *options = before
    done = _run(
        command,
        "launch",
        *[script if a == "SCRIPT" else a for a in options],
        EXPECTED=" ".join(map("=".join, nccl.items())),
        **nccl,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"{rank}|2|{rank}|127.0.0.1 lr 0.5 local None grad 0.5" for rank in (0, 1)
    ]
    if not torch.cuda.is_available():
        assert [line for line in done.stderr.splitlines() if "fastreduce launch" in line] == [
            f"fastreduce launch: no GPU on this machine: --gpus 2 {message}" for message in after
        ]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("--nproc-per-node", '"--local-rank"'),
        ("--nproc_per_node", '"--local-rank", "--local_rank"'),
    ],
)
@pytest.mark.long
def test_torchs_older_launcher(tmp_path: Path, option: str, names: str):
    """It passes --local-rank=N, which scripts declare in that spelling or in both."""
    path = tmp_path / "train.py"
    path.write_text(TRAIN.replace('"--local-rank", "--local_rank"', names))
    done = _run(sys.executable, "-W", "ignore", "-m", "torch.distributed.launch", option, "2", path)
    assert done.returncode == 0, done.stderr
    assert {line.partition(" ")[2] for line in done.stdout.splitlines()} == {
        f"lr 0.0 local {rank} grad 0.5" for rank in (0, 1)
    }


@pytest.mark.long
def test_mp_spawn(tmp_path: Path):
    """torch's tutorial: the worker sets the group up itself."""
    path = tmp_path / "train.py"
    path.write_text(
        """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from fastreduce import DistributedDataParallel as DDP

def worker(rank, world_size):
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    ddp = DDP(torch.nn.Linear(3, 2))
    ddp(torch.ones(1, 3) * rank).sum().backward()
    os.write(1, f"{rank} {ddp.module.weight.grad[0, 0].item()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(worker, nprocs=2, args=(2,))
"""
    )
    done = _run(sys.executable, path, MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 0.5", "1 0.5"]


@pytest.mark.long
def test_log_dir_has_a_file_for_each_rank_and_a_restart_starts_all_again(tmp_path: Path):
    path = tmp_path / "fails.py"
    path.write_text(FAILS.replace("import sys", "import os, sys; print('up', os.environ['RANK'])\nimport sys"))
    done = _run(*LAUNCH, "--nproc_per_node=2", "--max_restarts=1", "--log-dir", tmp_path / "logs", path)
    assert done.returncode == 1
    for folder in (tmp_path / "logs", tmp_path / "logs" / "attempt_1"):
        assert [(folder / f"rank.{rank}" / "stdout").read_text() for rank in (0, 1)] == ["up 0\n", "up 1\n"]
        assert "ValueError: boom on one" in (folder / "rank.1" / "stderr").read_text()
    assert sorted(done.stdout.splitlines()) == ["[rank 0] up 0"] * 2 + ["[rank 1] up 1"] * 2
    assert done.stderr.count("all ranks start again: restart 1 of 1") == 1
    assert done.stderr.count("ValueError: boom on one") == 2


def test_a_failure_is_printed_once_with_its_rank(tmp_path: Path):
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    done = _run(*LAUNCH, "--nproc-per-node", "2", path)
    assert done.returncode == 1
    ours = done.stderr[done.stderr.index("fastreduce launch") :].splitlines()
    assert ours[:5] == [
        "fastreduce launch: rank 1 failed with exit code 1",
        "Traceback (most recent call last):",
        f'  File "{path}", line 5, in <module>',
        '    raise ValueError("boom on one")',
        "ValueError: boom on one",
    ]
    assert ours[5:] in ([], ["fastreduce launch: rank 0 failed right after it"])


@pytest.mark.parametrize(
    ("end", "code", "fate"),
    [
        pytest.param("sys.exit(7)", 7, "failed with exit code 7", marks=pytest.mark.long),
        ("sys.exit(-1)", 255, "failed with exit code 255"),
        pytest.param("os._exit(9)", 9, "failed with exit code 9", marks=pytest.mark.long),
        pytest.param("os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL", marks=pytest.mark.long),
        pytest.param("os.kill(os.getpid(), 37)", 165, "was ended by signal 37", marks=pytest.mark.long),
        pytest.param("sys.exit(2**70)", 255, "failed with exit code 255", marks=pytest.mark.long),
    ],
)
def test_the_exit_code_is_the_ranks(tmp_path: Path, end: str, code: int, fate: str):
    path = tmp_path / "exits.py"
    path.write_text(EXITS.format(end=end))
    done = _run(*LAUNCH, "--nproc-per-node", "2", path)
    assert done.returncode == code
    assert done.stderr == f"fastreduce launch: rank 1 {fate}\n"


FORKS = """
import os, sys
sys.excepthook = lambda kind, error, trace: print("told of", error, file=sys.stderr, flush=True)
if not (child := os.fork()):
    raise ValueError("the child's")
os.waitpid(child, 0)
raise ValueError("the rank's")
"""


@pytest.mark.long
def test_a_scripts_own_hook_is_told_of_errors_and_a_forked_child_is_not_the_rank(tmp_path: Path):
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    done = _run(*LAUNCH, "--nproc-per-node", "1", path)
    assert done.returncode == 1
    told, other, *ours = done.stderr.splitlines()
    assert [told, other] == ["told of the child's", "told of the rank's"]
    assert ours[0] == "fastreduce launch: rank 0 failed with exit code 1"
    assert ours[-1] == "ValueError: the rank's" and "child" not in "".join(ours[1:-4])


@pytest.mark.long
def test_where_the_launchers_folder_is_gone_a_rank_says_itself_why_it_ends(tmp_path: Path):
    path = tmp_path / "cleans.py"
    gone = 'import os, shutil; shutil.rmtree(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]))'
    path.write_text(f"{gone}\nraise ValueError('boom')\n")
    done = _run(*LAUNCH, "--nproc-per-node", "1", path)
    assert done.returncode == 1
    *trace, error, ours = done.stderr.splitlines()
    assert error == "ValueError: boom" and len(trace) == 3, done.stderr
    assert ours == "fastreduce launch: rank 0 failed with exit code 1"


@pytest.mark.parametrize(
    ("given", "ranks", "of_script"),
    [
        ("--script=a.py --nproc-per-node 2 -- --nnodes 3 -- x", "2", "--nnodes 3 -- x"),
        ("--script a.py -- --help", None, "--help"),
        ("--script a.py --lr 1 --nproc-per-node 2 -- --nnodes 3", "2", "--lr 1 -- --nnodes 3"),
        ("--nproc-per-node 2 -- a.py -- --nnodes 3", "2", "-- --nnodes 3"),
        ("--nproc-per-node 2 a.py --nnodes 3", "2", "--nnodes 3"),
    ],
)
def test_what_is_the_scripts_stays_the_scripts(given: str, ranks: str | None, of_script: str):
    options = parse(make_parser(launch), given.split())
    assert (options.training_script, options.nproc_per_node, options.nnodes) == ("a.py", ranks, "1:1")
    assert options.training_script_args == of_script.split()


INTERRUPTED = """
import signal, time, torch, torch.distributed as dist, fastreduce
dist.init_process_group("gloo")
ddp = fastreduce.DistributedDataParallel(torch.nn.Linear(2, 2))
if dist.get_rank() == 1:
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(2)  # until when it has introduced itself
try:
    while True:
        ddp(torch.ones(1, 2)).sum().backward()
        time.sleep(0 if dist.get_rank() else 0.05)  # for which rank 1 waits when it is interrupted
except fastreduce.TransportError as error:
    print(error)
    raise
except KeyboardInterrupt:
    time.sleep({ending})
    raise
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "ending", [pytest.param(0, id="at once"), pytest.param(1, id="when its script has cleaned up")]
)
def test_a_rank_that_was_interrupted_alone_tells_the_others_so(tmp_path: Path, ending: int):
    path = tmp_path / "interrupted.py"
    path.write_text(INTERRUPTED.format(ending=ending))
    done = _run(*LAUNCH, "--nproc-per-node", "2", path)
    assert re.search("^Rank 1 has ended, .*: it raised KeyboardInterrupt", done.stdout, re.MULTILINE), done.stdout


WAITS = """
import os, sys, threading
os.write(1, b"up\\n")
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(7)
threading.Event().wait()
"""


TALKS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, b"up\\n")
while True:
    dist.barrier()
"""


@pytest.mark.long
def test_where_ranks_miss_a_node_first_it_is_named_too(tmp_path: Path):
    path = tmp_path / "talks.py"
    path.write_text(TALKS)
    with _two_nodes(path) as (survivor, killed):
        end(killed)
        done = finish(survivor, 100)
    assert done.returncode == 1
    assert "rank 0 failed with exit code 1" in done.stderr and done.stderr.count("Traceback") == 1
    assert re.search(r"\nfastreduce launch: no word from node 1( \(.+\))? for 1\.8 s\n", done.stderr), done.stderr


STAYS = """
import os, signal, sys, time, torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["RANK"] == "3":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["LOCAL_RANK"] == "1":
    os.write(1, b"up\\n")
    time.sleep(60)
others = dist.new_group([0, 2], use_local_synchronization=True)
for count in range(10**9):
    try:
        dist.barrier(others)
    except RuntimeError:
        time.sleep(1)  # until the other's launcher has seen that it ended: launchers look ten times a second
        raise
    if count == 0:
        os.write(1, b"up\\n")
    if count == 100 and os.environ["RANK"] == sys.argv[1]:
        sys.exit(7)
"""


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGTERM", "a rank of its own"])
def test_the_node_whose_ranks_ended_first_is_named(tmp_path: Path, how: str):
    """Another rank of node 1 takes its time to end, after node 0 has missed the first one's."""
    path = tmp_path / "stays.py"
    path.write_text(STAYS)
    with _two_nodes(path, 0 if how != "SIGTERM" else -1, ranks=2) as nodes:
        if how == "SIGTERM":
            nodes[1].send_signal(signal.SIGTERM)
        here, there = (finish(node, 100) for node in nodes)
    named = r"^fastreduce launch: node 1 \(.+\) ends its ranks$"
    assert bool(re.search(named, here.stderr, re.MULTILINE)) == (how == "SIGTERM"), here.stderr
    assert ("node 1" in here.stderr) == (how == "SIGTERM"), here.stderr
    assert ("node 0 (127.0.0.1) has ended: rank 0 failed with exit code 7" in there.stderr) == (how != "SIGTERM")


@contextlib.contextmanager
def _two_nodes(*script: object, ranks: int = 1) -> Iterator[list[Running]]:
    """Two launchers as two nodes, whose ranks are up."""
    command = [*LAUNCH, "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", free_port()]
    command += ["--nproc-per-node", ranks]
    env = with_environment(FASTREDUCE_NODE_SECONDS="6", GLOO_SOCKET_IFNAME="lo")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(started(*command, "--node-rank", n, *script, env=env)) for n in (0, 1)]
        for each in nodes * ranks:
            assert each.stdout is not None and each.stdout.readline() == "up\n"
        yield nodes


@pytest.mark.long
@pytest.mark.parametrize(("node", "how"), [(1, "killed"), (0, "killed"), (1, "its rank fails")])
def test_a_node_that_is_gone_is_named_on_the_others(tmp_path: Path, node: int, how: str):
    """The ranks do not talk: none of them would miss the other's."""
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    with _two_nodes(path, -1 if how == "killed" else node) as nodes:
        survivor = nodes[1 - node]
        ranks = psutil.Process(survivor.pid).children(recursive=True)
        if how == "killed":
            end(nodes[node])
        done = finish(survivor, 100)
    assert done.returncode == 1
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
    last = done.stderr.splitlines()[-1]
    assert re.match(rf"fastreduce launch: node {node}( \(.+\))? (is gone|has ended)", last), done.stderr
    assert last.endswith("; the ranks here were ended")
    assert (how == "killed") != ("has ended: rank 1 failed with exit code 7" in last)


@pytest.mark.long
@pytest.mark.parametrize("slow", [0, 1])
def test_a_node_that_is_done_earlier_is_not_missed(tmp_path: Path, slow: int):
    path = tmp_path / "uneven.py"
    path.write_text(f"import os, time; os.write(1, b'up\\n'); time.sleep(9 * (os.environ['RANK'] == '{slow}'))")
    with _two_nodes(path) as nodes:
        assert [finish(node, 100).returncode for node in nodes] == [0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "2", "missing.py"], "there is no script 'missing.py'"),
        (["--nproc-per-node", "2", "-m", "missing.module"], "there is no module 'missing.module'"),
        (["--gpus", "2", "--nproc-per-node", "2", "SCRIPT"], "give one of them"),
        (["--nproc-per-node", "0", "SCRIPT"], "0 ranks: give 1 to 4096 on one machine"),
        (["--nproc-per-node", "5000", "SCRIPT"], "5000 ranks: give 1 to 4096 on one machine"),
        (["--nproc-per-node", "2", "FOLDER"], "FOLDER' is a folder without a __main__.py: give the script in it"),
        (["--nproc-per-node", "2", "--script", ""], "there is no script ''"),
        (
            ["--nproc-per-node", "1", "--event-log-handler", "bogus", "SCRIPT"],
            "--event-log-handler bogus: give null, or",
        ),
        (["--nproc-per-node", "2", "--local-ranks-filter", "0,2", "SCRIPT"], "--local-ranks-filter 0,2: there is no 2"),
        (["--nproc-per-node", "1", "--nnodes", "0", "SCRIPT"], "--nnodes 0: give a number, or a range as in 1:4"),
        (["--nproc-per-node", "1", "--node-rank", "1", "SCRIPT"], "--node-rank 1 with --nnodes 1: give 0 to 0"),
        (["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", "2", "SCRIPT"], "with --nnodes 2: give 0 to 1"),
        (["--nproc-per-node", "1", "--nnodes", "2", "--node-rank", "-1", "SCRIPT"], "--node-rank -1 with --nnodes 2"),
        (["--nproc-per-node", "1", "--master-port", "70000", "SCRIPT"], "--master-port 70000: give 0 to 65535"),
        (["--nproc-per-node", "1", "--monitor-interval", "nan", "SCRIPT"], "--monitor-interval nan: give seconds"),
        (["--nproc-per-node", "1", "--monitor-interval", "0", "SCRIPT"], "--monitor-interval 0.0: give seconds"),
        (["--nproc-per-node", "2", "--master-port", "PORT", "SCRIPT"], "127.0.0.1, port PORT is in use"),
        (["--nproc-per-node", "1", "--redirects", "3", "SCRIPT"], "say where with --log-dir"),
    ],
)
def test_bad_input_is_an_error_before_anything_starts(script: Path, arguments: list[str], message: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = {"SCRIPT": str(script), "PORT": str(taken.getsockname()[1]), "FOLDER": str(script.parent)}
        done = CliRunner().invoke(main, ["launch", *[words.get(a, a) for a in arguments]])
    assert done.exit_code in (1, 2)
    assert done.stdout == ""
    message = message.replace("PORT", words["PORT"]).replace("FOLDER", words["FOLDER"])
    assert done.stderr.startswith("fastreduce launch: ") and message in done.stderr


def test_a_rendezvous_that_is_none_is_one_line(script: Path):
    done = _run(*LAUNCH, "--nproc-per-node", "1", "--rdzv-backend", "none-such", script)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch("fastreduce launch: .*'none-such'.*\n", done.stderr), done.stderr


def test_a_limit_that_is_no_number_is_an_error(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_NODE_SECONDS", "soon")
    done = CliRunner().invoke(main, ["launch", "--nproc-per-node", "1", str(script)])
    assert (done.exit_code, done.stderr) == (
        2,
        "fastreduce launch: FASTREDUCE_NODE_SECONDS=soon: give seconds, more than 0\n",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the number of GPUs is the default")
def test_without_gpus_the_number_of_ranks_must_be_given(script: Path):
    done = CliRunner().invoke(main, ["launch", str(script)])
    assert (done.exit_code, done.stderr) == (
        2,
        "fastreduce launch: this machine has no GPU: say how many ranks to start, as in --nproc-per-node 2\n",
    )


def test_the_template_in_the_docs_finds_its_node_rank(tmp_path: Path):
    blocks = (ROOT / "docs" / "launching.md").read_text().split("```")
    template = next(b.removeprefix("bash\n") for b in blocks if b.startswith("bash\n#!"))
    (tmp_path / "hostname").write_text("#!/bin/sh\necho 172.17.0.1 10.0.0.2 fe80::1\n")
    (tmp_path / "fastreduce").write_text('#!/bin/sh\necho "$@"\n')
    for name in ("hostname", "fastreduce"):
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def start(script: str) -> Done:
        return run("bash", "-c", script, "train.sh", "--lr", "1", env=env)

    assert start(template).stdout == "launch --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 train.py --lr 1\n"
    elsewhere = start(template.replace("10.0.0.2)", "10.0.0.3)"))
    assert elsewhere.returncode == 1 and "172.17.0.1 10.0.0.2" in elsewhere.stderr


@pytest.mark.parametrize("name", ["FASTREDUCE_LAUNCHER", "FASTREDUCE_ONE_GPU"])
def test_a_rank_does_not_take_rubbish_for_what_its_launcher_says(tmp_path: Path, name: str):
    done = run(sys.executable, WORKER, "script", tmp_path / "none.py", env=with_environment(**{name: "rubbish"}))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"fastreduce launch: {name}=rubbish: this is set to")


@pytest.mark.parametrize(("visible", "sees"), [("4,7", "7"), (None, "1")])
def test_with_gpus_each_rank_sees_one(tmp_path: Path, visible: str | None, sees: str):
    """What a rank does before its script runs; asked of the process itself, so that no GPU is needed."""
    path = tmp_path / "show.py"
    path.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['LOCAL_RANK'])")
    env = {"LOCAL_RANK": "1", "FASTREDUCE_ONE_GPU": "1", "FASTREDUCE_LAUNCHER": str(os.getpid())}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = run(sys.executable, WORKER, "script", path, env={**inherited, **env})
    assert done.stdout == f"{sees} 0\n", done.stderr


def test_options_are_read_where_python_has_dropped_docstrings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "__doc__", None)  # as `python -OO` does
    assert make_parser(launch).prog == "fastreduce launch"
