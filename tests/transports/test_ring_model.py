"""The rings' own source under every interleaving of two and three ranks, and what is found when it is broken."""

from __future__ import annotations

import pytest

from fastreduce.transports.shm.ring import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, ONE_SHOT, REDUCE_SCATTER, TWO_SHOT
from tests.support.ring_model import Model, WrongError


@pytest.mark.parametrize(
    ("ranks", "cells", "calls"),
    [
        (2, 1, [(ALL_REDUCE, 2)]),
        (2, 2, [(ALL_TO_ALL, 2), (ALL_GATHER, 1)]),
        (2, 2, [(ALL_GATHER, 2), (ALL_REDUCE, 1), (ONE_SHOT, 1)]),
        (2, 2, [(TWO_SHOT, 2)]),
        (2, 2, [(REDUCE_SCATTER, 2), (ALL_GATHER, 1)]),
        pytest.param(3, 1, [(ONE_SHOT, 1)], marks=pytest.mark.long),
        pytest.param(2, 2, [(ALL_REDUCE, 3)], marks=pytest.mark.long),
        pytest.param(2, 2, [(ALL_REDUCE, 4), (ALL_TO_ALL, 2)], marks=pytest.mark.long),
        pytest.param(2, 3, [(ALL_REDUCE, 5)], marks=pytest.mark.long),
        pytest.param(3, 1, [(ALL_TO_ALL, 2)], marks=pytest.mark.long),
        pytest.param(3, 1, [(ALL_REDUCE, 1)], marks=pytest.mark.long),
        pytest.param(2, 2, [(TWO_SHOT, 3), (ALL_GATHER, 1), (TWO_SHOT, 1)], marks=pytest.mark.long),
        pytest.param(3, 1, [(TWO_SHOT, 1)], marks=pytest.mark.long),
        pytest.param(2, 2, [(REDUCE_SCATTER, 3), (TWO_SHOT, 1), (REDUCE_SCATTER, 1)], marks=pytest.mark.long),
        pytest.param(3, 1, [(REDUCE_SCATTER, 2)], marks=pytest.mark.long),
    ],
)
def test_no_interleaving_reads_too_early_overwrites_or_sleeps_for_ever(
    ranks: int, cells: int, calls: list[tuple[int, int]]
):
    assert Model(calls, ranks, cells).run() > 1000


@pytest.mark.parametrize(
    ("kind", "good", "bad", "found"),
    [
        (ALL_REDUCE, "first + number + 1 - cells", "first + number - cells", "where another may read"),
        (REDUCE_SCATTER, "first + number + 1 - cells", "first + number - cells", "where another may read"),
        (ALL_REDUCE, "_have(bases, SUMMED if summed else SENT,", "_have(bases, SENT,", "before it is there"),
        (ALL_REDUCE, "number < at[0] and _have(bases, SENT, first + number + 1)", "number < at[0]", "status 3"),
        (ALL_REDUCE, "wake(futex, bases[other] + ASLEEP)", "pass", "sleeps for ever"),
        (
            ALL_REDUCE,
            "asleep = True\n            fall_asleep(word)",
            "fall_asleep(word)\n            sleep(futex, word, limit)",
            "for ever",
        ),
    ],
    ids=["a cell too few", "a cell too few to scatter", "take unsummed", "sum unsent", "no wake", "no second look"],
)
def test_what_is_broken_is_found(kind: int, good: str, bad: str, found: str):
    changed = []

    def change(source: str) -> str:
        changed.append(good in source)
        return source.replace(good, bad)

    model = Model([(kind, 3)], 2, 2, change)
    assert any(changed)
    with pytest.raises(WrongError, match=found):
        model.run()
