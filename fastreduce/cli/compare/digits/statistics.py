"""From what the ranks saw to the figures of each contender, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import binomtest

from ..intervals import WORTHLESS, Estimate, Floats, estimate_median, say_ratio
from .training import BARE, TORCH, TORCH_FP16, Experiment, Record

SIGNIFICANT = 0.05
DECIDES = "intervals that hold 1 narrow with more --rounds, and on a machine that does nothing else"
STAGES = ("compress", "reduce", "decompress")


def chance_of_disagreement(ours: Sequence[bool], base: Sequence[bool]) -> float:
    """McNemar's exact test on the images that only one of the two gets right: its p-value."""
    a, b = np.asarray(ours), np.asarray(base)
    only_ours, only_base = int((a & ~b).sum()), int((b & ~a).sum())
    if only_ours == only_base == 0:
        return 1.0
    return float(binomtest(only_ours, only_ours + only_base).pvalue)


@dataclass(frozen=True)
class Figures:
    """One contender's figures; times are medians over all timed steps, in milliseconds.

    `step` is the slowest rank's. `compute` is the same for the network without a wrapper and `exposed` the
    difference: what communication adds. The stages are a step's time on communication's thread or stream, averaged
    over the ranks; they run beside backward, so they do not add up to `exposed`.
    """

    name: str
    step: float
    quartiles: tuple[float, float]
    compute: float
    exposed: float
    stages: dict[str, float]
    ratio: Estimate
    ratio_to_torch: Estimate
    sent_bytes: int
    gradient_error: float
    losses: list[float] = field(repr=False)
    accuracy: float
    chance: float
    same_on_all_ranks: bool


def summarise(experiment: Experiment, ranks: Sequence[Mapping[str, Record]]) -> list[Figures]:
    """The figures of every contender but the bare network, in the experiment's order."""
    steps = {name: step_seconds([rank[name] for rank in ranks]) * 1e3 for name in experiment.contenders}
    rounds = {name: np.median(times, axis=1) for name, times in steps.items()}
    medians = {name: float(np.median(times)) for name, times in steps.items()}
    figures = []
    for name in experiment.contenders:
        if name == BARE:
            continue
        records = [rank[name] for rank in ranks]
        low, high = np.quantile(steps[name], (0.25, 0.75))
        figures.append(
            Figures(
                name=name,
                step=medians[name],
                quartiles=(float(low), float(high)),
                compute=medians[BARE],
                exposed=medians[name] - medians[BARE],
                stages=_stages(records),
                ratio=estimate_median(rounds[name] / rounds["none"]),
                ratio_to_torch=estimate_median(rounds[name] / rounds[TORCH]),
                sent_bytes=records[0].sent_bytes,
                gradient_error=float(np.median(records[0].gradient_errors)),
                losses=np.mean([r.losses for r in records], axis=0).tolist(),
                accuracy=float(np.mean(records[0].correct)),
                chance=chance_of_disagreement(records[0].correct, ranks[0]["none"].correct),
                same_on_all_ranks=len({r.weights for r in records}) == 1,
            )
        )
    return figures


def _stages(records: Sequence[Record]) -> dict[str, float]:
    """Milliseconds by stage; empty for torch, which does not tell."""
    by_step = np.mean([r.stage_seconds for r in records], axis=0) * 1e3  # rounds × steps × stages
    return dict(zip(STAGES, np.median(by_step, axis=(0, 1)).tolist(), strict=True)) if by_step.size else {}


def step_seconds(records: Sequence[Record]) -> Floats:
    """Rounds × steps: what the slowest rank took, for which all wait."""
    return np.asarray(np.max([r.step_seconds for r in records], axis=0), dtype=np.float64)


def conclude(figures: Sequence[Figures]) -> list[str]:
    """What the figures say, in plain sentences."""
    ours = [f for f in figures if f.name not in (TORCH, TORCH_FP16)]
    fastest = min(ours, key=lambda f: f.ratio.median)
    sentences = [_say_fastest(fastest, ours), _say_torch(fastest, figures), _say_accuracy(figures)]
    split = [f.name for f in figures if not f.same_on_all_ranks]
    if split:
        sentences.append(f"Warning: at the end the ranks' weights differ under {', '.join(split)}.")
    return sentences


def _say_fastest(fastest: Figures, ours: Sequence[Figures]) -> str:
    """Whether compressing pays here, does not, or cannot be told yet: the intervals say it, not the medians."""
    others = sorted((f for f in ours if f.name != "none"), key=lambda f: f.ratio.median)
    if not others:
        return "Only none was run."
    sure = [f for f in others if f.ratio.high < 1]
    open_ = [f for f in others if f not in sure and not f.ratio.low >= WORTHLESS]
    takes = f"Fastest here was {fastest.name}"
    if fastest.name != "none":
        takes += f": a step takes {say_ratio(fastest.ratio, 'none')}"
    if fastest in sure:
        return f"{takes}, a real difference."
    if sure:
        named = ", ".join(f"{f.name} with {say_ratio(f.ratio)}" for f in sure)
        return f"{takes}, no real difference; really faster than none: {named}."
    if open_:
        named = "; ".join(f"{f.name} takes {say_ratio(f.ratio, 'none')}" for f in open_ if f is not fastest)
        decides = "from 6 rounds on there is an interval" if np.isnan(open_[0].ratio.low) else DECIDES
        undecided = f"Whether compressing pays on this machine is undecided: {decides}."
        return f"{takes}{f'; {named}' if named else ''}. {undecided}"
    verdict = "compressing does not pay on this machine"
    if fastest.name != "none":
        return f"{takes}: {verdict}."
    return (
        f"{takes}: {verdict}. "
        f"Next is {others[0].name}: a step takes {say_ratio(others[0].ratio, 'none')}, {_verdict(others[0].ratio)}."
    )


def _say_torch(fastest: Figures, figures: Sequence[Figures]) -> str:
    torch_fp16 = next(f for f in figures if f.name == TORCH_FP16)
    return (
        f"Beside torch's own DDP, {fastest.name} takes {say_ratio(fastest.ratio_to_torch, 'its step')}, "
        f"{_verdict(fastest.ratio_to_torch)}; torch's fp16 hook takes {say_ratio(torch_fp16.ratio_to_torch)}."
    )


def _say_accuracy(figures: Sequence[Figures]) -> str:
    low, high = min(figures, key=lambda f: f.accuracy), max(figures, key=lambda f: f.accuracy)
    if low.accuracy == high.accuracy:
        return f"Accuracy on the held-out digits is {low.accuracy:.1%} under every setting."
    limit = SIGNIFICANT / (len(figures) - 1)  # as many chances as comparisons with none
    different = [f.name for f in figures if f.chance < limit]
    verdict = (
        "different from none beyond chance: " + ", ".join(different)
        if different
        else "the differences are within chance"
    )
    return (
        f"Accuracy on the held-out digits is {low.accuracy:.1%} ({low.name}) to {high.accuracy:.1%} "
        f"({high.name}): {verdict} (McNemar's exact test)."
    )


def _verdict(ratio: Estimate) -> str:
    if np.isnan(ratio.low):
        return "too few rounds to say whether that is real"
    return "a real difference" if ratio.differs else "no real difference"
