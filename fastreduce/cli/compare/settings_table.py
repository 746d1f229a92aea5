"""A table in the terminal: a row for each setting, and what its columns mean below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def make_table(columns: Sequence[str], first: str = "\nsetting") -> Table:
    """An empty one; `first` is the column of settings."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(console: Console, table: Table, notes: str) -> None:
    """Print it with its notes."""
    console.print()
    console.print(table)
    console.print(f"\n{notes}", style="dim")
