"""The picture of a comparison: ratios of step times with their intervals, and loss curves with the seeds' spread."""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from ..curves import means_over_stretches
from ..digits.plot import CURVES, tidy
from ..intervals import Estimate
from .plan import AGAIN, BASE
from .quality import Quality
from .report import Summary
from .speed import Speed
from .verdicts import say_difference

WIDE = 3  # intervals whose ends are further apart than that are drawn on a logarithmic axis
LETTERS, LINES = 32, 2  # of a setting's name, which policies have long ones of
FASTER, SLOWER, OPEN = "#0072B2", "#D55E00", "#999999"


def draw(path: Path, summary: Summary, margin: float, title: str) -> None:
    """Write the PNG: a panel for ratios, where there are any, and two for losses; `margin` is a fraction of none's."""
    tested = [quality for quality in summary.qualities.values() if quality.loss is not None]
    panels = bool(summary.speeds) + bool(summary.qualities) + bool(tested)
    rows = max(len(summary.speeds), len(summary.qualities), 6)
    figure = Figure(figsize=(1.5 + 5.5 * panels, 1.8 + 0.45 * rows), layout="constrained")
    shown = textwrap.fill(title.encode(errors="replace").decode(), 60 * panels)  # a script's name may be no UTF-8
    figure.suptitle(shown, fontsize=12, parse_math=False)  # or have $ in it
    axes = list(np.atleast_1d(figure.subplots(1, panels)))
    if summary.speeds:
        _draw_ratios(axes.pop(0), list(summary.speeds.values()))
    if summary.qualities:
        _draw_losses(axes.pop(0), list(summary.qualities.values()))
    if tested:
        _draw_differences(axes.pop(0), tested, margin * 100)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of its name: a box stands for it
        figure.savefig(path, dpi=130)


def _draw_ratios(axes: Axes, speeds: Sequence[Speed]) -> None:
    for row, speed in enumerate(speeds):
        ratio = speed.ratio
        text = f"{speed.step:.0f} ms" + ("" if speed.contestant == BASE else f", {ratio.median:.2f}×")
        _draw_interval(axes, row, (ratio.low, ratio.median, ratio.high), _colour(speed.contestant, ratio), text)
    axes.axvline(1, color="black", linewidth=0.8)
    bounds = [bound for speed in speeds for bound in (speed.ratio.low, speed.ratio.high) if not np.isnan(bound)]
    if bounds and max(bounds) > WIDE * min(bounds):
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
    axes.margins(x=0.3)
    axes.set(title="Speed: 95 % intervals", xlabel="step over none's; below 1 is faster")
    _name_rows(axes, [speed.contestant for speed in speeds])


def _draw_differences(axes: Axes, qualities: Sequence[Quality], margin: float) -> None:
    """Equal is what lies between the dashed lines with its whole interval."""
    for row, quality in enumerate(qualities):
        test = quality.loss
        assert test is not None
        if np.isfinite(test.difference):
            low, middle, high = (100 * value for value in (test.low, test.difference, test.high))
            colour = {"equal": FASTER, "lower": FASTER, "higher": SLOWER}.get(test.verdict, OPEN)
            _draw_interval(axes, row, (low, middle, high), colour, test.verdict)
        else:
            axes.annotate(say_difference(test), (0, row), va="center", fontsize=9)
    axes.axvspan(-margin, margin, color="#009E73", alpha=0.12, linewidth=0)
    for bound in (-margin, margin):
        axes.axvline(bound, color="#009E73", linewidth=1, linestyle="--")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.margins(x=0.3)
    axes.set(title=f"Loss: 90 % intervals, margin {margin:g} %", xlabel="final loss over none's, percent")
    _name_rows(axes, [quality.setting for quality in qualities])


def _draw_interval(axes: Axes, row: int, values: tuple[float, float, float], colour: str, text: str) -> None:
    low, middle, high = (values[1] if np.isnan(value) else value for value in values)
    axes.plot([low, high], [row, row], "-", color=colour, linewidth=3, solid_capstyle="butt")
    axes.plot([middle], [row], "o", color=colour)
    axes.annotate(text, (high, row), (8, 0), textcoords="offset points", va="center", fontsize=9)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), map(_folded, names), parse_math=False)
    axes.set_ylim(len(names) - 0.5, -0.5)
    tidy(axes, grid="x")


def _folded(name: str) -> str:
    return textwrap.fill(name, LETTERS, max_lines=LINES, placeholder=" …")


def _plain_ticks(axis: Any) -> None:
    """Numbers instead of powers of ten."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(name: str, ratio: Estimate) -> str:
    if name in (BASE, AGAIN) or not ratio.differs:
        return OPEN
    return FASTER if ratio.high < 1 else SLOWER


def _draw_losses(axes: Axes, qualities: Sequence[Quality]) -> None:
    """The mean over the seeds of means over stretches of the training; shaded from the lowest seed to the highest."""
    lowest = np.inf
    for i, quality in enumerate(qualities):
        parts, curves = means_over_stretches([outcome.losses for outcome in quality.outcomes])
        places = [part.mean() for part in parts]
        colour, style = CURVES[i % len(CURVES)], "--" if i >= len(CURVES) else "-"
        axes.plot(places, curves.mean(0), style, color=colour, label=_folded(quality.setting))
        axes.fill_between(places, curves.min(0), curves.max(0), color=colour, alpha=0.12, linewidth=0)
        lowest = min(lowest, float(np.min(curves, initial=np.inf, where=np.isfinite(curves))))
    seeds = max(len(quality.outcomes) for quality in qualities)
    title = f"Loss: mean and range of {seeds} seeds" if seeds > 1 else "Loss: one seed"
    axes.set(title=title, xlabel="step", ylabel="loss, mean over ranks")
    if 0 < lowest < np.inf:
        axes.set_yscale("log")
        _plain_ticks(axes.yaxis)
    for text in axes.legend(frameon=False).get_texts():
        text.set_parse_math(False)
    tidy(axes)
