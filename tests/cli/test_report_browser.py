"""The report in a browser: it draws, sorts, filters and answers to the pointer, and runs no code but its own."""

from __future__ import annotations

import base64
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is missing: pip install playwright")
pytest.importorskip("plotly", reason="plotly is missing: pip install plotly")
from playwright.sync_api import Error, sync_playwright

from fastreduce.cli.report import page
from tests.support.results_files import (
    GROUPS,
    HOSTILE,
    interval,
    of_a_script,
    of_digits,
    with_flights,
    with_gradient_errors,
    with_names,
    write,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]

MARKS = ".points path, .boxes path, .bars path, .js-line"
# What WCAG calls contrast, between a colour and the card's.
CONTRAST = """(selector) => {
    const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const card = light(getComputedStyle(document.querySelector("section")).backgroundColor);
    return Math.min(...[...document.querySelectorAll(selector)].map((element) => {
        const style = getComputedStyle(element);
        const own = light(element.closest("svg") ? style.fill : style.color);
        return Math.max(own, card) / Math.min(own, card);
    }));
}"""


@dataclass
class Opened:
    """A page in the browser, what it has said and what it has asked for."""

    tab: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def texts(self, selector: str) -> list[str]:
        """Of what is to be seen, in SVG too."""
        found: list[str] = self.tab.locator(f"{selector}:visible").all_text_contents()
        return found

    def count(self, selector: str) -> int:
        """Of what is to be seen."""
        found: int = self.tab.locator(f"{selector}:visible").count()
        return found

    def wait(self, condition: str) -> None:
        """Until it is true; playwright's own way evaluates strings, which the page forbids."""
        self.tab.evaluate(
            f"""new Promise((end, fail) => {{
                setTimeout(() => fail(new Error("not within 100 s")), 100000);
                const look = () => ({condition}) ? end() : setTimeout(look, 50);
                look();
            }})"""
        )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        try:
            chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])  # a page of our own
        except Error as error:
            pytest.skip(f"Chromium is installed and does not start here: {error}")
        yield chromium
        chromium.close()


@pytest.fixture(scope="module", params=["a script, hostile names", "digits"])
def opened(request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    """A page for all tests of it, which leave it as they found it and let it say nothing."""
    folder = tmp_path_factory.mktemp("report")
    results = (
        of_digits()
        if request.param == "digits"
        else with_names(with_flights(with_gradient_errors(of_a_script())), HOSTILE)
    )
    page.write(write(results, folder), folder / "report.html")
    found = Opened(browser.new_context(viewport={"width": 1200, "height": 900}).new_page())
    found.tab.set_default_timeout(100_000)  # machines may be busy
    found.tab.on("console", lambda message: found.said.append(message.text))
    found.tab.on("pageerror", lambda error: found.said.append(str(error)))

    def refuse(dialog: Any) -> None:
        found.said.append(dialog.message)
        dialog.dismiss()

    found.tab.on("dialog", refuse)
    found.tab.on("request", lambda request: found.asked.append(request.url))
    found.tab.goto((folder / "report.html").as_uri())
    found.wait("document.querySelectorAll('.plot .xaxislayer-above').length > 4")
    yield found
    found.tab.close()


@pytest.fixture(autouse=True)
def quiet(opened: Opened) -> Iterator[None]:
    yield
    said = list(opened.said)
    opened.said.clear()
    assert said == []
    assert len([url for url in opened.asked if not url.startswith(("data:", "blob:"))]) == 1  # itself


def test_every_plot_has_marks(opened: Opened):
    plots = opened.tab.locator(".plot")
    marks = [plots.nth(number).locator(MARKS).count() for number in range(plots.count())]
    rows = opened.count("#ratios tbody tr")
    tested = opened.count("#differences tbody tr")
    curves = opened.count("#losses .js-line")
    assert len(marks) == (7 if tested else 6) and curves in (rows, 2 * 2)  # with the spread of seeds
    assert not tested or opened.count("#group-errors .points path") == 2 * (len(GROUPS) - 1)
    assert marks[0] > 2 * rows and marks[1] > 6 * rows and min(marks) >= 1, marks


def test_code_that_gets_into_it_does_not_run(opened: Opened):
    opened.tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=data:, onerror=\"alert(4)\">')")
    opened.tab.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'alert(5)'}))")
    deadline = time.monotonic() + 100
    while len(opened.said) < 2 and time.monotonic() < deadline:
        opened.tab.wait_for_timeout(50)
    opened.tab.wait_for_timeout(50)
    assert len(opened.said) == 2 and all("Content Security Policy" in text for text in opened.said)
    opened.said.clear()
    opened.tab.evaluate("[...document.querySelectorAll('body > img, body > script:last-child')].map(e => e.remove())")


