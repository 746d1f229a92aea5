"""The picture of a run: kernels against a copy, steps, and what a wrapper adds to a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .goals import NOT_PLAIN, Results

OURS, TORCH, NEITHER = "#0b6e99", "#e07b39", "#8a8a8a"
BACKENDS = {"numba_cpu": OURS, "triton": OURS, "numba_cuda": "#7bb8d0"}

HOOKS = "empty Python hooks"

Rows = dict[str, Any]  # a contestant → its figures
Panel = tuple[Callable[[Axes, Any], None], str, Any]


def draw(results: Results, path: Path) -> None:
    """Write the plot: a panel for whatever was measured."""
    kernels = {
        _case(name.replace("-resnet50", "")): {"numba_cpu": info["contestants"]}
        for name, info in results.items()
        if name.startswith("test_kernel[") and "-resnet50" in name
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
    panels: list[Panel] = [
        (panel, title, data)
        for panel, title, data in (
            (draw_kernels, "Kernels, gradients of ResNet-50, one thread", kernels),
            (draw_steps, "Step, 25 M parameters, 2 gloo ranks", steps),
            (draw_overheads, "What a wrapper adds, 1,000 parameters of 64", overheads),
        )
        if data
    ]
    if panels:
        draw_panels(panels, path)


def draw_panels(panels: Sequence[Panel], path: Path, height: float = 7, above: str = "", warns: bool = False) -> None:
    """Write panels side by side: each a function that draws, a title, and what it draws; `warns`: `above` is red."""
    size = (7.2 * len(panels), height)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for (panel, title, data), axis in zip(panels, axes[0], strict=True):
        panel(axis, data)
        axis.set_title(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.invert_yaxis()
    if above:
        figure.suptitle(above, color="#b00020" if warns else "black", fontweight="bold")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _case(name: str) -> str:
    """A benchmark's parameters without the backend."""
    return name.partition("[")[2].rpartition("-")[0].replace("-", " ")


def draw_kernels(axis: Axes, kernels: dict[str, dict[str, Rows]]) -> None:
    """By case and backend: bytes a second, in shares of a copy's."""
    for y, by_backend in enumerate(kernels.values()):
        height = 0.7 / len(by_backend)
        for i, (backend, rows) in enumerate(by_backend.items()):
            middle = y + (i - (len(by_backend) - 1) / 2) * height
            share = _middle(rows[backend]["of_copy"])
            axis.barh(middle, share, height, color=BACKENDS[backend], label=backend if y == 0 else None)
        plain = [_middle(row["of_copy"]) for way, row in rows.items() if way not in NOT_PLAIN]
        if plain:
            axis.plot(plain, [y] * len(plain), "o", color=TORCH, mec="white", label="torch's ways" if y == 0 else None)
        if "reference" in rows:
            reference = _middle(rows["reference"]["of_copy"])
            axis.plot(reference, y, "d", color=NEITHER, mec="white", label="reference" if y == 0 else None)
    axis.axvline(1, color="black", lw=0.8, ls=":")
    axis.set_yticks(range(len(kernels)), list(kernels))
    axis.set(xlabel="bytes a second / those of a copy in the same run")
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def draw_steps(axis: Axes, steps: dict[str, dict[str, Any]]) -> None:
    """By contestant: a step's time."""
    for y, (name, row) in enumerate(steps.items()):
        low, median, high = (1e3 * s for s in row["quartiles_s"])
        colour = NEITHER if name == "unwrapped" else TORCH if name.startswith("torch") else OURS
        axis.barh(y, median, 0.7, color=colour, xerr=[[median - low], [high - median]], ecolor="black", capsize=2)
    axis.set_yticks(range(len(steps)), list(steps))
    axis.set(xlabel="ms, median and quartiles")


def draw_overheads(axis: Axes, overheads: dict[str, dict[str, Any]]) -> None:
    """By title and contestant: what a wrapper adds to a step."""
    labels: list[str] = []
    intervals = False
    for title, rows in overheads.items():
        for name, row in rows.items():
            if "overhead_s" not in row:
                continue
            figure = row["overhead_s"]
            median = 1e3 * _middle(figure)
            low, high = (1e3 * s for s in figure[1:]) if isinstance(figure, Sequence) else (median, median)
            spread = None if low == high else [[median - low], [high - median]]
            colour = NEITHER if name == HOOKS else TORCH if name.startswith("torch") else OURS
            axis.barh(len(labels), median, 0.7, color=colour, xerr=spread, capsize=2)
            intervals |= spread is not None
            labels.append(f"{name} ({title})" if title else name)
    axis.set_yticks(range(len(labels)), labels)
    axis.set(xlabel="ms a step, median and its 95 % interval" if intervals else "ms a step, median")


def _middle(figure: float | Sequence[float]) -> float:
    """A figure that is kept alone, or the first of three: a median, and its interval."""
    return figure[0] if isinstance(figure, Sequence) else figure
