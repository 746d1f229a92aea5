"""Collectives on a torch process group of our own (gloo), over the ranks of the user's group."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment.exits import Exit, at_exit
from ..environment.signals import is_of_signal
from ..errors import DeviceError, TransportError
from . import messages
from .base import LateGatherTransport, Work
from .connections import ALL, Lease, drop_all, failed_here
from .deadlines import GRACE_SECONDS, in_background
from .meeting import AbsentError, clear, look_for, meet, no_word_from, notes, wait_until
from .ranks import NEVER_SENT, Ranks, client_of, names_of, own_name, place_in, timeout_of, who_has_ended, who_is_gone
from .store_client import SOON_SECONDS, StoreClient

LEAST_SECONDS = 0.001  # that torch waits for: less is taken for no deadline
BROKEN_SECONDS = 1.5  # until all who are left have noticed that a connection broke

at_exit(Exit.GLOO, lambda: drop_all("gloo"), ALL)


class _GlooStore(dist.Store):
    """Where gloo leaves the addresses that it listens at: torch's interface, over the one client.

    Once `left` is set, because nobody waits for gloo any more, what waits for an address fails.
    """

    def __init__(self, client: StoreClient, look: Callable[[], None]) -> None:
        super().__init__()
        self._client, self._look, self.left = client, look, threading.Event()

    def set(self, key: str, value: Any) -> None:
        """Write bytes."""
        self._client.call(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """The bytes, when they are there."""
        self.wait([key])
        return self._client.call(lambda store: bytes(store.get(key)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all are there.

        Raises:
            TimeoutError: if they do not come within the client's deadline.
            TransportError: once nobody waits for gloo any more.
        """

        def there(client: StoreClient) -> bool:
            if self.left.is_set():
                raise TransportError("gloo is not waited for any more")
            return not client.absent(keys)

        if not wait_until(self._client, there, self._client.seconds, self._look):
            raise TimeoutError(f"no word at {', '.join(keys)} within {self._client.seconds:g} s")


