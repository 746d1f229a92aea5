"""Figures of speed: ratios to none, steps, rounds, and the parts of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..compare.intervals import Estimate, say_ratio
from ..compare.script.plan import BASE
from .reading import Comparison
from .tables import Cell, Table, csv_link
from .traces import (
    Figure,
    Trace,
    axis,
    band,
    colour_of,
    curve,
    dots,
    escape,
    filled,
    interval,
    key,
    labels,
    layout,
    line_at,
    symbol_of,
    values_of,
)

MOST_POINTS = 300  # of a box; beyond that its outliers are drawn
PARTS = {"compute": ("#7a7a7a", ""), "exposed communication": ("#D55E00", "/")}
STAGES = {"compress": ("#1a7fc1", "\\"), "reduce": ("#0a8f6a", "."), "decompress": ("#8a63d2", "x")}


def draw_ratios(c: Comparison) -> Figure:
    """Ratios to none, round by round, with their intervals and the control's."""
    data: list[Trace] = []
    raw: list[list[object]] = []
    medians = _medians(c)
    for name, speed in c.speeds.items():
        ratios = [medians[name][r] / medians[BASE][r] for r in medians[name]] if name in medians else []
        raw += [[r + 1, name, medians[name][r], ratio] for r, ratio in zip(medians.get(name, ()), ratios, strict=True)]
        if name != BASE:
            data.append(dots(c, name, ratios, [f"round {r + 1}: %{{x:.3f}}" for r in medians.get(name, ())]))
        data.append(interval(c, name, speed.ratio, f"{speed.ratio.median:.2f}", say_ratio(speed.ratio, "none")))
    shapes = [line_at(1)]
    control = c.control
    if control is not None and not math.isnan(control.ratio.low):
        shapes.append(band(control.ratio.low, control.ratio.high))
    words = {verdict.setting: verdict.word for verdict in c.verdicts}
    rows = [
        (
            name,
            [
                _decimal(s.step),
                _ratio(s.ratio),
                Cell("–") if s.ratio_to_torch is None else _ratio(s.ratio_to_torch),
                Cell(str(s.rounds), s.rounds),
                *([Cell(words.get(name, ""))] if any(words) else []),
            ],
        )
        for name, s in c.speeds.items()
    ]
    columns = ["setting", "step, ms", "over none (95 %)", "over torch (95 %)", "rounds"]
    said = "; ".join(f"{name} {say_ratio(speed.ratio)}" for name, speed in c.speeds.items() if name != BASE)
    return Figure(
        name="ratios",
        title="Are steps shorter?",
        says="Each round's step over none's of the same round (small), their median and its 95 % interval. Left of 1 "
        "is shorter."
        + (" Shaded is the control, none again: what lies within it may be chance." if control is not None else ""),
        alt=f"Median ratio of each step to none's, with 95 % intervals: {said}.",
        data=data,
        layout=layout(axis("step over none's", values_of(data)), shapes=shapes),
        rows=labels(c, c.speeds),
        table=Table(
            "Median steps, and their ratios to none's and to torch's with 95 % intervals",
            [*columns, *(["verdict"] if any(words) else [])],
            rows,
        ),
        raw=csv_link(["round", "setting", "median step, s", "ratio to none"], raw),
    )


def draw_steps(c: Comparison) -> Figure:
    """The distribution of all timed steps."""
    steps = {name: 1e3 * np.concatenate([t.steps for t in c.turns if t.contestant == name]) for name in c.speeds}
    data = [
        {
            "type": "box",
            "orientation": "h",
            "x": values.tolist(),
            "y": [0] * len(values),
            "boxpoints": "all" if len(values) <= MOST_POINTS else "outliers",
            "jitter": 0.6,
            "pointpos": 0,
            "width": 0.6,
            "quartilemethod": "linear",
            "line": {"width": 2},
            "marker": {"color": colour_of(c, name), "size": 4, "opacity": 0.5, "symbol": symbol_of(c, name)},
            "fillcolor": "rgba(128,128,128,0.12)",
            "hovertemplate": "%{x:.1f} ms",
            "name": escape(name),
            "meta": name,
        }
        for name, values in steps.items()
    ]
    quantiles = {name: np.quantile(values, (0, 0.25, 0.5, 0.75, 0.95, 1)).tolist() for name, values in steps.items()}
    rows = [
        (name, [Cell(str(len(steps[name])), len(steps[name])), *(Cell(f"{q:.1f}", q) for q in found)])
        for name, found in quantiles.items()
    ]
    most = max((len(turn.seconds) for turn in c.turns), default=0)
    ranks = [f"rank {number}, s" for number in range(most)] if most > 1 else []
    raw = [
        [turn.round + 1, number, turn.contestant, slowest, *(each if ranks else ())]
        for turn in c.turns
        for number, (slowest, each) in enumerate(zip(turn.steps, zip(*turn.seconds, strict=True), strict=True), 1)
    ]
    said = "; ".join(f"{name} {found[2]:.1f} ms ({found[1]:.1f}–{found[3]:.1f})" for name, found in quantiles.items())
    return Figure(
        name="steps",
        title="How long are steps?",
        says="Every timed step, on its slowest rank. A box holds the middle half, with a line at the median.",
        alt=f"Distribution of step times, medians with quartiles: {said}.",
        data=data,
        layout=layout(axis("milliseconds", values_of(data))),
        rows=labels(c, steps),
        table=Table(
            "Milliseconds of a step",
            ["setting", "steps", "shortest", "lower quartile", "median", "upper quartile", "95 % below", "longest"],
            rows,
        ),
        raw=csv_link(["round", "step", "setting", "slowest rank, s", *ranks], raw),
    )


