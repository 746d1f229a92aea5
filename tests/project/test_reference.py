"""docs/reference.md is what the code says of itself, all of it."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

import fastreduce
import fastreduce.distributed
from fastreduce.cli import main
from fastreduce.compression import KINDS
from fastreduce.environment.variables import VARIABLES
from tests.support.commands import ROOT

PAGE = ROOT / "docs" / "reference.md"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_code_says(maker: ModuleType):
    assert PAGE.read_text() == maker.reference(), "run: python docs/make_reference.py"


def test_nothing_is_missing():
    text = PAGE.read_text()
    names = {*fastreduce.__all__, *fastreduce.distributed.__all__, *KINDS, *VARIABLES} - {"__version__"}
    names |= {f"fastreduce {command.callback.__name__}" for command in main.registered_commands}
    assert [name for name in sorted(names) if not re.search(rf"\b{re.escape(name)}\b", text)] == []
    headings = re.findall(r"^#{3,4} (.*)$", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) > 80
    assert "object at 0x" not in text


def test_a_docstring_becomes_paragraphs_lists_and_code(maker: ModuleType):
    doc = (
        "What it does.\n\nx = f(1)\n\nArgs:\n    a, b: two,\n        of a kind.\n    *rest: others.\n\n"
        "Returns:\n    A number: one.\n\nRaises:\n    SettingError: if\n        not."
    )
    assert maker.render(doc) == (
        "What it does.\n\n```python\nx = f(1)\n```\n\n- `a`, `b`: two,\n  of a kind.\n- `*rest`: others.\n\n"
        "Returns:\n\nA number: one.\n\nRaises:\n\n- `SettingError`: if\n  not.\n"
    )
