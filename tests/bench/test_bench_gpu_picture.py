"""The picture of kept rows of a GPU: what is drawn of them, and what is not."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import plot
from bench.gpu import kept_picture
from bench.gpu.collect import COLUMNS, KEPT, latest, show


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path) -> dict[str, Any]:
    """The panels that are made of a file of kept rows, by title."""
    found: dict[str, Any] = {}

    def keep(panels: Sequence[plot.Panel], *_: Any, **__: Any) -> None:
        found.update({title: data for _, title, data in panels})

    monkeypatch.setattr(kept_picture, "draw_panels", keep)
    of_gpu = kept_picture.of_kept(path)
    kept_picture.draw(latest(of_gpu[max(of_gpu)]), path, "")
    return found


def write(path: Path, *rows: dict[str, Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({"gpu": "A GPU", "phase": "steps", "overhead_s": 1, **row} for row in rows)


def test_steps_that_were_timed_in_turns_of_one_are_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for_long = {"case": "gpt2, 128 tokens", "first_of_turn_s": 0.1}
    write(
        tmp_path / "kept.csv",
        {"date": "2026-01-01", **for_long, "contestant": "unwrapped", "overhead_s": ""},
        {"date": "2026-01-01", **for_long, "contestant": "torch"},
        {"date": "2026-01-01", "case": "gpt2, 1024 tokens", "contestant": "unwrapped", "overhead_s": ""},
        {"date": "2026-01-01", "case": "gpt2, 1024 tokens", "contestant": "torch"},
    )
    steps = drawn(monkeypatch, tmp_path / "kept.csv")["What a wrapper adds to a step"]
    assert list(steps) == ["gpt2, 128 tokens"] and steps["gpt2, 128 tokens"]["torch"]["overhead_s"] == 1


def test_the_newest_rows_of_the_newest_gpu_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    about = {"case": "gpt2, 128 tokens", "first_of_turn_s": 0.1}
    write(
        tmp_path / "kept.csv",
        *(
            {"gpu": gpu, "date": date, **about, "contestant": contestant, "overhead_s": overhead}
            for gpu, date, overhead in (("B", "2026-01-03", 3), ("A", "2026-01-04", 4), ("A", "2026-01-02", 2))
            for contestant in ("unwrapped", "torch")
        ),
    )
    steps = drawn(monkeypatch, tmp_path / "kept.csv")["What a wrapper adds to a step"]
    assert steps["gpt2, 128 tokens"]["torch"]["overhead_s"] == 4


def test_the_kept_rows_make_a_picture_of_two_panels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    show(KEPT, tmp_path, keep=False)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn(monkeypatch, KEPT)) == 2
