"""What tells the ranks of one host apart from those of others."""

from __future__ import annotations

import datetime
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from fastreduce.transports import hosts
from tests.support.commands import PYTHON, run
from tests.support.ranks import RankPool, message, run_ranks

SAY = "from fastreduce.transports.hosts import this_host; print(this_host())"


def test_processes_of_one_host_say_the_same():
    assert run(PYTHON, "-c", SAY).stdout.strip() == hosts.this_host()


def test_a_network_namespace_is_a_host():
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("no network namespaces here: they need root and unshare")
    if subprocess.run([unshare, "-n", "true"], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("no network namespaces here: unshare -n fails")
    done = run(unshare, "-n", sys.executable, "-c", SAY)
    assert done.stdout.strip() not in ("", hosts.this_host()), done.stderr


def test_another_dev_shm_is_another_host(monkeypatch: pytest.MonkeyPatch):
    before = hosts.this_host()
    monkeypatch.setattr(hosts, "SHARED_MEMORY", Path("/proc"))
    assert hosts.this_host() != before
    monkeypatch.setattr(hosts, "SHARED_MEMORY", Path("/nowhere"))
    assert hosts.this_host() != before


def test_a_name_that_was_given_counts_alone(monkeypatch: pytest.MonkeyPatch):
    before = hosts.this_host()
    monkeypatch.setenv("FASTREDUCE_HOST", "rack 7, blade 3")
    named = hosts.this_host()
    assert named != before and named == hosts.this_host() and len(named) == len(before) == hosts.DIGITS
    monkeypatch.setenv("FASTREDUCE_HOST", "rack 7, blade 4")
    assert hosts.this_host() != named
    monkeypatch.setenv("FASTREDUCE_HOST", "")
    assert hosts.this_host() == before


def test_nodes_are_in_the_order_of_their_first_rank():
    assert hosts.nodes_of(["b", "a", "b", "c", "a"]) == [[0, 2], [1, 4], [3]]


def _told(rank: int, world_size: int) -> list[object]:
    """Nodes of two groups, of which the second is told apart; a second question waits for nobody."""
    world, pair = dist.group.WORLD, dist.new_group()
    one = hosts.nodes_of(hosts.hosts_of(world))
    os.environ["FASTREDUCE_HOST"] = f"node {rank % 2}"
    try:
        two = hosts.nodes_of(hosts.hosts_of(pair))
        again = hosts.nodes_of(hosts.hosts_of(world)) if rank == 0 else one
    finally:
        del os.environ["FASTREDUCE_HOST"]
    return [one, two, again]


def test_ranks_tell_each_other(ranks3: RankPool):
    assert ranks3.run(_told) == [[[[0, 1, 2]], [[0, 2], [1]], [[0, 1, 2]]]] * 3


def _alone(rank: int, world_size: int) -> str:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    return message(lambda: hosts.hosts_of(group)) if rank == 0 else ""


def _garbled(rank: int, world_size: int) -> str:
    if rank == 1:
        hosts.this_host = lambda: "../../etc"
    return message(lambda: hosts.hosts_of(dist.group.WORLD))


def test_who_does_not_come_or_sends_something_else_is_named():
    told, _ = run_ranks(_alone, 2, check_exit=False)
    assert "rank 0 of 2: finding out who shares a host failed. No word from rank 1: it has exited" in told
    for rank, told in enumerate(run_ranks(_garbled, 2)):
        assert f"rank {rank} of 2: finding out who shares a host failed. Rank 1 sent '../../etc'" in told
