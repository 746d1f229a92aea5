"""Ranks that stop (SIGSTOP) or die (SIGKILL), and links that are cut: whoever is left ends in time, and says why.

The bound: the timeout and 5 s until the last exit handler has run, whoever holds the store; torch's own wrapper
needs as long. What the interpreter needs for its own end is added, since that is a matter of the machine's load.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as torch_dist

import fastreduce.distributed as dist
from fastreduce import TransportError
from fastreduce.cli.launch.nodes import Nodes
from fastreduce.transports.store_client import StoreClient
from tests.support.commands import PYTHON, Running, end, free_port, started, with_environment
from tests.support.fault_jobs import STAGES
from tests.support.fork_server import Forked, run_as_script, server
from tests.support.mpirun import MPIRUN, environment, needs_mpirun
from tests.support.two_nodes import ADDRESSES, INTERFACE, or_skip, two_nodes

TIMEOUT = 4.0
LATE = 5.0
TEARDOWN = 40.0  # the interpreter's own end: half a second of computing, here beside everything else
START = 240.0
HOLDER = r"which holds the store, does not answer|the store is gone, and with it"
CHOOSING = "choosing a transport"
AT_ONCE = 3  # groups of ranks

Process = subprocess.Popen[str] | Forked
JOBS = "tests.support.fault_jobs"

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


class Case(NamedTuple):
    """One group of three ranks and what happens to one of them."""

    what: str
    stage: str
    victim: int
    setting: str

    def __str__(self) -> str:
        return f"{self.what} of rank {self.victim} in {self.stage}, {self.setting}"


PICKED = {
    "gloo": [Case("SIGSTOP", "construction", 0, "int8"), Case("SIGSTOP", "rebuild", 2, "int8")],
    "shm": [Case("SIGSTOP", "collective", 0, "int8"), Case("SIGKILL", "backward", 1, "none")],
}
IN_LEVELS = [
    Case("SIGSTOP", "construction", 0, "int8"),
    Case("SIGKILL", "collective", 1, "none"),
    Case("SIGSTOP", "collective", 2, "int8"),
]
WITHOUT_A_WIRE = ("construction", "rebuild", "exit")  # what is waited for there is the same under each setting
ALL = [
    Case(what, stage, victim, setting)
    for what in ("SIGSTOP", "SIGKILL")
    for stage in STAGES
    for victim in range(3)
    for setting in (["none", "int8"] if stage not in WITHOUT_A_WIRE else ["int8"] if victim % 2 else ["none"])
]


class Seen(NamedTuple):
    """What survivors did, by rank: seconds from the failure until the last exit handler, and their output."""

    left: dict[int, float]
    output: dict[int, str]


Check = Callable[[Case, Seen], None]


def _ends(processes: Mapping[int, Process], deadline: float) -> bool:
    while time.time() < deadline:
        if all(process.poll() is not None for process in processes.values()):
            return True
        time.sleep(0.05)
    return False


def _wait_for(path: Path, processes: Mapping[int, Process]) -> None:
    deadline = time.monotonic() + START
    while not path.exists():
        assert time.monotonic() < deadline, "the ranks did not come so far"
        assert any(process.poll() is None for process in processes.values()), "the ranks have ended before"
        time.sleep(0.05)


@contextlib.contextmanager
def _resumed(folder: Path) -> Iterator[None]:
    """End the ranks in the end, stopped ones too."""
    try:
        yield
    finally:
        for file in folder.glob("*.pid"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def _arguments(folder: Path, backend: str, case: Case) -> list[str]:
    return [str(folder), "ours", backend, case.setting, str(case.victim), case.what, case.stage, str(TIMEOUT)]


def _job(folder: Path, backend: str, case: Case) -> list[str]:
    return [sys.executable, "-m", JOBS, *_arguments(folder, backend, case)]


def _output(folder: Path, ranks: list[int], failed_at: float) -> Seen:
    output = {rank: folder.joinpath(f"{rank}.out").read_text() for rank in ranks}
    marks = {rank: re.findall(r"left at ([\d.]+)", text) for rank, text in output.items()}
    return Seen({rank: float(found[-1]) - failed_at for rank, found in marks.items() if found}, output)


def _over_gloo(folder: Path, case: Case, transport: str = "gloo", hosts: str = "", cores: int = 0) -> Seen:
    """Three ranks over env://, on hosts of these names, and on so few cores."""
    folder.mkdir()
    port = str(free_port())
    with contextlib.ExitStack() as stack:
        processes = {}
        for rank in range(3):
            where = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            where |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "FASTREDUCE_TRANSPORT": transport}
            where["FASTREDUCE_HOST"] = hosts[rank : rank + 1]
            env = with_environment(**where)
            job = (JOBS, _arguments(folder, "gloo", case), str(folder / f"{rank}.out"))
            processes[rank] = server(rank).fork(run_as_script, *job, env=env)
            if cores:
                os.sched_setaffinity(processes[rank].pid, sorted(os.sched_getaffinity(0))[:cores])
            stack.callback(processes[rank].kill)
        _wait_for(folder / "event", processes)
        failed_at = float(folder.joinpath("event").read_text())
        left = {rank: process for rank, process in processes.items() if rank != case.victim}
        assert _ends(left, failed_at + TIMEOUT + LATE + TEARDOWN), f"{case}: still running"
        if case.stage != "exit":
            assert all(process.poll() == 1 for process in left.values())
        return _output(folder, list(left), failed_at)


