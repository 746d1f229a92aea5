"""`python -m bench.error_rates`: how often `fastreduce compare` says something that is not so.

Comparisons whose truth is known go through the code that judges users' trainings. Simulated, 2,000 of each kind: steps
of six contestants on two ranks, one of which takes as much of the base's time as the row says. And recorded:
`--recorded results.json` cuts one long comparison into pieces of 20 rounds, in which `none` and `none again` are the
same; a slowdown is put in by making the steps of one of them longer. Rows go to bench/results/error_rates.csv, those of
a recording stay there until the next; docs/compare.md has them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import binomtest

from fastreduce.cli.compare.intervals import Estimate
from fastreduce.cli.compare.script.equivalence import compare
from fastreduce.cli.compare.script.speed import Turn, summarise
from fastreduce.run.orders import order

from .tables import write_csv

KEPT = Path(__file__).parent / "results" / "error_rates.csv"
BASE, AGAIN, OTHER = "none", "none again", "other"
CONTESTANTS = (BASE, AGAIN, OTHER, "4", "5", "6")
ROUNDS, STEPS, RANKS = 20, 3, 2
RATIOS = (1.0, 0.97, 1.03)
SIMULATED = 2000
MARGIN = 0.01


class Noise(NamedTuple):
    """What moves a step's time, as standard deviations of its logarithm.

    Attributes:
        step: of each step on each rank, by itself.
        mood: of the machine, which lasts: each turn's is 0.9 of the turn's before, and something new.
        bursts: the share of turns in which something else takes half of the machine.
    """

    step: float
    mood: float
    bursts: float


QUIET, USUAL, LOADED = Noise(0.01, 0.02, 0.0), Noise(0.03, 0.05, 0.02), Noise(0.1, 0.2, 0.1)
KINDS = {
    "quiet machine": (QUIET, ROUNDS),
    "usual machine": (USUAL, ROUNDS),
    "usual machine, 60 rounds": (USUAL, 60),
    "loaded machine": (LOADED, ROUNDS),
}


class Row(NamedTuple):
    """How often comparisons of one kind said so: a ratio is in its interval, or the interval leaves out 1 (seen)."""

    kind: str
    truth: str
    said: str
    comparisons: int
    happened: int


def simulated(noise: Noise, rounds: int, ratio: float, random: np.random.Generator) -> list[Turn]:
    """The turns of one comparison, in which OTHER's steps take `ratio` of the others'."""
    mood, found = random.normal(0, noise.mood), []
    for number in range(rounds):
        for name in order(CONTESTANTS, number):
            mood = 0.9 * mood + random.normal(0, noise.mood * (1 - 0.9**2) ** 0.5)
            half = 2.0 if random.random() < noise.bursts else 1.0
            seconds = half * np.exp(mood + random.normal(0, noise.step, (RANKS, STEPS)))
            found.append(Turn(number, name, seconds.tolist()))
    return slowed(found, OTHER, ratio)


def recorded(results: Path) -> Iterator[list[Turn]]:
    """Pieces of so many rounds of a comparison of `none` with itself, as it has written them."""
    turns = [Turn(**turn) for turn in json.loads(results.read_text())["turns"]]
    last = max(turn.round for turn in turns) + 1
    for begin in range(0, last - ROUNDS + 1, ROUNDS):
        yield [turn for turn in turns if begin <= turn.round < begin + ROUNDS]


def slowed(turns: Iterable[Turn], name: str, times: float) -> list[Turn]:
    """The same, the steps of `name` longer by a factor."""
    return [
        replace(turn, seconds=(times * np.array(turn.seconds)).tolist()) if turn.contestant == name else turn
        for turn in turns
    ]


def ratio_of(name: str, turns: Sequence[Turn]) -> Estimate:
    """Of the steps of `name` to the base's, as `compare` takes it."""
    return summarise((BASE, name), [turn for turn in turns if turn.contestant in (BASE, name)])[1].ratio


def speed_rows(kind: str, estimates: Sequence[Estimate], truth: float) -> Iterator[Row]:
    """What intervals say where the true ratio is known."""
    ratio, many = f"ratio {truth:g}", len(estimates)
    yield Row(kind, ratio, "in interval", many, sum(e.low <= truth <= e.high for e in estimates))
    if truth == 1:
        yield Row(kind, ratio, "seen", many, sum(e.differs for e in estimates))
    else:
        seen: Callable[[Estimate], bool] = (lambda e: e.high < 1) if truth < 1 else (lambda e: e.low > 1)
        yield Row(kind, ratio, "seen", many, sum(map(seen, estimates)))


def quality_rows(seeds: int, random: np.random.Generator) -> Iterator[Row]:
    """What the test of equivalence says of losses that differ by a part of the margin, and scatter by half of it."""
    for part, said in ((0.0, "called equal"), (1.0, "called equal"), (2.0, "called equal"), (2.0, "called higher")):
        happened = 0
        for _ in range(SIMULATED):
            base = 1 + random.normal(0, 0.02, seeds)
            ours = base + MARGIN * (part + random.normal(0, 0.5, seeds))
            happened += compare(ours.tolist(), base.tolist(), MARGIN).verdict == said.removeprefix("called ")
        yield Row(f"losses of {seeds} seeds", f"{part:g} margins higher", said, SIMULATED, happened)


def main(
    results: Annotated[
        Path | None,
        typer.Option("--recorded", metavar="FILE", help="results.json of: compare --rounds 4000 --settings none …"),
    ] = None,
    seed: Annotated[int, typer.Option(help="of what is simulated")] = 0,
) -> None:
    """How often `fastreduce compare` says what is not so: simulated, and in pieces of a long recorded comparison."""
    rows, random = [], np.random.default_rng(seed)
    for kind, (noise, rounds) in track(KINDS.items(), "simulated", console=Console(stderr=True)):
        for truth in RATIOS:
            estimates = [ratio_of(OTHER, simulated(noise, rounds, truth, random)) for _ in range(SIMULATED)]
            rows += speed_rows(kind, estimates, truth)
    for seeds in (3, 5, 10):
        rows += quality_rows(seeds, random)
    if results is not None:
        pieces = list(recorded(results))
        for truth in RATIOS:
            rows += speed_rows("recorded", [ratio_of(AGAIN, slowed(piece, AGAIN, truth)) for piece in pieces], truth)
    else:
        rows += [row for row in kept() if row.kind == "recorded"]
    write_csv(KEPT, [row._asdict() for row in rows])
    Console().print(table(rows))


def kept() -> list[Row]:
    """Rows of the last run."""
    if not KEPT.exists():
        return []
    with KEPT.open(newline="") as file:
        return [
            Row(kind, truth, said, int(comparisons), int(happened))
            for kind, truth, said, comparisons, happened in list(csv.reader(file))[1:]
        ]


def table(rows: Sequence[Row]) -> Table:
    """Shares in percent, each with its own 95 % interval (Clopper and Pearson 1934)."""
    found = Table("comparisons", "truth", "said", "of", "percent", "95 %", box=None)
    for row in rows:
        share = binomtest(row.happened, row.comparisons)
        interval = share.proportion_ci(0.95)
        found.add_row(
            row.kind,
            row.truth,
            row.said,
            f"{row.comparisons:,}",
            f"{100 * share.statistic:.1f}",
            f"{100 * interval.low:.1f}–{100 * interval.high:.1f}",
        )
    return found


if __name__ == "__main__":
    typer.run(main)
