"""LeftOver: what another backward through the same forward may bring, once one has been reduced."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ReducerError
from .bucketed import BucketedGradients


class LeftOver:
    """Parameters that no rank used in the last reduction, and which of the others this rank brought gradients to.

    Losses over disjoint parts of a model may be backpropagated one after the other. What no rank used in the first
    backward is the same set on all ranks, so that all of them can run the same buckets for the second.

    Attributes:
        parameters: the indices of those that no rank used: the same on every rank.
        brought: for each parameter, whether this rank has brought a gradient to it; changed in place.
    """

    def __init__(self, buckets: BucketedGradients) -> None:
        self._buckets = buckets
        self.parameters: set[int] = set()
        self.brought = [True] * len(buckets.specs)

    def forget(self) -> None:
        """No backward comes that belongs to the last reduction."""
        self.parameters = set()
        self.brought[:] = [True] * len(self.brought)

    def add(self, count: int) -> None:
        """So many parameters more are averaged, from the next reduction on."""
        self.brought += [True] * count

    def first(self, used: Sequence[bool], why_once: str = "") -> list[int]:
        """The parameters whose first gradients a backward has brought that follows a reduction.

        Args:
            used: all that it has reached.
            why_once: why there may be none such, as words before "sum the losses"; "" where there may.

        Raises:
            ReducerError: if some of them were averaged already, or others are brought once more, or there may be none.
        """
        rank, names = self._buckets.transport.rank, self._buckets.gradients.names
        first = [i for i, is_used in enumerate(used) if is_used and not self.brought[i]]
        late = [names[i] for i in first if i not in self.parameters]
        if late:
            raise ReducerError(
                f"rank {rank}: a second backward through one forward brought this rank's first gradient for "
                f"{late[0]!r}, which was averaged already with what other ranks had of it. Sum the losses and call "
                "backward once"
            )
        if first and why_once:
            raise ReducerError(
                f"rank {rank}: a second backward through one forward brought first gradients for {names[first[0]]!r}: "
                f"{why_once} sum the losses and call backward once"
            )
        twice = [name for i, name in enumerate(names) if used[i] and self.brought[i]]
        if first and twice:
            raise ReducerError(
                f"rank {rank}: a second backward through one forward brought first gradients for {names[first[0]]!r} "
                f"and further ones for {twice[0]!r}, which was averaged already. Sum the losses and call backward once"
            )
        return first

    def settle(self, first: Sequence[int], left: set[int]) -> None:
        """They have been reduced, all but `left`, which nobody used again."""
        self.parameters &= left
        for i in first:
            self.brought[i] = True