def test_columns_sort_up_and_down_by_numbers(opened: Opened):
    header = opened.tab.locator("#ratios thead th").nth(2)
    first = opened.texts("#ratios tbody th")
    header.locator("button").focus()
    opened.tab.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    ratios = [float(text.split()[0]) for text in opened.texts("#ratios tbody td:nth-child(3)")]
    assert ratios == sorted(ratios) and opened.texts("#ratios tbody th") != first
    header.locator("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    ratios = [float(text.split()[0]) for text in opened.texts("#ratios tbody td:nth-child(3)")]
    assert ratios == sorted(ratios, reverse=True)
    opened.tab.locator("#ratios thead button").first.click()
    assert sorted(opened.texts("#ratios tbody th")) == sorted(first)
    assert opened.texts("#ratios thead th[aria-sort]") == ["setting"]
    if opened.count("#parts"):
        for _ in range(2):  # torch's have no such number and stay last, up and down
            opened.tab.locator("#parts thead button", has_text="reduce").first.click()
            assert opened.texts("#parts tbody th")[-2:] == ["torch DDP", "torch fp16 hook"]


@pytest.mark.long
def test_settings_that_are_not_chosen_leave_tables_and_plots(opened: Opened):
    boxes = opened.tab.locator("#settings input")
    names = [boxes.nth(number).get_attribute("value") for number in range(boxes.count())]
    rows, ticks = "#ratios tbody tr", "#ratios .ytick text"
    assert opened.count(rows) == opened.count(ticks) == len(names)
    marks = opened.count("#ratios .points path")
    boxes.nth(2).uncheck()
    assert opened.count(rows) == opened.count(ticks) == len(names) - 1
    assert set(opened.texts(f"{rows} th")) == set(names) - {names[2]}
    assert opened.count("#ratios .points path") < marks
    opened.tab.evaluate("document.querySelectorAll('#settings input').forEach((e, i) => { e.checked = i === 1; })")
    boxes.nth(1).uncheck()
    assert opened.count("tbody tr") == opened.count(ticks) == 0
    boxes.nth(0).check()
    assert opened.count(ticks) == 1 and opened.texts(f"{rows} th") == ["none"]
    opened.tab.evaluate("document.querySelectorAll('#settings input').forEach((e, i) => { e.checked = i > 0; })")
    boxes.nth(0).check()
    assert opened.count("#ratios .points path") == marks


def test_the_pointer_shows_a_points_numbers_and_a_name_as_it_is(opened: Opened):
    name = opened.tab.locator("#settings input").nth(3 if opened.count("#parts") else 2).get_attribute("value")
    digits = opened.count("#parts") > 0
    place = opened.tab.locator("#ratios .plot")
    place.scroll_into_view_if_needed()
    box = place.locator(".trace:has(.textpoint) .points path").nth(3 if digits else 2).bounding_box()
    opened.tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    label = place.locator(".hoverlayer .hovertext")
    label.wait_for()
    results = of_digits()["settings"] if digits else of_a_script()["speed"]
    ratio = interval(results["int8"]["ratio"], "× none")
    assert label.text_content().replace("\xa0", " ") == f"{name}: {ratio}"
    assert name in [text.replace("\xa0", " ") for text in opened.texts("#rounds .legendtext")]


def test_files_are_saved_whole(opened: Opened, tmp_path: Path):
    link = opened.tab.locator("#losses a[download='losses.csv']")
    held = base64.b64decode(link.get_attribute("href").partition(",")[2])
    for number in range(2):  # the second time it is a blob from the start
        with opened.tab.expect_download() as download:
            link.click()
        assert download.value.suggested_filename == "losses.csv"
        download.value.save_as(tmp_path / f"{number}.csv")
        assert (tmp_path / f"{number}.csv").read_bytes() == held and len(held) > 10_000


@pytest.mark.long
def test_a_browser_that_cannot_unpack_plotly_has_the_tables(opened: Opened):
    tab = opened.tab.context.new_page()
    tab.add_init_script("delete window.DecompressionStream")
    tab.goto(opened.tab.url)
    tab.get_by_text("This browser draws no plots").first.wait_for()
    tab.locator("#settings input").nth(1).uncheck()
    tab.locator("#ratios thead button").nth(2).click()
    assert tab.locator("#ratios thead th").nth(2).get_attribute("aria-sort") == "ascending"
    assert tab.locator("#ratios tbody tr:visible").count() == opened.count("#ratios tbody tr") - 1
    tab.close()


def test_readable_on_a_phone_in_light_and_dark(opened: Opened):
    opened.tab.set_viewport_size({"width": 390, "height": 844})
    opened.wait(
        "[...document.querySelectorAll('div.plot .main-svg')].every(e => e.getBoundingClientRect().width < 390)"
    )
    assert opened.tab.evaluate("document.documentElement.scrollWidth") <= 390
    areas = opened.tab.evaluate("[...document.querySelectorAll('.plot .nsewdrag')].map(e => e.width.baseVal.value)")
    assert len(areas) > 4 and min(areas) > 120  # what names leave for the plot
    for scheme in ("dark", "light"):
        opened.tab.emulate_media(color_scheme=scheme)
        texts = "h1, header li, dt, dd, section p, td, th button, .plot text:not(:empty)"
        assert opened.tab.evaluate(CONTRAST, texts) > 4.5  # WCAG's AA
        assert opened.tab.evaluate(CONTRAST, ".scatterlayer .points path") > 3  # and that of graphics
    opened.tab.set_viewport_size({"width": 1200, "height": 900})


@pytest.mark.long
def test_the_order_of_headings_and_the_names_of_what_can_be_used(opened: Opened):
    levels = opened.tab.evaluate("[...document.querySelectorAll('h1, h2')].map(e => e.tagName)")
    assert levels == ["H1"] + ["H2"] * (opened.count("div.plot") + 1)
    unnamed = """[...document.querySelectorAll('a, button, input, summary, [role=img], [role=region], table')].filter(
        e => !(e.ariaLabel || e.textContent || e.labels?.[0]?.textContent)).map(e => e.outerHTML)"""
    assert opened.tab.evaluate(unnamed) == []
    hidden = opened.count("#rounds tbody tr")
    opened.tab.locator("#rounds summary").click()
    assert hidden == 0 < opened.count("#rounds tbody tr")
    opened.tab.locator("#rounds summary").click()
