"""`fastreduce launch --elastic` on several nodes: one that is lost comes back, and the others go on meanwhile."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import FASTREDUCE, ROOT, free_port, started, with_environment

HOST = socket.gethostname()
STAYS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / f"{os.environ['RANK']}.{os.getpid()}").touch()
while not (folder / "end").exists():
    time.sleep(0.01)
sys.exit(int(os.environ["RANK"] in sys.argv[2:]))
"""
BEFORE = (
    f"fastreduce launch: node 1 was here before, on {HOST}: it is back once there is no word from that for long enough"
)
ON = "the ranks here go on, and it may come back\n"
Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the launcher of one of two nodes, whose ranks stay until there is a file `end`."""
    script, port = tmp_path / "stays.py", free_port()
    script.write_text(STAYS)
    env = with_environment(FASTREDUCE_NODE_SECONDS="3")
    with ExitStack() as stack:

        def node(rank: int, *more: object, elastic: bool = True) -> Any:
            where = ["--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", port]
            options = [*where, "--nproc-per-node", 1, *(["--elastic"] if elastic else [])]
            return stack.enter_context(started(FASTREDUCE, "launch", *options, script, tmp_path, *more, env=env))

        yield node


def comes(folder: Path, rank: int, times: int = 1, seconds: float = 60.0) -> None:
    """Wait until a rank has started so often."""
    deadline = time.monotonic() + seconds
    while len(list(folder.glob(f"{rank}.*"))) < times:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_a_node_that_was_killed_comes_back_and_none_takes_the_place_of_one_that_is_there(tmp_path: Path, start: Start):
    first, second = start(0), start(1)
    for rank in range(2):
        comes(tmp_path, rank)
    twin = start(1)
    assert twin.wait(timeout=60) == 1
    here = f"fastreduce launch: node 1 is here already, on {HOST}: give each node its own --node-rank"
    assert twin.stderr.read().splitlines() == [BEFORE, here]
    second.kill()
    gone = f"fastreduce launch: node 1 ({HOST}) is gone: no word from its launcher for 3 s; {ON}"
    assert first.stderr.readline() == gone
    again = start(1)
    comes(tmp_path, 1, times=2)
    assert first.poll() is None
    assert first.stderr.readline() == f"fastreduce launch: node 1 ({HOST}) is back\n"
    (tmp_path / "end").touch()
    assert [each.wait(timeout=60) for each in (first, again)] == [0, 0]
    assert first.stderr.read() == ""
    assert again.stderr.read().splitlines() == [BEFORE]


@pytest.mark.long
def test_a_node_that_has_said_why_it_ended_comes_back_at_once(tmp_path: Path, start: Start):
    first, second = start(0), start(1)
    for rank in range(2):
        comes(tmp_path, rank)
    second.send_signal(signal.SIGTERM)
    assert second.wait(timeout=60) == 128 + signal.SIGTERM
    ended = f"fastreduce launch: node 1 ({HOST}) has ended: it received SIGTERM; {ON}"
    assert first.stderr.readline() == ended
    again = start(1)
    comes(tmp_path, 1, times=2)
    (tmp_path / "end").touch()
    assert [each.wait(timeout=60) for each in (first, again)] == [0, 0]


@pytest.mark.long
def test_a_launcher_that_was_stopped_ends_when_another_has_come_in_its_place(tmp_path: Path, start: Start):
    first, second = start(0), start(1)
    for rank in range(2):
        comes(tmp_path, rank)
    second.send_signal(signal.SIGSTOP)
    again = start(1)
    comes(tmp_path, 1, times=2)
    second.send_signal(signal.SIGCONT)
    assert second.wait(timeout=60) == 1
    taken = f"fastreduce launch: another launcher has come as node 1 ({HOST}); the ranks here were ended\n"
    assert second.stderr.read() == taken
    (tmp_path / "end").touch()
    assert [each.wait(timeout=60) for each in (first, again)] == [0, 0]


@pytest.mark.long
def test_nobody_is_waited_for_or_comes_when_ranks_are_done(tmp_path: Path, start: Start):
    """torch's launcher would wait for a node that is gone, five minutes long."""
    first, second = start(0), start(1)
    for rank in range(2):
        comes(tmp_path, rank)
    second.kill()
    (tmp_path / "end").touch()
    late = start(1)
    assert late.wait(timeout=60) == 1
    too_late = "fastreduce launch: node 1 comes too late: the ranks of node 0 are done"
    assert late.stderr.read().splitlines() == [BEFORE, too_late]
    assert first.wait(timeout=60) == 0


@pytest.mark.long
def test_a_node_whose_ranks_failed_is_told_of_and_the_job_succeeds_on_the_others(tmp_path: Path, start: Start):
    first, second = start(0, 1), start(1, 1)
    for rank in range(2):
        comes(tmp_path, rank)
    (tmp_path / "end").touch()
    assert [each.wait(timeout=60) for each in (first, second)] == [0, 1]
    told = f"fastreduce launch: node 1 ({HOST}) has ended: rank 1 failed with exit code 1; {ON}"
    assert first.stderr.read() == told


@pytest.mark.long
def test_nodes_of_which_one_is_not_elastic_are_no_job(start: Start):
    nodes = [start(0), start(1, elastic=False)]
    assert [each.wait(timeout=60) for each in nodes] == [1, 1]
    for each in nodes:
        told = each.stderr.read()
        kinds = "(1 was started without --elastic, node 0 with|0 was started with --elastic, node 1 without)"
        assert re.fullmatch(f"fastreduce launch: node {kinds}\n", told), told


@pytest.mark.long
@pytest.mark.timeout(300)
def test_training_goes_on_without_a_node_and_with_it_again(tmp_path: Path):
    port, env = free_port(), with_environment(FASTREDUCE_NODE_SECONDS="3", OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    where = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", 1]
    train = [ROOT / "examples" / "elastic_train.py", "--steps", 10**9]
    command = [FASTREDUCE, "launch", "--elastic", *where]
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(started(*command, "--node-rank", node, *train, env=env, together=True))
            for node in range(2)
        )

        def until(pattern: str) -> None:
            while not re.match(pattern, line := first.stdout.readline()):
                assert line, first.wait()

        until("step 200: loss")
        second.kill()
        until(r"rank 0 of 1 from step \d+ on")
        again = stack.enter_context(started(*command, "--node-rank", 1, *train, env=env, together=True))
        until(r"rank 0 of 2 from step \d+ on")
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=60) == 128 + signal.SIGTERM
        again.send_signal(signal.SIGTERM)
        again.wait(timeout=60)
