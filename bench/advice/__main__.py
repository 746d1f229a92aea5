"""`python -m bench.advice`: is what `fastreduce advise` says right?

In each cell a model trains on so many ranks over a link: on this host, or each rank in a network namespace of its own,
behind a switch whose cables tc shapes. The advisor is asked; then all settings are measured, in turns within one
training. A row is written when a cell has ended, and a command that is repeated measures what is missing, or was
measured in fewer rounds. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fastreduce.cli.advise import DEFAULT_SETTINGS, measure
from fastreduce.cli.compare import results
from fastreduce.cli.compare.script import speed, trainings
from fastreduce.cli.compare.script.plan import BASE, Plan
from fastreduce.cli.ending import SignalError, signals_end_ranks
from fastreduce.policy import Policy
from fastreduce.run.machine import machine

from .. import json_lines
from ..scaling.star import address, star
from ..tables import markdown
from .advised_training import MODELS

RESULTS = Path(__file__).parents[1] / "results" / "advice.jsonl"
LOOPBACK = "loopback"
LINKS = [LOOPBACK, "10gbit", "1gbit", "100mbit"]
RANKS = [2, 3, 4]
ROUNDS = 6
TIMEOUT = 300.0
GOOD = 1.05  # times the best measured step
KEY = ("model", "link", "ranks")


def cell(
    model: str, link: str, ranks: int, settings: Sequence[str], rounds: int, varied: bool, console: Console
) -> dict[str, Any]:
    """Ask, then measure all settings and what is advised, or all that was predicted (`varied`): one row."""
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastreduce-advice-")))
        hosts = [] if link == LOOPBACK else stack.enter_context(star(ranks, link))
        places = [f"{name}:{address(i)}" for i, name in enumerate(hosts)]
        names = tuple(str(Policy.of(name)) for name in settings)
        words = ("bench.advice.advised_training", model, *places)
        plan = Plan(
            words=words,
            module=True,
            settings=names,
            ranks=1 if places else ranks,
            rounds=rounds,
            steps=measure.CHECK_STEPS,
            out=folder,
            timeout=TIMEOUT,
        )
        findings = measure.investigate(plan, None, console)
        assert findings.advice is not None
        advised = findings.advice.name
        names = tuple(findings.seconds) if varied else tuple(dict.fromkeys([*names, advised]))
        lines = trainings.run(plan, measure.rotation(plan, names, rounds), lambda _: None)
    seen = {each.contestant: each for each in speed.summarise(names, speed.read_rotation(names, lines))}
    assert BASE in seen, "the training ended before all settings were measured"
    best = min(seen, key=lambda name: seen[name].step)
    return {
        "model": model,
        "link": link,
        "ranks": ranks,
        "rounds": rounds,
        "transport": findings.readings.wrapped["transport"],
        "advised": advised,
        "best": best,
        "ratio": seen[advised].step / seen[best].step,
        "worse_than_none": advised != BASE and seen[advised].ratio.low > 1,
        "steps_ms": {name: each.step for name, each in seen.items()},
        "ratios": {name: [each.ratio.median, each.ratio.low, each.ratio.high] for name, each in seen.items()},
        "predicted_ms": {name: 1e3 * findings.seconds[name] for name in seen},
        "checked": sorted(findings.measured),
        "sentence": findings.advice.sentence,
        "seconds": time.monotonic() - start,
        "load": os.getloadavg()[0],
        "commit": results.commit(),
        "machine": machine("cpu"),
        "versions": results.versions(),
    }


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Which cell a row is of."""
    return tuple(row[name] for name in KEY)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What all rows say, in a sentence."""
    good = sum(row["ratio"] <= GOOD for row in rows)
    worse = sum(row["worse_than_none"] for row in rows)
    errors = sorted(
        abs(row["predicted_ms"][name] / row["steps_ms"][name] - 1) for row in rows for name in row["steps_ms"]
    )
    return (
        f"{len(rows)} cells: the advised setting is within 5 % of the best measured in {good} "
        f"({good / len(rows):.0%}), and worse than none beyond its interval in {worse}. Half of all predictions are "
        f"off by {errors[len(errors) // 2]:.0%} at most, nine of ten by {errors[len(errors) * 9 // 10]:.0%}."
    )


def columns(row: dict[str, Any]) -> list[str]:
    """A row as it is shown."""
    steps, predicted = row["steps_ms"], row["predicted_ms"]
    times = [f"{steps[name]:.0f} ({predicted[name]:.0f})" for name in (BASE, row["advised"], row["best"])]
    return [
        row["model"],
        f"{row['link']}, {row['transport']}",
        str(row["ranks"]),
        str(row["rounds"]),
        row["advised"],
        row["best"],
        f"{row['ratio']:.2f}",
        "yes" if row["ratio"] <= GOOD else "no",
        "yes" if row["worse_than_none"] else "no",
        *times,
    ]


TITLES = [
    "model",
    "link",
    "ranks",
    "rounds",
    "advised",
    "best measured",
    "ratio",
    "within 5 %",
    "worse than none",
    "none, ms",
    "advised, ms",
    "best, ms",
]


def write_table(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """All rows as Markdown."""
    lines = ["# Is the advice right?", "", "Made by `python -m bench.advice` out of advice.jsonl. " + summary(rows), ""]
    where = Counter(
        f"{row['machine']['cores']} cores of {row['machine']['processor']}, torch {row['versions']['torch']}, commit "
        f"{row['commit'][:12]}"
        for row in rows
    )
    cells = "; ".join(f"{count} on {machine}" for machine, count in where.items())
    lines += [
        f"{cells}; load from {min(row['load'] for row in rows):.1f} to {max(row['load'] for row in rows):.1f}. "
        "Milliseconds are medians of the slowest rank; predicted ones in parentheses.",
        "",
        markdown([TITLES, *map(columns, rows)]),
    ]
    path.write_text("\n".join(lines))


def main(
    models: Annotated[list[str], typer.Option("--model", help="Repeat for several.")] = MODELS,
    links: Annotated[list[str], typer.Option("--link", help="Repeat for several.")] = LINKS,
    sizes: Annotated[list[int], typer.Option("--ranks", help="Repeat for several.")] = RANKS,
    settings: Annotated[list[str], typer.Option("--setting", help="Repeat for several.")] = DEFAULT_SETTINGS,
    rounds: Annotated[int, typer.Option(min=6, help="Rounds of the check, and of the measurement.")] = ROUNDS,
    varied: Annotated[
        bool, typer.Option(help="Measure all sizes of buckets and transports that are predicted; with --rows.")
    ] = False,
    rows: Annotated[Path, typer.Option(help="Where rows are kept; beside it goes a table.")] = RESULTS,
) -> None:
    """Measure the cells that are missing, and show all."""
    console = Console()
    done = {key_of(row): row for row in json_lines.read(rows)}
    wanted = [(model, link, count) for model in models for link in links for count in sizes]
    try:
        with open(os.devnull, "w") as nowhere, signals_end_ranks():
            for key in wanted:
                if key in done and done[key]["rounds"] >= rounds:
                    continue
                row = cell(*key, settings, rounds, varied, Console(file=nowhere))
                json_lines.append(rows, [row])
                done[key] = row
                console.print(
                    f"{', '.join(map(str, key))}: {row['sentence']} ({row['seconds']:.0f} s)", highlight=False
                )
    except SignalError as error:
        raise typer.Exit(error.code) from None
    found = [done[key] for key in wanted]
    table = Table(box=box.SIMPLE_HEAD)
    for title in TITLES:
        table.add_column(title)
    for row in found:
        table.add_row(*columns(row))
    console.print(table)
    console.print(summary(found), highlight=False)
    write_table(list(done.values()), rows.with_suffix(".md"))


if __name__ == "__main__":
    typer.run(main)
