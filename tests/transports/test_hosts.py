"""What tells the ranks of one host apart from those of others."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fastreduce.transports import hosts
from tests.support.commands import PYTHON, run

SAY = "from fastreduce.transports.hosts import this_host; print(this_host())"


def test_processes_of_one_host_say_the_same():
    assert run(PYTHON, "-c", SAY).stdout.strip() == hosts.this_host()


@pytest.mark.long
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


def test_where_the_kernel_tells_no_number_the_hosts_name_counts(monkeypatch: pytest.MonkeyPatch):
    known, read = hosts.boot(), Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read(path.with_name("nothing")))
    assert hosts.boot() == socket.gethostname() != known
    assert len(hosts.this_host()) == hosts.DIGITS


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
