"""Is the advice right? What the command says of the cells that it has measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.advice import __main__ as advice


def row(model: str, ratio: float, worse: bool) -> dict[str, Any]:
    return {
        "model": model,
        "link": "1gbit",
        "ranks": 2,
        "rounds": 6,
        "transport": "gloo",
        "advised": "fp8",
        "best": "int8",
        "ratio": ratio,
        "worse_than_none": worse,
        "steps_ms": {"none": 100.0, "fp8": 50.0 * ratio, "int8": 50.0},
        "predicted_ms": {"none": 110.0, "fp8": 50.0 * ratio, "int8": 50.0},
        "load": 0.5,
        "commit": "0123456789abcdef",
        "machine": {"cores": 4, "processor": "a processor"},
        "versions": {"torch": "2"},
    }


def test_rows_are_counted_and_shown(tmp_path: Path):
    rows = [row("mlp", 1.04, False), row("gpt", 1.06, False), row("cnn", 1.0, True), row("rnn", 1.0, False)]
    said = advice.summary(rows)
    assert said.startswith("4 cells: ") and "within 5 % of the best measured in 3 (75%)" in said
    assert "beyond its interval in 1" in said and "nine of ten by 10%" in said
    assert len(set(map(advice.key_of, rows))) == 4
    path = tmp_path / "advice.md"
    advice.write_table(rows, path)
    table = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert table[2] == "| mlp | 1gbit, gloo | 2 | 6 | fp8 | int8 | 1.04 | yes | no | 100 (110) | 52 (52) | 50 (50) |"
    assert len(table) == 2 + len(rows) and len({line.count("|") for line in table}) == 1
