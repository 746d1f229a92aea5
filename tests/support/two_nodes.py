"""Two hosts on this machine: network namespaces joined by a veth pair."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from tests.support.commands import finish, started, with_environment

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "veth0"


class CannotMake(Exception):
    """Why there are no namespaces here."""


@contextlib.contextmanager
def or_skip() -> Iterator[None]:
    """Around a test: skip it where no namespaces can be made."""
    try:
        yield
    except CannotMake as reason:
        pytest.skip(f"no network namespaces here: {reason}")


@contextlib.contextmanager
def two_nodes(rate: str | None = None) -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other at `ADDRESSES`, both ways shaped to `rate` as tc spells it."""
    need_tools()
    first, second = names = (f"fastreduce-{os.getpid()}-0", f"fastreduce-{os.getpid()}-1")
    try:
        for name in names:
            do("ip", "netns", "add", name)
        do("ip", "link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for device in ("lo", INTERFACE):
                do("ip", "-n", name, "link", "set", device, "up")
            if rate is not None:
                shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
                do("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launch(
    names: Sequence[str], command: Sequence[object], timeout: float, port: int = 29500, ranks: Sequence[int] = (1, 1)
) -> list[str]:
    """What the nodes print, each started with `command`, torchrun's options and so many ranks.

    Raises:
        AssertionError: if a node fails, with what it wrote.
    """
    environment = with_environment(GLOO_SOCKET_IFNAME=INTERFACE)
    with contextlib.ExitStack() as stack:
        nodes = []
        for rank, name in enumerate(names):
            where = ["--nnodes=2", f"--node_rank={rank}", f"--master_addr={ADDRESSES[0]}", f"--master_port={port}"]
            words: list[object] = ["ip", "netns", "exec", name, sys.executable]
            for word in command:
                words += [*where, f"--nproc_per_node={ranks[rank]}"] if word == "WHERE" else [word]
            nodes.append(stack.enter_context(started(*words, env=environment)))
        done = [finish(node, timeout) for node in nodes]
    for node in done:
        assert node.returncode == 0, node.stdout + node.stderr
    return [node.stdout for node in done]


def need_tools() -> None:
    """Raise CannotMake where there can be no namespaces."""
    if os.geteuid() != 0:
        raise CannotMake("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise CannotMake(f"{tool} is missing: apt-get install iproute2")


def do(*command: str) -> None:
    """Run a command that makes them."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CannotMake(f"{' '.join(command)}: {done.stderr.strip()}")
