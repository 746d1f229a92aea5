"""Lines of JSON: a case is planned, begun, and ends. Whatever is killed leaves all that was written before."""

from __future__ import annotations

import csv
import hashlib
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from .. import json_lines

ROOT = Path(__file__).parents[2]
FILE = "lines.jsonl"
ENDS = ("done", "failed", "skipped")
USED_UP = "the budget was used up"

Line = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """A file that lines are appended to, each in one write and on disk when `write` returns.

    `common` is in every line: the commit, when the run began, and whether it is a rehearsal.
    """

    path: Path
    common: Mapping[str, Any]

    def write(self, phase: str, case: str, status: str, **more: Any) -> None:
        """Add a line: planned, begun, done, failed or skipped."""
        self.write_all([{"phase": phase, "case": case, "status": status, **more}])

    def write_all(self, lines: Iterable[Line]) -> None:
        """Add several lines, which need one flush only."""
        now = round(time.time(), 3)
        json_lines.append(self.path, ({"at": now, **self.common, **line} for line in lines))


def read(path: Path) -> Iterator[Line]:
    """The lines of a file, none if it is not there; those that were torn are left out."""
    return (line for line in json_lines.read(path) if {"phase", "case", "status"} <= line.keys())


@dataclass
class Row:
    """All that is known of one case of one run: how it ended, or how far it came."""

    phase: str
    case: str
    run: str
    rehearsal: bool
    commit: str
    status: str = "planned"
    predictions: dict[str, Any] = field(default_factory=dict)  # written before the case began
    result: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    at: float = 0.0

    @property
    def ending(self) -> str:
        """In a word or a sentence."""
        if self.status == "planned":
            return "not reached: the run ended before"
        if self.status == "begun":
            return "the run ended in the middle of it"
        return f"{self.status}: {self.why}" if self.why else self.status

    @property
    def tells(self) -> bool:
        """Whether it was done or failed: not skipped, not reached, and not cut off for lack of time."""
        return self.status == "done" or (self.status == "failed" and not self.why.endswith(USED_UP))

    @property
    def is_test(self) -> bool:
        """Whether it is a test of pytest's, and no measurement."""
        return "::" in self.case


def rows(lines: Iterable[Line]) -> list[Row]:
    """A row for each case of each run, in the order in which they were planned."""
    found: dict[tuple[str, str, str, bool], Row] = {}
    for line in lines:
        phase, case, run = str(line["phase"]), str(line["case"]), str(line.get("run", ""))
        rehearsal = bool(line.get("rehearsal"))
        row = found.get((phase, case, run, rehearsal))
        if row is None:
            row = Row(phase, case, run, rehearsal, str(line.get("commit", "")))
            found[phase, case, run, rehearsal] = row
        if row.status in ENDS:
            continue  # a line that came late, of a case already given up
        row.status, row.at = str(line["status"]), float(line.get("at", 0))
        row.predictions = line.get("predictions", row.predictions)
        row.result = line.get("result", row.result)
        row.why = str(line.get("why", row.why))
    return list(found.values())


def commit() -> str:
    """What is run: the commit, or, in a copy without Git's folder, a hash of the sources."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        top, head = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
        if head and Path(top).resolve() == ROOT:
            changed = git("status", "--porcelain", "--untracked-files=no")
            return head[:12] + ("+changes" if changed else "")
    except FileNotFoundError:
        pass
    return f"sources:{sources()}"


def sources() -> str:
    """A hash of all that a row depends on: the package, the kernels, the benchmarks, the tests."""
    whole = hashlib.sha256()
    for folder in ("bench", "fastreduce", "kernels", "tests"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            whole.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return whole.hexdigest()[:12]


@cache
def _predicted() -> list[dict[str, str]]:
    with (Path(__file__).parent / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def predictions(phase: str, case: str) -> dict[str, Any]:
    """What the table expects of a case: by contestant and figure, bounds (either may be missing) and the reason."""
    return {
        f"{each['contestant']}: {each['figure']}": {
            "low": float(each["low"]) if each["low"] else None,
            "high": float(each["high"]) if each["high"] else None,
            "reason": each["reason"],
        }
        for each in _predicted()
        if each["phase"] == phase and fnmatchcase(case, each["case"])
    }
