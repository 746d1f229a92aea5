"""Whether the other nodes of a job still run: their launchers tell each other on the store where the ranks meet."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from ...errors import TransportError, headline
from ...transports.meeting import wait_until
from ...transports.store_client import StoreClient

PREFIX = "fastreduce/nodes"  # of what they write
LIMIT_VARIABLE = "FASTREDUCE_NODE_SECONDS"
LIMIT_SECONDS = 15.0
BEATS = 10  # in that time
LONGEST_LINE = 400  # characters
SUSPECT_BEATS = 3  # without a word, after which a node may be why ranks fail here


def limit_seconds() -> float:
    """What FASTREDUCE_NODE_SECONDS says, or 15.

    Raises:
        ValueError: if that is no positive number.
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    try:
        seconds = float(text) if text else LIMIT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{LIMIT_VARIABLE}={text}: give seconds, more than 0")
    return seconds


class NodeLostError(RuntimeError):
    """Another node of the job has ended or is silent; names it."""


class Nodes:
    """Beats for this node's launcher on a thread, and listens to the others'.

    1. Every beat, count up `beat/NODE` and look at the other nodes' numbers: one that does not change for the limit
       belongs to a launcher that is gone. The store is served by node 0, and gone with it.
    2. Who leaves before its ranks are done writes why into `left/NODE`; the others read it at their next beat.
    3. Who has read it, or leaves too, says so in `knows/NODE`, so that node 0 keeps the store open until then.
    4. The first node whose ranks fail, or are ended, is in `first to end`: the others' fail after it.

    Args:
        environment: of a rank on this node.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._rank, others, self._address = place_of(environment)
        self._limit = limit_seconds()
        self._lost = ""
        self._others = others  # those that are not known to have ended
        self._numbers = dict.fromkeys(self._others, 0)  # how often each has beaten
        self._silent_seconds, self._last_check = 0.0, time.monotonic()
        self._store: StoreClient | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Which other node has left or is silent; "" if none."""
        return self._lost

    def check(self) -> None:
        """Look at what the thread has heard; called often.

        Raises:
            NodeLostError: if another node has left, or there is no word from it for the limit.
        """
        now = time.monotonic()
        self._silent_seconds += min(now - self._last_check, 1.0)  # time in which this process was stopped is no silence
        self._last_check = now
        if not self._lost and self._rank != 0 and self._silent_seconds > self._limit:
            self._lost = f"{self._name(0)} is gone: no answer from it for {self._limit:g} s"
        if self._lost:
            raise NodeLostError(f"{self._lost}; the ranks here were ended")

    check_at_end = check  # where the ranks here are done, too

    def note_end(self) -> None:
        """Note that ranks have failed here, or are about to be ended, unless that was so on another node before."""
        if self._store is not None:
            with contextlib.suppress(TransportError):
                self._store.at("", self._limit / BEATS).set_first("first to end", str(self._rank))

    def suspect(self) -> str:
        """Which other node may be why ranks failed here: one whose ranks ended first, or that is silent; "" if none."""
        if self._store is None:
            return self._lost
        store, seconds = self._store.at("", self._limit / BEATS), SUSPECT_BEATS * self._limit / BEATS
        try:
            first = store.read("first to end")
            for node in self._numbers:
                if first == str(node):
                    return self._end_of(node, store, seconds)
            silent = self._silent(store, seconds)
        except TransportError:  # node 0, which holds the store, is gone: the thread says how
            self._thread.join(seconds)
            if self._lost:
                return self._lost
            silent = [0]
        return f"no word from {' and '.join(map(self._name, silent))} for {seconds:g} s" if silent else ""

    def _end_of(self, node: int, store: StoreClient, seconds: float) -> str:
        """How a node has ended whose ranks did, or do."""
        wait_until(store, lambda store: store.has(f"left/{node}"), seconds)
        why = store.read(f"left/{node}")
        return f"{self._name(node)} ends its ranks" if why is None else self._lost_by(node, why)

    def _silent(self, store: StoreClient, seconds: float) -> list[int]:
        """Nodes that neither beat within so many seconds nor have left."""
        before = {node: store.add(f"beat/{node}", 0) for node in self._numbers}

        def silent() -> list[int]:
            same = [node for node, number in before.items() if store.add(f"beat/{node}", 0) == number]
            return [node for node in same if not store.has(f"left/{node}")]

        wait_until(store, lambda _: not silent(), seconds)
        return silent()

    def leave(self, why: str) -> None:
        """End the thread, and tell the others `why` this node leaves early ("": its ranks are done)."""
        self._ending.set()
        self._thread.join(self._limit / BEATS)
        if self._store is None or self._thread.is_alive() or 0 not in {self._rank, *self._others}:
            return
        store = self._store.at("", self._limit / BEATS)
        with contextlib.suppress(TransportError):  # node 0 may be gone by now
            if why:
                store.set(f"left/{self._rank}", why)
            store.set(f"knows/{self._rank}", "")
            if why and self._rank == 0:
                known = [f"knows/{node}" for node in self._others]
                wait_until(store, lambda store: not store.absent(known), self._limit / 3)

    def _beat(self) -> None:
        pause = self._limit / BEATS
        unchanged = dict.fromkeys(self._others, 0)  # for how many beats of ours
        try:
            self._store = store = connect(self._address, self._limit)
            store.set(f"host/{self._rank}", socket.gethostname())
            while not self._ending.wait(pause):
                store.add(f"beat/{self._rank}", 1)
                for node, number in self._numbers.items():
                    self._numbers[node] = store.add(f"beat/{node}", 0)
                    unchanged[node] = unchanged[node] + 1 if self._numbers[node] == number else 0
                    if (why := store.read(f"left/{node}")) is not None:
                        self._lost = self._lost_by(node, why)
                        store.set(f"knows/{self._rank}", "")
                    elif unchanged[node] > BEATS:
                        self._lost = f"{self._name(node)} is gone: no word from its launcher for {self._limit:g} s"
                    if self._lost:
                        self._others.discard(node)
                        return
                self._silent_seconds = 0.0
        except RuntimeError as error:
            self._others.discard(0)
            self._lost = f"{self._name(0)} is gone, and with it the store: {headline(error)}"

    def _lost_by(self, node: int, why: str) -> str:
        return f"{self._name(node)} has ended: {one_line(why)}"

    def _name(self, node: int) -> str:
        return name_of(node, self._address[0], self._store and self._store.at("", self._limit / BEATS))


def place_of(environment: Mapping[str, str]) -> tuple[int, set[int], tuple[str, int]]:
    """This node's number, the others', and where the store is, by what a rank here has in its environment."""
    rank, size = int(environment["GROUP_RANK"]), int(environment["GROUP_WORLD_SIZE"])
    return rank, set(range(size)) - {rank}, (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def connect(address: tuple[str, int], seconds: float) -> StoreClient:
    """What launchers tell each other on the store of a job, with a deadline for each call.

    Raises:
        RuntimeError: if it does not answer.
    """
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
    return StoreClient(store, seconds).at(PREFIX)


def name_of(node: int, first: str, store: StoreClient | None) -> str:
    """A node with its host, where that is known; of node 0, which holds the store, the address."""
    if node == 0:
        return f"node 0 ({first})"
    with contextlib.suppress(TransportError):
        host = store and store.read(f"host/{node}")
        if host:
            return f"node {node} ({one_line(host)})"
    return f"node {node}"


def one_line(told: str) -> str:
    """What another node wrote, as one line that can be printed, whoever wrote it."""
    return "".join(letter if letter.isprintable() else "?" for letter in told[:LONGEST_LINE])
