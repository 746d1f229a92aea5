"""Nodes of an elastic job, which are lost and come back one by one: their launchers tell each other on the store."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping

import torch.distributed as dist

from ...errors import TransportError, headline
from ...transports.store_client import StoreClient
from .nodes import BEATS, NodeLostError, connect, limit_seconds, name_of, one_line, place_of


class ElasticNodes:
    """Beats for this node's launcher on a thread, and says when another node is gone, or back.

    1. `holder/NODE` has the launcher that came last as this node. One that finds another there ends its ranks.
    2. Every beat, count up `beat/NODE` and look at the other nodes' numbers: a node whose number does not change for
       the limit is gone, and so is one that has written into `left/NODE` why it ended. The ranks here go on.
    3. A node whose ranks are done says so in `done/NODE`, and beats until the others are done or gone, too.

    Without node 0, which holds the store, ranks go on until one is lost.

    Args:
        environment: of a rank on this node.
        tell: takes a line for the user.
    """

    def __init__(self, environment: Mapping[str, str], tell: Callable[[str], None]) -> None:
        self._rank, others, self._address = place_of(environment)
        self._tell, self._limit, self._me = tell, limit_seconds(), uuid.uuid4().hex
        self._others = dict.fromkeys(others, (0, 0))  # beats, and looks since the last one
        self._away: set[int] = set()  # of the others, those that are gone or done
        self._taken, self._done = "", False
        self._store: StoreClient | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str:
        """Who has this launcher's place; "" if nobody."""
        return self._taken

    def check(self) -> None:
        """Look at what the thread has heard; called often.

        Raises:
            NodeLostError: if another launcher has come as this node.
        """
        if self._taken:
            raise NodeLostError(f"{self._taken}; the ranks here were ended")

    def check_at_end(self) -> None:
        """The same, where the ranks here are done and others are waited for.

        Raises:
            NodeLostError: if nobody is left to wait for.
        """
        if len(self._away) == len(self._others):
            raise NodeLostError("the others are done, or gone")

    def note_done(self) -> None:
        """The ranks here are done."""
        self._done = True
        with contextlib.suppress(TransportError):
            if self._store is not None:
                self._store.at("", self._limit / BEATS).set(f"done/{self._rank}", "")

    def note_end(self) -> None:
        """Nobody else ends with the ranks here."""

    def suspect(self) -> str:
        """No other node is why ranks failed here."""
        return ""

    def leave(self, why: str) -> None:
        """End the thread, and tell the others `why` this node leaves early ("": its ranks are done)."""
        self._ending.set()
        self._thread.join(self._limit / BEATS)
        if why and not self._taken and self._store is not None and not self._thread.is_alive():
            with contextlib.suppress(TransportError):
                self._store.at("", self._limit / BEATS).set(f"left/{self._rank}", why)

    def _beat(self) -> None:
        without = False
        while True:
            try:
                self._store = store = self._store or self._take_place()
                self._look(store)
                without = False
            except RuntimeError as error:
                if not (without or self._done or self._ending.is_set()):
                    why = headline(error)
                    self._tell(f"{self._name(0)} is gone, and with it the store: {why}; ranks go on until one is lost")
                without = True
            if self._ending.wait(self._limit / BEATS):
                return

    def _take_place(self) -> StoreClient:
        store = connect(self._address, self._limit)
        store.set(f"holder/{self._rank}", self._me)
        store.set(f"host/{self._rank}", socket.gethostname())
        store.delete(f"left/{self._rank}")
        return store

    def _look(self, store: StoreClient) -> None:
        if store.read(f"holder/{self._rank}") != self._me:
            if not self._done:
                self._taken = f"another launcher has come as {self._name(self._rank)}"
            return
        store.add(f"beat/{self._rank}", 1)
        for node, (last, looks) in self._others.items():
            number, left = store.add(f"beat/{node}", 0), store.read(f"left/{node}")
            looks = looks + 1 if number == last else 0
            self._others[node] = number, looks
            if store.has(f"done/{node}"):
                self._away.add(node)
            elif node in self._away:
                if number != last and left is None:
                    self._away.discard(node)
                    self._tell(f"{self._name(node)} is back")
            elif left is not None:
                self._go_on_without(node, f"has ended: {one_line(left)}")
            elif looks > BEATS:
                self._go_on_without(node, f"is gone: no word from its launcher for {self._limit:g} s")

    def _go_on_without(self, node: int, why: str) -> None:
        self._away.add(node)
        self._tell(f"{self._name(node)} {why}; the ranks here go on, and it may come back")

    def _name(self, node: int) -> str:
        return name_of(node, self._address[0], self._store and self._store.at("", self._limit / BEATS))


def is_here(store: dist.Store, node: int, wait: Callable[[], bool]) -> bool:
    """Whether a node's launcher beats within the limit, unless it has said that it left; `wait` is True at an end."""
    end, first = time.monotonic() + limit_seconds() * (1 + 1 / BEATS), store.add(f"beat/{node}", 0)
    while time.monotonic() < end and not store.check([f"left/{node}"]):
        if store.add(f"beat/{node}", 0) != first:
            return True
        if wait():
            break
    return False
