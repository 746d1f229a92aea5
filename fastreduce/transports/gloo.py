"""Collectives on a torch process group of our own (gloo), over the ranks of the user's group."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from ..environment.exits import Exit, at_exit
from ..errors import DeviceError, TransportError
from . import messages
from .base import Transport, Work
from .connections import Connections, timeout_of
from .deadlines import GRACE_SECONDS, in_background
from .meeting import SHORTEST, AbsentError, clear, meet, wait_until
from .store_client import SOON_SECONDS, StoreClient, client_of, connect

_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections] = weakref.WeakKeyDictionary()


def _let_go() -> None:
    """At exit: one of gloo's threads that dropped its last tensor later, on a busy machine, would abort the process."""
    for connections in list(_beside.values()):
        connections.end()


at_exit(Exit.GLOO, _let_go)


class _Works:
    """Several torch works as one, each with what it does, for errors."""

    def __init__(self, transport: TorchProcessGroup, operation: str, works: list[tuple[str, Any]]) -> None:
        self._transport, self._operation, self._works = transport, operation, works

    def wait(self) -> None:
        """Wait for all of them, for the group's timeout in all; their errors come out as TransportError."""
        deadline = time.monotonic() + self._transport.seconds
        for doing, work in self._works:
            left = timedelta(seconds=max(SHORTEST, deadline - time.monotonic()))
            self._transport.call(self._operation, work.wait, left, doing=doing)


