"""What `fastreduce doctor` prints and gives as JSON: rows of name, value, state and what helps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OK, MISSING, FAILED = "ok", "missing", "failed"


@dataclass(frozen=True)
class Row:
    """One line: a fact, something that is not here (and the command that brings it), or something that fails."""

    name: str
    value: str
    state: str = OK
    help: str = ""


def row(name: str, find: Callable[[], str | Row]) -> Row:
    """The row that `find` gives; whatever it raises becomes one too, since a broken library must not end the rest."""
    try:
        found = find()
    except Exception as error:
        return Row(name, f"cannot be told: {one_line(error)}", MISSING)
    return found if isinstance(found, Row) else Row(name, found)


def rows(find: Callable[[], list[Row]]) -> list[Row]:
    """The rows that `find` gives, in the same way."""
    try:
        return find()
    except Exception as error:
        return [Row("error", one_line(error), FAILED)]


def one_line(error: BaseException) -> str:
    """An exception's kind and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