class GlooConnection:
    """gloo over the ranks of `group`, in a group of its own.

    Raises:
        TransportError: if ranks do not come within the timeout.
    """

    def __init__(self, group: Ranks, name: str) -> None:
        self.rank, self.size = place_in(group)
        self.me, self.names = own_name(group), names_of(group)
        self.seconds = timeout_of(group).total_seconds()
        self.failed = False
        self._gone = who_is_gone(group)
        self._asking, self._told = threading.Lock(), no_word_from([])
        self._missing: list[int] = []
        self.under_way = set[_Works]()  # begun here, and not waited for
        self._failures = client_of(group).at(f"fastreduce/failed/{name}", SOON_SECONDS)
        self._tags = 0
        self._gloo: Any = None
        self._gloo = self._connect(group, f"fastreduce/{name}")

    def _connect(self, group: Ranks, prefix: str) -> Any:
        """Meet, so that who is missing can be named; then gloo connects, in the background.

        Rank 0 names a place for addresses that nobody has used: those of an earlier group of this name are stale.
        """
        ranks, store = self.names, client_of(group).at(prefix)
        here, place = store.at("here"), uuid.uuid4().hex
        look = look_for(who_has_ended(group))
        self.call("connecting", meet, here, ranks[self.rank], ranks, self.seconds, place, look)
        place, *_ = self.call("connecting", notes, here, ranks)
        self.call("connecting", clear, here, ranks)
        self._failures = self._failures.at(place)
        self._addresses = _GlooStore(store.at(place), look)  # gloo keeps it, without what is Python's of it

        def make() -> Any:
            return dist.ProcessGroupGloo(self._addresses, self.rank, self.size, timeout=timeout_of(group))

        try:
            return self.call("connecting", in_background, make, self.seconds + GRACE_SECONDS, look)
        except BaseException:  # an interrupt, say; else gloo may connect later, as TORCH_GLOO_LAZY_INIT says
            self._addresses.left.set()
            raise

    @property
    def gloo(self) -> Any:
        """Torch's group."""
        if self._gloo is None:
            raise TransportError(f"{self.me}: this gloo transport is closed")
        return self._gloo

    def new_tag(self) -> int:
        """A number that messages of one operation bear, since several are under way at once."""
        self._tags += 1
        return self._tags

    def begin(self) -> None:
        """Count tags anew, as all ranks do: not all may have come as far before."""
        self._tags = 0

    def leave(self) -> None:
        """Leave it to the next; drop it, if it has failed, and end it, with something under way."""
        if self.failed:
            self._gloo = None
        elif self.under_way:
            self.abort()

    def abort(self) -> None:
        """Drop it, and end what waits on it: where one wait times out, gloo closes all of its sockets."""
        gloo, self.failed, self._gloo = self._gloo, True, None
        self._hang_up(gloo)

    def _hang_up(self, gloo: Any) -> None:
        """Close all sockets: what waits on them, here and on the peers, fails."""
        others = [rank for rank in range(self.size) if rank != self.rank and gloo is not None]
        for rank in others:  # one of them still connected
            with contextlib.suppress(RuntimeError):
                gloo.recv([torch.empty(1, device="cpu")], rank, NEVER_SENT).wait(timedelta(milliseconds=1))

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        gloo = self.gloo

        def gather(tensor: Tensor) -> list[Tensor]:
            gathered = [torch.empty_like(tensor) for _ in range(self.size)]
            self.call(operation, lambda: gloo.allgather([gathered], [tensor]).wait())
            return gathered

        return messages.exchange(value, gather)

    def call(self, operation: str, function: Callable[..., Any], *args: Any, doing: str = "") -> Any:
        """Call into gloo or the store; their errors come out as TransportError.

        What a signal's handler raises comes out as it is, and ends the connection: nobody knows how far the call came.
        """
        try:
            return function(*args)
        except BaseException as error:
            if is_of_signal(error):
                self.abort()
                raise
            if not isinstance(error, (RuntimeError, TimeoutError)):
                raise
            if isinstance(error, AbsentError):
                self._missing = list(error.missing)
                what, who = "", no_word_from(error.missing)
            elif isinstance(error, TransportError):  # the store's
                what, who = "", f"{error}. {no_word_from([])}"
            else:
                what, who = f": {error}", self._culprit("timed out" in str(error).lower())
            self.failed = True
            failed_here.set()
            raise TransportError(
                f"{self.me}: {operation} over gloo failed{doing}{what}. {who}", self._missing
            ) from error

    def _culprit(self, timed_out: bool) -> str:
        """Who is named in errors: the first that fails asks, and those that fail with it wait for the answer."""
        with self._asking:
            if not self.failed:
                self.failed = True
                self._told = self._who(timed_out)
            return self._told

    def _who(self, timed_out: bool) -> str:
        """Ranks that do not say in the store, soon after this one, that the connection failed for them too.

        Those that wait in a collective do say so, so the others are the ones that they wait for. Steps cost nothing.
        """
        if self._gone is not None:
            self._missing = list(self._gone())
            return no_word_from(self._missing)
        silent = [name for name in self.names if name != self.names[self.rank]]

        def all_told(store: StoreClient) -> bool:
            silent[:] = [silent[i] for i in store.absent([str(rank) for rank in silent])]
            return not silent

        # Ranks that came one after the other time out like that too; a connection that breaks breaks for all at once,
        # once this rank hangs up: others may wait for this one alone.
        patience = min(3.0, max(1.0, self.seconds / 10)) if timed_out else BROKEN_SECONDS
        try:
            self._failures.set(str(self.names[self.rank]), "")
            if not timed_out:
                self._hang_up(self._gloo)
            wait_until(self._failures, all_told, patience)
        except TransportError as error:
            return f"Nobody can be asked who is missing: {error}. {no_word_from([])}"
        self._missing = silent
        return no_word_from(silent)


