"""`python -m bench.faults` says of which commits the rows are that it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import json_lines
from bench.faults import __main__ as faults


@pytest.mark.parametrize("in_markdown", [False, True])
def test_rows_of_older_commits_are_named(in_markdown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"kind": "SIGSTOP", "right": True, "seconds": 10.0}
    rows = [{**row, "seed": seed, "commit": commit} for seed, commit in enumerate(("older", "older", "newer"))]
    json_lines.append(tmp_path / "faults.jsonl", rows)
    faults.main(only=["SIGSTOP"], seeds=3, clean=0, jobs=1, out=tmp_path / "faults.jsonl", in_markdown=in_markdown)
    said = capsys.readouterr().out
    assert "Rows by commit: 2 of older, 1 of newer." in " ".join(said.split())
    assert ("| SIGSTOP | is stopped | 3 | 3 |" in said) is in_markdown
