"""Figures of quality: differences of losses, and loss curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..compare.curves import means_over_stretches
from ..compare.intervals import Estimate
from ..compare.script.equivalence import Equivalence
from ..compare.script.plan import BASE
from ..compare.script.quality import Quality
from ..compare.script.verdicts import say_difference
from .reading import Comparison
from .tables import Cell, Table, csv_link
from .traces import (
    Figure,
    Trace,
    axis,
    band,
    colour_of,
    curve,
    interval,
    labels,
    layout,
    line_at,
    make_trace,
    values_of,
)


def draw_differences(c: Comparison) -> Figure:
    """Final losses beside none's, and the margin."""
    tested = {name: quality.loss for name, quality in c.qualities.items() if quality.loss is not None}
    data = [
        interval(c, name, _in_percent(test), test.verdict, f"{say_difference(test, ' %')}: {test.verdict}")
        if math.isfinite(test.difference)
        else make_trace(c, name) | {"x": [0], "y": [0], "mode": "text", "text": [say_difference(test)]}
        for name, test in tested.items()
    ]
    margin = 100 * c.margin
    ends = [abs(end) for test in tested.values() for end in (100 * test.difference, 100 * test.low, 100 * test.high)]
    reach = 1.2 * max([margin, *filter(math.isfinite, ends)])
    raw = [
        [name, outcome.seed, outcome.final, base.final, outcome.final - base.final]
        for name in tested
        for outcome in c.qualities[name].outcomes
        for base in c.qualities[BASE].outcomes
        if base.seed == outcome.seed
    ]
    said = "; ".join(f"{name} {say_difference(test, ' %')}, {test.verdict}" for name, test in tested.items())
    return Figure(
        name="differences",
        title="Is the loss equal?",
        says=f"Mean difference of the final loss to none's of the same seed, with its 90 % interval. Equal is what "
        f"lies within the margin of {margin:g} % (shaded) with its whole interval.",
        alt=f"Difference of the final loss to none's, with 90 % intervals: {said}. The margin is {margin:g} %.",
        data=data,
        layout=layout(
            axis("final loss over none's, %") | {"range": [-reach, reach]},
            shapes=[line_at(0), band(-margin, margin, outlined=True)],
        ),
        rows=labels(c, tested),
        table=_quality_table(c),
        raw=csv_link(["setting", "seed", "final loss", "none's", "difference"], raw),
    )


def draw_losses(c: Comparison) -> Figure:
    """Loss curves, with the seeds' spread."""
    data: list[Trace] = []
    rows: list[tuple[str, list[Cell]]] = []
    for name, quality in c.qualities.items():
        parts, curves = means_over_stretches([outcome.losses for outcome in quality.outcomes])
        low, mean, high = curves.min(0).tolist(), curves.mean(0).tolist(), curves.max(0).tolist()
        places = [float(part.mean()) + 1 for part in parts]
        if len(quality.outcomes) > 1:
            data.append(_spread(c, name, places, low, high))
        data.append(curve(c, name, places, mean, "step %{x:.0f}: %{y:.4g}"))
        rows += [
            (name, [Cell(f"{part[0] + 1}–{part[-1] + 1}", float(part[0] + 1)), *map(_significant, figures)])
            for part, *figures in zip(parts, mean, low, high, strict=True)
        ]
    seeds = max(len(quality.outcomes) for quality in c.qualities.values())
    raw = [
        [name, o.seed, step, loss, *o.seconds[step - 1 : step]]
        for name, quality in c.qualities.items()
        for o in quality.outcomes
        for step, loss in enumerate(o.losses, 1)
    ]
    spread = f"mean of {seeds} seeds; shaded from the lowest to the highest" if seeds > 1 else "one seed"
    finals = "; ".join(f"{name} ends at {quality.final:.4g}" for name, quality in c.qualities.items())
    tested = any(quality.loss is not None for quality in c.qualities.values())
    return Figure(
        name="losses",
        title="How does the loss fall?",
        says=f"Mean over all ranks and over stretches of the training, {spread}.",
        alt=f"Training loss by step, {spread}: {finals}.",
        data=data,
        layout=layout(axis("step"), axis("loss", values_of(data, "y"))),
        rows=[],
        table=Table("Loss by stretches of steps", ["setting", "steps", "mean", "lowest seed", "highest seed"], rows)
        if tested
        else _quality_table(c),
        raw=csv_link(["setting", "seed", "step", "loss", "seconds"], raw),
        folded=tested,
    )


def _quality_table(c: Comparison) -> Table:
    """Final losses beside none's, metrics, and how soon the target was reached; columns of what there is."""
    qualities = c.qualities.values()
    columns: dict[str, Callable[[Quality], Cell]] = {"final loss": lambda q: _significant(q.final)}
    if any(q.loss is not None or q.note for q in qualities):
        columns["to none, % (90 %)"] = lambda q: _difference(q.loss)
        columns["loss is"] = lambda q: Cell(q.note or ("" if q.loss is None else q.loss.verdict))
    if c.metric:
        columns[c.metric] = lambda q: Cell("–") if q.metric_mean is None else _significant(q.metric_mean)
    if any(q.metric is not None for q in qualities):
        columns["metric to none, % (90 %)"] = lambda q: _difference(q.metric)
    if c.target is not None:
        columns[f"steps to a loss of {c.target:g}"] = _say_target
    rows = [(name, [make(quality) for make in columns.values()]) for name, quality in c.qualities.items()]
    return Table("Final losses: the mean of the last tenth of the steps and of the seeds", ["setting", *columns], rows)


def _say_target(quality: Quality) -> Cell:
    steps, seconds = quality.target_steps, quality.target_seconds
    if steps is None or seconds is None:
        return Cell("never")
    of = f" ({quality.reached} of {len(quality.outcomes)} seeds)" if quality.reached < len(quality.outcomes) else ""
    return Cell(f"{steps:g}, {seconds:.1f} s{of}", steps)


def _spread(c: Comparison, name: str, x: Sequence[float], low: Sequence[float], high: Sequence[float]) -> Trace:
    known = [point for point in zip(x, low, high, strict=True) if all(map(math.isfinite, point))]
    return make_trace(c, name) | {
        "x": [p[0] for p in known] + [p[0] for p in reversed(known)],
        "y": [p[2] for p in known] + [p[1] for p in reversed(known)],
        "mode": "lines",
        "line": {"width": 0},
        "fill": "toself",
        "fillcolor": f"rgba({', '.join(str(int(colour_of(c, name)[at : at + 2], 16)) for at in (1, 3, 5))}, 0.18)",
        "hoverinfo": "skip",
    }


def _significant(value: float) -> Cell:
    return Cell(f"{value:.4g}" if math.isfinite(value) else "not finite", value)


def _in_percent(test: Equivalence) -> Estimate:
    return Estimate(100 * test.difference, 100 * test.low, 100 * test.high)


def _difference(test: Equivalence | None) -> Cell:
    return Cell("–") if test is None else Cell(say_difference(test), test.difference)
