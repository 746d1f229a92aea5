"""The picture of all trainings: differences with their intervals, beside the margin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fastreduce.cli.compare.script.plot import FASTER, OPEN, SLOWER

from .tasks import OPTIMIZERS, TASKS
from .verdicts import Findings

MARKERS = "osD^v"


def draw(path: Path, findings: Findings, margin: float) -> None:
    """Write the PNG: a panel for each task and optimizer, a row for each setting, a marker for each number of ranks."""
    settings, size = findings.settings, (3 * len(TASKS) + 1.5, 0.3 * len(findings.settings) * len(OPTIMIZERS) + 2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(OPTIMIZERS), len(TASKS), sharey=True, squeeze=False)
    for line, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for axes, (task, about) in zip(line, TASKS.items(), strict=True):
            axes.set_title(f"{about.name}, {optimizer}", fontsize=10)
            axes.axvspan(-margin, margin, color="#009E73", alpha=0.12, linewidth=0)
            axes.axvline(0, color="black", linewidth=0.8)
            axes.set_xscale("symlog", linthresh=margin)
            axes.xaxis.set_minor_locator(NullLocator())
            for row, setting in enumerate(settings):
                for i, ranks in enumerate(findings.ranks):
                    test = findings.tests.get((setting, (task, optimizer, ranks)))
                    if test is None or not np.isfinite(test.difference):
                        continue
                    low, middle, high = (100 * x for x in (test.low, test.difference, test.high))
                    y = row + 0.3 * (i - (len(findings.ranks) - 1) / 2)
                    colour = {"higher": SLOWER, "undecided": OPEN}.get(test.verdict, FASTER)
                    axes.plot([low, high], [y, y], "-", color=colour, linewidth=2)
                    axes.plot([middle], [y], MARKERS[i], color=colour, markersize=4)
            axes.set_xlim(min(axes.get_xlim()[0], -2 * margin), max(axes.get_xlim()[1], 2 * margin))
            ticks = _ticks(axes, margin)
            axes.set_xticks(ticks, [_label(tick) for tick in ticks])
            axes.set_yticks(range(len(settings)), settings)
            axes.set_ylim(len(settings) - 0.5, -0.5)
            axes.grid(axis="y", alpha=0.3)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel(
        f"final loss over none's, percent, with its 90 % interval; shaded: the margin of {margin:g} %. Markers: "
        + ", ".join(f"{'●■◆▲▼'[i]} {ranks} ranks" for i, ranks in enumerate(findings.ranks))
        + ". Blue: equal or lower, orange: higher, grey: undecided",
        fontsize=10,
    )
    figure.savefig(path, dpi=110)


def _label(tick: float) -> str:
    """A percentage in a few characters, with its sign: +1000, +1e5."""
    short = f"{tick:+.0e}".replace("e+0", "e")
    return "0" if not tick else short if abs(tick) >= 10_000 else f"{tick:+g}"


def _ticks(axes: Axes, margin: float) -> list[float]:
    """0, the margin either way, and powers of ten times it, so far apart that their labels do not meet."""
    low, high = axes.get_xlim()
    at = axes.transScale.transform
    width = at((high, 0))[0] - at((low, 0))[0]
    chosen = [0.0]
    for sign, end in ((1, high), (-1, -low)):
        last, value = 0.0, margin
        while value <= end:
            if abs(at((sign * value, 0))[0] - at((last, 0))[0]) > 0.14 * width:
                chosen.append(last := sign * value)
            value *= 10
    return chosen