def draw_rounds(c: Comparison) -> Figure:
    """Median steps over the rounds."""
    medians = {name: {r + 1: 1e3 * seconds for r, seconds in of.items()} for name, of in _medians(c).items()}
    data = [
        curve(c, name, list(of), list(of.values()), "round %{x}: %{y:.1f} ms") for name, of in medians.items() if of
    ]
    rows = [(name, [Cell(str(r), r), Cell(f"{ms:.1f}", ms)]) for name, of in medians.items() for r, ms in of.items()]
    return Figure(
        name="rounds",
        title="Did the machine stay the same?",
        says="The median step of each turn, round by round. What moves all curves together is the machine; ratios are "
        "taken within a round and do not see it.",
        alt="Median step of each contestant by round: "
        + "; ".join(f"{name} from {min(of.values()):.1f} to {max(of.values()):.1f} ms" for name, of in medians.items())
        + ".",
        data=data,
        layout=layout(axis("round"), axis("median step, ms", values_of(data, "y"))),
        rows=[],
        table=Table("Milliseconds of a step, round by round", ["setting", "round", "median step"], rows),
        raw=csv_link(
            ["setting", "round", "median step, ms"], [[n, r, v] for n, of in medians.items() for r, v in of.items()]
        ),
        folded=True,
    )


def draw_parts(c: Comparison) -> Figure:
    """What a step and communication beside it consist of."""
    data: list[Trace] = [key(part, *look) for part, look in (PARTS | STAGES).items()]
    for name, parts in c.parts.items():
        data += _stack(name, parts, PARTS, -0.2)
        data += _stack(name, c.stages.get(name, {}), STAGES, 0.2)
    columns = ["setting", "step", *PARTS, *STAGES, "sent, MB"]
    rows = [
        (
            name,
            [
                *(_decimal(each) for each in (sum(parts.values()), *(parts[part] for part in PARTS))),
                *(_decimal(c.stages[name].get(stage, math.nan)) for stage in STAGES),
                Cell(f"{c.sent[name] / 1e6:.3g}", c.sent[name]),
            ],
        )
        for name, parts in c.parts.items()
    ]
    raw = [[name, part, ms] for name in c.parts for part, ms in (c.parts[name] | c.stages[name]).items()]
    return Figure(
        name="parts",
        title="Where does a step's time go?",
        says="Upper bar: the step, of which compute is the step without a wrapper and the rest what communication "
        "adds. Lower bar: what communication does on a thread, with GPUs on a stream, of its own, largely beside "
        "backward; torch does not tell its own.",
        alt="Parts of a step in milliseconds: "
        + "; ".join(f"{n} {', '.join(f'{part} {ms:.1f}' for part, ms in p.items())}" for n, p in c.parts.items())
        + ".",
        data=data,
        layout=layout(axis("milliseconds"), legend=True) | {"barmode": "overlay"},
        rows=labels(c, c.parts),
        table=Table("Milliseconds of a step and of communication beside it, and what a rank sends", columns, rows),
        raw=csv_link(["setting", "part", "ms"], raw),
    )


def _stack(name: str, parts: Mapping[str, float], looks: Mapping[str, tuple[str, str]], offset: float) -> list[Trace]:
    """Bars end to end; one that is negative goes back."""
    traces, base = [], 0.0
    for part, (colour, pattern) in looks.items():
        if part in parts:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "x": [parts[part]],
                    "y": [offset],
                    "base": [base],
                    "width": 0.36,
                    "marker": filled(colour, pattern),
                    "hovertemplate": f"{escape(name)}, {part}: {parts[part]:.1f} ms<extra></extra>",
                    "showlegend": False,
                    "meta": name,
                }
            )
            base += parts[part]
    return traces


def _medians(c: Comparison) -> dict[str, dict[int, float]]:
    """Contestant → round → the median of its turn, in seconds."""
    found: dict[str, dict[int, float]] = {}
    for turn in c.turns:
        found.setdefault(turn.contestant, {})[turn.round] = float(np.median(turn.steps))
    return found


def _ratio(found: Estimate) -> Cell:
    if found.low == found.high == 1:  # to itself
        return Cell("1", 1)
    return Cell(str(found), found.median)


def _decimal(value: float) -> Cell:
    return Cell("–") if math.isnan(value) else Cell(f"{value:.1f}", value)
