"""What plotly draws: traces and axes, and how contestants look in them."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..compare.intervals import Estimate
from ..compare.script.plan import AGAIN
from .reading import Comparison
from .tables import Table

Trace = dict[str, Any]

# Each contrasts with white and with black by 3.8 at least, so they are about as bright as each other: dashes and
# symbols differ too, and rows have names.
COLOURS = ("#7a7a7a", "#1a7fc1", "#D55E00", "#0a8f6a", "#8a63d2", "#a6761d", "#C4609A")
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "star", "triangle-up", "triangle-down", "hexagon")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
BAND = "rgba(128,128,128,0.22)"
WIDE, NEAR, FAR = 3, 10, 1000  # how far values lie apart: logarithmic, with ticks at 1, 2, 3 …; 1, 2, 5; powers of ten
LABEL, LINES = 16, 4  # of a row's name: characters in a line, lines


@dataclass(frozen=True)
class Figure:
    """A plot with its table.

    Attributes:
        name: of its files, and its place in the page.
        title: the question that it answers.
        says: how to read it.
        alt: what the plot shows, for who does not see it.
        data: plotly's traces; `meta` is the contestant, and y counts from its row where the figure has rows.
        layout: plotly's.
        rows: the contestants that have a row, each with its label; none in a figure of curves.
        table: the numbers that are drawn.
        raw: a data link to the measured ones.
        folded: whether the table is long.
    """

    name: str
    title: str
    says: str
    alt: str
    data: list[Trace]
    layout: dict[str, Any]
    rows: list[tuple[str, str]]
    table: Table
    raw: str
    folded: bool = False


def interval(c: Comparison, name: str, found: Estimate, text: str, hover: str) -> Trace:
    """A median with its interval, and a text above it."""
    trace = make_trace(c, name) | {
        "x": [found.median],
        "y": [0],
        "mode": "markers+text",
        "text": [text],
        "textposition": "top center",
        "cliponaxis": False,
        "hovertemplate": f"{escape(name)}: {escape(hover)}<extra></extra>",
        "marker": {"color": colour_of(c, name), "symbol": symbol_of(c, name), "size": 11},
    }
    if not math.isnan(found.low):
        trace["error_x"] = {
            "type": "data",
            "symmetric": False,
            "array": [found.high - found.median],
            "arrayminus": [found.median - found.low],
            "thickness": 3,
            "width": 6,
            "color": colour_of(c, name),
        }
    return trace


def dots(c: Comparison, name: str, values: Sequence[float], hovers: Sequence[str]) -> Trace:
    """Single values, below the interval."""
    return make_trace(c, name) | {
        "x": list(values),
        "y": [0.27] * len(values),
        "mode": "markers",
        "hovertemplate": [f"{escape(name)}, {hover}<extra></extra>" for hover in hovers],
        "marker": {"color": colour_of(c, name), "symbol": symbol_of(c, name), "size": 5, "opacity": 0.55},
    }


def curve(c: Comparison, name: str, x: Sequence[float], y: Sequence[float], hover: str) -> Trace:
    """A line with symbols, in the legend."""
    return make_trace(c, name) | {
        "x": list(x),
        "y": list(y),
        "mode": "lines+markers",
        "line": {"color": colour_of(c, name), "dash": DASHES[_place(c, name) % len(DASHES)], "width": 2},
        "marker": {"symbol": symbol_of(c, name), "size": 6},
        "hovertemplate": f"{escape(name)}, {hover}<extra></extra>",
        "showlegend": True,
    }


def marks(c: Comparison, name: str, x: Sequence[float], y: Sequence[float], hovers: Sequence[str]) -> Trace:
    """Symbols, in the legend."""
    return make_trace(c, name) | {
        "x": list(x),
        "y": list(y),
        "mode": "markers",
        "marker": {"color": colour_of(c, name), "symbol": symbol_of(c, name), "size": 9},
        "hovertemplate": [f"{escape(name)}, {hover}<extra></extra>" for hover in hovers],
        "showlegend": True,
    }


def key(part: str, colour: str, pattern: str) -> Trace:
    """An entry of the legend, and no bar."""
    return {
        "type": "bar",
        "orientation": "h",
        "x": [None],
        "y": [None],
        "name": part,
        "marker": filled(colour, pattern),
    }


def filled(colour: str, pattern: str) -> Trace:
    """How a bar looks."""
    return {"color": colour, "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#fff", "size": 7}}


def make_trace(c: Comparison, name: str) -> Trace:
    """What all scatter traces of a contestant have."""
    shared = {"type": "scatter", "name": escape(name), "showlegend": False, "meta": name}
    return shared | {"legendgroup": str(_place(c, name))}


def _place(c: Comparison, name: str) -> int:
    return c.names.index(name)


def colour_of(c: Comparison, name: str) -> str:
    """A contestant's colour."""
    return COLOURS[_place(c, name) % len(COLOURS)]


def symbol_of(c: Comparison, name: str) -> str:
    """A contestant's symbol."""
    return SYMBOLS[_place(c, name) % len(SYMBOLS)]


def layout(
    x: dict[str, Any], y: dict[str, Any] | None = None, shapes: Sequence[Trace] = (), legend: bool = False
) -> dict[str, Any]:
    """The axes, the shapes behind the traces, and whether there is a legend, as curves have."""
    return {"xaxis": x, "yaxis": y or {}, "shapes": list(shapes), "showlegend": legend or y is not None}


def axis(title: str, values: Sequence[float] = ()) -> dict[str, Any]:
    """Logarithmic where the values lie far apart."""
    known = [value for value in values if math.isfinite(value)]
    apart = max(known) / min(known) if known and min(known) > 0 else 1.0
    if apart < WIDE:
        return {"title": {"text": title}}
    ticks = {} if apart > FAR else {"dtick": "D1" if apart < NEAR else "D2"}
    number = ".0e" if apart > FAR else "~g"
    return {"title": {"text": f"{title}, logarithmic"}, "type": "log", "tickformat": number} | ticks


def values_of(data: Sequence[Trace], axis: str = "x") -> list[float]:
    """All values of some traces."""
    return [value for trace in data for value in trace[axis]]


def line_at(x: float) -> Trace:
    """A vertical line."""
    return {
        "type": "line",
        "x0": x,
        "x1": x,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "#7a7a7a", "width": 1},
    }


def band(low: float, high: float, outlined: bool = False) -> Trace:
    """A shaded range of x."""
    line = {"color": "#7a7a7a", "width": 1 if outlined else 0, "dash": "dash"}
    places = {"x0": low, "x1": high, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "rect", **places, "line": line, "fillcolor": BAND, "layer": "below"}


def labels(c: Comparison, names: Mapping[str, object]) -> list[tuple[str, str]]:
    """What stands beside the rows."""
    said = {name: f"{name} (control)" if name == AGAIN and c.control is not None else name for name in names}
    return [(name, wrap(text)) for name, text in said.items()]


def wrap(text: str) -> str:
    """In lines that end behind punctuation where there is any."""
    lines = re.findall(rf".{{1,{LABEL}}}$|.{{1,{LABEL - 1}}}[\s:,;_|=.]|.{{1,{LABEL}}}", text)
    return "<br>".join(map(escape, [*lines[:LINES], *(["…"] if len(lines) > LINES else [])]))


def escape(text: str) -> str:
    """Text that plotly shows as it is: it knows a few tags, templates and formulas."""
    return html.escape(text, quote=False).replace("%", "&#37;").replace("$", "&#36;")
