"""How nodes meet before `fastreduce launch` starts their ranks, and where."""

from __future__ import annotations

import errno
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous, create_rdzv_handler

from ...distributed.rendezvous import is_loopback
from ...errors import headline
from ...transports.deadlines import in_background
from .elastic_nodes import is_here
from .nodes import PREFIX, one_line
from .torchs_launcher import Ranks, fail, say

LOCAL, STATIC = "fastreduce-local", "fastreduce-static"
SLOW_SECONDS = 5.0  # in which nodes that are started together have met
LOOK_SECONDS = 0.1
LEAVE_SECONDS = 1.0
REFUSED_SECONDS = 1.0  # in which the others have read why
LONGEST_SECONDS = 1e8  # stores have shorter timeouts of their own
GRACE_SECONDS = 10.0  # beyond the time in which nodes meet, whose own error says more


def open_port(address: str, port: int) -> socket.socket:
    """A listening socket on an address ("": all of them) and a port (0: a free one), or exit code 1 and a message."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        where = f"{address or 'every address'}, port {port}"
        if error.errno == errno.EADDRINUSE:
            fail(f"{where} is in use; without --master-port a free one is taken on one node", code=1)
        fail(f"cannot listen on {where}: {error.strerror or error}", code=1)


class LocalRendezvous(StaticTCPRendezvous):
    """One node alone: a store for its ranks on a socket that is bound already; after a restart, a store on a new port.

    The second store is needed because ranks that start again must not find the addresses of those that ended.
    """

    def __init__(self, listener: socket.socket) -> None:
        address, port = listener.getsockname()[:2]
        super().__init__(address, port, rank=0, world_size=1, run_id=LOCAL, timeout=600)
        self._listener = listener

    def get_backend(self) -> str:
        """The name it is registered under."""
        return LOCAL

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a store, and say where it is."""
        if self._store is not None:
            self._listener = open_port(self.master_addr, 0)
            self.master_port = self._listener.getsockname()[1]
        self._store = dist.TCPStore(
            self.master_addr,
            self.master_port,
            is_master=True,
            timeout=self.timeout,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        return super().next_rendezvous()


class StaticRendezvous(StaticTCPRendezvous):
    """Several nodes, of which each knows its number and where the first one is.

    torch's own counts who connects, whoever that is, and waits in C++, where neither Ctrl-C nor SIGTERM is seen.

    1. The first who comes writes into `nodes` how many there are and who it is. Who was told another number writes why
       it leaves into `refused`, and all who have not met yet leave with it.
    2. Each writes into `node/NODE` who it is. Who finds another there takes its place, since it may have been killed;
       one that was not sees that, and leaves. Who leaves on Ctrl-C gives its place back.
    3. Each that sees all places taken writes by whom into `seen/NODE`. Once all have seen the same, so that all were
       alive, they have `met`. Who comes later is refused.
    4. In an elastic job it comes in the place of one of whom there is no word any more, while no node's ranks are done.
    """

    def __init__(
        self, address: str, port: int, rank: int, nodes: int, run: str, seconds: int, elastic: bool = False
    ) -> None:
        super().__init__(address, port, rank, nodes, run, seconds)
        self._elastic, self._returns = elastic, False
        self._me, self._left = f"{uuid.uuid4().hex} {socket.gethostname()}", threading.Event()
        self._here: dist.Store | None = None  # where this node's place is, once it is taken
        self._at = f"{address}:{port}"

    def get_backend(self) -> str:
        """The name it is registered under."""
        return STATIC

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the others, or for a signal, and say so where that takes long.

        Raises:
            RuntimeError: if they do not come, were told another number of nodes, or this one is there already.
        """
        told = threading.Timer(SLOW_SECONDS, self._say_who_waits)
        told.daemon = True
        told.start()
        try:
            in_background(self._meet, self.timeout.total_seconds() + GRACE_SECONDS)
        except RuntimeError:  # the others do not come, or the store is gone
            raise
        except BaseException:
            self._left.set()
            if self._here is not None:
                with suppress(RuntimeError, TimeoutError):  # it may be gone
                    in_background(partial(self._here.compare_set, f"node/{self.rank}", self._me, ""), LEAVE_SECONDS)
            raise
        finally:
            told.cancel()
        met: RendezvousInfo = super().next_rendezvous()
        assert met.bootstrap_store_info is not None
        return RendezvousInfo(cast(dist.Store, _Apart(met.store)), met.rank, met.world_size, met.bootstrap_store_info)

    def _say_who_waits(self) -> None:
        if self._returns:  # which has been said
            return
        others = "node 0" if self._here is None and self.rank else "the others"
        limit = self.timeout.total_seconds()
        reached = ", which this host alone reaches (--master-addr HOST)" if is_loopback(self.master_addr) else ""
        say(f"node {self.rank} of {self.world_size} waits for {others} at {self._at}{reached}, for up to {limit:g} s")

    def _meet(self) -> None:
        try:
            self._meet_in(self._open())
        except dist.DistError as error:
            raise RuntimeError(f"node 0 does not answer at {self._at}: {headline(error)}") from error

    def _open(self) -> dist.Store:
        if self._store is None:
            self._store = dist.TCPStore(
                self.master_addr,
                self.master_port,
                self.world_size,
                is_master=self.rank == 0,
                timeout=self.timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        return dist.PrefixStore("fastreduce/meeting", self._store)

    def _meet_in(self, store: dist.Store) -> None:
        deadline = time.monotonic() + self.timeout.total_seconds()
        kind = "with" if self._elastic else "without"
        told = store.compare_set("nodes", "", f"{self.world_size} {self.rank} {kind}").decode()
        count, first, kind_of_first = told.split()
        if count != str(self.world_size):
            why = f"node {self.rank} was started with --nnodes {self.world_size}, node {first} with {count}"
            self._refuse(store, why)
        if kind_of_first != kind:
            self._refuse(store, f"node {self.rank} was started {kind} --elastic, node {first} {kind_of_first}")
        places, seen = ([f"{what}/{node}" for node in range(self.world_size)] for what in ("node", "seen"))
        if not store.check(["met"]):
            store.set(f"node/{self.rank}", self._me)
            self._here = store
        while not self._have_met(store, places, seen):
            if store.check(["refused"]):
                self._refuse(store, one_line(store.get("refused").decode()))
            if time.monotonic() > deadline:
                who, limit = ", ".join(self._absent(store, places, seen)), self.timeout.total_seconds()
                raise RuntimeError(f"node {who} has not come, or not stayed, within {limit:g} s")
            if self._left.wait(LOOK_SECONDS):
                return

    def _absent(self, store: dist.Store, places: list[str], seen: list[str]) -> list[str]:
        """Nodes that have not seen all others, or where all places are not taken, those whose are not."""
        empty = [place for place in places if not store.check([place]) or not store.get(place)]
        last = store.get(seen[self.rank]) if store.check([seen[self.rank]]) else b""
        blind = [key for key in seen if not store.check([key]) or store.get(key) != last]
        return [key.partition("/")[2] for key in empty or blind]

    def _have_met(self, store: dist.Store, places: list[str], seen: list[str]) -> bool:
        """Whether all nodes have.

        Raises:
            RuntimeError: if they have with another in this one's place, or there is another now.
        """
        if store.check(["met"]):
            met = store.get("met").decode().split("\n")[self.rank]
            if self._elastic and met != self._me:
                self._come_back(met)
            else:
                self._see_own_place(met)
            return True
        self._see_own_place(store.get(places[self.rank]).decode())
        if not store.check(places) or not all(there := [place.decode() for place in store.multi_get(places)]):
            return False
        roster = "\n".join(there)
        store.set(seen[self.rank], roster)
        if store.check(seen) and {found.decode() for found in store.multi_get(seen)} == {roster}:
            store.set("met", roster)
        return False

    def _come_back(self, there: str) -> None:
        """Wait until there is no word from the launcher that had this place."""
        assert self._store is not None
        self._returns, host = True, one_line(there.partition(" ")[2])
        say(f"node {self.rank} was here before, on {host}: it is back once there is no word from that for long enough")
        nodes = dist.PrefixStore(PREFIX, self._store)
        here = is_here(nodes, self.rank, lambda: self._left.wait(LOOK_SECONDS) or bool(self._done(nodes)))
        if done := self._done(nodes):
            raise RuntimeError(f"node {self.rank} comes too late: the ranks of node {done[0]} are done")
        if here:
            self._see_own_place(there)

    def _done(self, nodes: dist.Store) -> list[int]:
        return [node for node in range(self.world_size) if nodes.check([f"done/{node}"])]

    def _see_own_place(self, there: str) -> None:
        if there != self._me:
            host = one_line(there.partition(" ")[2])
            raise RuntimeError(f"node {self.rank} is here already, on {host}: give each node its own --node-rank")

    def _refuse(self, store: dist.Store, why: str) -> None:
        store.set("refused", why)
        if self.rank == 0:  # which holds the store
            time.sleep(REFUSED_SECONDS)
        raise RuntimeError(why)


def static_rendezvous(parameters: RendezvousParameters, elastic: bool = False) -> StaticRendezvous:
    """As torch makes its own."""
    made = create_rdzv_handler(parameters)
    assert isinstance(made, StaticTCPRendezvous)
    seconds = int(made.timeout.total_seconds())
    place = made.master_addr, made.master_port, made.rank, made.world_size
    return StaticRendezvous(*place, made.run_id, seconds, elastic)


class _Apart:
    """A store whose calls are made on other threads: those that wait in C++ keep signals waiting, and lost nodes."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return partial(_apart, value) if callable(value) else value


def _apart(function: Callable[..., Any], *args: Any) -> Any:
    return in_background(partial(function, *args), LONGEST_SECONDS, Ranks.look_for_lost)
