"""The picture of a run: loss curves, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .statistics import Figures
from .training import TORCH, TORCH_FP16, WARM_UP_STEPS, Experiment

# Okabe and Ito's colours, which readers with any colour vision can tell apart.
CURVES = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00")
COMPUTE, EXPOSED = "#999999", "#D55E00"
STAGES = {"compress": "#0072B2", "reduce": "#56B4E9", "decompress": "#009E73"}


def draw(path: Path, experiment: Experiment, figures: Sequence[Figures], title: str) -> None:
    """Write the PNG."""
    figure = Figure(figsize=(13, 2.6 + 0.62 * len(figures)), layout="constrained")
    figure.suptitle(title, fontsize=13)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_losses(left, experiment, figures)
    _draw_steps(right, figures)
    figure.savefig(path, dpi=130)


def _draw_losses(axes: Axes, experiment: Experiment, figures: Sequence[Figures]) -> None:
    """The mean of each round: single batches are too noisy to compare."""
    length = experiment.steps + 1
    middle = WARM_UP_STEPS + length * (np.arange(experiment.rounds) + 0.5)
    for i, f in enumerate(figures):
        means = np.reshape(f.losses[WARM_UP_STEPS:], (experiment.rounds, length)).mean(axis=1)
        style = "--" if f.name in (TORCH, TORCH_FP16) else "-"
        axes.plot(
            middle,
            means,
            style,
            color=CURVES[i % len(CURVES)],
            linewidth=1.8,
            label=f"{f.name}  {f.accuracy:.1%}",
        )
    axes.set(title="Training loss, mean of each round", xlabel="step", ylabel="cross-entropy", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend(
        title="accuracy on held-out digits",
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _draw_steps(axes: Axes, figures: Sequence[Figures]) -> None:
    """Two bars per setting: the step, and below it the communication thread, which runs beside it."""
    rows = np.arange(len(figures))
    compute = [f.step - f.communication for f in figures]
    axes.barh(rows - 0.18, compute, 0.36, color=COMPUTE, label="compute (step without wrapper)")
    axes.barh(
        rows - 0.18,
        [f.communication for f in figures],
        0.36,
        left=compute,
        color=EXPOSED,
        label="exposed communication",
    )
    left = np.zeros(len(figures))
    for stage, colour in STAGES.items():
        lengths = [getattr(f, stage) or 0.0 for f in figures]
        axes.barh(rows + 0.18, lengths, 0.3, left=left, color=colour, label=f"{stage} (thread)")
        left += lengths
    for row, f in zip(rows, figures, strict=True):
        ratio = "" if f.name == "none" else f"   {f.ratio.median:.2f}× none"
        axes.annotate(f"{f.step:.0f} ms{ratio}", (f.step, row - 0.18), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(rows, [f.name for f in figures])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(max(f.step for f in figures), left.max()))
    axes.set(title="A step, and the communication thread beside it", xlabel="milliseconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.13), ncols=3, frameon=False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
