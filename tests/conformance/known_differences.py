"""What torch's tests expect and we do otherwise: read from the two tables of docs/sharp-bits.md."""

from __future__ import annotations

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "sharp-bits.md"
_HEADS = ("| test, passes with torch's class |", "| test, fails with torch's class too and is not run |")


def _table(head: str) -> dict[str, str]:
    """Test → reason, from the table that begins with `head`."""
    table, _, _ = _PAGE.read_text().partition(head)[2].partition("\n\n")
    return dict(re.findall(r"^\| `(test_\w+)` \| (.+) \|$", table, re.MULTILINE))


KNOWN_DIFFERENCES, WITHOUT_BASELINE = map(_table, _HEADS)
