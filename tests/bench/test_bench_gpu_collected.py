"""`python -m bench.gpu --collect` of several runs: what is the last of a case, and of which commit it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("pytest_benchmark")
pytest.importorskip("triton")

from bench.gpu import __main__ as command
from bench.gpu import collect
from bench.gpu.collect import latest, tables
from bench.gpu.lines import FILE, USED_UP, Lines, Row, read, rows

CASE = "quantize-bert_large-compression=fp8-triton"
TEST = "kernels: test_int8.py::test_bits[triton-1]"
FIGURES = {
    "ours": "triton",
    "contestants": {
        "triton": {"median_s": 1e-3, "gpu_s": 1e-3, "rounds": 9, "late": 0, "of_copy": [0.95] * 3},
        "copy": {"median_s": 1e-3, "gpu_s": 1e-3, "rounds": 9, "late": 0, "of_copy": [1.0] * 3, "ratio": [1.0] * 3},
    },
}


def written(folder: Path, *ends: tuple[str, str, dict[str, Any]], case: str = CASE) -> list[Row]:
    """A run for each end of a case, a second apart: of which commit, and with which status."""
    folder.mkdir(exist_ok=True)
    for number, (commit, status, more) in enumerate(ends):
        common = {"run": f"2026-01-0{number + 1}", "commit": commit, "rehearsal": False}
        lines = Lines(folder / FILE, common)
        lines.write("kernels", case, "planned", at=number)
        lines.write("kernels", case, status, at=number + 0.5, **more)
    return rows(read(folder / FILE))


def printed(found: list[Row], tmp_path: Path) -> str:
    with (tmp_path / "printed").open("w") as file:
        console = Console(width=170, record=True, file=file)
        for table in tables(found):
            console.print(table)
    return console.export_text()


DONE, FAILED = ("a", "done", {"result": FIGURES}), ("b", "failed", {"why": "AssertionError: bits"})
UNTOLD = [
    ("b", "skipped", {"why": "it takes about 4 s, and 1 s of the budget are left"}),
    ("b", "failed", {"why": f"ended in the middle: {USED_UP}"}),
    ("b", "begun", {}),
    ("b", "planned", {}),
]


@pytest.mark.parametrize("case", [CASE, TEST])
def test_a_newer_failure_hides_an_older_success_and_what_was_left_out_hides_nothing(case: str, tmp_path: Path):
    (row,) = latest(written(tmp_path / "1", DONE, FAILED, case=case))
    assert (row.status, row.commit) == ("failed", "b")
    (row,) = latest(written(tmp_path / "2", FAILED, DONE, case=case))
    assert (row.status, row.commit) == ("done", "a")
    for i, untold in enumerate(UNTOLD):
        for j, told in enumerate((DONE, FAILED)):
            (row,) = latest(written(tmp_path / f"{i} {j}", told, untold, case=case))
            assert (row.status, row.commit) == (told[1], told[0]), untold


def test_a_goal_is_not_reached_by_a_figure_of_older_sources_than_its_failure(tmp_path: Path):
    for name, ends, verdict in (("done", [FAILED, DONE], "met"), ("failed", [DONE, FAILED], "unmeasured")):
        text = printed(written(tmp_path / name, *ends), tmp_path)
        assert verdict in next(line for line in text.splitlines() if "triton: FP8, BERT-large" in line)


def test_a_figure_outlives_a_failure_of_the_same_sources_which_is_named_and_a_tests_verdict_does_not(tmp_path: Path):
    same = ("a", "failed", {"why": "the GPU is gone"})
    found = written(tmp_path / "figure", DONE, same)
    assert [row.status for row in latest(found)] == ["done"]
    text = printed(found, tmp_path)
    assert "Failed since it was measured" in text and "failed: the GPU is gone" in text
    between = [DONE, FAILED, same]  # a failure of other sources hides no figure of these
    assert [row.status for row in latest(written(tmp_path / "between", *between))] == ["done"]
    changed = [("a+changes", *end[1:]) for end in (DONE, same)]  # of these no two need be the same
    for name, ends, case in (("test", [DONE, same], TEST), ("changed", changed, CASE)):
        found = written(tmp_path / name, *ends, case=case)
        assert [row.status for row in latest(found)] == ["failed"]
        assert "Failed since it was measured" not in printed(found, tmp_path)


def test_rows_of_several_commits_are_named_as_such(tmp_path: Path):
    written(tmp_path, DONE)
    one = printed(rows(read(tmp_path / FILE)), tmp_path)
    assert "commits" not in one
    both = [*written(tmp_path, FAILED, case=TEST), Row("steps", "never", "", False, "c")]
    text = printed(both, tmp_path)
    assert "Rows of several commits" in text
    assert any("kernels" in line and "1 of a, 1 of b" in line for line in text.splitlines())
    assert "of c" not in text


def test_rows_that_are_kept_already_are_not_kept_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = tmp_path / "kept.csv"
    monkeypatch.setattr(collect, "KEPT", kept)
    written(tmp_path / "runs", DONE)
    for _ in range(2):
        command.main(collect=tmp_path / "runs", out=tmp_path / "out", keep=True)
        assert len(kept.read_text().splitlines()) == 1 + 2
    written(tmp_path / "runs", DONE, ("a", "done", {"result": FIGURES}))
    command.main(collect=tmp_path / "runs", out=tmp_path / "out", keep=True)
    assert len(kept.read_text().splitlines()) == 1 + 4
    before = kept.read_text().replace("gb_per_s,of_copy", "of_copy,gb_per_s")
    kept.write_text(before)
    with pytest.raises(ValueError, match="has other columns than the rows to be appended: their order"):
        command.main(collect=tmp_path / "runs", out=tmp_path / "out", keep=True)
    assert kept.read_text() == before
