"""results.json of comparisons, for reports: those that are committed, and what may have become of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.commands import ROOT

Results = dict[str, Any]

# What a name may do to a page, to a plot's text, to an object of JavaScript, to a spreadsheet.
HOSTILE = {
    "int8": "<script>alert(1)</script>",
    "torch": '"><img src=x onerror=alert(2)>',
    "torch:fp16": "</script><script>alert(3)</script>",
    "no reduction": "__proto__",
    "GPT": "%{x} <b>bold</b> &lt; $x$",
    "examples/gpt_train.py": "<!--<script>.py",
}
FORMULA = "=HYPERLINK(1)"


def of_a_script() -> Results:
    """A small GPT under none, int8 and torch's own, with three seeds."""
    return _read("compare-gpt.json")


def of_digits() -> Results:
    """The built-in network."""
    return _read("demo.json")


def with_names(results: Results, names: dict[str, str]) -> Results:
    """The same with other names, wherever they stand."""
    text = json.dumps(results)
    for old, new in names.items():
        text = text.replace(json.dumps(old), json.dumps(new))
        text = text.replace(f'"{old} is undecided', f'"{json.dumps(new)[1:-1]} is undecided')
    renamed: Results = json.loads(text)
    return renamed


def write(results: object, folder: Path) -> Path:
    """A results.json in the folder."""
    path = folder / "results.json"
    path.write_text(json.dumps(results))
    return path


def _read(name: str) -> Results:
    found: Results = json.loads((ROOT / "bench" / "results" / name).read_text())
    return found
