"""How `fastreduce launch` ends: by Ctrl-C, by SIGTERM, with a rank that failed; real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from fastreduce.cli.launch.torchs_launcher import Ranks
from tests.support.commands import FASTREDUCE, free_port, run, started, with_environment

LAUNCH = [FASTREDUCE, "launch"]
STUCK = """
import os, signal, subprocess, sys, threading
import torch.distributed as dist
dist.init_process_group("gloo")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{dist.get_rank()} {os.getpid()} {child.pid}\\n")
dist.barrier()
os.write(1, b"up\\n")
if dist.get_rank() == 0:
    dist.barrier()  # in C++, where no Python handler runs
threading.Event().wait()
"""


@pytest.mark.parametrize(
    "how",
    [
        "SIGINT to the group",
        pytest.param("SIGINT", marks=pytest.mark.long),
        pytest.param("SIGTERM", marks=pytest.mark.long),
        "SIGKILL",
        pytest.param("rank", marks=pytest.mark.long),
    ],
)
def test_nothing_is_left_behind(tmp_path: Path, how: str):
    """Ranks that ignore SIGTERM or hang in C++, and what they started, end with the launcher or with each other."""
    path, pids = tmp_path / "stuck.py", tmp_path / "pids"
    path.write_text(STUCK)
    with started(*LAUNCH, "--nproc-per-node", "2", path, env=with_environment(PIDS=str(pids))) as launcher:
        assert launcher.stdout is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        lines = sorted([int(word) for word in line.split()] for line in pids.read_text().splitlines())
        processes = {pid: psutil.Process(pid) for _, *both in lines for pid in both}
        ranks = [rank_pid for _, rank_pid, _ in lines]
        if how != "SIGKILL":
            listening = {
                c.laddr.ip
                for p in [psutil.Process(launcher.pid), *processes.values()]
                for c in p.net_connections()
                if c.status == psutil.CONN_LISTEN
            }
            assert listening == {"127.0.0.1"}
        start = time.monotonic()
        if how == "rank":
            os.kill(ranks[1], signal.SIGSEGV)
        elif how == "SIGINT to the group":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            os.kill(launcher.pid, signal.Signals[how])
        if how == "SIGTERM":  # which both ignore
            assert launcher.stderr is not None
            line = "fastreduce launch: rank 0, 1 has 28 s more to end; Ctrl-C once more kills at once\n"
            assert launcher.stderr.readline() == line
            os.kill(launcher.pid, signal.SIGINT)
        _, alive = psutil.wait_procs([processes[pid] for pid in ranks], timeout=30)
        assert not alive and time.monotonic() - start < 25  # torch's launcher would wait for 30 s
        launcher.wait(timeout=60)
        if how == "SIGKILL":  # the ranks end; what they started themselves is out of its reach
            for pid in set(processes) - set(ranks):
                processes[pid].kill()
            return
        assert psutil.wait_procs(list(processes.values()), timeout=60)[1] == []
        assert launcher.returncode == 128 + (signal.SIGSEGV if how == "rank" else signal.SIGINT)
        assert launcher.stderr is not None
        told = "rank 1 was ended by SIGSEGV" if how == "rank" else "SIGINT: all ranks were ended"
        assert f"fastreduce launch: {told}\n" in launcher.stderr.read()


@pytest.mark.parametrize(
    ("node", "how"),
    [
        (0, "SIGINT"),
        pytest.param(1, "SIGINT", marks=pytest.mark.long),
        pytest.param(1, "SIGTERM", marks=pytest.mark.long),
    ],
)
def test_a_node_that_waits_for_another_says_so_and_ends_at_once(tmp_path: Path, node: int, how: str):
    where = ["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    env = with_environment(TMPDIR=str(tmp_path))
    with started(*LAUNCH, *where, "--nproc-per-node", "1", __file__, env=env) as launcher:
        assert launcher.stderr is not None
        others = "node 0" if node else "the others"
        assert launcher.stderr.readline().startswith(f"fastreduce launch: node {node} of 2 waits for {others} at 127.")
        launcher.send_signal(signal.Signals[how])
        assert launcher.wait(timeout=60) == 128 + signal.Signals[how]
        assert launcher.stderr.read() == f"fastreduce launch: {how}: all ranks were ended\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_node_that_is_killed_while_another_waits_for_its_ranks_is_named(tmp_path: Path):
    script = tmp_path / "stays.py"
    script.write_text('import os, time\nos.write(1, b"up\\n")\ntime.sleep(1000 * int(os.environ["GROUP_RANK"]))\n')
    env, port = with_environment(FASTREDUCE_NODE_SECONDS="3"), free_port()
    with started(*alone(script, 0, port), env=env) as first, started(*alone(script, 1, port), env=env) as killed:
        assert first.stdout is not None and killed.stdout is not None and first.stderr is not None
        assert (first.stdout.readline(), killed.stdout.readline()) == ("up\n", "up\n")
        time.sleep(2)  # the rank of the first has ended, and torch's launcher waits
        killed.kill()
        assert first.wait(timeout=60) == 1
        told = f"node 1 ({socket.gethostname()}) is gone: no word from its launcher for 3 s; the ranks here were done\n"
        assert first.stderr.read() == f"fastreduce launch: {told}"


STAYS = """
import os, pathlib, sys, time
pathlib.Path(sys.argv[1], os.environ["GROUP_RANK"]).touch()
while not pathlib.Path(sys.argv[1], "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.long
def test_nodes_that_cannot_be_one_job_are_named(tmp_path: Path):
    """One that was told another number of nodes ends all that wait; one that is there twice ends alone."""
    script = tmp_path / "stays.py"
    script.write_text(STAYS)

    def node(rank: int, count: int, port: int) -> Popen[str]:
        where = ["--nnodes", count, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
        return stack.enter_context(started(*LAUNCH, *where, "--nproc-per-node", 1, script, tmp_path))

    with ExitStack() as stack:
        port = free_port()
        for launcher in (node(0, 2, port), node(2, 3, port)):
            assert launcher.stderr is not None and launcher.wait(timeout=60) == 1
            told = launcher.stderr.read()
            assert re.search("node (0|2) was started with --nnodes (2|3), node (2|0) with (3|2)\n", told), told
        port = free_port()
        both = [node(0, 2, port), node(1, 2, port)]
        while not all((tmp_path / rank).exists() for rank in "01"):
            assert all(launcher.poll() is None for launcher in both)
            time.sleep(0.01)
        twice = node(1, 2, port)
        assert twice.stderr is not None and twice.wait(timeout=60) == 1
        here = f"node 1 is here already, on {socket.gethostname()}: give each node its own --node-rank\n"
        assert twice.stderr.read() == f"fastreduce launch: {here}"
        (tmp_path / "end").touch()
        assert [launcher.wait(timeout=60) for launcher in both] == [0, 0]


def alone(script: Path, rank: int, port: int, of: int = 2) -> list[object]:
    """One of several nodes."""
    where = ["--nnodes", of, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
    return [*LAUNCH, *where, "--nproc-per-node", 1, script]


@pytest.mark.long
def test_a_node_that_has_left_while_it_waited_may_come_again():
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # as node 0's
    here = dist.PrefixStore("fastreduce/meeting", store)
    for _ in range(2):
        with started(*alone(Path(__file__), 1, port)) as launcher:
            while not here.check(["node/1"]) or not here.get("node/1"):
                assert launcher.poll() is None
                time.sleep(0.01)
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.long
def test_a_node_that_was_killed_while_it_waited_may_come_again(tmp_path: Path):
    """And one that is there twice before all have met ends the one that came first."""
    port, script = free_port(), tmp_path / "empty.py"
    script.touch()
    with ExitStack() as stack:
        nodes = [alone(script, node, port, of=3) for node in range(3)]
        first, killed = (stack.enter_context(started(*nodes[node])) for node in (0, 1))
        store = None
        while store is None:
            with suppress(RuntimeError):
                store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        here = dist.PrefixStore("fastreduce/meeting", store)
        token = here.get("node/1")
        killed.kill()
        killed.wait()
        again = stack.enter_context(started(*nodes[1]))
        while here.get("node/1") == token:
            time.sleep(0.01)
        twice = stack.enter_context(started(*nodes[1]))
        assert again.stderr is not None and again.wait(timeout=60) == 1
        assert "node 1 is here already, on " in again.stderr.read()
        last = stack.enter_context(started(*nodes[2]))
        assert [launcher.wait(timeout=60) for launcher in (first, twice, last)] == [0] * 3


@pytest.mark.long
def test_a_node_that_has_met_one_that_does_nothing_more_ends_at_once():
    """torch's launcher waits for what every node has to say of its ranks."""
    port = free_port()
    with started(*alone(Path(__file__), 0, port)) as launcher:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        here = dist.PrefixStore("fastreduce/meeting", store)
        here.set("node/1", "fake nobody")
        here.set("seen/1", here.get("seen/0").decode())
        here.get("met")
        time.sleep(2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=30) == 128 + signal.SIGTERM


SAVES = """
import os, pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
os.write(1, b"up\\n")
while not told:
    time.sleep(0.01)
time.sleep(4)  # what is left of a step
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text("saved")
"""


@pytest.mark.long
@pytest.mark.parametrize("by", ["itself", "a shell, which ends at once"])
def test_ranks_that_save_when_they_are_told_to_end_have_the_time(tmp_path: Path, by: str):
    path, shell = tmp_path / "saves.py", tmp_path / "train.sh"
    path.write_text(SAVES)
    shell.write_text(f'#!/bin/sh\n{sys.executable} {path} "$@"\necho ended\n')
    shell.chmod(0o755)
    rank = [path] if by == "itself" else ["--no-python", shell]
    with started(*LAUNCH, "--nproc-per-node", "2", *rank, tmp_path) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        os.kill(launcher.pid, signal.SIGTERM)
        assert launcher.wait(timeout=60) == 128 + signal.SIGTERM
        assert [(tmp_path / rank).read_text() for rank in "01"] == ["saved"] * 2
        assert "had not ended" not in launcher.stderr.read()


@pytest.mark.long
def test_what_a_rank_has_started_is_waited_for_and_then_killed_by_name(tmp_path: Path):
    shell = tmp_path / "train.sh"
    shell.write_text("#!/bin/sh\n(trap '' TERM; exec sh -c 'echo $$; exec sleep 1000') &\nwait\n")
    shell.chmod(0o755)
    more = ["--shutdown-timeout", "3"] if "--shutdown-timeout" in run(*LAUNCH, "--help").stdout else []
    with started(*LAUNCH, "--nproc-per-node", "1", *more, "--no-python", shell) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        child = psutil.Process(int(launcher.stdout.readline()))
        os.kill(launcher.pid, signal.SIGTERM)
        seconds = 3 if more else 30
        line = f"fastreduce launch: rank 0 has {seconds - 2} s more to end; Ctrl-C once more kills at once\n"
        assert launcher.stderr.readline() == line
        killed = f"what was started by rank 0 had not ended {seconds} s after SIGTERM, and was killed"
        assert killed in launcher.stderr.readline()
        assert psutil.wait_procs([child], timeout=20)[1] == []


WARNED = """
import os, signal, time
told = []
for name in ("SIGUSR1", "SIGUSR2"):
    signal.signal(signal.Signals[name], lambda number, _: told.append(number))
os.write(1, b"up\\n")
while len(told) < 2:
    time.sleep(0.01)
"""


def test_ranks_get_the_signals_by_which_a_batch_system_warns(tmp_path: Path):
    path = tmp_path / "warned.py"
    path.write_text(WARNED)
    with started(*LAUNCH, "--nproc-per-node", "2", path) as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert [launcher.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        for name in ("SIGUSR1", "SIGUSR2"):
            os.kill(launcher.pid, signal.Signals[name])
        assert (launcher.wait(timeout=60), launcher.stderr.read()) == (0, "")


def test_signals_that_come_while_ranks_are_started_reach_all_of_them(monkeypatch: pytest.MonkeyPatch):
    """The first one was up before the launcher knew it, and never heard of them."""
    monkeypatch.setattr(Ranks, "here", None)
    ranks, told = object.__new__(Ranks), list[tuple[int, int]]()

    def start(self: Ranks) -> None:
        Ranks.pass_on(signal.SIGUSR1, None)
        Ranks.pass_on(signal.SIGUSR2, None)
        alive = [SimpleNamespace(poll=lambda: None, pid=pid) for pid in (1, 2)]
        self.subprocess_handlers = {rank: SimpleNamespace(proc=proc) for rank, proc in enumerate(alive)}

    monkeypatch.setattr(SubprocessContext, "_start", start)
    monkeypatch.setattr(os, "kill", lambda *sent: told.append(sent))
    ranks._start()
    assert told == [(1, signal.SIGUSR1), (2, signal.SIGUSR1), (1, signal.SIGUSR2), (2, signal.SIGUSR2)]
    Ranks.pass_on(signal.SIGUSR1, None)
    assert told[4:] == [(1, signal.SIGUSR1), (2, signal.SIGUSR1)]


WAITS = """
import os, pathlib, sys, time
os.write(1, b"up\\n")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
"""


@pytest.mark.long
@pytest.mark.parametrize("elastic", [[], ["--elastic"]], ids=["", "elastic"])
def test_under_nohup_a_terminal_that_is_closed_ends_nothing(tmp_path: Path, elastic: list[str]):
    path = tmp_path / "waits.py"
    path.write_text(WAITS)
    command = ["nohup", sys.executable, "-m", "fastreduce", "launch", *elastic, "--nproc-per-node", "1"]
    with started(*command, path, tmp_path / "go on") as launcher:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(signal.SIGHUP)
        time.sleep(0.5)  # torch's launcher looks every 0.1 s
        (tmp_path / "go on").touch()
        assert launcher.wait(timeout=60) == 0, launcher.stderr.read()


IGNORES = """
import os, pathlib, signal, sys, threading, time
ready = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    while not ready.exists():
        time.sleep(0.01)
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready.touch()
threading.Event().wait()
"""


@pytest.mark.long
def test_ranks_that_outlast_one_that_failed_are_killed_by_name(tmp_path: Path):
    path = tmp_path / "ignores.py"
    path.write_text(IGNORES)
    done = run(*LAUNCH, "--nproc-per-node", "2", path, tmp_path / "ready", env=with_environment())
    assert done.returncode == 7
    assert "rank 0 had not ended 2 s after SIGTERM, and was killed" in done.stderr


SLOW = """
import atexit, os, pathlib, sys, time
told = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "1":
    atexit.register(lambda: (told.touch(), time.sleep(30)))
    sys.exit(5)
while not told.exists():
    time.sleep(0.01)
raise ValueError("rank 1 is gone")
"""


@pytest.mark.long
def test_the_rank_that_began_to_end_first_is_the_cause_though_its_end_takes_longer(tmp_path: Path):
    path = tmp_path / "slow.py"
    path.write_text(SLOW)
    done = run(*LAUNCH, "--nproc-per-node", "2", path, tmp_path / "told")
    assert done.returncode == 5
    first, second = done.stderr.splitlines()
    assert first == "fastreduce launch: rank 1 failed with exit code 5"
    assert second == "fastreduce launch: rank 0 failed right after it"


FAILS = """
import sys
import torch.distributed as dist
if sys.argv[1] == "own":
    sys.excepthook = lambda kind, error, trace: print("told of", error, file=sys.stderr)
for _ in range(2):
    dist.init_process_group("gloo")
    dist.destroy_process_group()
raise ValueError("boom")
"""


@pytest.mark.parametrize("hook", ["torch's", pytest.param("own", marks=pytest.mark.long)])
def test_an_error_is_shown_once_whatever_hooks_torch_puts_before_the_scripts_own(tmp_path: Path, hook: str):
    path = tmp_path / "fails.py"
    path.write_text(FAILS)
    done = run(*LAUNCH, "--nproc-per-node", "1", path, hook)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1 and done.stderr.endswith("ValueError: boom\n")
    assert ("told of boom" in done.stderr) == (hook == "own"), done.stderr


LEAVES = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    left = subprocess.Popen(["sleep", "1000"], stdin=-3, stdout=-3, stderr=-3)
    (folder / "writing").write_text(f"{os.getpid()} {left.pid}")
    (folder / "writing").rename(folder / "left")
    sys.exit()
while not (folder / "left").exists() or os.path.exists("/proc/" + (folder / "left").read_text().split()[0] + "/exe"):
    time.sleep(0.01)
time.sleep(1)  # until the launcher has seen it
sys.exit(7)
"""


@pytest.mark.long
def test_what_a_rank_that_ended_well_left_running_goes_on_where_another_fails(tmp_path: Path):
    """Its process group has a number that, once that is empty, may be somebody else's."""
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES)
    done = run(*LAUNCH, "--nproc-per-node", "2", path, tmp_path)
    left = psutil.Process(int((tmp_path / "left").read_text().split()[1]))
    try:
        assert done.returncode == 7
        assert left.status() == psutil.STATUS_SLEEPING
    finally:
        left.kill()


class _Handler:
    def __init__(self, code: int) -> None:
        told = f"sleep 100 >&- & echo $!; exit {code}"
        self.proc = Popen(["sh", "-c", told], start_new_session=True, stdout=PIPE, text=True)
        self.left = psutil.Process(int(self.proc.communicate()[0]))


@pytest.mark.long
def test_what_a_rank_left_running_that_failed_beside_another_is_ended():
    """torch had not seen its end yet when it saw the other's."""
    ranks: Any = Ranks.__new__(Ranks)
    ranks.subprocess_handlers = {rank: _Handler(code) for rank, code in enumerate((1, 9, 0))}
    ranks._failures, ranks.envs = {0: None}, {rank: {"RANK": str(rank)} for rank in range(3)}
    left = [handler.left for handler in ranks.subprocess_handlers.values()]
    with patch.object(Ranks.__bases__[0], "_close"):
        ranks._close(signal.SIGTERM)
    _, going_on = psutil.wait_procs(left, timeout=5)
    going_on = [each for each in going_on if each.status() != psutil.STATUS_ZOMBIE]
    left[2].kill()
    assert going_on == [left[2]]
