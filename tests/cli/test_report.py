"""`fastreduce report`: one file with the verdict first, every number in it, and no name that is more than text."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("plotly", reason="plotly is missing: pip install plotly")
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from fastreduce.cli import ending, main
from fastreduce.cli.compare.results import FORMAT
from fastreduce.cli.compare.script.verdicts import Verdict, headline
from fastreduce.cli.report import write_page
from fastreduce.cli.report.tables import Cell, Table, csv_link
from fastreduce.cli.report.traces import axis
from tests.support.results_files import (
    FORMULA,
    GROUPS,
    HOSTILE,
    Results,
    interval,
    of_a_script,
    of_digits,
    whole,
    with_flights,
    with_gradient_errors,
    with_names,
    write,
)

SPEED, QUALITY = ["ratios", "steps", "rounds"], ["differences", "losses"]


@dataclass
class Page(HTMLParser):
    """What a browser makes of the page: elements with their attributes, and texts by the element that they are in."""

    text: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: dict[str, list[str]] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.inside.reverse()
        self.inside = self.inside[self.inside.index(tag) + 1 :]
        self.inside.reverse()

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.inside[-1] if self.inside else "", []).append(data)

    def words(self) -> str:
        """What is read in it."""
        read = (texts for element, texts in self.texts.items() if element not in ("script", "style"))
        return " ".join(text for texts in read for text in texts)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def plots(self) -> list[dict[str, Any]]:
        return [json.loads(text, parse_constant=_refuse) for text in self.scripts("application/json")]

    def scripts(self, kind: str) -> list[str]:
        """Of one type; "" is what runs."""
        kinds = [attributes.get("type", "") for attributes in self.all("script")]
        return [text for of, text in zip(kinds, self.texts["script"], strict=True) if of == kind]

    def files(self) -> dict[str, list[list[str]]]:
        links = {a["download"]: a["href"] for a in self.all("a") if "download" in a}
        return {name: _read_csv(link) for name, link in links.items()}


def _refuse(constant: str) -> None:
    raise ValueError(f"browsers do not read {constant}")


def _read_csv(link: str) -> list[list[str]]:
    kind, _, data = link.partition(",")
    assert kind == "data:text/csv;charset=utf-8;base64"
    return list(csv.reader(io.StringIO(base64.b64decode(data).decode())))


def _report(path: Path, *options: object) -> Result:
    return CliRunner().invoke(main, ["report", str(path), *map(str, options)])


@pytest.fixture
def page(tmp_path: Path) -> Callable[[Results], Page]:
    def make(results: Results) -> Page:
        done = _report(write(results, tmp_path))
        assert done.exit_code == 0, done.output
        return Page((tmp_path / "report.html").read_text())

    return make


# One file that shows all there is


@pytest.mark.parametrize(
    ("results", "figures", "first"),
    [
        (of_a_script(), SPEED + QUALITY, "int8 is undecided."),
        (
            of_digits(),
            [*SPEED, "parts", "losses", "gradient-errors"],
            of_digits()["conclusion"][0],
        ),
    ],
    ids=["script", "digits"],
)
def test_a_page_has_the_verdict_first_and_each_figure_with_its_table(
    results: Results, figures: list[str], first: str, page: Callable[[Results], Page]
):
    made = page(results)
    assert made.texts["h1"] == [first]
    assert next(tag for tag, _ in made.elements if tag in ("h1", "table", "section")) == "h1"
    assert [a["id"] for a in made.all("section")] == [*figures, "made"]
    plots = [a for a in made.all("div") if a.get("class") == "plot"]
    assert len(plots) == len(made.all("table")) == len(made.texts["caption"]) == len(figures)
    assert all(len(a["aria-label"]) > 60 and a["role"] == "img" for a in plots)
    assert all(a.get("scope") in ("col", "row") for a in made.all("th"))
    text = made.words()
    for value in (results["versions"]["torch"], results["machine"]["processor"], results["commit"][:12]):
        assert value in text
    for old in ("format", "commit", "date"):  # as written before there was a format
        results.pop(old)
    assert "not recorded" in page(results).words()
    for plot in made.plots():
        Figure(plot["data"], plot["layout"])  # plotly raises where it does not know a property


def test_nothing_is_asked_of_the_network_and_only_its_own_scripts_run(page: Callable[[Results], Page]):
    made = page(of_a_script())
    linked = [a[name] for _, a in made.elements for name in ("src", "href", "action", "data") if name in a]
    assert linked and all(link.startswith(("data:", "#")) for link in linked)
    assert len(made.text) < 2_300_000
    assert not re.search(r"https?:|@import|url\(", made.text)
    (packed,) = made.scripts("application/gzip")
    plotly = gzip.decompress(base64.b64decode(packed)).decode()
    assert plotly == get_plotlyjs()
    policy = next(a["content"] for a in made.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    (own,) = made.scripts("")
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (plotly, own)]
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    assert f"script-src {allowed};" in policy and policy.startswith("default-src 'none'")


def test_settings_differ_without_colours(page: Callable[[Results], Page]):
    for plot in page(of_digits()).plots():
        curves = [trace for trace in plot["data"] if trace.get("mode") == "lines+markers"]
        assert len({(t["line"]["dash"], t["marker"]["symbol"]) for t in curves}) == len(curves)
        bars = {(t["marker"]["color"], t["marker"]["pattern"]["shape"]) for t in plot["data"] if t["type"] == "bar"}
        assert len({pattern for _, pattern in bars}) == len(bars)
        assert plot["rows"] or curves  # rows have names


def test_names_are_text_everywhere(page: Callable[[Results], Page]):
    plain, made = page(of_a_script()), page(with_names(of_a_script(), HOSTILE))
    tags = [[tag for tag, _ in each.elements if tag != "span"] for each in (made, plain)]  # words have one each
    assert tags[0] == tags[1]
    assert not [name for _, a in made.elements for name in a if name.startswith("on")]
    text = made.words()
    assert all(name in text for name in HOSTILE.values())
    hovers = [t["hovertemplate"] for plot in made.plots() for t in plot["data"] if "hovertemplate" in t]
    assert not re.search(r"<(?!/?extra>)|%\{(?![xy][:}])", " ".join(map(str, hovers)))


# Numbers


def test_what_was_really_measured_has_every_figure(page: Callable[[Results], Page]):
    assert {"timeline", "group-errors", "losses", "differences"} < {a["id"] for a in page(whole()).all("section")}


def test_what_settings_lose_of_groups_of_gradients(page: Callable[[Results], Page]):
    results = with_gradient_errors(of_a_script())
    made = page(results)
    assert "group-errors" in [a["id"] for a in made.all("section")]
    columns, *rows = made.files()["group-errors.csv"]
    assert columns == ["seed", "step", "setting", "group", "squared error over squares"]
    assert rows == [
        [str(each["seed"]), str(each["step"]), setting, f"'{group}" if group == "=A1" else group, str(error or "nan")]
        for each in results["gradient_errors"]
        for setting, groups in each["errors"].items()
        for group, error in groups.items()
    ]
    table = [row for row in made.files()["group-errors-table.csv"][1:] if row[0] == "int8"]
    assert [row[1] for row in table] == [*GROUPS[:-1], "'=A1"] and table[3][2] == "not finite"
    assert [row[2:] for row in table[:1]] == [["1.50e-04", "1.00e-04", "2.00e-04"]]
    (plot,) = (each for each in made.plots() if "vNMSE" in each["layout"]["xaxis"]["title"]["text"])
    assert [len(trace["x"]) for trace in plot["data"]] == [4, 4] and len(plot["layout"]["yaxis"]["ticktext"]) == 5
    assert "int8 1.50e-04; none again 4.50e-08" in made.text
    Figure(plot["data"], plot["layout"])
    results["gradient_errors"] = [{"seed": 0, "step": 1, "errors": {"int8": {}}}]
    assert "group-errors" not in [a["id"] for a in page(results).all("section")]


def test_a_timeline_of_a_step_of_each_of_our_settings(page: Callable[[Results], Page]):
    made = page(with_flights(of_a_script()))
    assert [a["id"] for a in made.all("section")] == [*SPEED, "timeline", *QUALITY, "made"]
    columns, *rows = made.files()["timeline.csv"]
    assert columns == ["setting", "of", "part", "from, s", "to, s"] and {row[0] for row in rows} == {"none", "int8"}
    step = [(part, float(start), float(end)) for name, of, part, start, end in rows if (name, of) == ("int8", "rank 0")]
    step.sort(key=lambda span: span[1])
    assert [part for part, _, _ in step] == ["optimizer", "data", "waiting", "forward", "backward", "waiting"]
    assert [time for _, *times in step for time in times] == pytest.approx(
        [0, 0.003, 0.003, 0.005, 0.005, 0.006, 0.006, 0.036, 0.036, 0.096, 0.096, 0.116]
    )
    ways = {name: [row[2] for row in rows if row[:2] == [name, "bucket 9"]] for name in ("none", "int8")}
    assert ways == {
        "none": ["ready", "compress", "wire", "decompress"],
        "int8": ["ready", "compress", "wire", "sum", "wire", "decompress"],
    }
    (plot,) = (each for each in made.plots() if each["layout"].get("barmode") == "overlay")
    drawn = [trace for trace in plot["data"] if trace.get("meta") == "int8"]
    assert sum(len(trace["x"]) for trace in drawn) == 6 + 8 * 6, "eight of the ten buckets"
    assert all(-0.5 < y < 0.5 for trace in drawn for y in trace["y"])
    Figure(plot["data"], plot["layout"])
    assert "none 116.0 ms; int8 116.0 ms" in made.text
    assert "The first 8 buckets are drawn." in made.text
    results = with_flights(of_a_script())
    for flight in results["flights"].values():
        del flight["buckets"][8:]
    assert "buckets are drawn" not in page(results).text


def test_files_hold_every_number_that_was_measured(page: Callable[[Results], Page]):
    results = of_a_script()
    files = page(results).files()
    columns, *rows = files["steps.csv"]
    assert columns == ["round", "step", "setting", "slowest rank, s", "rank 0, s", "rank 1, s"]
    measured = [
        [str(turn["round"] + 1), str(i + 1), turn["contestant"], max(step), *step]
        for turn in results["turns"]
        for i, step in enumerate(zip(*turn["seconds"], strict=True))
    ]
    assert [[*row[:3], *map(float, row[3:])] for row in rows] == measured
    columns, *rows = files["losses.csv"]
    trained = [
        [name, str(outcome["seed"]), str(step), loss, seconds]
        for name, found in results["quality"].items()
        for outcome in found["outcomes"]
        for step, (loss, seconds) in enumerate(zip(outcome["losses"], outcome["seconds"], strict=True), 1)
    ]
    assert len(rows) == 600 and [[*row[:3], *map(float, row[3:])] for row in rows] == trained
    medians = {(row[0], row[1]): float(row[2]) for row in files["ratios.csv"][1:]}
    ratios = [float(row[3]) for row in files["ratios.csv"][1:] if row[1] == "int8"]
    assert ratios == [medians[str(r), "int8"] / medians[str(r), "none"] for r in range(1, 13)]
    assert sorted(ratios)[5] <= results["speed"]["int8"]["ratio"]["median"] <= sorted(ratios)[6]
    assert files["ratios-table.csv"][3] == [
        "int8",
        f"{results['speed']['int8']['step']:.1f}",
        interval(results["speed"]["int8"]["ratio"]),
        interval(results["speed"]["int8"]["ratio_to_torch"]),
        "12",
        "is undecided",
    ]
    seeds = [[row[0], row[1]] for row in files["differences.csv"][1:]]
    assert seeds == [["int8", "0"], ["int8", "1"], ["int8", "2"]]


def test_files_of_the_built_in_network(page: Callable[[Results], Page]):
    results = of_digits()
    files = page(results).files()
    int8 = results["settings"]["int8"]
    steps = [float(row[3]) for row in files["steps.csv"][1:] if row[2] == "int8"]
    assert steps == [seconds for steps in int8["step_seconds"] for seconds in steps]
    assert [float(row[3]) for row in files["losses.csv"][1:] if row[0] == "int8"] == int8["losses"]
    assert [float(row[2]) for row in files["gradient-errors.csv"][1:] if row[0] == "int8"] == int8["gradient_errors"]
    parts = {row[1]: float(row[2]) for row in files["parts.csv"][1:] if row[0] == "int8"}
    assert parts["compute"] + parts["exposed communication"] == pytest.approx(int8["step"])
    assert {"compress", "reduce", "decompress"} <= parts.keys()


def test_no_text_of_a_file_is_a_formula():
    assert _read_csv(csv_link(["setting", "ratio"], [[FORMULA, -1.5], ["+0.09 (-0.11 to +0.29)", "–"]]))[1:] == [
        [f"'{FORMULA}", "-1.5"],
        ["+0.09 (-0.11 to +0.29)", "–"],
    ]
    assert Table("", ["setting", "verdict"], [("none", [Cell("")])]).is_number(1) is False


def test_values_far_apart_get_a_logarithmic_axis():
    assert "type" not in axis("ms", [1, 2.9]) and axis("ms", [1, 3.1])["type"] == "log"
    assert "type" not in axis("ms", [0, 100]) and "type" not in axis("ms", [math.nan]) and "type" not in axis("ms")


# Results of all kinds


def _only_speed(results: Results) -> None:
    results["quality"] = {}


def _only_quality(results: Results) -> None:
    results |= {"speed": {}, "turns": [], "verdicts": []}


def _diverged(results: Results) -> None:
    for outcome in results["quality"]["int8"]["outcomes"]:
        outcome["losses"][50:] = [None] * 50
    results["quality"]["int8"] |= {"final": None}
    results["quality"]["int8"]["loss"] |= {"difference": None, "low": None, "high": None, "verdict": "higher"}


def _of_zero(results: Results) -> None:
    lost = {"difference": None, "low": None, "high": None, "verdict": "undecided", "of_zero": True}
    results["quality"]["int8"]["loss"] |= lost


def _few_rounds(results: Results) -> None:
    results["turns"] = [turn for turn in results["turns"] if turn["round"] < 2]
    for speed in results["speed"].values():
        speed["rounds"] = 2
        speed["ratio"] |= {"low": None, "high": None}


def _apart(results: Results) -> None:
    results["apart"] = "the script wraps several modules"
    for turn in results["turns"]:
        turn["seconds"] = [seconds * 10 for seconds in turn["seconds"]]


def _ended_early(results: Results) -> None:
    results["missing"] = ["3 of 6 trainings for quality"]
    results["warnings"] = ["Warning: none differs from itself."]
    results["turns"] = results["turns"][:-2]
    results["quality"]["int8"]["outcomes"] = results["quality"]["int8"]["outcomes"][:1]


@pytest.mark.parametrize(
    ("change", "figures", "said"),
    [
        (_only_speed, SPEED, ["not compared"]),
        (_only_quality, QUALITY, ["not compared", "Nothing was held against none."]),
        (_diverged, SPEED + QUALITY, ["not finite"]),
        (_of_zero, SPEED + QUALITY, ["none's is 0"]),
        (_few_rounds, SPEED + QUALITY, ["2 rounds of 3 timed steps each"]),
        (_apart, SPEED + QUALITY, ["of 30 timed steps each", "in turns: the script wraps several modules."]),
        (_ended_early, SPEED + QUALITY, ["Missing: 3 of 6 trainings for quality.", "none differs from itself"]),
    ],
)
def test_what_is_not_there_is_not_shown(
    change: Callable[[Results], None], figures: list[str], said: list[str], page: Callable[[Results], Page]
):
    results = of_a_script()
    change(results)
    made = page(results)
    assert [a["id"] for a in made.all("section")] == [*figures, "made"]
    text = made.words()
    assert all(each in text for each in said)
    assert not re.search(r"\bnan\b", text)
    for plot in made.plots():
        Figure(plot["data"], plot["layout"])


def test_a_name_that_is_no_utf8_is_shown_with_question_marks(page: Callable[[Results], Page]):
    results = of_a_script()
    results["plan"]["words"][0] = "caf\udce9.py"
    assert any("caf?.py" in text for text in page(results).texts["b"])


# Errors


def _with_a_step_of_one_rank(results: Results) -> Results:
    results["turns"][0]["seconds"][1].append(0.1)
    return results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: [], "is no results.json of `fastreduce compare`: it has neither a plan nor an experiment"),
        (lambda r: {**r, "format": FORMAT + 1}, f"has format {FORMAT + 1}; this fastreduce reads up to {FORMAT}"),
        (
            lambda r: {k: v for k, v in r.items() if k not in ("date", "commit")},
            "lacks date, commit: run `fastreduce compare` again",
        ),
        (lambda r: {k: v for k, v in r.items() if k not in ("turns", "wrapped")}, "lacks wrapped, turns: run"),
        (lambda r: {**r, "speed": {"none": {"contestant": "none"}}}, "lacks quartiles: run"),
        (
            lambda r: {**r, "turns": r["turns"][:0]},
            "is not as `fastreduce compare` writes it: turns are of , figures of",
        ),
        (lambda r: {**r, "seconds": "long"}, "is not as `fastreduce compare` writes it"),
        (lambda r: {**r, "seconds": 10**400}, "is not as `fastreduce compare` writes it"),
        (_with_a_step_of_one_rank, "is not as `fastreduce compare` writes it: zip() argument 2 is longer"),
    ],
)
def test_what_is_no_results_file_is_said_in_a_line(change: Callable[[Results], object], message: str, tmp_path: Path):
    done = _report(write(change(of_a_script()), tmp_path))
    assert done.exit_code == 2 and len(done.output.splitlines()) == 1
    assert done.output.startswith("fastreduce report: ") and message in done.output
    assert not (tmp_path / "report.html").exists()


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    done = _report(tmp_path / "results.json")
    assert done.exit_code == 2 and "cannot read" in done.output and "No such file" in done.output
    (tmp_path / "results.json").write_text("{")
    assert "is no JSON" in _report(tmp_path / "results.json").output
    done = _report(write(of_digits(), tmp_path), "--out", "/dev/null/report.html")
    assert done.exit_code == 2 and "cannot write to /dev/null/report.html" in done.output


@pytest.mark.parametrize("out", ["results.json", "sub/../results.json", "hard link"])
def test_the_results_are_not_written_over(tmp_path: Path, out: str):
    path = write(of_a_script(), tmp_path)
    before = path.read_bytes()
    (tmp_path / "sub").mkdir()
    (tmp_path / "hard link").hardlink_to(path)
    result = _report(path, "--out", tmp_path / out)
    said = f"fastreduce report: cannot write to {tmp_path / out}: it is RESULTS, which the page is made of\n"
    assert (result.exit_code, result.stderr, path.read_bytes()) == (2, said, before)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ending, "find_spec", lambda name: None if name == "plotly" else name)
    done = _report(write(of_digits(), tmp_path))
    assert (done.exit_code, done.output) == (2, "fastreduce report: plotly is missing: pip install plotly\n")


@pytest.mark.parametrize(
    ("lacking", "packages"), [(["plotly"], "plotly"), (["plotly", "jinja2"], "jinja2 plotly")], ids=["one", "both"]
)
def test_compare_does_without_it_and_says_how_to_get_it(
    lacking: list[str], packages: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "a b"
    folder.mkdir()
    results = write(of_digits(), folder)
    for name in lacking:
        monkeypatch.setitem(sys.modules, name, None)
    get = f"pip install {packages}, then fastreduce report '{results}'."
    assert write_page(folder) == f"Wrote {results} and compare.png. For report.html: {get}"
    assert not (folder / "report.html").exists()
    monkeypatch.undo()
    assert write_page(folder) == f"Wrote {results}, compare.png and report.html."
    assert (folder / "report.html").exists()


# The first sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"int8": "pays"}, "int8 pays."),
        ({"fp16": "does not pay", "int8": "pays", "bf16": "pays"}, "int8 and bf16 pay; fp16 does not pay."),
        ({"a": "is undecided", "b": "is undecided", "c": "is undecided"}, "a, b and c are undecided."),
        ({"int8": "is not faster", "torch": "is faster", "none again": "is equal"}, "int8 is not faster."),
        ({"a": "does not pay", "b": "does not pay", "c": "is worse"}, "a and b do not pay; c is worse."),
        ({"torch": "is faster"}, "torch is faster."),
        ({}, "Nothing was held against none."),
    ],
)
def test_headline(words: dict[str, str], sentence: str):
    assert headline([Verdict(name, word, "") for name, word in words.items()]) == sentence
