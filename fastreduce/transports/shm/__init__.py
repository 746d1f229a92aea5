"""Collectives in memory that the ranks of one host share: no socket, no copy by the system."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...environment.numba_imports import import_compiled
from ...kernels.slots import Pieces, SlotTable
from ..base import SlotTransport, Work
from ..connections import Lease
from ..ranks import Ranks, place_in
from .segments import GEOMETRY, why_no_shm

if TYPE_CHECKING:
    from .connection import ShmConnection

__all__ = ["ShmTransport", "why_no_shm"]


@cache
def _load() -> Any:
    """The module that connects, with what Numba compiles; imported on first use."""
    return import_compiled([".connection"], __package__)[0]


def _connect(group: Ranks, name: str, times: int) -> ShmConnection:
    made: ShmConnection = _load().ShmConnection(group, name, times)
    return made


class ShmTransport(SlotTransport):
    """Shared memory of the ranks of `group`, which must all run on one host.

    Each rank maps a ring of 2 MB of every other one (/dev/shm). Collectives go through it in pieces that stay in the
    cache; ranks do the work themselves, in `Work.wait`, in the order in which they began it. Ranks, store and timeout
    come from `group`. The first collective connects.

    Raises:
        BackendUnavailableError: on every rank, with the reason, if one of them cannot share memory with the others.
        TransportError: if ranks do not come within the timeout.
        DeviceError: for tensors that are not on the CPU.
    """

    name = "shm"

    def __init__(self, group: Ranks, times: int = 1) -> None:
        self.rank, self.world_size = place_in(group)
        self._lease: Lease[ShmConnection] = Lease("shm", group, partial(_connect, times=times))

    def connect(self) -> None:
        """Do what the first collective would; every rank calls it."""
        self._lease.connection  # noqa: B018

    def all_reduce(self, tensor: Tensor) -> Work:
        """The sum in rank order, in place: each rank sums a part of every piece, small tensors whole."""
        return self._lease.connection.all_reduce(tensor)

    def all_reduce_slots(
        self, tensors: Sequence[Tensor], slots: SlotTable, scale: float, into: Sequence[Tensor]
    ) -> Work:
        """Straight from the tensors into the ring, and from there to where they belong: no flat."""
        return self._lease.connection.all_reduce_slots(tensors, slots, scale, into)

    def two_shot(self, pieces: Pieces) -> Work:
        """Encoded into the ring, averaged out of it, and decoded from there, while a piece is in the cache: no wire."""
        return self._lease.connection.two_shot(pieces)

    def reduce_scatter(self, pieces: Pieces) -> Work:
        """Encoded into the ring, and summed out of it while a piece is in the cache: no flat."""
        return self._lease.connection.reduce_scatter(pieces)

    @property
    def piece_bytes(self) -> int:
        """Nearly a rank's part of a cell."""
        return GEOMETRY.cell_bytes // self.world_size - 64

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Each rank copies what is for it out of the others' rings."""
        return self._lease.connection.all_to_all(received, wire)

    def all_gather(self, wire: Tensor) -> Work:
        """Each rank copies the others' shards out of their rings, in place."""
        return self._lease.connection.all_gather(wire)

    def exchange(self, value: Any) -> list[Any]:
        """Two all-gathers: lengths, then bytes."""
        return self._lease.connection.exchange(value)

    def abort(self) -> None:
        """Collectives under way end with an error, on the peers at once."""
        self._lease.abort()

    def close(self) -> None:
        """Leave the segments to the next transport over these ranks, unless a collective failed or is under way."""
        self._lease.close()
