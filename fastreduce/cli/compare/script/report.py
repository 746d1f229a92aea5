"""What a comparison of a script leaves: a table and verdicts on the terminal, and results.json; plot.py draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import results
from ..settings_table import make_table, print_table
from . import quality, speed
from .equivalence import Equivalence
from .plan import AGAIN, BASE, Plan
from .quality import GradientErrors, Outcome, Quality
from .speed import Flight, Speed, Turn
from .trainings import Line
from .verdicts import Verdict, judge, say_difference

TIMES = (
    "step: ms, the slowest rank's median, with quartiles. over none: median of the ratios to none round by round, with "
    "its 95 % interval from order statistics; 'none again' is the same once more, and should hold 1."
)
LOSSES = (
    "loss: mean of the last tenth of the steps and of the seeds. to none: mean difference by seed, in percent, with "
    "the 90 % interval that two one-sided tests at 5 % take."
)


@dataclass
class Findings:
    """What has been measured so far, and what is missing."""

    wrapped: Line = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    flights: dict[str, list[Flight]] = field(default_factory=dict)
    apart: str = ""  # why contestants ran in trainings of their own
    left_out: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    gradient_errors: list[GradientErrors] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    seconds: float = 0.0
    copy_seconds: float = 0.0  # of a step's gradients, under --weights-from


@dataclass(frozen=True)
class Summary:
    """Figures and verdicts."""

    speeds: dict[str, Speed]
    qualities: dict[str, Quality]
    verdicts: list[Verdict]


def summarise(plan: Plan, findings: Findings) -> Summary:
    """What the findings say."""
    speeds = {each.contestant: each for each in speed.summarise(plan.contestants, findings.turns)}
    qualities = {each.setting: each for each in quality.summarise(plan, findings.outcomes) if each.outcomes}
    return Summary(speeds, qualities, judge(plan, speeds, qualities, findings.apart))


def print_report(console: Console, plan: Plan, findings: Findings, summary: Summary) -> None:
    """A table of speed and one of quality with their notes, as far as there are any, and the verdicts."""
    if summary.speeds:
        narrower = [("the quartiles", _speed_table(summary, quartiles=False))]
        print_table(console, _speed_table(summary), TIMES, narrower)
        if plan.weights_from:
            console.print(speed.say_weights(plan.weights_from, findings.copy_seconds), style="dim")
    if findings.apart:
        console.print(f"Contestants ran in trainings of their own, in turns: {findings.apart}.", style="dim")
    for name, why in findings.left_out.items():
        console.print(f"{name} was left out: {why.splitlines()[-1].strip()}.", style="dim")
    if summary.qualities:
        narrower = [
            ("the 90 %", _quality_table(plan, summary, intervals=False)),
            ("the 90 %, loss", _quality_table(plan, summary, intervals=False, loss=False)),
        ]
        print_table(console, _quality_table(plan, summary), LOSSES, narrower)
    console.print()
    for verdict in summary.verdicts:
        console.print(verdict.sentence)
    for sentence in warnings(summary):
        console.print(sentence)
    for what in findings.missing:
        console.print(f"Missing: {what}.")


def warnings(summary: Summary) -> list[str]:
    """What makes the verdicts doubtful."""
    control = summary.speeds.get(AGAIN)
    if control is not None and control.ratio.differs:
        return [
            f"Warning: none differs from itself: none again takes {control.ratio} of none. Something besides "
            "the settings moves the times; a setting counts as faster here only beyond that."
        ]
    return []


def _speed_table(summary: Summary, quartiles: bool = True) -> Table:
    table = make_table(
        ["step, ms\n(quartiles)" if quartiles else "step,\nms", "over none\n(95 %)", "over torch\n(95 %)"]
    )
    verbs = {verdict.setting: verdict.word for verdict in summary.verdicts}
    for name, found in summary.speeds.items():
        torch = "–" if found.ratio_to_torch is None else "1" if name == "torch" else str(found.ratio_to_torch)
        table.add_row(
            name,
            f"{found.step:.1f}" + (f" ({found.quartiles[0]:.0f}–{found.quartiles[1]:.0f})" if quartiles else ""),
            "1" if name == BASE else str(found.ratio),
            torch,
            style=_style(name, verbs),
        )
    return table


def _quality_table(plan: Plan, summary: Summary, intervals: bool = True, loss: bool = True) -> Table:
    difference = "to none, %\n(90 %)" if intervals else "to\nnone, %"
    columns = ["\nloss"] if loss else []
    columns += [difference if loss else f"loss {difference}"]
    columns += ["\nmetric", difference] if plan.has_metric else []
    columns += [f"steps to\na loss of {plan.target:g}"] if plan.target is not None else []
    table = make_table(columns)
    verbs = {verdict.setting: verdict.word for verdict in summary.verdicts}
    for name, found in summary.qualities.items():
        cells = _losses(plan, found, intervals)
        table.add_row(name, *(cells if loss else cells[1:]), style=_style(name, verbs))
    return table


def _style(name: str, verbs: Mapping[str, str]) -> str | None:
    if verbs.get(name) == "pays":
        return "bold"
    return None if name in verbs or name == BASE else "dim"


def _losses(plan: Plan, found: Quality, intervals: bool) -> list[str]:
    cells = [f"{found.final:.4g}", _difference(found.loss, intervals)]
    if plan.has_metric:
        cells += ["–" if found.metric_mean is None else f"{found.metric_mean:.4g}"]
        cells.append(_difference(found.metric, intervals))
    if plan.target is not None:
        of = f" ({found.reached} of {len(found.outcomes)})" if found.reached < len(found.outcomes) else ""
        steps = found.target_steps
        cells.append("never" if steps is None else f"{steps:g}, {found.target_seconds:.1f} s{of}")
    return cells


def _difference(test: Equivalence | None, interval: bool) -> str:
    return "–" if test is None else say_difference(test, interval=interval)


def write_results(path: Path, command: Sequence[str], plan: Plan, findings: Findings, summary: Summary) -> None:
    """Everything measured, with what is needed to measure it again."""
    measured: Mapping[str, object] = {
        **results.describe(findings.wrapped["machine"]),
        "command": list(command),
        "seconds": findings.seconds,
        "plan": {**asdict(plan), "out": str(plan.out)},
        "wrapped": findings.wrapped,
        "verdicts": [asdict(verdict) for verdict in summary.verdicts],
        "warnings": warnings(summary),
        "missing": findings.missing,
        "left_out": findings.left_out,
        "apart": findings.apart,
        "copy_seconds": findings.copy_seconds,
        "speed": {name: asdict(found) for name, found in summary.speeds.items()},
        "turns": [asdict(turn) for turn in findings.turns],
        "flights": {name: speed.typical(found) for name, found in findings.flights.items() if found},
        "quality": {name: asdict(found) for name, found in summary.qualities.items()},
        "gradient_errors": [asdict(found) for found in findings.gradient_errors],
    }
    results.write(path, measured)
