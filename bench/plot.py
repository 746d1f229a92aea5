"""The picture of a run: kernels against a copy, steps, and what a wrapper adds to a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .goals import NOT_PLAIN, Results

OURS, TORCH, NEITHER = "#0b6e99", "#e07b39", "#8a8a8a"


def draw(results: Results, path: Path) -> None:
    """Write the plot: a panel for whatever was measured."""
    kernels = {
        name.removeprefix("test_kernel[").split("-numba_cpu")[0].replace("-resnet50", "").replace("-", " "): info[
            "contestants"
        ]
        for name, info in results.items()
        if "-resnet50" in name and "-numba_cpu" in name
    }
    steps = results.get("test_step[none]", {}).get("contestants", {})
    overheads = {
        title: results[name]["contestants"]
        for name, title in (
            ("test_overhead[1]", "world size 1"),
            ("test_overhead[2]", "2 ranks"),
            ("test_overhead_of_hooks", "world size 1, no_sync"),
        )
        if name in results
    }
    panels = [(f, data) for f, data in ((_kernels, kernels), (_steps, steps), (_overheads, overheads)) if data]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(7.2 * len(panels), 7), squeeze=False, layout="constrained")
    for (panel, data), axis in zip(panels, axes[0], strict=True):
        panel(axis, data)
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _kernels(axis: Axes, kernels: dict[str, dict[str, Any]]) -> None:
    for y, rows in enumerate(kernels.values()):
        axis.barh(y, rows["numba_cpu"]["of_copy"][0], 0.7, color=OURS, label="numba_cpu" if y == 0 else None)
        plain = [row["of_copy"][0] for way, row in rows.items() if way not in NOT_PLAIN]
        axis.plot(plain, [y] * len(plain), "o", color=TORCH, mec="white", label="torch's ways" if y == 0 else None)
        reference = rows["reference"]["of_copy"][0]
        axis.plot(reference, y, "d", color=NEITHER, mec="white", label="reference" if y == 0 else None)
    axis.axvline(1, color="black", lw=0.8, ls=":")
    axis.set_yticks(range(len(kernels)), list(kernels))
    axis.set(
        title="Kernels, gradients of ResNet-50, one thread", xlabel="bytes a second / those of a copy in the same run"
    )
    axis.legend(loc="lower right", frameon=False)


def _steps(axis: Axes, steps: dict[str, dict[str, Any]]) -> None:
    for y, (name, row) in enumerate(steps.items()):
        low, median, high = (1e3 * s for s in row["quartiles_s"])
        colour = NEITHER if name == "unwrapped" else TORCH if name.startswith("torch") else OURS
        axis.barh(y, median, 0.7, color=colour, xerr=[[median - low], [high - median]], ecolor="black", capsize=2)
    axis.set_yticks(range(len(steps)), list(steps))
    axis.set(title="Step, 25 M parameters, 2 gloo ranks", xlabel="ms, median and quartiles")


def _overheads(axis: Axes, overheads: dict[str, dict[str, Any]]) -> None:
    labels: list[str] = []
    for title, rows in overheads.items():
        for name, row in rows.items():
            if "overhead_s" not in row:
                continue
            median, low, high = (1e3 * s for s in row["overhead_s"])
            colour = OURS if name == "fastreduce" else TORCH if name.startswith("torch") else NEITHER
            axis.barh(len(labels), median, 0.7, color=colour, xerr=[[median - low], [high - median]], capsize=2)
            labels.append(f"{name} ({title})")
    axis.set_yticks(range(len(labels)), labels)
    axis.set(title="What a wrapper adds, 1,000 parameters of 64", xlabel="ms a step, median and its 95 % interval")
