"""What rows say: a test of equivalence for each setting, task, optimizer and number of ranks, and the table of all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from fastreduce.cli.compare.script.equivalence import MOST_SEEDS, Equivalence, compare
from fastreduce.cli.compare.script.verdicts import percent

from .tasks import OPTIMIZERS, TASKS

BASE = "none"
SETTINGS = (
    "none:accumulate=fp32",
    "fp16",
    "fp16:accumulate=wire",
    "bf16",
    "bf16:accumulate=wire",
    "bf16:rounding=stochastic",
    "int8",
    "int8:error_feedback",
    "int8:error_feedback=8bit",
    "int8:rounding=stochastic",
    "int8:block=16",
    "fp8",
    "fp8:error_feedback",
    "fp8:rounding=stochastic",
    "int4",
    "int4:block=64",
    "int4:error_feedback",
    "int4:error_feedback=8bit",
    "int4:rounding=stochastic",
    "auto4",
    "powersgd:rank=4",
    "topk:ratio=0.01",
)
Row = dict[str, Any]
Case = tuple[str, str, int]  # task, optimizer, ranks
CASES = [(task, optimizer) for task in TASKS for optimizer in OPTIMIZERS]
GROUPS = {
    "GPT and CNN": [case for case in CASES if case[0] in ("gpt", "cnn")],
    "hard cases, SGD": [("loud", "sgd"), ("spread", "sgd")],
    "hard cases, AdamW": [("loud", "adamw"), ("spread", "adamw")],
}
WORDS = {"equal": "equal", "lower": "lower", "undecided": "open", "higher": "**higher**"}


@dataclass(frozen=True)
class Findings:
    """What rows say.

    Attributes:
        tests: by setting and case; only what has a seed in common with `none`.
        seeds: how many these have.
        base: the mean loss of `none`, by case.
        bytes, vnmse: means by setting and task, over all ranks, optimizers and seeds.
    """

    tests: dict[tuple[str, Case], Equivalence]
    seeds: dict[tuple[str, Case], int]
    base: dict[Case, float]
    bytes: dict[tuple[str, str], float]
    vnmse: dict[tuple[str, str], float]

    @property
    def settings(self) -> list[str]:
        """Without `none`: those of `SETTINGS`, then others in the order of the rows."""
        found = dict.fromkeys(setting for setting, _ in self.tests)
        return [
            *(setting for setting in SETTINGS if setting in found),
            *(setting for setting in found if setting not in SETTINGS),
        ]

    @property
    def ranks(self) -> list[int]:
        """The numbers of ranks."""
        return sorted({ranks for _, (_, _, ranks) in self.tests})


def longest(rows: Iterable[Row]) -> list[Row]:
    """Without trainings of fewer steps than others of their task have, as under --quick: losses fall with steps."""
    found = list(rows)
    most: dict[str, int] = {}
    for row in found:
        most[row["task"]] = max(most.get(row["task"], 0), row["steps"])
    return [row for row in found if row["steps"] == most[row["task"]]]


def summarise(rows: Iterable[Row], margin: float) -> Findings:
    """Test the losses against those of `none` of the same seeds; `margin` is a fraction of its mean loss."""
    losses: dict[tuple[str, Case], dict[int, float]] = defaultdict(dict)
    sent, lost = defaultdict(list), defaultdict(list)
    for row in longest(rows):
        setting, case = row["setting"], (row["task"], row["optimizer"], row["ranks"])
        losses[setting, case][row["seed"]] = row["loss"]
        sent[setting, row["task"]].append(row["bytes"])
        lost[setting, row["task"]].append(row["vnmse"])
    tests, seeds = {}, {}
    for (setting, case), found in list(losses.items()):
        base = losses.get((BASE, case), {})
        common = sorted(found.keys() & base.keys())
        if setting != BASE and common:
            tests[setting, case] = compare([found[s] for s in common], [base[s] for s in common], margin)
            seeds[setting, case] = len(common)
    return Findings(
        tests,
        seeds,
        {case: fmean(found.values()) for (setting, case), found in losses.items() if setting == BASE},
        {key: fmean(values) for key, values in sent.items()},
        {key: fmean(values) for key, values in lost.items()},
    )


def summary(findings: Findings) -> list[list[str]]:
    """By setting: bytes, vNMSE, and verdicts counted by groups of cases; first the heading."""
    lines = [["setting", "bytes an element", "vNMSE", *GROUPS]]
    for setting in findings.settings:
        sent, lost = findings.bytes.get((setting, "gpt")), findings.vnmse.get((setting, "gpt"))
        counts = [
            counted([test for (of, case), test in findings.tests.items() if of == setting and case[:2] in group])
            for group in GROUPS.values()
        ]
        figures = ["–" if sent is None else f"{sent:.2f}", "–" if lost is None else f"{lost:.1e}"]
        lines.append([f"`{setting}`", *figures, *counts])
    return lines


def counted(tests: Sequence[Equivalence]) -> str:
    """As in `6 equal, 2 open: -0.1 to +1.3`; in percent."""
    counts = Counter(test.verdict for test in tests)
    parts = [f"{counts[verdict]} {word}" for verdict, word in WORDS.items() if counts[verdict]]
    differences = [test.difference for test in tests]
    if not tests:
        return "–"
    return f"{', '.join(parts)}: {percent(min(differences))} to {percent(max(differences))}"


def by_case(findings: Findings, ranks: int) -> list[list[str]]:
    """By setting and case: the verdict and the difference in percent; first the heading, then the loss of `none`."""
    lines = [["setting", *(f"{task}, {optimizer}" for task, optimizer in CASES)]]
    base = [findings.base.get((*case, ranks)) for case in CASES]
    lines.append([f"`{BASE}`: loss", *("–" if loss is None else f"{loss:.4g}" for loss in base)])
    for setting in findings.settings:
        tests = [findings.tests.get((setting, (*case, ranks))) for case in CASES]
        lines.append([f"`{setting}`", *("–" if test is None else said(test) for test in tests)])
    return lines


def errors(findings: Findings) -> list[list[str]]:
    """By setting and task: vNMSE; first the heading."""
    settings = [BASE, *findings.settings]
    lines = [["setting", *(f"{task.name}" for task in TASKS.values())]]
    for setting in settings:
        found = [findings.vnmse.get((setting, task)) for task in TASKS]
        lines.append([f"`{setting}`", *("–" if value is None else f"{value:.1e}" for value in found)])
    return lines


def said(test: Equivalence) -> str:
    """As in `= +0.02`, `higher +5.3` or `? +0.9 (12 seeds)`; in percent."""
    if test.verdict == "equal":
        return f"= {percent(test.difference)}"
    if test.verdict != "undecided":
        return f"**{test.verdict} {percent(test.difference)}**"
    if test.seeds is None:
        return f"? {percent(test.difference)}"
    return f"? {percent(test.difference)} ({'>' if test.seeds > MOST_SEEDS else ''}{min(test.seeds, MOST_SEEDS)} seeds)"
