"""Hosts on this machine: network namespaces, each at a cable to one switch, shaped in both directions."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.support.commands import finish, free_port, started, with_environment
from tests.support.two_nodes import do, need_tools

INTERFACE = "veth0"


@contextlib.contextmanager
def star(hosts: int, rate: str) -> Iterator[list[str]]:
    """The names of so many namespaces; `rate` as tc spells it.

    Raises:
        CannotMake: with the reason, where there can be none.
    """
    need_tools()
    names = [f"fastreduce-{os.getpid()}-{i}" for i in range(hosts)]
    switch = f"fastreduce-{os.getpid()}-switch"
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    try:
        for name in (switch, *names):
            do("ip", "netns", "add", name)
        do("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        do("ip", "-n", switch, "link", "set", "bridge0", "up")
        for i, name in enumerate(names):
            port = f"port{i}"
            do("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
            do("ip", "-n", switch, "link", "set", port, "master", "bridge0")
            do("ip", "-n", switch, "link", "set", port, "up")
            do("ip", "-n", name, "addr", "add", f"{address(i)}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                do("ip", "-n", name, "link", "set", device, "up")
            do("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *shape)
            do("tc", "-n", switch, "qdisc", "add", "dev", port, *shape)
        yield names
    finally:
        for name in (switch, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def address(host: int) -> str:
    """Of a host."""
    return f"10.78.0.{host + 1}"


def run(names: Sequence[str], ranks: int, command: Sequence[object], timeout: float) -> None:
    """Python's `command` on so many ranks of each host, by torch's environment variables.

    Raises:
        AssertionError: if a rank fails, with what it wrote.
    """
    here = {"LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": INTERFACE}
    where = {**here, "WORLD_SIZE": str(ranks * len(names)), "MASTER_ADDR": address(0), "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(ranks * len(names)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks)}
            words = ["ip", "netns", "exec", names[rank // ranks], sys.executable, *command]
            processes.append(stack.enter_context(started(*words, env=with_environment(**where, **own))))
        for process in processes:
            done = finish(process, timeout)
            assert done.returncode == 0, done.stdout + done.stderr
