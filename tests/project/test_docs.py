"""The pages: links lead somewhere, named files exist, figures are measured ones, the README lists each page once."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT

PAGES = [*(page for folder in (".", "docs", "kernels", "bench/results") for page in ROOT.joinpath(folder).glob("*.md"))]


def _anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        if name.startswith("http"):
            continue
        target = (page.parent / name) if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in _anchors(target), f"{page.name}: {link}"


def test_the_readme_lists_every_page_once():
    text = ROOT.joinpath("README.md").read_text()
    listed = Counter(re.findall(r"\]\(([^)#]+)\)", text.partition("## Where to read on")[2]))
    pages = {str(path.relative_to(ROOT)) for path in [*ROOT.glob("docs/*.md"), ROOT / "CHANGELOG.md"]}
    assert pages - listed.keys() == set()
    assert [name for name, times in listed.items() if times > 1] == []


def test_the_changelog_knows_this_version():
    titles = re.findall(r"^## (.*)$", ROOT.joinpath("CHANGELOG.md").read_text(), re.MULTILINE)
    version = re.search(r'__version__ = "(.*)"', ROOT.joinpath("fastreduce/version.py").read_text())
    assert version is not None and titles[0] == "Unreleased" and version[1] in titles


def test_what_formats_lose_is_as_the_results_have_it():
    text = ROOT.joinpath("docs/which-setting.md").read_text()
    shown = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (\d[^|]+) \| (\d[^|]+) \|$", text, re.MULTILINE)
    with ROOT.joinpath("bench/results/formats.csv").open() as file:
        _, *kept = csv.reader(file)
    assert [[name.strip("`"), bits, *f"{gpt}, {cnn}".split(", ")] for name, bits, gpt, cnn in shown] == kept


def test_what_a_step_takes_the_host_is_as_the_results_have_it():
    text = ROOT.joinpath("docs/kernels.md").read_text()
    shown = re.findall(r"^\| `(.+)` \| (\d) \| ([\d,]+) \| ([\d,]+) \| (.+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    kept = json.loads(ROOT.joinpath("bench/results/host_step.json").read_text())["rows"]
    expected = []
    for name, row in kept.items():
        setting, _, ranks = name.partition(", ")
        if setting != "torch" and " rank" in ranks:
            figure = "{:.2f} ({:.2f} to {:.2f})".format(*row["ratio"][0])
            buckets = (f"{each:.0f}" for each in row["bucket"])
            expected.append((setting, ranks[0], *(f"{each:,}" for each in row["step"]), figure, *buckets))
    assert shown == expected


def test_verdicts_on_training_are_those_of_the_results():
    text = ROOT.joinpath("docs/which-setting.md").read_text()
    shown = re.search(r"\n\n(\| setting \| [^\n]+ vNMSE .*?)\n\n", text, re.DOTALL)
    assert shown is not None
    assert f"\n\n{shown[1]}\n\n" in ROOT.joinpath("bench/results/quality.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in shown[1].splitlines()]
    verdicts = {row[1].strip("`"): [cell.partition(":")[0] for cell in row[4:7]] for row in rows[2:]}
    _, _, readme = ROOT.joinpath("README.md").read_text().partition("Is the training as good?")
    good, _, rest = readme.partition(" end with a loss equal to that of `none`")
    fail, _, _ = rest.partition(" do so in 12")
    for names, expected in ((good, ["8 equal", "4 equal", "4 equal"]), (fail, ["8 equal", "4 equal", "4 **higher**"])):
        named = re.findall(r"`(.+?)`", names)
        assert len(named) == 4 and [verdicts[name] for name in named] == [expected] * 4


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(page: Path):
    named = re.findall(r"`((?:bench|docs|examples|fastreduce|kernels|tests)/[\w./-]+)`", page.read_text())
    made = {"kernels/__pycache__"}
    assert [name for name in named if not ROOT.joinpath(name).exists() and name not in made] == []


def _either_way(ratio: float, low: float, high: float) -> set[tuple[str, str, str]]:
    """A ratio and its interval as pages have it, and that of what was compared with."""
    ways = ((ratio, low, high), (1 / ratio, 1 / high, 1 / low))
    return {(f"{a:.{n}f}", f"{b:.{n}f}", f"{c:.{n}f}") for a, b, c in ways for n in (2, 3)}


def _ratios(value: Any) -> set[tuple[str, str, str]]:
    """Those of a results.json, wherever in it."""
    if isinstance(value, dict) and {"median", "low", "high"} <= value.keys():
        return _either_way(value["median"], value["low"], value["high"])
    inside: Iterable[Any] = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {found for each in inside for found in _ratios(each)}


FIGURE = r"(\d\.\d\d\d?)×?[^()|\d]*\((\d\.\d\d\d?)–(\d\.\d\d\d?)\)"


@cache
def _measured() -> set[tuple[str, str, str]]:
    results = ROOT / "bench" / "results"
    known = set(re.findall(FIGURE, results.joinpath("elastic_beside.csv").read_text()))
    for name in ("demo.json", "compare-gpt.json"):
        known |= _ratios(json.loads(results.joinpath(name).read_text()))
    with results.joinpath("history.csv").open() as file:
        for row in csv.DictReader(file):
            for kind in ("ratio", "overhead_ratio"):
                if row[f"{kind}_low"]:
                    known |= _either_way(*(float(row[f"{kind}{end}"]) for end in ("", "_low", "_high")))
    return known


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_with_intervals_are_in_the_results(page: Path):
    """A ratio and its interval: as a row of the results has them, in either direction."""
    assert [figure for figure in re.findall(FIGURE, page.read_text()) if figure not in _measured()] == []


def test_figures_are_found_in_pages():
    found = {page.name: len(re.findall(FIGURE, page.read_text())) for page in PAGES}
    assert min(found[name] for name in ("which-setting.md", "shared-memory.md", "two-levels.md", "elastic.md")) > 6
