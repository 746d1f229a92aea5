"""UnevenInputs: which ranks have no inputs left, and hear from the others what becomes of averages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any, NamedTuple

from ..transports import Transport
from ..transports.messages import checked, of_types
from .pipeline import BucketPipeline
from .residuals.applied import Fate


class _Word(NamedTuple):
    """What a rank tells the others where some have joined.

    `awaits` and `fates` are by bucket, and these by slot: None where the rank knows nothing.
    """

    keeps_statistics: bool
    joined: bool
    scale: float
    awaits: list[bool]
    fates: list[list[Fate] | None]


class UnevenInputs:
    """In torch's `join()`: a rank without inputs left has joined, and brings zeros to what the others reduce and apply.

    Attributes:
        joining: whether a rank may have joined; the same on all.
        here: whether this one has.
        active: tells how many have not; None where nobody knows, as in a module that joins behind another one.
        some_had_joined: whether some had when the last reduction began, as all know then.
        scale: what averages of the last reduction were multiplied by, since ranks had joined; what is kept is for such.
    """

    def __init__(self) -> None:
        self.joining = self.here = self.some_had_joined = False
        self.active: Callable[[], int] | None = None
        self.scale = 1.0
        self._before = False  # whether some had joined in the last reduction
        self._told = False  # whether ranks have told each other in this `join()`, of buckets that are as they were then

    def begin(self) -> None:
        """A `join()` begins, and what one that an exception left has told, on some ranks only, counts no more."""
        self.end()
        self.active = None

    def lay_out(self) -> None:
        """Buckets have been laid out anew."""
        self._told = False

    def end(self) -> None:
        """All have joined."""
        self.joining = self.here = self._told = False

    def some_have_joined(self, world_size: int) -> bool:
        """Whether some ranks may have by now: the same on every rank."""
        return self.joining and (self.here or self.active is None or self.active() < world_size)

    def matter(self, world_size: int, reducing: bool = False) -> bool:
        """Whether ranks tell each other what became of the last averages: the same on every rank.

        They do where some have joined, or had in the last reduction; and in a join's first reduction, since some may
        join behind it. `reducing`: another reduction begins.
        """
        now = self.some_have_joined(world_size)
        found = now or self._before or (self.joining and not self._told)
        if reducing:
            self._before, self._told = now, self.joining
        return found

    def tell(
        self,
        transport: Transport,
        pipelines: Sequence[BucketPipeline],
        keeps_statistics: bool,
        divisor: int | None = None,
    ) -> bool:
        """Where ranks have joined, let them hear from the others what became of the last averages.

        Else their shards would be added to as if all had been applied in full. Whoever has something left of an earlier
        setting hears it from ranks that have nothing, which watch too, then: from a join's first reduction on, since a
        rank may join while others accumulate on averages that nobody has applied yet. Where only one that has joined
        since knows it, the others hear it from that. Every rank calls it.

        Args:
            transport: what connects them.
            pipelines: by bucket.
            keeps_statistics: whether this rank does.
            divisor: a reduction follows, in the mean over so many ranks, as those know that have not joined.

        Returns:
            Whether a rank is known to keep statistics.
        """
        ranks, reducing = transport.world_size, divisor is not None
        if reducing:
            self.some_had_joined = False
        if not self.matter(ranks, reducing):
            return keeps_statistics
        kept = [pipeline.kept for pipeline in pipelines]
        mine = [None if each is None else each.told(joined=self.here) for each in kept]
        awaits, scale = [each is not None for each in kept], ranks / (divisor or ranks)
        exchanged = transport.exchange([keeps_statistics, self.here, scale, awaits, mine])
        counts = [len(pipeline.bucket.slots) for pipeline in pipelines]
        told = checked(exchanged, lambda value: _checked_word(value, counts), "word of the last averages")
        active = [word for word in told if not word.joined]
        joined = [word for word in told if word.joined]
        if reducing:
            self.some_had_joined = bool(joined)
        may_join = told if self.joining else joined  # behind this reduction, before these averages are applied
        for i, pipeline in enumerate(pipelines):
            pipeline.watches_for_others = reducing and any(word.awaits[i] for word in may_join)
        if active:
            for i, (each, own) in enumerate(zip(kept, mine, strict=True)):
                heard = next((word.fates[i] for word in (*active, *joined) if word.fates[i] is not None), None)
                if each is not None and (own is None or self.here) and heard is not None:
                    each.hear(heard)
                if each is not None and reducing:
                    each.expect(len(active) / ranks, active[0].scale / self.scale)
            if reducing:
                self.scale = active[0].scale
        return any(word.keeps_statistics for word in told)


def _checked_word(value: Any, counts: Sequence[int]) -> _Word:
    """`counts`: of slots, by bucket."""
    word = _Word(*of_types(value, bool, bool, float, list, list))
    of_types(word.awaits, *[bool] * len(counts))
    for fates, count in zip(of_types(word.fates, *[(list, NoneType)] * len(counts)), counts, strict=True):
        for fate in of_types(fates, *[list] * count) if fates is not None else ():
            of_types(fate, float, float, (float, NoneType), bool, bool, bool)
    return word
