"""The pages: links lead somewhere, figures are measured ones, and the README lists each page once."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

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
    version = re.search(r'__version__ = "(.*)"', ROOT.joinpath("fastreduce/__init__.py").read_text())
    assert version is not None and titles[0] == "Unreleased" and version[1] in titles


def test_what_formats_lose_is_as_the_results_have_it():
    text = ROOT.joinpath("docs/which-setting.md").read_text()
    shown = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (\d[^|]+) \| (\d[^|]+) \|$", text, re.MULTILINE)
    with ROOT.joinpath("bench/results/formats.csv").open() as file:
        _, *kept = csv.reader(file)
    assert [[name.strip("`"), bits, *f"{gpt}, {cnn}".split(", ")] for name, bits, gpt, cnn in shown] == kept


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


def test_figures_in_which_setting_are_in_the_results():
    """A ratio and its interval: as a row of the results has them, in either direction, or as the README does."""
    text = ROOT.joinpath("docs/which-setting.md").read_text()
    figures = re.findall(r"(\d\.\d\d) \((\d\.\d\d)–(\d\.\d\d)", text)
    assert len(figures) > 6
    readme = ROOT.joinpath("README.md").read_text()
    known = set(re.findall(r"(\d\.\d\d)×? ?[^()|]*\((\d\.\d\d)–(\d\.\d\d)\)", readme))
    for line in ROOT.joinpath("bench/results/history.csv").read_text().splitlines()[1:]:
        cells = re.sub(r'"[^"]*"', "", line).split(",")
        if len(cells) > 20 and all(cells[18:21]):
            ratio, low, high = map(float, cells[18:21])
            known.add((f"{ratio:.2f}", f"{low:.2f}", f"{high:.2f}"))
            known.add((f"{1 / ratio:.2f}", f"{1 / high:.2f}", f"{1 / low:.2f}"))
    assert [figure for figure in figures if figure not in known] == []
