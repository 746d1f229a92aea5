"""`fastreduce trace`: one file of all ranks' traces, where the ranks have not made it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..reduction.telemetry.trace_files import MERGED, merge
from .ending import fail


def trace(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where rank0.json and the others are.")],
) -> None:
    """Merge what ranks have written under FASTREDUCE_TRACE or --trace into trace.json.

    The last rank to end does so where it sees all files. Copy them into one folder after a run on several nodes that
    share none; a run in which a rank was killed is merged as far as it came.
    """
    try:
        path = merge(folder)
    except (OSError, ValueError) as error:
        fail(str(error))
    typer.echo(f"{path}: open it at https://ui.perfetto.dev, which reads it in the browser, or in chrome://tracing")


def stamps(folder: Path) -> dict[str, int]:
    """When the ranks' files in a folder have changed last, in nanoseconds."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("rank*.json")}


def merge_after_run(folder: Path, before: Mapping[str, int]) -> str:
    """Merge what a run has left, which may have failed, where `stamps` were `before`; returns what to say of it."""
    if before and stamps(folder) == before:
        return f"no rank wrote a trace: what {folder} holds is of an earlier run"
    try:
        return f"the trace is {merge(folder)}: open it at https://ui.perfetto.dev"
    except (OSError, ValueError) as error:
        return f"there is no {MERGED}: {error}"