def _over_shm(folder: Path, case: Case, cores: int = 0) -> Seen:
    """The same in shared memory."""
    seen = _over_gloo(folder, case, "shm", cores=cores)
    for text in seen.output.values():
        assert case.stage in ("construction", "exit") or "over shm failed" in text, text
    return seen


def _in_two_levels(folder: Path, case: Case, cores: int = 0) -> Seen:
    """The same with ranks 0 and 1 on one host and rank 2 on another."""
    return _over_gloo(folder, case, "", "aab", cores)


def _check(case: Case, seen: Seen) -> None:
    assert len(seen.left) == 2, f"{case}: {seen.output}"
    for rank, seconds in seen.left.items():
        text = seen.output[rank]
        assert seconds < TIMEOUT + LATE, f"{case}: rank {rank} left after {seconds:.1f} s\n{text}"
        if case.stage == "exit":  # nobody needs the one that is gone
            continue
        last = next(line for line in reversed(text.splitlines()) if "TransportError: " in line)
        doing = rf"(connecting|exchange|[a-z]+_\w+) over (gloo|MPI|shm)|{CHOOSING}|a reduction in two levels"
        assert re.search(rf"rank {rank} of 3: ({doing}) failed", last), last
        assert case.victim == 0 or f"rank {case.victim}" in last or "exited" in last, last
        assert case.victim != 0 or re.search(HOLDER, last) or "rank 0" in last, last
        if case.stage in ("forward", "backward", "collective"):
            assert re.search(r"Bucket \d holds layers\.", last), last


def _over_mpi(folder: Path, case: Case) -> Seen:
    return _under_mpirun(folder, case, FASTREDUCE_TRANSPORT="mpi")


def _under_mpirun(folder: Path, case: Case, **asked: str) -> Seen:
    """Three ranks that mpirun starts, which share memory unless another transport is asked for.

    It gives one output for all, here rank -1's, and ends those that are left.
    """
    folder.mkdir()
    command = [str(MPIRUN), "--oversubscribe", "-n", "3", *_job(folder, "mpi", case)]
    out = folder.joinpath("-1.out").open("w")
    with out, _resumed(folder):
        process = subprocess.Popen(
            command, env=environment(**asked), cwd=folder, stdout=out, stderr=out, text=True, start_new_session=True
        )
        try:
            _wait_for(folder / "event", {0: process})
            failed_at = float(folder.joinpath("event").read_text())
            assert _ends({0: process}, failed_at + TIMEOUT + LATE + TEARDOWN), folder.joinpath("-1.out").read_text()
        finally:
            end(process)
    assert process.returncode != 0
    text = folder.joinpath("-1.out").read_text()
    raised = [float(moment) - failed_at for moment in re.findall(r"raised at ([\d.]+)", text)]
    return Seen(dict(enumerate(raised)), {-1: text})