class _Works:
    """Several torch works as one, each with what it does, for errors."""

    def __init__(self, connection: GlooConnection, operation: str, works: list[tuple[str, Any]]) -> None:
        self._connection, self._operation, self._works = connection, operation, works
        connection.under_way.add(self)

    def wait(self) -> None:
        """Wait for all of them, for the group's timeout in all; their errors come out as TransportError."""
        deadline = time.monotonic() + self._connection.seconds
        for doing, work in self._works:
            left = timedelta(seconds=max(LEAST_SECONDS, deadline - time.monotonic()))
            self._connection.call(self._operation, work.wait, left, doing=doing)
        self._connection.under_way.discard(self)


class GlooTransport(LateGatherTransport):
    """gloo over the same ranks as `group`, in a group of its own so that our collectives never mix with the user's.

    Ranks, store and timeout come from `group`. The first collective connects.

    Raises:
        TransportError: if ranks do not come within the timeout.
        DeviceError: for tensors that are not on the CPU.
    """

    name = "gloo"
    of_some = True

    def __init__(self, group: Ranks) -> None:
        self.rank, self.world_size = place_in(group)
        self._me = own_name(group)
        self._lease = Lease("gloo", group, GlooConnection)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Gloo's all-reduce: the algorithm that torch's own wrapper uses."""
        self._check("all_reduce", tensor)
        connection = self._lease.connection
        work = connection.call("all_reduce", connection.gloo.allreduce, [tensor])
        return _Works(connection, "all_reduce", [("", work)])

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Sends and receives: gloo's own all-to-all fills a slow link in one direction at a time, in half of its runs.

        32 MB on two ranks with 1 Gbit/s between them took 142 ms so, and 146 or 280 with gloo's.
        """
        self._check("all_to_all", received)
        self._check("all_to_all", wire)
        rows, shards = (tensor.view(-1).view(torch.uint8).view(self.world_size, -1) for tensor in (received, wire))
        works = self._swap("all_to_all", list(rows), list(shards), self._lease.connection.new_tag())
        rows[self.rank].copy_(shards[self.rank])
        return works

    def all_gather(self, wire: Tensor) -> Work:
        """Sends and receives in place: 18 ms for 50 MB on two ranks where gloo's own all-gather took 51."""
        self._check("all_gather", wire)  # before ranks are waited for, where the tag connects
        return self.late_all_gather()(wire)

    def late_all_gather(self) -> Callable[[Tensor], Work]:
        """Its place among the collectives is the tag of its messages."""
        tag = self._lease.connection.new_tag()

        def begin(wire: Tensor) -> Work:
            self._check("all_gather", wire)
            shards = list(wire.view(torch.uint8).view(self.world_size, -1))
            return self._swap("all_gather", shards, [shards[self.rank]] * self.world_size, tag)

        return begin

    def _swap(self, operation: str, into: list[Tensor], out: list[Tensor], tag: int) -> Work:
        """`into[r]` comes from rank r, `out[r]` goes to it."""
        connection, works = self._lease.connection, list[tuple[str, Any]]()
        gloo = connection.gloo
        others = [r for r in range(self.world_size) if r != self.rank]
        for verb, start, tensors in (("receiving from", gloo.recv, into), ("sending to", gloo.send, out)):
            for r in others:
                doing = f", {verb} rank {connection.names[r]}"
                works.append((doing, connection.call(operation, start, [tensors[r]], r, tag, doing=doing)))
        return _Works(connection, operation, works)

    def _check(self, operation: str, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"{self._me}: {operation} over gloo: GlooTransport moves tensors on the "
                f"CPU, and this one is on {tensor.device}: use NcclTransport, which make_transport(group, "
                f"{str(tensor.device)!r}) makes, or move the tensor with .cpu()"
            )

    def exchange(self, value: Any) -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return self._lease.connection.exchange(value)

    def abort(self) -> None:
        """Drop the connection: gloo ends what waits on it."""
        self._lease.abort()

    def close(self) -> None:
        """Leave the connection to the next transport over these ranks, unless it has failed."""
        self._lease.close()


TorchProcessGroup = GlooTransport  # an older name
