"""Tables of `advise` and `compare` on narrow terminals: settings keep their names, and no cell is cut."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastreduce.cli.advise.model import Parts, Rank, Step
from fastreduce.cli.advise.prediction import Interval, Link, Prediction
from fastreduce.cli.advise.readings import Flight, Probe, Readings
from fastreduce.cli.advise.report import Findings, show
from fastreduce.cli.compare.digits import report as digits
from fastreduce.cli.compare.digits.statistics import Figures
from fastreduce.cli.compare.digits.training import TORCH, TORCH_FP16
from fastreduce.cli.compare.intervals import Estimate
from fastreduce.cli.compare.script import report as script
from fastreduce.cli.compare.script.equivalence import Equivalence
from fastreduce.cli.compare.script.plan import AGAIN, Plan
from fastreduce.cli.compare.script.quality import Quality
from fastreduce.cli.compare.script.speed import Speed
from fastreduce.run.contestants import Variant
from fastreduce.run.probing import COLLECTIVES

SETTINGS = ["none", "fp16", "int8:error_feedback", "int4:error_feedback", "int8:error_feedback=8bit"]
POLICY = "*.bias|ndim<2: fp16; *.norm*: bf16; *: int8:error_feedback"
RATIO = Estimate(0.9, 0.85, 0.95)
VARIANTS = [Variant(name, size, over) for name in SETTINGS for size in (None, 1, 5, 25) for over in (None, "two_level")]


def _advise(console: Console, unit: float, names: list[str]) -> None:
    """What advise shows of steps of `unit` ms."""
    found = Interval(1e-3 * unit, 0.95e-3 * unit, 1.05e-3 * unit)
    parts = Parts(*(0.1e-3 * unit,) * 8)
    share = Interval(0.9, 0.85, 0.95)
    some = [*names, "int8:error_feedback bucket_cap_mb=25 FASTREDUCE_TRANSPORT=two_level"]
    predicted = {name: Prediction(Variant.of(name), found, share, parts, 45_000_000) for name in some}
    ones = np.ones((1, 12, 5))
    buckets, flags, counts = [[place] for place in range(12)], [False] * 12, [1] * 12
    probes = {
        str(variant): Probe(variant, buckets, counts, counts, flags, flags, 1, ones, ones, np.ones(1))
        for variant in [*VARIANTS, Variant(POLICY)]
    }
    wrapped = {"transport": "shm", "wrapped": "Net", "parameters": 1000, "ranks": 2, "local_ranks": 2}
    latency = {"shm": dict.fromkeys(COLLECTIVES, 1e-3)}
    flight = Flight(Step((1.0,), (Rank(0.0, 1.0),)), [1.0], 1.0)
    measured = {name: Speed(name, unit, (unit, unit), RATIO, None, 6) for name in some[:3]}
    findings = Findings(
        lines=[],
        readings=Readings(wrapped, latency, probes, {}, [flight], [1.0]),
        seconds=dict.fromkeys(probes, 1e-3 * unit),
        predicted=predicted,
        measured=measured,
    )
    show(console, findings, Link(4, 1.0))


def _digits(console: Console, unit: float, names: list[str]) -> None:
    """The table of compare's own training."""
    stages = dict.fromkeys(("compress", "reduce", "decompress"), unit / 9)
    quartiles = 0.9 * unit, 1.1 * unit
    figures = [
        Figures(n, unit, quartiles, unit, unit / 3, stages, RATIO, RATIO, 4500, 2e-3, [1.0], 0.97, 0.1, True)
        for n in [*names, TORCH, TORCH_FP16]
    ]
    digits.print_table(console, figures)


def _script(console: Console, unit: float, names: list[str]) -> None:
    """Both of a comparison of a script, with a metric and a target."""
    plan = Plan(
        words=("train.py",),
        module=False,
        settings=tuple(names),
        ranks=2,
        rounds=6,
        steps=4,
        out=Path(),
        trains=True,
        seeds=(0, 1, 2),
        target=0.25,
        timeout=60.0,
        metric_line="accuracy",
    )
    test = Equivalence(0.0123, -0.0123, 0.0234, "undecided")
    speeds = {
        name: Speed(name, unit, (0.9 * unit, 1.1 * unit), RATIO, RATIO, 6)
        for name in [*names, AGAIN, "none after backward"]
    }
    qualities = {name: Quality(name, [0, 1, 2], 0.2345, test, 0.9123, test, "", 1200, unit, 2) for name in names}
    script.print_report(console, plan, script.Findings(), script.Summary(speeds, qualities, []))


def _shown(tables: Callable[[Console, float, list[str]], None], width: int, unit: float, names: list[str]) -> str:
    file = io.StringIO()
    tables(Console(file=file, width=width, markup=False, emoji=False, highlight=False), unit, names)
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("unit", [4.0, 120.0, 2500.0])
@pytest.mark.parametrize(("tables", "count"), [(_advise, 2), (_digits, 1), (_script, 2)])
def test_every_row_has_its_settings_name_in_one_piece(
    tables: Callable[[Console, float, list[str]], None], count: int, unit: float, width: int
):
    text = _shown(tables, width, unit, SETTINGS)
    for name in SETTINGS:
        rows = re.findall(rf"^{re.escape(name)}  .*\d", text, re.MULTILINE)
        assert len(rows) >= count, (name, text)
    assert "…" not in text and max(map(len, text.splitlines())) <= width, text
    assert "too narrow" not in text or width < 140, text


@pytest.mark.parametrize("tables", [_advise, _digits, _script])
def test_what_a_narrow_terminal_leaves_out_is_told(tables: Callable[[Console, float, list[str]], None]):
    text = " ".join(_shown(tables, 80, 120.0, SETTINGS).split())
    file = "advice.json" if tables is _advise else "results.json"
    assert re.search(rf"The terminal is too narrow for [a-z0-9%, ]+: see {file}", text), text


@pytest.mark.parametrize("tables", [_advise, _digits, _script])
def test_a_long_policy_folds_and_costs_no_column(tables: Callable[[Console, float, list[str]], None]):
    text = _shown(tables, 80, 120.0, [*SETTINGS, POLICY])
    assert "…" not in text and re.search(r"^\*\.bias\|ndim<2: fp16;.*  \d", text, re.MULTILINE), text
    assert not re.search(rf"^{re.escape(POLICY)}", text, re.MULTILINE)
    lacks = re.compile(r"too narrow for[^:]+:")
    assert lacks.findall(text) == lacks.findall(_shown(tables, 80, 120.0, SETTINGS))


@pytest.mark.parametrize("tables", [_advise, _digits, _script])
def test_a_terminal_that_no_table_fits_has_the_names(tables: Callable[[Console, float, list[str]], None]):
    text = _shown(tables, 40, 2500.0, SETTINGS)
    for name in SETTINGS:
        assert re.search(rf"^{re.escape(name)}  ", text, re.MULTILINE), text
    assert "…" not in text
