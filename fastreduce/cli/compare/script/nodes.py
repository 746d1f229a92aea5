"""Trainings on several nodes: the first measures and writes, the others start their ranks when it says so."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import typer
from rich.console import Console

from ....distributed.rendezvous import serve
from ....errors import TransportError, headline
from ....transports.store_client import StoreClient
from ...ending import SignalError, fail, signals_end_ranks
from ...launch.nodes import one_line
from ..starting import Nodes
from . import trainings
from .plan import Plan
from .trainings import END_SECONDS, LOOK_SECONDS, Training, TrainingError

ANSWER_SECONDS = 15.0  # within which the first node answers the others
KNOWN_SECONDS = 5.0  # that it stays for, so that all learn how it ended


class FirstNode:
    """Tells the other nodes what to train, by a store that this process holds.

    1. Each of the others writes into `came/NODE` who it is and what it was asked for.
    2. `job/NUMBER` is the next training; a later one, or the end, ends that before.
    3. Who leaves early writes why into `left/NODE`.
    4. `end` has the exit code and where results are; who has read it says so in `knows/NODE`.

    Raises:
        TrainingError: if its port cannot be listened on.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._jobs = nodes, 0
        self._others = range(1, nodes.count)
        self._hosts: dict[int, str] = {}
        try:
            self._store = serve(nodes.port, here_only=False)
        except OSError as error:
            where = f"{nodes.address}, port {nodes.port}"
            raise TrainingError(f"cannot listen on {where}: {error.strerror or error}", 1) from error

    def meet(self, plan: Plan) -> None:
        """Wait for the others, and see that they were asked for the same.

        Raises:
            TrainingError: if one does not come within --timeout, or was asked for another one.
        """
        deadline = time.monotonic() + plan.timeout
        while absent := [node for node in self._others if not self._store.check([f"came/{node}"])]:
            if time.monotonic() > deadline:
                names = ", ".join(map(str, absent))
                where = f"{self._nodes.address}, port {self._nodes.port}"
                raise TrainingError(f"node {names} has not come to {where} within {plan.timeout:g} s (--timeout)", 1)
            time.sleep(LOOK_SECONDS)
        here = json.loads(json.dumps(plan.common()))
        for node in self._others:
            told = json.loads(self._store.get(f"came/{node}"))
            self._hosts[node] = str(told["host"])
            for name, value in here.items():
                if (there := told["plan"].get(name)) != value:
                    raise TrainingError(f"node {node} was asked for another {name}: {there!r}, here {value!r}", 2)

    def tell(self, training: Training, record: Path) -> int:
        """Let the others begin a training; returns the port of this node at which ranks meet."""
        with socket.create_server(("", 0)) as free:
            port: int = free.getsockname()[1]
        job = {"training": asdict(training), "record": str(record), "port": port}
        self._store.set(f"job/{self._jobs}", json.dumps(job))
        self._jobs += 1
        return port

    def check(self) -> None:
        """See whether the others are there.

        Raises:
            TrainingError: if one has left.
        """
        for node in self._others:
            if self._store.check([f"left/{node}"]):
                why = self._store.get(f"left/{node}").decode()
                raise TrainingError(f"node {node} ({self._hosts.get(node, '?')}) has left: {why}", 1)

    def end(self, code: int, said: str) -> None:
        """Let the others end with this exit code."""
        self._store.set("end", json.dumps({"code": code, "said": said}))
        deadline = time.monotonic() + KNOWN_SECONDS
        known = [f"knows/{node}" for node in self._others if self._store.check([f"came/{node}"])]
        while not all(self._store.check([key]) for key in known) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)


def follow(plan: Plan, nodes: Nodes, console: Console) -> None:
    """Start this node's ranks when the first one says so, until it says that all is over.

    Raises:
        typer.Exit: with the first node's exit code; 1 if it is gone, 128 + the signal if one ended this process.
    """
    other = _Follower(plan, nodes)
    try:
        with signals_end_ranks():
            console.print(
                f"{plan.name}, {plan.started}: this is node {nodes.rank}; {nodes.address} measures.",
            )
            code, said = other.follow()
    except SignalError as error:
        other.leave(error.received.name)
        fail(f"{error.received.name}: all ranks of this node were ended", error.code)
    except OSError as error:  # a full disk, say
        other.leave(f"no training can be started: {error}")
        fail(f"no training can be started: {error}", 1)
    except TransportError as error:
        fail(f"node 0 ({nodes.address}) is gone: {error}", 1)
    if code:
        fail(said, code)
    console.print(said, soft_wrap=True)
    raise typer.Exit(code)


class _Follower:
    """One of the other nodes."""

    def __init__(self, plan: Plan, nodes: Nodes) -> None:
        self._plan, self._nodes = plan, nodes
        self._client: StoreClient | None = None
        self._told: tuple[int, str] | None = None

    def follow(self) -> tuple[int, str]:
        """Train what is told, until the end: its code and what is to be said.

        Raises:
            TransportError: if the first node does not answer.
        """
        plan, nodes = self._plan, self._nodes
        store = self._connect()
        self._client = store
        me = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "plan": plan.common()})
        if (there := store.set_first(f"came/{nodes.rank}", me)) != me:
            host = one_line(json.loads(there)["host"])
            return 2, f"node {nodes.rank} is here already, on {host}: give each node its own --node-rank"
        number = 0
        while (end := self._end(store)) is None:
            if (job := store.read(f"job/{number}")) is None:
                time.sleep(LOOK_SECONDS)
                continue
            number += 1
            told = json.loads(job)
            training = Training(**told["training"])
            with trainings.open_log(plan, training) as output:
                process = trainings.start(plan, training, Path(told["record"]), output, told["port"])
                try:
                    while process.poll() is None and self._end(store) is None and not store.has(f"job/{number}"):
                        time.sleep(LOOK_SECONDS)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_SECONDS)
                finally:
                    trainings.end(process)
        return end

    def _end(self, store: StoreClient) -> tuple[int, str] | None:
        """What the first node has said at its end, which it is told at once that we know; None before."""
        if self._told is None and (text := store.read("end")) is not None:
            end = json.loads(text)
            self._told = end["code"], end["said"]
            store.set(f"knows/{self._nodes.rank}", "")
        return self._told

    def _connect(self) -> StoreClient:
        nodes, seconds = self._nodes, self._plan.timeout
        deadline = time.monotonic() + seconds
        while True:  # the first node may begin later
            with suppress(OSError), socket.create_connection((nodes.address, nodes.port), timeout=1):
                break
            if time.monotonic() > deadline:
                raise TransportError(f"nobody listens on port {nodes.port} of it within {seconds:g} s (--timeout)")
            time.sleep(LOOK_SECONDS)
        limit = timedelta(seconds=ANSWER_SECONDS)
        try:
            store = dist.TCPStore(nodes.address, nodes.port, is_master=False, wait_for_workers=False, timeout=limit)
        except RuntimeError as error:
            raise TransportError(headline(error)) from error
        return StoreClient(store, ANSWER_SECONDS)

    def leave(self, why: str) -> None:
        """Tell the first node."""
        if self._client is not None:
            with suppress(TransportError):
                self._client.at("", KNOWN_SECONDS).set(f"left/{self._nodes.rank}", why)
