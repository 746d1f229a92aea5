"""Collectives on MPI (mpi4py), in communicators of our own over the ranks of the user's group."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..base import Done, Transport, Work
from ..connections import Lease
from ..ranks import Ranks, place_in
from .communicator import MpiConnection, ready
from .library import load_mpi


class MpiTransport(Transport):
    """MPI over the ranks of `group`, which must have the order of COMM_WORLD (`init_process_group("mpi")` sees to it).

    MPI moves bytes, we sum. CUDA tensors go through pinned memory, unless MPI takes them as they are. The first
    collective makes the communicator.

    Raises:
        BackendUnavailableError: if MPI cannot be used.
        TransportError: if ranks do not come within the group's timeout; it names them.
    """

    name = "mpi"
    of_some = True

    def __init__(self, group: Ranks) -> None:
        load_mpi()
        self.rank, self.world_size = place_in(group)
        self._lease = Lease("MPI", group, MpiConnection)

    def all_reduce(self, tensor: Tensor) -> Work:
        """All-to-all, a sum in rank order, all-gather."""
        if not tensor.numel() or self.world_size == 1:
            return Done()
        if tensor.is_cuda and not _takes_cuda():
            host = _to_host(tensor)
            return self._lease.connection.all_reduce(host, lambda: tensor.copy_(host, non_blocking=True))
        return self._lease.connection.all_reduce(ready(tensor))

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """MPI's Ialltoall on the bytes."""
        if not wire.numel():
            return Done()
        if wire.is_cuda and not _takes_cuda():
            into = torch.empty_like(received, device="cpu", pin_memory=True)
            after = lambda: received.copy_(into, non_blocking=True)  # noqa: E731
            return self._lease.connection.all_to_all(into, _to_host(wire), after)
        return self._lease.connection.all_to_all(received, ready(wire))

    def all_gather(self, wire: Tensor) -> Work:
        """MPI's Iallgather on the bytes, in place."""
        if not wire.numel():
            return Done()
        if wire.is_cuda and not _takes_cuda():
            host = _to_host(wire)
            return self._lease.connection.all_gather(host, after=lambda: wire.copy_(host, non_blocking=True))
        return self._lease.connection.all_gather(ready(wire))

    def exchange(self, value: Any) -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return self._lease.connection.exchange(value)

    def abort(self) -> None:
        """Collectives under way end with an error, on the peers when they next ask, within half a second."""
        self._lease.abort()

    def close(self) -> None:
        """Leave the communicator to the next transport over these ranks, unless it has failed."""
        self._lease.close()


def _to_host(tensor: Tensor) -> Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    ready(tensor)
    return host


@cache
def _takes_cuda() -> bool:
    """Whether this MPI says that it takes CUDA addresses (Open MPI's MPIX_Query_cuda_support)."""
    import mpi4py.MPI

    with contextlib.suppress(OSError, AttributeError):
        return bool(ctypes.CDLL(mpi4py.MPI.__file__).MPIX_Query_cuda_support())
    return False
