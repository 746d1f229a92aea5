"""Names and sizes of test and benchmark files."""

from __future__ import annotations

from collections import Counter

from tests.support.commands import ROOT

FILES = [file for folder in ("tests", "bench") for file in (ROOT / folder).rglob("*.py")]
IN_EVERY_FOLDER = {"__init__.py", "__main__.py", "conftest.py"}


def test_no_name_occurs_twice():
    names = Counter(file.name for file in FILES if file.name not in IN_EVERY_FOLDER)
    assert len(names) > 100 and not [name for name, count in names.items() if count > 1]


def test_no_test_file_is_over_500_lines():
    assert not [file for file in FILES if file.name.startswith("test_") and file.read_text().count("\n") > 500]
