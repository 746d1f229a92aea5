"""`fastreduce compare` and `advise` where ranks are started otherwise: on several nodes, by mpirun, by torchrun."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from fastreduce.cli import main
from tests.support import mpirun, two_nodes
from tests.support.commands import ROOT, Done, command_line, finish, free_port, run, started, with_environment
from tests.support.slurm import cluster, needs_slurm

SCRIPT = str(ROOT / "tests" / "support" / "trained_script.py")
FASTREDUCE = [sys.executable, "-c", "from fastreduce.cli import main; main()"]
COMPARE, ADVISE = [*FASTREDUCE, "compare"], [*FASTREDUCE, "advise"]
BRIEF = ["--settings", "none", "--rounds", 1, "--steps", 1, "--train", 4, "--seeds", 1]
NAMES = {"none", "none again", "torch", "torch:fp16", "no reduction"}


# What is refused


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nnodes", "2"], {}, "--nnodes 2: say which of them this is, by --node-rank 0 to 1"),
        (
            ["--nnodes", "2", "--node-rank", "2"],
            {},
            "--node-rank 2 with --nnodes 2: give 0 to 1, which of them this is",
        ),
        (["--nnodes", "2", "--node-rank", "1"], {}, "--nnodes 2: say where the first one is, by --master-addr"),
        ([], {"PET_NNODES": "2"}, "--nnodes 2: say which of them this is, by --node-rank 0 to 1"),
        (["--launch", "env", "--ranks", "2"], {}, "--launch and --ranks both say what is started: give one of them"),
        (["--launch", "no-such-program -n 2"], {}, "there is no program 'no-such-program'"),
        (["--launch", "mpirun '"], {}, "--launch mpirun ': No closing quotation"),
        (
            [],
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun says rank 1 of 2: {command} starts ranks itself, for each training anew; --launch 'mpirun -n 4'",
        ),
        (
            [],
            {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2"},
            "torchrun says rank 0 of 2: {command} starts ranks itself",
        ),
    ],
)
@pytest.mark.parametrize("command", ["compare", "advise"])
def test_what_cannot_be_started_is_one_line(
    command: str,
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (line,) = _refused(command, tmp_path, *arguments)
    assert message.format(command=command) in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["torch"], "--weights-from torch: give a setting of ours"),
        (["none", "--rounds", "0", "--train", "9"], "--weights-from is for speed"),
    ],
)
def test_weights_that_cannot_be_followed_are_one_line(arguments: list[str], message: str, tmp_path: Path):
    (line,) = _refused("compare", tmp_path, "--weights-from", *arguments)
    assert message in line


def _refused(command: str, out: Path, *arguments: str) -> list[str]:
    """The lines of its message."""
    result = CliRunner().invoke(main, [command, "--out", str(out), *arguments, SCRIPT])
    assert result.exit_code == 2 and result.stderr.startswith(f"fastreduce {command}: ")
    return result.stderr.splitlines()


# A command that starts ranks


def _compare(out: Path, launch: str, *options: object, env: dict[str, str] | None = None) -> Done:
    command = [*COMPARE, "--launch", launch, "--out", out, *options]
    with started(*command, cwd=out.parent, env=mpirun.environment(**(env or {}))) as process:
        return finish(process, 200)


@pytest.mark.long
@mpirun.needs_mpirun
def test_by_mpirun(tmp_path: Path):
    options = ["--settings", "none", "--rounds", 1, "--steps", 1, "--weights-from", "int8:error_feedback"]
    done = _compare(tmp_path / "out", f"{mpirun.MPIRUN} -n 2 --oversubscribe", *options, SCRIPT, 90)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {turn["contestant"] for turn in results["turns"]} == NAMES and results["missing"] == []
    assert results["wrapped"]["ranks"] == 2
    assert not list((tmp_path / "out").glob("fastreduce-compare-*"))


@pytest.mark.long
@mpirun.needs_mpirun
def test_advise_by_mpirun(tmp_path: Path):
    launch = ["--launch", f"{mpirun.MPIRUN} -n 2 --oversubscribe", "--settings", "none", "fp16", "--rounds", 1]
    command = [*ADVISE, *launch, "--out", tmp_path / "out", SCRIPT, 90]
    with started(*command, env=mpirun.environment()) as process:
        done = finish(process, 200)
    assert done.returncode == 0, done.stdout + done.stderr
    advice = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert advice["wrapped"]["ranks"] == 2 and {"none", "fp16"} <= set(advice["predicted"]) and advice["measured"]


@pytest.mark.long
@mpirun.needs_mpirun
def test_a_rank_of_mpiruns_that_fails_ends_it_all(tmp_path: Path):
    options = ["--rounds", 0, "--train", 5, "--seeds", 1, "--settings", "int8"]
    done = _compare(tmp_path / "out", f"{mpirun.MPIRUN} -n 2 --oversubscribe", *options, SCRIPT, 9, "failing")
    assert done.returncode == 7
    assert "fastreduce compare: the training under int8 with seed 0 failed with exit code 7" in done.stderr
    assert "Missing: 1 of 2 trainings for quality." in done.stdout


@pytest.mark.long
def test_by_torchrun(tmp_path: Path):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 --no-python"
    options = ["--settings", "none", "--rounds", 0, "--train", 4, "--seeds", 1]
    done = _compare(tmp_path / "out", torchrun, *options, "-m", "tests.support.trained_script", 90)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["quality"]["none"]["outcomes"][0]["losses"]) == 4 and results["wrapped"]["ranks"] == 2


@pytest.mark.long
@needs_slurm
def test_by_srun_on_two_nodes(tmp_path: Path):
    (tmp_path / "slurm").mkdir()
    options = ["--settings", "none", "--rounds", 0, "--train", 4, "--seeds", 1, "--out", tmp_path / "out"]
    with cluster(tmp_path / "slurm") as slurm:
        done = slurm.run(*COMPARE, "--launch", "srun -N 2 -n 2", *options, SCRIPT, 90, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["wrapped"]["ranks"] == 2 and results["wrapped"]["local_ranks"] == 1


@pytest.mark.long
@mpirun.needs_mpirun
def test_no_rank_of_mpiruns_outlives_the_command(tmp_path: Path):
    options = ["--settings", "none", "--rounds", 5000, "--out", tmp_path / "out"]
    launch = f"{mpirun.MPIRUN} -n 2 --oversubscribe"
    with started(*COMPARE, "--launch", launch, *options, SCRIPT, 10**9, env=mpirun.environment()) as process:
        ranks = _wait_for_ranks(process.pid, 2)
        process.kill()
        assert psutil.wait_procs(ranks, timeout=100)[1] == []
        finish(process, 60)


def _wait_for_ranks(command: int, count: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 100
    while len(ranks := _ranks(command)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return ranks


def _ranks(command: int) -> list[psutil.Process]:
    children = psutil.Process(command).children(recursive=True)
    return [child for child in children if "worker.py script" in command_line(child)]


# Several nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, str]]:
    with two_nodes.or_skip(), two_nodes.two_nodes() as names:
        yield names


@contextlib.contextmanager
def _on_both(
    names: Sequence[str],
    folder: Path,
    *options: object,
    more: Sequence[object] = (),
    command: Sequence[object] = COMPARE,
) -> Iterator[list[Any]]:
    """The same command on both nodes, with `more` on the second; the second begins first."""
    environment = with_environment(GLOO_SOCKET_IFNAME=two_nodes.INTERFACE)
    with contextlib.ExitStack() as stack:
        running: list[Any] = [None, None]
        for rank in (1, 0):
            where = ["--nnodes", 2, "--node-rank", rank, "--master-addr", two_nodes.ADDRESSES[0], "--ranks", 1]
            here = ["ip", "netns", "exec", names[rank], *command, *where, "--out", folder / str(rank)]
            extra = more if rank else ()
            running[rank] = stack.enter_context(started(*here, *extra, *options, env=environment))
        yield running


@pytest.mark.long
def test_on_two_nodes_the_first_one_writes_and_the_other_says_where(nodes: tuple[str, str], tmp_path: Path):
    with _on_both(nodes, tmp_path, *BRIEF, "--weights-from", "none", SCRIPT, 90) as running:
        first, second = (finish(process, 200) for process in running)
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + first.stderr + second.stderr
    results = json.loads((tmp_path / "0" / "results.json").read_text())
    assert {turn["contestant"] for turn in results["turns"]} == NAMES and results["missing"] == []
    assert results["wrapped"]["ranks"] == 2 and results["wrapped"]["local_ranks"] == 1
    assert all(len(turn["seconds"]) == 2 for turn in results["turns"])
    assert not (tmp_path / "1" / "results.json").exists()
    assert second.stdout.splitlines()[-1].startswith("Results are in ")
    assert second.stdout.splitlines()[-1].endswith(str(tmp_path / "0" / "results.json"))


@pytest.mark.long
def test_two_nodes_are_advised_by_the_first_one(nodes: tuple[str, str], tmp_path: Path):
    options = ["--settings", "none", "int8", "--rounds", 1]
    with _on_both(nodes, tmp_path, *options, SCRIPT, 90, command=ADVISE) as running:
        first, second = (finish(process, 200) for process in running)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    file = tmp_path / "0" / "advice.json"
    advice = json.loads(file.read_text())
    assert (advice["wrapped"]["ranks"], advice["wrapped"]["local_ranks"]) == (2, 1)
    assert advice["wrapped"]["transport"] == "gloo" and advice["measured"]
    assert second.stdout.splitlines()[-1].endswith(str(file))


@pytest.mark.long
def test_nothing_is_projected_from_several_hosts(tmp_path: Path):
    script = tmp_path / "apart.py"
    code = ["import os, runpy", "os.environ['LOCAL_WORLD_SIZE'] = '1'"]
    script.write_text("\n".join([*code, f"runpy.run_path({SCRIPT!r}, run_name='__main__')"]))
    options = ["--ranks", 2, "--settings", "none", "--rounds", 1, "--nodes", 4, "--gbits", 1]
    done = run(*ADVISE, *options, "--out", tmp_path / "out", script, 90, seconds=200)
    said = "fastreduce advise: --nodes projects from the ranks of one host, and these are on several\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.long
def test_nodes_that_were_asked_for_different_things_say_which(nodes: tuple[str, str], tmp_path: Path):
    with _on_both(nodes, tmp_path, *BRIEF, SCRIPT, 90, more=["--margin", 2]) as running:
        first, second = (finish(process, 100) for process in running)
    assert (first.returncode, second.returncode) == (2, 2)
    said = "node 1 was asked for another margin: 0.02, here 0.01"
    assert said in first.stderr and second.stderr == f"fastreduce compare: node 0: {said}\n"


@pytest.mark.long
def test_a_node_that_is_there_twice_is_named_and_the_first_goes_on(tmp_path: Path):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as node 0's
    where = ["--nnodes", 2, "--node-rank", 1, "--master-addr", "127.0.0.1", "--master-port", port, "--ranks", 1]
    command = [*COMPARE, *where, *BRIEF, "--out", tmp_path, SCRIPT, 90]
    with started(*command, env=with_environment()) as first:
        while not store.check(["came/1"]):
            assert first.poll() is None
            time.sleep(0.1)
        second = run(*command)
        said = f"node 1 is here already, on {socket.gethostname()}: give each node its own --node-rank\n"
        assert (second.returncode, second.stderr) == (2, f"fastreduce compare: {said}")
        store.set("end", json.dumps({"code": 0, "said": "done"}))
        assert (finish(first, 60).returncode, store.get("knows/1")) == (0, b"")


@pytest.mark.long
@pytest.mark.parametrize(("leaves", "received"), [(0, signal.SIGINT), (1, signal.SIGKILL)])
def test_a_node_that_leaves_ends_the_other_and_what_was_measured_is_written(
    nodes: tuple[str, str], tmp_path: Path, leaves: int, received: signal.Signals
):
    options = ["--settings", "none", "--rounds", 5000, "--steps", 1]
    with _on_both(nodes, tmp_path, *options, SCRIPT, 10**9) as running:
        ranks = [rank for process in running for rank in _wait_for_ranks(process.pid, 1)]
        log = tmp_path / "0" / "logs" / "speed.txt"
        deadline = time.monotonic() + 100
        while not log.exists() or "wrapped by" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(15)  # so that rounds are over
        running[leaves].send_signal(received)
        done = [finish(process, 100) for process in running]
        assert psutil.wait_procs(ranks, timeout=100)[1] == []
    codes = [each.returncode for each in done]
    assert codes[leaves] == (130 if received == signal.SIGINT else -9)
    other = done[1 - leaves]
    if leaves == 0:
        assert other.returncode == (130 if received == signal.SIGINT else 1)
        assert (
            "node 0: SIGINT: all ranks were ended" if received == signal.SIGINT else "node 0 (10.77.0.1) is gone"
        ) in other.stderr
    else:
        # What is told first is torch's own error, with its address, where the other's launcher has outlived its rank.
        named = "node 1" in other.stderr or two_nodes.ADDRESSES[1] in other.stderr
        assert other.returncode == 1 and named, other.stderr
    if (leaves, received) != (0, signal.SIGKILL):
        assert (tmp_path / "0" / "results.json").exists() and "rounds of speed" in done[0].stdout
