"""Rows of `python -m bench` go to the history if no benchmark has failed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_benchmark")

from bench import __main__ as command

DOCUMENT = {
    "datetime": "2026-01-01T00:00:00.000000",
    "commit_info": {"id": "0123456789abcdef", "dirty": False},
    "machine_info": {
        "cpu": {"brand_raw": "a processor"},
        "cores": 2,
        "load": 0.5,
        "python_version": "3.12",
        "versions": {"torch": "2", "numba": "0", "numpy": "2"},
        "quick": False,
    },
    "benchmarks": [
        {"name": "test_mpi", "extra_info": {"contestants": {"mpi4py": {"median_s": 1.0, "ratio": [1.0] * 3}}}}
    ],
}


@pytest.mark.parametrize("code", [0, 1])
def test_history_has_rows_of_green_runs_only(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def ran(arguments: list[str]) -> Any:
        (source,) = [each.partition("=")[2] for each in arguments if each.startswith("--benchmark-json=")]
        Path(source).write_text(json.dumps(DOCUMENT))
        return code

    monkeypatch.setattr(pytest, "main", ran)
    monkeypatch.setattr(command, "HERE", tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(quick=False, out=tmp_path / "out", select="")
    assert ended.value.code == code
    history, said = tmp_path / "results" / "history.csv", capsys.readouterr().out
    assert history.exists() is (code == 0)
    assert ("a benchmark has failed, and no row is added to" in said) is (code == 1)
    if history.exists():
        with history.open(newline="") as file:
            assert [row["contestant"] for row in csv.DictReader(file)] == ["mpi4py"]
