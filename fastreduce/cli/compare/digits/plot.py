"""The picture of a run: loss curves, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..curves import means_over_stretches
from ..intervals import say_ratio
from .statistics import Figures
from .training import TORCH, TORCH_FP16

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
CURVES = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00")
STRETCHES = 24
COMPUTE, EXPOSED = "#999999", "#D55E00"
STAGE_COLOURS = {"compress": "#0072B2", "reduce": "#56B4E9", "decompress": "#009E73"}


def draw(path: Path, figures: Sequence[Figures], title: str) -> None:
    """Write the PNG."""
    figure = Figure(figsize=(13, 2.6 + 0.62 * len(figures)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    grid = figure.add_gridspec(1, 2, width_ratios=(1, 1.25))
    left, right = (figure.add_subfigure(grid[column]) for column in (0, 1))
    _draw_losses(left.subplots(), figures)
    left.legend(loc="outside lower center", ncols=2, frameon=False, title="accuracy on held-out digits")
    _draw_steps(right.subplots(), figures)
    right.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, figures: Sequence[Figures]) -> None:
    for i, f in enumerate(figures):
        parts, (means,) = means_over_stretches([f.losses], STRETCHES)
        axes.plot(
            [part.mean() for part in parts],
            means,
            "--" if f.name in (TORCH, TORCH_FP16) else "-",
            color=CURVES[i % len(CURVES)],
            label=f"{f.name}  {f.accuracy:.1%}",
        )
    axes.set(title="Training loss", xlabel="step", ylabel="cross-entropy, mean over ranks", yscale="log")
    tidy(axes)


def _draw_steps(axes: Axes, figures: Sequence[Figures]) -> None:
    """Two bars per setting: the step, and below it what communication does beside it."""
    rows = range(len(figures))
    step, thread = [row - 0.18 for row in rows], [row + 0.18 for row in rows]
    parts = {"compute (step without wrapper)": COMPUTE, "exposed communication": EXPOSED}
    _stack(axes, step, parts, [[f.compute, f.exposed] for f in figures])
    parts = {f"{stage} (beside)": colour for stage, colour in STAGE_COLOURS.items()}
    _stack(axes, thread, parts, [[f.stages.get(stage, 0.0) for stage in STAGE_COLOURS] for f in figures])
    for row, f in zip(step, figures, strict=True):
        text = f"{f.step:.0f} ms" + ("" if f.name == "none" else f",  {say_ratio(f.ratio, 'none')}")
        axes.annotate(text, (max(f.step, f.compute), row), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [f.name for f in figures])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7 * max(f.step for f in figures))
    axes.set(title="A step, and communication beside it", xlabel="milliseconds")
    tidy(axes, grid="x")


def _stack(axes: Axes, rows: Sequence[float], parts: Mapping[str, str], lengths: Sequence[Sequence[float]]) -> None:
    """Stacked bars, one per row; `parts` are labels with their colours."""
    left = np.zeros(len(rows))
    for (label, colour), widths in zip(parts.items(), np.transpose(lengths), strict=True):
        axes.barh(rows, widths, 0.34, left=left, color=colour, label=label)
        left += widths


def tidy(axes: Axes, grid: Literal["both", "x"] = "both") -> None:
    """Light lines behind the curves, and an open frame."""
    axes.grid(axis=grid, alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
