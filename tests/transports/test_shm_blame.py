"""Whom a rank names that has waited in vain over shared memory, by what it sees of the others' segments."""

from __future__ import annotations

from typing import Any

import pytest

from fastreduce.transports.shm.connection import ENDED, GAVE_UP, ShmConnection
from fastreduce.transports.shm.segments import BEAT, FAILED


class Owned:
    """A segment as others see it: whether its rank has ended, what that has said of a failure, whether it waits."""

    def __init__(self, ended: bool = False, failed: int = 0, waits: bool = False) -> None:
        self._ended, self._words, self._waits = ended, {FAILED: failed, BEAT: 0}, waits

    def owner_is_gone(self) -> bool:
        return self._ended

    def word(self, at: int) -> int:
        if at == BEAT and self._waits:
            self._words[at] += 1
        return self._words[at]

    def set_word(self, at: int, value: int) -> None:
        self._words[at] = value


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (Owned(ended=True, failed=GAVE_UP), Owned(ended=True), [2]),
        (Owned(ended=True, failed=GAVE_UP), Owned(), [2]),
        (Owned(ended=True, failed=GAVE_UP), Owned(waits=True), [1]),
        (Owned(ended=True), Owned(waits=True), [1]),
        (Owned(failed=ENDED), Owned(ended=True, failed=GAVE_UP), [1]),
    ],
)
def test_who_gave_up_and_ended_is_not_blamed_for_who_was_missing(first: Owned, second: Owned, named: list[int]):
    here: Any = ShmConnection.__new__(ShmConnection)
    here.rank, here.size, here._names, here._gone = 0, 3, range(3), None
    here._segments = [Owned(), first, second]
    assert here._who(0.2) == named
