"""The few collectives that a reducer needs, and the Work that each returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from ..kernels.slots import Pieces, SlotTable


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the collective is done.

        Raises:
            TransportError: if it failed or timed out.
        """


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """It has."""


class Transport(ABC):
    """Collectives over contiguous tensors among `world_size` ranks.

    Every rank calls the same methods in the same order. A call may return before the data has moved;
    the tensors belong to the transport until `Work.wait`.

    Attributes:
        enqueues: whether a collective of CUDA tensors is work on the current stream, for which no host waits.
        of_some: whether the class makes transports of some of the ranks of a process group, too (`ranks.py`).
    """

    name: str
    rank: int
    world_size: int
    enqueues = False
    of_some = False

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum a floating-point tensor over the ranks, in place and in its dtype."""

    @abstractmethod
    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        """Send shard r of `wire` to rank r; row r of `received` comes from rank r. Any dtype: bytes move."""

    @abstractmethod
    def all_gather(self, wire: Tensor) -> Work:
        """Give every rank this rank's shard of `wire`, in place: shard r comes from rank r. Any dtype."""

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Every rank's small value in rank order; blocks. In steps only where ranks have joined.

        Values are what JSON has: None, bools, numbers, strings, lists, dicts with string keys. They are somebody
        else's: who uses them looks whether they are what was to come.

        Raises:
            TransportError: if it failed or timed out.
            TypeError: for another value.
        """

    def check(self) -> None:  # noqa: B027 (most transports raise where they are waited for)
        """Raise what made the transport fail, for whom no collective waits on the host.

        Raises:
            TransportError: if it did.
        """

    def tell_watchdog(self, about: str) -> None:  # noqa: B027 (most transports raise where they are called)
        """Say what the collectives that follow work for, as a sentence: errors that come by themselves tell it."""

    @abstractmethod
    def abort(self) -> None:
        """End collectives under way with an error, here and on the peers."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport made; collectives fail afterwards."""


def gather_rows(transport: Transport, mine: Tensor) -> Tensor:
    """Every rank's tensor of the same shape and dtype, stacked in rank order; blocks."""
    everybody = mine.new_empty(transport.world_size, *mine.shape)
    everybody[transport.rank] = mine
    if mine.numel():
        transport.all_gather(everybody.view(-1)).wait()
    return everybody


class LateGatherTransport(Transport):
    """A transport that also begins an all-gather later than collectives that come after it."""

    @abstractmethod
    def late_all_gather(self) -> Callable[[Tensor], Work]:
        """`all_gather` with its place among the collectives now; what is returned begins it, once, on any thread."""


class PieceTransport(Transport):
    """A transport that also sums shards of tensors where they lie: no flat."""

    @abstractmethod
    def reduce_scatter(self, pieces: Pieces) -> Work:
        """Average what `pieces` encodes, shard r on rank r, and decode it there: the first half of a two-shot.

        Functions of `pieces` are called now or until the end of `Work.wait`. Every rank comes with as many blocks, of
        as many bytes, as encode alike.
        """


class SlotTransport(PieceTransport):
    """A transport that also averages tensors where they lie: no flat, and no wire."""

    @abstractmethod
    def all_reduce_slots(
        self, tensors: Sequence[Tensor], slots: SlotTable, scale: float, into: Sequence[Tensor]
    ) -> Work:
        """`all_reduce` of the flat that tensors of one floating-point dtype make, each multiplied by `scale`.

        The sums go into the tensors `into`, which may be the same. To the other ranks it is the `all_reduce` of a flat.

        Args:
            tensors: dense, one for each slot.
            slots: where each lies in the flat.
            scale: by which they are multiplied, in FP64 for FP64, else in FP32.
            into: of the same sizes.
        """

    @abstractmethod
    def two_shot(self, pieces: Pieces) -> Work:
        """Average what `pieces` encodes, shard r on rank r, and decode it on every rank.

        Functions of `pieces` are called now or until the end of `Work.wait`, from several places one after the other.
        Every rank comes with as many blocks, of as many bytes, as encode alike.
        """

    @property
    @abstractmethod
    def piece_bytes(self) -> int:
        """How much of each shard is in a piece of `two_shot`, at most: a block must fit."""
