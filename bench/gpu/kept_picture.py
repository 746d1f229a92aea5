"""The picture of what was measured on a GPU: kernels against a copy, and what wrappers add to steps."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ..kernels.kernel_cases import case_id
from ..plot import Panel, draw_kernels, draw_overheads, draw_panels
from .kernel_rows import GOALS
from .lines import Row

BACKENDS = ("triton", "numba_cuda")
FIGURES = ("of_copy", "overhead_s", "first_of_turn_s")


def draw(last: Sequence[Row], path: Path, above: str) -> None:
    """Write the plot: kernels on which a goal stands, and the headline steps, if their turns were long enough."""
    kernels: dict[str, dict[str, Any]] = {}
    panels: list[Panel] = []
    shown_kernels = {case_id(named) for named in GOALS}
    for row in last:
        ours = row.result.get("ours", "")
        if row.status == "done" and ours in BACKENDS and not row.result.get("wrong"):
            case = row.case.removesuffix(f"-{ours}")
            if case in shown_kernels:
                kernels.setdefault(case.replace("-", " "), {})[ours] = row.result["contestants"]
    if kernels:
        panels.append((draw_kernels, "Kernels, the GPU's time", kernels))
    steps = [row for row in last if row.status == "done" and _tells_of_steps(row)]
    steps.sort(key=lambda row: row.case.count(","))  # the headline before other settings
    if steps:
        overheads = {row.case: row.result["contestants"] for row in steps[:3]}
        panels.append((draw_overheads, "What a wrapper adds to a step", overheads))
    if panels:
        draw_panels(panels, path, max(7, 0.3 * len(kernels)), above, warns=any(row.rehearsal for row in last))


def _tells_of_steps(row: Row) -> bool:
    """Whether steps were timed in turns of several: a turn's first step pays for gradients that have moved since."""
    bare = row.result.get("contestants", {}).get("unwrapped", {})
    return bool(bare.get("first_of_turn_s"))


def of_kept(path: Path) -> dict[tuple[str, str], list[Row]]:
    """The kept rows of a CSV file, by the date of the last run on a GPU and its name, with what is drawn of them."""
    cases: dict[tuple[str, str, str, str], Row] = {}
    with path.open(newline="") as file:
        for each in csv.DictReader(file):
            phase, case, gpu = each["phase"], each["case"], each["gpu"]
            ours = next((name for name in BACKENDS if case.endswith(f"-{name}")), "")
            new = Row(phase, case, each["date"], bool(each["rehearsal"]), each["commit"], "done")
            new.result = {"ours": ours, "wrong": each["wrong"], "contestants": {}}
            new.at = datetime.fromisoformat(each["date"]).timestamp()
            row = cases.setdefault((gpu, each["date"], phase, case), new)
            figures = {name: float(each[name]) for name in FIGURES if each[name]}
            row.result["contestants"][each["contestant"]] = figures
    names = {gpu for gpu, *_ in cases}
    by_name = {name: [row for (gpu, *_), row in cases.items() if gpu == name] for name in names}
    return {(max(row.run for row in found), name): found for name, found in by_name.items()}
