"""Where commands print, and the progress bar of a comparison, on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_WIDTH = 118  # where output goes to a file, an issue or a CI log


def make_console() -> Console:
    """Of the terminal's width, or of a fixed one where output is no terminal; text is printed as it is."""
    width = None if Console().is_terminal else PLAIN_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


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
