"""How often `fastreduce compare` is wrong: what the command counts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from bench import error_rates
from bench.error_rates import AGAIN, BASE, OTHER, QUIET, ROUNDS, Noise


def test_a_comparison_without_noise_shows_its_truth_and_nothing_else():
    random = np.random.default_rng(0)
    turns = error_rates.simulated(Noise(0.0, 0.0, 0.0), ROUNDS, 1.03, random)
    assert len(turns) == ROUNDS * len(error_rates.CONTESTANTS)
    assert error_rates.ratio_of(OTHER, turns).median == pytest.approx(1.03)
    rows = list(error_rates.speed_rows("", [error_rates.ratio_of(OTHER, turns)] * 3, 1.03))
    assert [(row.said, row.comparisons, row.happened) for row in rows][1] == ("seen", 3, 3)


def test_a_long_comparison_is_cut_into_whole_pieces(tmp_path: Path):
    random, path = np.random.default_rng(0), tmp_path / "results.json"
    turns = error_rates.simulated(QUIET, 2 * ROUNDS + 7, 1.0, random)
    path.write_text(json.dumps({"turns": [asdict(turn) for turn in turns]}))
    pieces = list(error_rates.recorded(path))
    assert [sorted({turn.round for turn in piece}) for piece in pieces] == [
        list(range(ROUNDS)),
        list(range(ROUNDS, 2 * ROUNDS)),
    ]
    slowed = error_rates.ratio_of(AGAIN, error_rates.slowed(pieces[0], AGAIN, 1.03))
    assert slowed.median == pytest.approx(1.03 * error_rates.ratio_of(AGAIN, pieces[0]).median)
    assert error_rates.ratio_of(BASE, pieces[1]).median == 1


def test_the_kept_rows_are_those_of_the_command_and_hold_what_the_docs_promise():
    """No figure moves by itself: intervals hold 93 to 98 %, the control is flagged in about 5 % at most."""
    rows = error_rates.kept()
    kinds = [*error_rates.KINDS, "losses of 3 seeds", "losses of 5 seeds", "losses of 10 seeds"]
    assert list(dict.fromkeys(row.kind for row in rows if row.kind != "recorded")) == kinds
    for row in rows:
        if row.said == "in interval":
            assert 0.93 <= row.happened / row.comparisons <= 0.98
