"""The wires of one bucket: what travels of it under a setting, made of gradients and made into averages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from ...transports import SlotTransport, Work
from ..residuals.bucket_residuals import SlotResiduals
from ..residuals.error_feedback import ErrorFeedback

Sum = Callable[[], Work]
"""Waits for what has been started, sums what has come, and starts the last collective."""


class BucketWires(ABC):
    """What is sent and received of one bucket, and three stages over it.

    Attributes:
        wire: what holds the averages when it has been reduced.
        feedback: what was lost; None without error feedback.
        nodes: the ranks of each node, of a reduction in two levels; else nothing.
        shard: which of its shards this rank reduces; -1 for none, and where there are none.
        block: elements that share a scale; 0 without.
        in_place: whether the wire is the flat in the gradients' own dtype, so that bucket views can lie in it.
        keeps_statistics: whether `decompress` can make them.
        direct: the transport, if it can do without a wire.
        piecewise: whether it compresses and sums, too.
    """

    wire: Tensor
    feedback: ErrorFeedback | None
    nodes = ""
    shard: int
    block = 0
    in_place = False
    keeps_statistics = False
    direct: SlotTransport | None = None
    piecewise = False

    @abstractmethod
    def compress(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None) -> None:
        """Gradients and used-flags → wire; `finite` becomes 0 if they are not."""

    @abstractmethod
    def reduce(self, mark: Callable[[int], None]) -> Work | Sum:
        """Wire → reduced wire, the same bits on every rank, once the returned work is done.

        Or its first transfers are under way: then what is returned waits for them, sums what has come, and returns the
        work.

        Args:
            mark: called where a reduction has passed `Point.EXCHANGED` or `SUMMED`.
        """

    @abstractmethod
    def decompress(
        self, averaged: Sequence[Tensor], used: Tensor, finite: Tensor | None, statistics: Tensor | None
    ) -> None:
        """Wire → averaged gradients, and used-flags of all ranks; `finite` becomes 0 if averages are not."""

    @abstractmethod
    def launch_kernels(self, grads: Sequence[Tensor], used: Tensor, finite: Tensor | None, in_wire: bool) -> None:
        """Launch every kernel once but those that `decompress` launches, and move nothing between ranks."""

    @abstractmethod
    def magnitudes(self) -> Tensor:
        """Of each slot's average in the wire: the largest magnitude, and the sum of all, FP64 `[2, slots]`."""

    @property
    @abstractmethod
    def sent_by_stage(self) -> dict[str, int]:
        """Bytes that one rank sends in one reduction, by stage on the wire."""

    def holds(self, averaged: Sequence[Tensor]) -> bool:
        """Whether averages are views of the wire, and need not be written."""
        return False

    def reduce_between(
        self, tensors: Sequence[Tensor], into: Sequence[Tensor], finite: Tensor | None, in_wire: bool
    ) -> Work:
        """All three stages in one, from gradients and used-flags, where there is a `direct`.

        Averages of a two-shot are to be `in_wire`, as `reduce` would leave them, or `into` tensors.
        """
        raise NotImplementedError

    # What is kept between steps

    def factor(self, position: int) -> Tensor | None:
        """What a slot's next factors begin from, under PowerSGD."""
        return None

    def factors(self) -> dict[str, Tensor]:
        """The same of all, by parameter name."""
        return {}

    def go_on(self, position: int, factor: Tensor) -> None:  # noqa: B027 (most have none)
        """Begin a slot's factors from what others have told."""

    def spread(self) -> None:  # noqa: B027 (most have no second stage)
        """Move what is kept of shards into the first stage, on every rank alike; every rank calls it."""

    def of_node(self, parts: Mapping[int, SlotResiduals]) -> Mapping[int, SlotResiduals]:
        """What this rank keeps of slots, as what is to be put into `feedback`: in two levels its node's sum.

        Every rank of the node calls it then, also one that keeps nothing.
        """
        return parts

    def of_rank(self, parts: Mapping[int, SlotResiduals]) -> Mapping[int, SlotResiduals]:
        """What was taken of slots, as what is this rank's own: in two levels the node's, on its first rank.

        So no column's place tells in it. Every rank of the node calls it then.
        """
        return parts