class TorchProcessGroup(Transport):
    """gloo over the same ranks as `group`, in a group of its own so that our collectives never mix with the user's.

    Ranks, store and timeout come from `group`. The first collective connects.

    Raises:
        TransportError: if ranks do not come within the timeout.
        DeviceError: for tensors that are not on the CPU.
    """

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.seconds = timeout_of(group).total_seconds()
        self._group, self._failed, self._ended = group, False, False
        self._number: int | None = None
        self._swaps = 0

    @property
    def _gloo(self) -> Any:
        if self._ended:
            raise TransportError(f"rank {self.rank} of {self.world_size}: this gloo transport is closed")
        return self._taken

    @cached_property
    def _taken(self) -> Any:
        """Taken at the first collective, so that a copied or loaded wrapper needs nobody until it trains.

        All ranks take the first connection that is free on every one of them, or make a new one.
        """
        ours = _beside.setdefault(self._group, Connections())
        self._number = ours.take(self._connect, self._exchange)
        return ours.made[self._number]

    def _connect(self, name: str) -> Any:
        """Meet, so that who is missing can be named; then gloo connects.

        That asks the store without a limit: in the background, on a connection that nobody else needs.
        """
        timeout, prefix = timeout_of(self._group), f"fastreduce/{name}"
        ranks, here = range(self.world_size), client_of(self._group).at(f"{prefix}/here")
        try:
            meet(here, self.rank, ranks, self.seconds)
            clear(here, ranks)
        except TransportError as error:
            self._failed = True
            who = f"No word from rank {error.names}: it" if isinstance(error, AbsentError) else f"{error}. A peer"
            raise TransportError(
                f"rank {self.rank} of {self.world_size}: connecting over gloo failed. "
                f"{who} has exited, takes no part, or did not come within the timeout."
            ) from error

        def make() -> Any:
            store = dist.PrefixStore(prefix, connect(_get_process_group_store(self._group)))
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, timeout=timeout)

        return self.call("connecting", in_background, make, self.seconds + GRACE_SECONDS)

    def call(self, operation: str, function: Callable[..., Any], *args: Any, doing: str = "") -> Any:
        """Call into torch; its errors come out as TransportError."""
        try:
            return function(*args)
        except (RuntimeError, TimeoutError) as error:
            known, self._failed = self._failed, True
            who = "A peer has exited" if known else self._who("timed out" in str(error).lower())
            raise TransportError(
                f"rank {self.rank} of {self.world_size}: {operation} over gloo failed{doing}: {error}. "
                f"{who}, takes no part, or did not come within the timeout."
            ) from error

    def _who(self, timed_out: bool) -> str:
        """Ranks that do not say in the store, soon after this one, that the connection failed for them too.

        Those that wait in a collective do say so, so the others are the ones that they wait for. Steps cost nothing.
        """
        store = client_of(self._group).at(f"fastreduce/failed/{self._number}", SOON_SECONDS)
        silent = [rank for rank in range(self.world_size) if rank != self.rank]

        def all_told(store: StoreClient) -> bool:
            silent[:] = [silent[i] for i in store.absent([str(rank) for rank in silent])]
            return not silent

        # Ranks that came one after the other time out like that too; a connection that breaks breaks for all at once.
        patience = min(3.0, max(1.0, self.seconds / 10)) if timed_out else 1.0
        try:
            store.set(str(self.rank), "")
            wait_until(store, all_told, patience)
        except TransportError as error:
            return f"Nobody can be asked who is missing: {error}. A peer has exited"
        return f"No word from rank {', '.join(map(str, silent))}: it has exited" if silent else "A peer has exited"

    def all_reduce(self, tensor: Tensor) -> Work:
        """Gloo's all-reduce: the algorithm that torch's own wrapper uses."""
        self._check("all_reduce", tensor)
        gloo = self._gloo
        return _Works(self, "all_reduce", [("", self.call("all_reduce", gloo.allreduce, [tensor]))])

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Sends and receives: gloo's own all-to-all fills a slow link in one direction at a time, in half of its runs.

        32 MB on two ranks with 1 Gbit/s between them took 142 ms so, and 146 or 280 with gloo's.
        """
        self._check("all_to_all", received)
        self._check("all_to_all", wire)
        rows, shards = (tensor.view(-1).view(torch.uint8).view(self.world_size, -1) for tensor in (received, wire))
        works = self._swap("all_to_all", list(rows), list(shards))
        rows[self.rank].copy_(shards[self.rank])
        return works

    def all_gather(self, wire: Tensor) -> Work:
        """Sends and receives in place: 18 ms for 50 MB on two ranks where gloo's own all-gather took 51."""
        self._check("all_gather", wire)
        shards = list(wire.view(torch.uint8).view(self.world_size, -1))
        return self._swap("all_gather", shards, [shards[self.rank]] * self.world_size)

    def _swap(self, operation: str, into: list[Tensor], out: list[Tensor]) -> Work:
        """`into[r]` comes from rank r, `out[r]` goes to it."""
        gloo, works = self._gloo, list[tuple[str, Any]]()
        others = [r for r in range(self.world_size) if r != self.rank]
        self._swaps += 1  # a tag of its own for each, since several are under way at once
        for verb, start, tensors in (("receiving from", gloo.recv, into), ("sending to", gloo.send, out)):
            for r in others:
                doing = f", {verb} rank {r}"
                works.append((doing, self.call(operation, start, [tensors[r]], r, self._swaps, doing=doing)))
        return _Works(self, operation, works)

    def _check(self, operation: str, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"rank {self.rank} of {self.world_size}: {operation} over gloo: TorchProcessGroup moves tensors on the "
                f"CPU, and this one is on {tensor.device}: use NcclTransport, which make_transport(group, "
                f"{str(tensor.device)!r}) makes, or move the tensor with .cpu()"
            )

    def exchange(self, value: Any) -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return self._exchange(self._gloo, value)

    def _exchange(self, gloo: Any, value: Any) -> list[Any]:
        return messages.exchange(value, lambda tensor: self._gather(gloo, tensor))

    def _gather(self, gloo: Any, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.call("exchange", lambda: gloo.allgather([gathered], [tensor]).wait())
        return gathered

    def abort(self) -> None:
        """Drop the connection: gloo ends what waits on it."""
        self._failed = True
        self.close()

    def close(self) -> None:
        """Leave the connection to the next transport over these ranks, unless it has failed."""
        ended, self._ended = self._ended, True
        self.__dict__.pop("_taken", None)
        if not ended and self._number is not None and self._group in _beside:
            _beside[self._group].leave(self._number, self._failed)
