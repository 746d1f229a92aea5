"""UnevenInputs: which ranks have no inputs left, and know nothing of what becomes of averages."""

from __future__ import annotations

from collections.abc import Callable


class UnevenInputs:
    """In torch's `join()`: a rank without inputs left has joined, and brings zeros to what the others reduce and apply.

    Attributes:
        joining: whether a rank may have joined; the same on all.
        here: whether this one has.
        active: tells how many have not; None where nobody knows, as in a module that joins behind another one.
        some_had_joined: whether some had when the last reduction began, as all know then.
    """

    def __init__(self) -> None:
        self.joining = self.here = self.some_had_joined = False
        self.active: Callable[[], int] | None = None
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
