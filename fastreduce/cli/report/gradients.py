"""Figures of what settings lose of gradients: of all parameters together, and of groups of them."""

from __future__ import annotations

import math

import numpy as np

from ..compare.intervals import Estimate
from .reading import Comparison
from .tables import Cell, Table, csv_link
from .traces import Figure, Trace, axis, dots, escape, interval, labels, layout, marks, values_of, wrap

LINE, BETWEEN, MARGINS = 16, 10, 150  # pixels: of a line of a group's name, between groups, around all


def draw_gradient_errors(c: Comparison) -> Figure:
    """Errors of averaged gradients, step by step."""
    data: list[Trace] = []
    rows = []
    for name, errors in c.gradient_errors.items():
        drawn = [error for error in errors if error > 0]
        median = float(np.median(errors)) if errors else math.nan
        data.append(dots(c, name, drawn, ["%{x:.2e}"] * len(drawn)))
        if median > 0:
            data.append(interval(c, name, Estimate(median, math.nan, math.nan), f"{median:.0e}", f"{median:.2e}"))
        figures = (median, min(errors, default=math.nan), max(errors, default=math.nan))
        rows.append((name, [Cell(str(len(errors)), len(errors)), *(Cell(f"{each:.2e}", each) for each in figures)]))
    return Figure(
        name="gradient-errors",
        title="How far are gradients from the exact average?",
        says="Relative L2 distance, at the same weights, in each inspected step (small), and the median. Error "
        "feedback adds what a step has lost to the next: a larger distance in one step, a smaller one over many.",
        alt="Relative gradient error, medians: " + "; ".join(f"{name} {cells[1].text}" for name, cells in rows) + ".",
        data=data,
        layout=layout(axis("relative error", values_of(data))),
        rows=labels(c, c.gradient_errors),
        table=Table(
            "Relative distance of averaged gradients to the exact average",
            ["setting", "inspected steps", "median", "smallest", "largest"],
            rows,
        ),
        raw=csv_link(
            ["setting", "inspected step", "relative error"],
            [[name, number, e] for name, errors in c.gradient_errors.items() for number, e in enumerate(errors)],
        ),
    )


def draw_group_errors(c: Comparison) -> Figure:
    """What each setting would lose of the gradients of a training under none, by group of parameters."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in c.group_errors:
        for name, groups in each.errors.items():
            for group, error in groups.items():
                of_group = found.setdefault(name, {}).setdefault(group, [])
                of_group += [error] if math.isfinite(error) else []  # a GradScaler's first steps may overflow
    order = list(dict.fromkeys(group for groups in found.values() for group in groups))
    medians = {
        name: {group: float(np.median(errors)) if errors else math.nan for group, errors in of.items()}
        for name, of in found.items()
    }
    drawn = {name: {group: median for group, median in of.items() if median > 0} for name, of in medians.items()}
    data = [
        marks(
            c,
            name,
            list(of.values()),
            [order.index(group) for group in of],
            [f"{escape(group)}: %{{x:.2e}}" for group in of],
        )
        for name, of in drawn.items()
    ]
    rows = []
    for name, of in found.items():
        for place, group in enumerate(order):
            errors = of.get(group, [])
            figures = (medians[name].get(group, math.nan), min(errors, default=math.nan), max(errors, default=math.nan))
            rows.append((name, [Cell(group, place), *(Cell(_say(each), each) for each in figures)]))
    steps = len({(each.seed, each.step) for each in c.group_errors})
    whole = "; ".join(f"{name} {_say(of[order[0]])}" for name, of in medians.items() if order and order[0] in of)
    texts = [wrap(group) for group in order]
    lines = max(text.count("<br>") + 1 for text in texts)
    y = {"tickvals": [*range(len(order))], "ticktext": texts, "range": [len(order) - 0.4, -0.6], "fixedrange": True}
    return Figure(
        name="group-errors",
        title="What is lost of the gradients, and where?",
        says=f"In {steps} steps of trainings under none, each rank sent its gradients through each setting and "
        "back: the squared error over the gradients' squares (vNMSE), of all ranks, by module. Medians. It is one "
        "rounding in one step: error feedback adds it again in the next.",
        alt=f"Relative squared error of gradients by group of parameters and setting; of all together: {whole}.",
        data=data,
        layout=layout(axis("vNMSE", values_of(data)), y) | {"height": MARGINS + (LINE * lines + BETWEEN) * len(order)},
        rows=[],
        table=Table(
            "Squared error of gradients over their squares, by group of parameters",
            ["setting", "group", "median", "smallest", "largest"],
            rows,
        ),
        raw=csv_link(
            ["seed", "step", "setting", "group", "squared error over squares"],
            [
                [each.seed, each.step, name, group, error]
                for each in c.group_errors
                for name, groups in each.errors.items()
                for group, error in groups.items()
            ],
        ),
        folded=True,
    )


def _say(error: float) -> str:
    return f"{error:.2e}" if math.isfinite(error) else "not finite"