def _check_mpi(case: Case, seen: Seen) -> None:
    text = seen.output[-1]
    assert seen.left and max(seen.left.values()) < TIMEOUT + LATE, f"{case}: {text}"
    # mpirun lets a stopped rank go on for a moment before it ends it.
    told = re.findall(
        rf"TransportError: rank (?!{case.victim})\d of 3: (?:\w+ over (?:MPI|shm)|{CHOOSING}) failed[:.] .*", text
    )
    assert told, f"{case}: {text}"
    # Of two ranks that write at once, mpirun mixes the lines: one of them is whole.
    assert any(
        re.search(rf"{HOLDER}|rank {case.victim} did not come|No word from rank {case.victim}:", line) for line in told
    ), f"{case}: {text}"


def _run_all(folder: Path, cases: list[Case], run: Callable[[Path, Case], Seen], check: Check) -> None:
    """Side by side, since they mostly wait."""
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [pool.submit(run, folder / str(i), case) for i, case in enumerate(cases)]
    for i, (case, seen) in enumerate(zip(cases, found, strict=True)):
        try:
            check(case, seen.result())
        except AssertionError:  # many at once share few cores: alone it must keep its time
            check(case, run(folder / f"{i} alone", case))


RUNS = pytest.mark.parametrize("run", [_over_gloo, _over_shm], ids=["gloo", "shm"])


@pytest.mark.long
@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_ranks_that_stop_or_die_are_not_waited_for(tmp_path: Path, transport: str):
    _run_all(tmp_path, PICKED[transport], _over_gloo if transport == "gloo" else _over_shm, _check)


@pytest.mark.long
def test_nor_are_they_in_two_levels(tmp_path: Path):
    _run_all(tmp_path, IN_LEVELS, _in_two_levels, _check)


@pytest.mark.long
def test_nor_where_all_ranks_share_a_core(tmp_path: Path):
    cases = [Case("SIGKILL", "collective", 1, "none"), Case("SIGSTOP", "backward", 0, "int8")]
    _run_all(tmp_path / "levels", cases, partial(_in_two_levels, cores=1), _check)
    _run_all(tmp_path / "shm", cases[:1], partial(_over_shm, cores=1), _check)


@RUNS
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", STAGES)
def test_in_each_stage_each_rank(tmp_path: Path, stage: str, run: Callable[[Path, Case], Seen]):
    _run_all(tmp_path, [case for case in ALL if case.stage == stage], run, _check)


UNDER_MPIRUN = pytest.mark.parametrize("run", [_over_mpi, _under_mpirun], ids=["mpi", "shm"])


@needs_mpirun
@UNDER_MPIRUN
@pytest.mark.long
def test_a_stopped_rank_under_mpirun_ends_the_job(tmp_path: Path, run: Callable[[Path, Case], Seen]):
    _run_all(tmp_path, [Case("SIGSTOP", "backward", 0, "int8")], run, _check_mpi)


@needs_mpirun
@UNDER_MPIRUN
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "exit"])
def test_under_mpirun_in_each_stage_each_rank(tmp_path: Path, stage: str, run: Callable[[Path, Case], Seen]):
    cases = [case for case in ALL if case.what == "SIGSTOP" and case.stage == stage]
    _run_all(tmp_path, cases, run, _check_mpi)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["env", "torchrun"])
