"""Collectives on a torch process group of our own (gloo), over the ranks of the user's group."""

from __future__ import annotations

import contextlib
import pickle
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import DeviceError, TransportError
from .base import Transport, Work
from .connections import Connections, timeout_of

_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections] = weakref.WeakKeyDictionary()


def _let_go() -> None:
    """At exit, behind all that closes transports: gloo's threads end before Python does.

    One that dropped its last tensor later, on a busy machine, would abort the process.
    """
    for connections in list(_beside.values()):
        connections.end()


class _Works:
    """Several torch works as one."""

    def __init__(self, transport: TorchProcessGroup, operation: str, works: list[Any]) -> None:
        self._transport, self._operation, self._works = transport, operation, works

    def wait(self) -> None:
        """Wait for all of them; their errors come out as TransportError."""
        for work in self._works:
            self._transport.call(self._operation, work.wait)


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
        self._group, self._failed = group, False
        self._number: int | None = None
        self._swaps = 0

    @cached_property
    def _gloo(self) -> Any:
        """Taken at the first collective, so that a copied or loaded wrapper needs nobody until it trains.

        All ranks take the first connection that is free on every one of them, or make a new one.
        """
        ours = _beside.setdefault(self._group, Connections())
        self._number = ours.take(self._connect, self._exchange)
        return ours.made[self._number]

    def _connect(self, name: str) -> Any:
        store = dist.PrefixStore(f"fastreduce/{name}", _get_process_group_store(self._group))
        return self.call(
            "connecting", dist.ProcessGroupGloo, store, self.rank, self.world_size, timeout=timeout_of(self._group)
        )

    def call(self, operation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call into torch; its errors come out as TransportError."""
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            known, self._failed = self._failed, True
            silent = [] if known else self._silent("timed out" in str(error).lower())
            who = f"No word from rank {', '.join(map(str, silent))}: it" if silent else "A peer"
            raise TransportError(
                f"rank {self.rank} of {self.world_size}: {operation} over gloo failed: {error}. "
                f"{who} has exited, takes no part, or did not come within the timeout."
            ) from error

    def _silent(self, timed_out: bool) -> list[int]:
        """Ranks that do not say in the store, soon after this one, that the connection failed for them too.

        Those that wait in a collective do say so, so the others are the ones that they wait for. Steps cost nothing.
        """
        store = dist.PrefixStore(f"fastreduce/failed/{self._number}", _get_process_group_store(self._group))
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        # Ranks that came one after the other time out like that too; a connection that breaks breaks for all at once.
        patience = min(5.0, max(1.0, timeout_of(self._group).total_seconds() / 10)) if timed_out else 1.0
        deadline = time.monotonic() + patience
        with contextlib.suppress(RuntimeError):  # the process that holds the store may be gone
            store.set(str(self.rank), "")
            while (silent := [r for r in silent if not store.check([str(r)])]) and time.monotonic() < deadline:
                time.sleep(0.05)
        return silent

    def all_reduce(self, tensor: Tensor) -> Work:
        """Gloo's all-reduce: the algorithm that torch's own wrapper uses."""
        self._check("all_reduce", tensor)
        return _Works(self, "all_reduce", [self.call("all_reduce", self._gloo.allreduce, [tensor])])

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
        others = [r for r in range(self.world_size) if r != self.rank]
        self._swaps += 1  # a tag of its own for each, since several are under way at once
        works = [self.call(operation, self._gloo.recv, [into[r]], r, self._swaps) for r in others]
        works += [self.call(operation, self._gloo.send, [out[r]], r, self._swaps) for r in others]
        return _Works(self, operation, works)

    def _check(self, operation: str, tensor: Tensor) -> None:
        if tensor.device.type != "cpu":
            raise DeviceError(
                f"rank {self.rank} of {self.world_size}: {operation} over gloo: TorchProcessGroup moves tensors on the "
                f"CPU, and this one is on {tensor.device}: use NcclTransport, which make_transport(group, "
                f"{str(tensor.device)!r}) makes, or move the tensor with .cpu()"
            )

    def exchange(self, value: Any) -> list[Any]:
        """Pickle, gather the lengths, gather the bytes padded to the longest."""
        return self._exchange(self._gloo, value)

    def _exchange(self, gloo: Any, value: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [int(t) for t in self._gather(gloo, torch.tensor([mine.numel()]))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: mine.numel()] = mine
        gathered = self._gather(gloo, padded)
        return [pickle.loads(t[:n].numpy().tobytes()) for t, n in zip(gathered, lengths, strict=True)]

    def _gather(self, gloo: Any, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.call("exchange", lambda: gloo.allgather([gathered], [tensor]).wait())
        return gathered

    def abort(self) -> None:
        """Drop the connection: gloo ends what waits on it."""
        self._failed = True
        self.__dict__["_gloo"] = None
        if self._number is not None and self._group in _beside:
            _beside[self._group].leave(self._number, failed=True)

    def close(self) -> None:
        """Leave the connection to the next transport over these ranks, unless it has failed."""
        self.__dict__["_gloo"] = None
        if self._number is not None and not self._failed and self._group in _beside:
            _beside[self._group].leave(self._number, failed=False)


weakref.finalize(TorchProcessGroup, _let_go)  # made before those of any reducer, and so called after them
