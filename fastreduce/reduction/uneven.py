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

    def end(self) -> None:
        """All have joined."""
        self.joining = self.here = False

    def matter(self, world_size: int, reducing: bool = False) -> bool:
        """Whether some ranks have joined, or had in the last reduction: the same on every rank.

        `reducing`: another reduction begins.
        """
        now = self.joining and (self.here or self.active is None or self.active() < world_size)
        before, self._before = self._before, now if reducing else self._before
        return now or before