def test_a_cut_link_between_two_nodes_ends_both(tmp_path: Path, launcher: str):
    case = Case("SIGSTOP", "none", -1, "int8")
    with or_skip(), two_nodes() as names, contextlib.ExitStack() as stack:
        stack.enter_context(_resumed(tmp_path))
        processes = {}
        for rank, name in enumerate(names):
            inside = ["ip", "netns", "exec", name]
            job, env = _job(tmp_path, "gloo", case), with_environment(GLOO_SOCKET_IFNAME=INTERFACE)
            if launcher == "env":
                where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
                env.update(where, LOCAL_RANK="0")
            else:
                where_words = ["--nnodes=2", f"--node_rank={rank}", f"--master_addr={ADDRESSES[0]}"]
                torchrun = [sys.executable, "-m", "torch.distributed.run"]
                job = [*torchrun, *where_words, "--nproc_per_node=1", *job[1:]]
            out = stack.enter_context(tmp_path.joinpath(f"{rank}.out").open("w"))
            processes[rank] = subprocess.Popen(
                [*inside, *job], env=env, stdout=out, stderr=out, text=True, start_new_session=True
            )
            stack.callback(end, processes[rank])
        _wait_for(tmp_path / "going", processes)
        subprocess.run(["ip", "-n", names[0], "link", "set", INTERFACE, "down"], check=True)
        failed_at = time.time()
        assert _ends(processes, failed_at + TIMEOUT + LATE + TEARDOWN), "a node still runs"
        seen = _output(tmp_path, [0, 1], failed_at)
    assert all(process.returncode != 0 for process in processes.values())
    assert len(seen.left) == 2 and max(seen.left.values()) < TIMEOUT + LATE, seen
    assert "No word from rank 1" in seen.output[0] and re.search(HOLDER, seen.output[1]), seen


# One process


@contextlib.contextmanager
def _silent_listener() -> Iterator[int]:
    """The port of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.long
def test_an_address_at_which_no_store_answers_is_told_in_time():
    with _silent_listener() as port:
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"what listens at tcp://127.0.0.1:\d+ does not answer as a store"):
            address = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", address, world_size=2, rank=1, timeout=timedelta(seconds=TIMEOUT))
        assert time.monotonic() - start < 100  # not torch's own five minutes
    assert not dist.is_initialized()


HOLD = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


def _stop(process: Running) -> None:
    """Stop it, and wait until it is."""
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + START
    while Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.long
def test_a_store_whose_holder_is_stopped_and_goes_on():
    with started(PYTHON, "-c", HOLD) as holder:
        assert holder.stdout is not None
        port = int(holder.stdout.readline())
        client = StoreClient(torch_dist.TCPStore("127.0.0.1", port, is_master=False), 4.0).at("a")
        client.set("key", "value")
        assert client.read("key") == "value" and client.read("other") is None
        _stop(holder)
        start = time.monotonic()
        with pytest.raises(TransportError, match="does not answer within 4 s"):
            client.read("key")
        for _ in range(20):  # at once
            with pytest.raises(TransportError, match="does not answer"):
                client.add("count", 1)
        with pytest.raises(TransportError, match=r"does not answer within 4\.5 s"):  # that of a group with more time
            client.at("", 4.5).read("key")
        assert time.monotonic() - start > 4.45
        assert time.monotonic() - start < 40  # the twenty would have waited for 80
        os.kill(holder.pid, signal.SIGCONT)
        deadline = time.monotonic() + START
        while time.monotonic() < deadline:
            with contextlib.suppress(TransportError):
                if client.read("key") == "value":
                    break
            time.sleep(0.05)
        assert client.add("count", 1) == 1, "calls that were given up have not been made"
        holder.kill()
        holder.wait()
        with pytest.raises(TransportError, match="the store is gone, and with it rank 0's process"):
            for _ in range(3):  # the first may still be sent
                client.read("key")


@pytest.mark.long
def test_a_launcher_leaves_a_store_whose_holder_is_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FASTREDUCE_NODE_SECONDS", "6")
    with started(PYTHON, "-c", HOLD) as holder:
        assert holder.stdout is not None
        port = holder.stdout.readline().strip()
        where = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        nodes = Nodes(where)
        store = torch_dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
        while store.add("fastreduce/nodes/beat/1", 0) == 0:
            time.sleep(0.05)
        _stop(holder)
        start = time.monotonic()
        assert "node 2" in nodes.suspect() or "node 0" in nodes.suspect()
        nodes.leave("its ranks failed")
        assert time.monotonic() - start < 100  # else it would wait for ever
