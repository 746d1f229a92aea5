"""A table in the terminal: a row for each setting, and what its columns mean below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

NAMES = 24  # letters of a setting that are never broken; what is longer, as policies are, folds where it must


def make_table(columns: Sequence[str]) -> Table:
    """An empty one: the column of settings, then these."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("\nsetting", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def print_table(
    console: Console,
    table: Table,
    notes: str,
    narrower: Iterable[tuple[str, Table]] = (),
    file: str = "results.json",
) -> None:
    """Print it with its notes; where it does not fit, the first that does of `narrower` ones, or the last, folded.

    Args:
        console: the terminal.
        table: what is to be seen.
        notes: what its columns mean.
        narrower: what each lacks, and the table without that.
        file: has what they lack.
    """
    lacks = ""
    for lacking, less in narrower:
        if _fits(console, table):
            break
        lacks, table = lacking, less
    if not _fits(console, table):
        names, *others = table.columns
        names.width = min(_longest(table), NAMES)
        for column in others:
            column.no_wrap, column.overflow = False, "fold"
    console.print()
    console.print(table)
    console.print(f"\n{notes}", style="dim")
    if lacks:
        console.print(f"The terminal is too narrow for {lacks}: see {file}.", style="dim")


def _fits(console: Console, table: Table) -> bool:
    """Whether nothing is cut, and no setting's name is broken but a long one."""
    whole = Measurement.get(console, console.options.update_width(1000), table).maximum
    return whole - max(0, _longest(table) - NAMES) <= console.width


def _longest(table: Table) -> int:
    """The cells that the column of settings takes."""
    names = table.columns[0]
    return max(cell_len(line) for cell in (names.header, *names.cells) for line in str(cell).splitlines())
