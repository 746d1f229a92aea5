"""Tables that benchmarks leave: rows as CSV, and lines as Markdown."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a heading of the first row's keys, and the rows; what the file had is gone."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, the first line of which is its heading."""
    heading, *rest = lines
    rows = [heading, ["---"] * len(heading), *rest]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def of_commits(commits: Iterable[str]) -> str:
    """Of how many rows each commit is: `9 of 0123456789ab, 2 of ba9876543210`."""
    return ", ".join(f"{count} of {commit}" for commit, count in Counter(commits).items())
