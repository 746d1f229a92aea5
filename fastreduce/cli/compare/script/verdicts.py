"""What figures say of each setting, in one plain sentence. Where an interval leaves it open, so does the sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ....run.contestants import NO_REDUCTION, TORCHS
from ..intervals import WORTHLESS, Estimate
from .equivalence import MOST_SEEDS, Equivalence
from .plan import AGAIN, BASE, Plan
from .quality import Quality
from .speed import Speed

Gain = Literal["faster", "not faster", "undecided"]
GOOD = ("pays", "is faster", "is better", "is equal")
BAD = ("is not faster", "does not pay", "is worse")


@dataclass(frozen=True)
class Verdict:
    """On one contestant: the verb, and the sentence that begins with its name and the verb."""

    setting: str
    word: str
    sentence: str


def judge(plan: Plan, speeds: Mapping[str, Speed], qualities: Mapping[str, Quality], apart: str = "") -> list[Verdict]:
    """Verdicts on whoever was held against none, in the plan's order; the control is judged by its losses alone.

    Contestants that ran `apart`, in trainings of their own, had six rounds, whatever --rounds says.
    """
    control = speeds[AGAIN].ratio if AGAIN in speeds else None
    timed = {name: speed for name, speed in speeds.items() if name not in (BASE, AGAIN, NO_REDUCTION)}
    tested = {name: q for name, q in qualities.items() if q.loss is not None or q.note}
    names = [name for name in plan.contestants if name in timed or name in tested]
    more = "take a machine that does nothing else" if apart else "take more --rounds"
    return [_judge(plan, name, timed.get(name), control, tested.get(name), more) for name in names]


def headline(verdicts: Sequence[Verdict]) -> str:
    """All verbs in one sentence, the best first; torch's own and the control are in it where there is nobody else."""
    ours = [verdict for verdict in verdicts if verdict.setting not in (*TORCHS, AGAIN)] or verdicts
    said = []
    for word in (*GOOD, "is undecided", *BAD):
        names = [verdict.setting for verdict in ours if verdict.word == word]
        if names:
            several = word.replace("pays", "pay").replace("does", "do").replace("is ", "are ")
            said.append(f"{join(names)} {word if len(names) == 1 else several}")
    return "; ".join(said) + "." if said else "Nothing was held against none."


def join(names: Sequence[str]) -> str:
    """As in fp16, bf16 and int8."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def gain(ratio: Estimate, control: Estimate | None) -> Gain:
    """Whether steps are shorter than none's beyond doubt, or certainly not worth it.

    Where the control shows a difference, which is none, an interval must leave out the control's too.
    """
    low, high = 1.0, WORTHLESS
    if control is not None and control.differs:
        low, high = min(low, control.low), max(high, control.high)
    if ratio.high < low:
        return "faster"
    if ratio.low >= high:
        return "not faster"
    return "undecided"


def _judge(
    plan: Plan, name: str, speed: Speed | None, control: Estimate | None, quality: Quality | None, more: str
) -> Verdict:
    faster = None if speed is None else gain(speed.ratio, control)
    same, losses = (None, "") if quality is None else _say_quality(plan, quality)
    word = _word(faster, same, name in TORCHS)
    parts = []
    if speed is not None:
        parts.append(f"step {speed.ratio} of none")
        if faster == "undecided" and word == "is undecided":
            few = math.isnan(speed.ratio.low)
            parts[-1] += ", which decides nothing: " + ("intervals need 6 rounds" if few else more)
    if losses:
        parts.append(losses)
    elif faster == "faster" and name not in TORCHS:
        parts.append("loss not compared, --train does")
    return Verdict(name, word, f"{name} {word}: {'; '.join(parts)}.")


def _word(faster: Gain | None, same: str | None, torchs: bool) -> str:
    """The verb: a setting pays where its step is shorter and its loss no worse."""
    if faster is None:
        return {"equal": "is equal", "better": "is better", "worse": "is worse"}.get(same or "", "is undecided")
    if same == "worse":
        return "does not pay"
    if faster == "not faster":
        return "is not faster" if torchs and same is None else "does not pay"
    if faster == "undecided" or same == "undecided":
        return "is undecided"
    return "is faster" if same is None else "pays"


def _say_quality(plan: Plan, quality: Quality) -> tuple[str, str]:
    """Equal, worse, better or undecided; and in words."""
    if quality.loss is None:
        return "undecided", f"loss not tested: {quality.note}"
    same, said = _say_test(plan, "loss", quality.loss)
    same = {"higher": "worse", "lower": "better"}.get(same, same)
    if quality.metric is not None:
        metric, said_metric = _say_test(plan, "metric", quality.metric)
        said += f"; {said_metric}"
        if metric != "equal" and same in ("equal", "better"):
            same = "undecided"
            if metric != "undecided" and math.isfinite(quality.metric.difference):
                said += ", and whether that is better is for you to say"
    return same, said + (f" ({quality.note})" if quality.note else "")


def _say_test(plan: Plan, what: str, test: Equivalence) -> tuple[str, str]:
    margin = f"{plan.margin * 100:g} %"
    if test.verdict == "equal" and test.low == test.high == 0:
        return "equal", f"{what} equal to the last bit"
    if test.of_zero:
        return "undecided", f"{what} not tested: none's mean is 0, so that a margin of {margin} of it has no meaning"
    if not math.isfinite(test.difference):
        return test.verdict, f"{what} not finite" if test.verdict == "higher" else f"{what} under none not finite"
    differs = say_difference(test, " %")
    if test.verdict == "equal":
        return "equal", f"{what} equal within {margin}: {differs}"
    if test.verdict != "undecided":
        return test.verdict, f"{what} {test.verdict} by more than {margin}: {differs}"
    if test.seeds is None:
        return (
            "undecided",
            f"{what} {differs}: one seed shows no scatter, nor do few that differ by the same; give --seeds 3 or more",
        )
    many = f"more than {MOST_SEEDS}" if test.seeds > MOST_SEEDS else f"about {test.seeds}"
    return "undecided", f"{what} {differs} against a margin of {margin}: {many} seeds would decide"


def say_difference(test: Equivalence, unit: str = "", interval: bool = True) -> str:
    """In percent, with its interval where there is one: +0.12 (-0.03 to +0.27); or why there is no number."""
    if not math.isfinite(test.difference):
        return "none's is 0" if test.of_zero else "not finite"
    bounds = f" ({percent(test.low)} to {percent(test.high)})" if interval and math.isfinite(test.low) else ""
    return f"{percent(test.difference)}{unit}{bounds}"


def percent(fraction: float) -> str:
    """With two digits behind the point, or as many as count: +0.12, -0.0031, +13654."""
    value = 100 * fraction
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or abs(value) >= 100:
        return f"{value:+.0f}" if value else "0"
    return f"{value:+.2f}" if abs(value) >= 0.01 else f"{value:+.1g}"
