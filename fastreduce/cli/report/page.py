"""The page: one HTML file that needs nothing else, with plotly's JavaScript in it, packed."""

from __future__ import annotations

import base64
import gzip
import hashlib
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from ... import __version__
from ..compare.results import finite
from ..compare.script.verdicts import BAD, GOOD
from . import reading
from .gradients import draw_gradient_errors, draw_group_errors
from .quality import draw_differences, draw_losses
from .speed import draw_parts, draw_ratios, draw_rounds, draw_steps
from .timeline import draw_timeline
from .traces import Figure, colour_of

HERE = Path(__file__).parent


def write(results: Path, out: Path) -> None:
    """Make the page of a results.json.

    Raises:
        ReportError: if no report can be made of it.
        OSError: if the page cannot be written.
    """
    comparison = reading.read(results)
    try:
        html = render(comparison)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # figures that do not fit
        raise reading.ReportError(f"{results} is not as `fastreduce compare` writes it: {error}") from error
    out.write_bytes(html.encode(errors="replace"))


def render(comparison: reading.Comparison) -> str:
    """The page's HTML; what names and paths hold is text in it, and its scripts are the only ones that may run."""
    plotly, script = get_plotlyjs().encode(), (HERE / "page.js").read_text("utf-8")
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    figures = [
        replace(figure, data=finite(figure.data), layout=finite(figure.layout)) for figure in _figures(comparison)
    ]
    html: str = environment.get_template("page.html").render(
        c=comparison,
        figures=figures,
        colours=[colour_of(comparison, name) for name in comparison.names],
        marks=dict.fromkeys(GOOD, ("good", "✓")) | dict.fromkeys(BAD, ("bad", "✗")),
        style=(HERE / "page.css").read_text("utf-8"),
        plotly=base64.b64encode(gzip.compress(plotly, mtime=0)).decode(),
        script=script,
        hashes=[base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (plotly, script.encode())],
        version=__version__,
    )
    return html


def _figures(comparison: reading.Comparison) -> list[Figure]:
    """Those that the results have numbers for."""
    figures = []
    if comparison.speeds:
        figures += [draw_ratios(comparison), draw_steps(comparison), draw_rounds(comparison)]
    if any(comparison.parts.values()):
        figures.append(draw_parts(comparison))
    if comparison.flights:
        figures.append(draw_timeline(comparison))
    if any(quality.loss is not None for quality in comparison.qualities.values()):
        figures.append(draw_differences(comparison))
    if comparison.qualities:
        figures.append(draw_losses(comparison))
    if any(comparison.gradient_errors.values()):
        figures.append(draw_gradient_errors(comparison))
    if any(groups for each in comparison.group_errors for groups in each.errors.values()):
        figures.append(draw_group_errors(comparison))
    return figures
