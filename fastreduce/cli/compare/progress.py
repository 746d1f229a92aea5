"""The progress bar of a comparison, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


def make_bar(console: Console, *count: ProgressColumn) -> Progress:
    """What is done, a bar, `count` and the time; nothing where output is no terminal."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *count,
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
