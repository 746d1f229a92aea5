"""`fastreduce report`: results.json as one HTML file."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ..ending import fail, need

FOR_PAGES = ("jinja2", "plotly")  # which a comparison does without, for it makes other files too


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="The results.json of a comparison.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; else report.html beside RESULTS.")] = None,
) -> None:
    """Make one HTML file of a comparison's results.json.

    It needs no network and no other file: the verdict, plots with their tables, and each plot's numbers as CSV.
    `fastreduce compare` writes it too.
    """
    need("scipy", *FOR_PAGES)
    from . import page
    from .reading import ReportError

    path = results.parent / "report.html" if out is None else out
    if os.path.exists(path) and os.path.exists(results) and path.samefile(results):
        fail(f"cannot write to {path}: it is RESULTS, which the page is made of")
    try:
        page.write(results, path)
    except ReportError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write to {path}: {error.strerror}")
    typer.echo(f"Wrote {path}.")


def write_page(out: Path) -> str:
    """Make report.html of results.json if the packages for it are there; say what was written, or what to install."""
    lacking = [module for module in FOR_PAGES if find_spec(module) is None]
    if lacking:
        get = f"pip install {' '.join(lacking)}, then {shlex.join(['fastreduce', 'report', f'{out}/results.json'])}"
        return f"Wrote {out}/results.json and compare.png. For report.html: {get}."
    from . import page

    page.write(out / "results.json", out / "report.html")
    return f"Wrote {out}/results.json, compare.png and report.html."
