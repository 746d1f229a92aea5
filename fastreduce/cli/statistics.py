"""From what the ranks saw to the figures of each contender, and what follows from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, quantile_test

from .training import BARE, TORCH, TORCH_FP16, Experiment, Record

Floats = NDArray[np.float64]
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Estimate:
    """A median and its interval; NaN bounds where there are too few values for one."""

    median: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out 1: a ratio that is a real difference."""
        return self.low > 1 or self.high < 1


def estimate_median(values: Sequence[float] | Floats) -> Estimate:
    """The median with its 95 % interval between order statistics: exact for any distribution, from 6 values on."""
    interval = quantile_test(values, q=1.0, p=0.5).confidence_interval(0.95)
    return Estimate(float(np.median(values)), float(interval.low), float(interval.high))


def chance_of_disagreement(ours: Sequence[bool], base: Sequence[bool]) -> float:
    """McNemar's exact test: how often chance alone splits the images that only one of two gets right so unevenly."""
    a, b = np.asarray(ours), np.asarray(base)
    only_ours, only_base = int((a & ~b).sum()), int((b & ~a).sum())
    if only_ours == only_base == 0:
        return 1.0
    return float(binomtest(only_ours, only_ours + only_base).pvalue)


@dataclass(frozen=True)
class Figures:
    """One contender's figures. Times are milliseconds of the slowest rank, medians over all timed steps.

    `compute` is the step of the network without a wrapper, `communication` what the step takes beyond
    that (median of the differences round by round). The stages are what one step costs on the
    communication thread, averaged over the ranks. They overlap with compute, so they do not add up to
    `communication`.
    """

    name: str
    step: float
    quartiles: tuple[float, float]
    compute: float
    communication: float
    compress: float | None
    reduce: float | None
    decompress: float | None
    ratio: Estimate
    ratio_to_torch: Estimate
    sent_bytes: int
    gradient_error: float
    losses: list[float] = field(repr=False)
    final_loss: float
    accuracy: float
    chance: float
    same_on_all_ranks: bool


def summarise(experiment: Experiment, ranks: Sequence[Mapping[str, Record]]) -> list[Figures]:
    """The figures of every contender but the bare network, in the experiment's order."""
    seconds = {name: step_seconds([rank[name] for rank in ranks]) for name in experiment.contenders}
    by_round = {name: np.median(steps, axis=1) for name, steps in seconds.items()}
    figures = []
    for name in experiment.contenders:
        if name == BARE:
            continue
        records = [rank[name] for rank in ranks]
        stages = np.mean([r.stage_seconds for r in records], axis=0) * 1e3  # rounds × steps × stages, or empty
        medians = np.median(stages, axis=(0, 1)) if stages.size else (None, None, None)
        losses = np.mean([r.losses for r in records], axis=0)
        figures.append(
            Figures(
                name=name,
                step=float(np.median(seconds[name])) * 1e3,
                quartiles=(
                    float(np.quantile(seconds[name], 0.25)) * 1e3,
                    float(np.quantile(seconds[name], 0.75)) * 1e3,
                ),
                compute=float(np.median(seconds[BARE])) * 1e3,
                communication=float(np.median(by_round[name] - by_round[BARE])) * 1e3,
                compress=_number(medians[0]),
                reduce=_number(medians[1]),
                decompress=_number(medians[2]),
                ratio=estimate_median(by_round[name] / by_round["none"]),
                ratio_to_torch=estimate_median(by_round[name] / by_round[TORCH]),
                sent_bytes=records[0].sent_bytes,
                gradient_error=float(np.median(records[0].gradient_errors)),
                losses=losses.tolist(),
                final_loss=float(losses[-experiment.steps - 1 :].mean()),
                accuracy=float(np.mean(records[0].correct)),
                chance=chance_of_disagreement(records[0].correct, ranks[0]["none"].correct),
                same_on_all_ranks=len({r.weights for r in records}) == 1,
            )
        )
    return figures


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
    if fastest.name != "none":
        verdict = _verdict(fastest.ratio, "a real difference", "no real difference: none is as good")
        return f"Fastest here was {fastest.name}: its step takes {_times(fastest.ratio)} that of none, {verdict}."
    others = [f for f in ours if f.name != "none"]
    if not others:
        return "Only none was run."
    second = min(others, key=lambda f: f.ratio.median)
    verdict = _verdict(second.ratio, "a real difference", "no real difference")
    return (
        "Fastest here was none: compression does not pay on this machine. "
        f"Next, {second.name} takes {_times(second.ratio)} its step, {verdict}."
    )


def _say_torch(fastest: Figures, figures: Sequence[Figures]) -> str:
    torch_fp16 = next(f for f in figures if f.name == TORCH_FP16)
    verdict = _verdict(fastest.ratio_to_torch, "a real difference", "no real difference")
    sentence = f"Against torch's DDP {fastest.name} takes {_times(fastest.ratio_to_torch)} the step, {verdict}"
    return f"{sentence}; torch's DDP with its fp16 hook takes {_times(torch_fp16.ratio_to_torch)}."


def _say_accuracy(figures: Sequence[Figures]) -> str:
    low, high = min(figures, key=lambda f: f.accuracy), max(figures, key=lambda f: f.accuracy)
    limit = SIGNIFICANT / max(1, len(figures) - 1)  # as many chances as comparisons with none
    off = [f for f in figures if f.chance < limit]
    verdict = (
        f"different from none beyond chance: {', '.join(f.name for f in off)}"
        if off
        else "none of the differences is more than chance"
    )
    return (
        f"Accuracy on the held-out digits is {low.accuracy:.1%} ({low.name}) to {high.accuracy:.1%} "
        f"({high.name}); {verdict} (McNemar's exact test)."
    )


def _verdict(ratio: Estimate, real: str, unreal: str) -> str:
    if np.isnan(ratio.low):
        return "too few rounds to tell whether that is real"
    return real if ratio.differs else unreal


def _times(ratio: Estimate) -> str:
    return f"{ratio.median:.2f}×" + ("" if np.isnan(ratio.low) else f" ({ratio.low:.2f}–{ratio.high:.2f})")


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)
