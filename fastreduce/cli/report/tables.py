"""Tables of the report, and the same numbers as CSV."""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what spreadsheets take for the beginning of one


@dataclass(frozen=True)
class Cell:
    """What is shown, and the number by which rows are sorted; NaN sorts last."""

    text: str
    number: float = math.nan


@dataclass(frozen=True)
class Table:
    """Rows that begin with a contestant's name."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]

    def is_number(self, column: int) -> bool:
        """Whether a column, counted from 0, the name's, holds numbers."""
        return column > 0 and any(not math.isnan(cells[column - 1].number) for _, cells in self.rows)

    def csv(self) -> str:
        """A data link to it."""
        return csv_link(self.columns, ([name, *(cell.text for cell in cells)] for name, cells in self.rows))


def csv_link(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A data link to a CSV file, in which no text is a formula to a spreadsheet."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_harmless(value) for value in row] for row in rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(file.getvalue().encode(errors="replace")).decode()


def _harmless(value: object) -> object:
    formula = isinstance(value, str) and value.startswith(FORMULA) and not _is_number(value)
    return f"'{value}" if formula else value


def _is_number(text: str) -> bool:
    """Also with a sign, a unit or an interval behind it."""
    return text[1:2].isdigit()
