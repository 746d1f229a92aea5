"""results.json of comparisons, for reports: those that are committed, and what may have become of one."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
GROUPS = ["all", "transformer.blocks.*.attention.projection", "<b>%{x}</b>'\"", "head", "=A1"]


def of_a_script() -> Results:
    """A small GPT under none, int8 and torch's own, with three seeds; without what `with_…` below put in."""
    return {name: value for name, value in whole().items() if name not in ("flights", "gradient_errors")}


def whole() -> Results:
    """The same with all that was measured."""
    return _read("compare-gpt.json")


def of_digits() -> Results:
    """The built-in network."""
    return _read("demo.json")


def with_gradient_errors(results: Results) -> Results:
    """The same with what int8 and another lose of gradients, with two seeds; a group and a step are not finite."""
    errors = {"int8": 1e-4, "none again": 3e-8}
    measured = [
        {
            "seed": seed,
            "step": step,
            "errors": {
                setting: {group: None if group == "head" else error * (1 + i + seed) for i, group in enumerate(GROUPS)}
                for setting, error in errors.items()
            },
        }
        for seed in range(2)
        for step in (1, 11)
    ]
    overflow = {"seed": 0, "step": 2, "errors": {setting: dict.fromkeys(GROUPS) for setting in errors}}
    return {**results, "gradient_errors": [*measured, overflow]}


def with_flights(results: Results) -> Results:
    """The same with a step of each of our settings: ten buckets, in one stage on the wire under `none`, in two else."""

    def bucket(i: int, two: bool) -> dict[str, Any]:
        names = ("ready", "compress", "compressed", "exchanged", "summed", "reduced", "decompressed")
        times = [0.01 * (i + 1) + 0.001 * k if two or k not in (3, 4) else None for k in range(7)]
        return {"bucket": i, **dict(zip(names, times, strict=True))}

    def flight(two: bool) -> dict[str, Any]:
        took = {"after": 0.001, "optimizer": 0.002, "data": 0.002, "forward": 0.03, "backward": 0.06, "waiting": 0.02}
        began = {"after": 0.0, "optimizer": 0.001, "data": 0.003, "forward": 0.006, "backward": 0.036, "waiting": 0.005}
        buckets = [bucket(i, two) for i in range(10)]
        return {"step": 40, "seconds": 0.116, "began": began, "took": took, "buckets": buckets}

    return {**results, "flights": {name: flight(name == "int8") for name in ("none", "none again", "int8")}}


def interval(ratio: Mapping[str, float], sign: str = "") -> str:
    """A ratio of such a file as people read it."""
    return f"{ratio['median']:.2f}{sign} ({ratio['low']:.2f}–{ratio['high']:.2f})"


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
