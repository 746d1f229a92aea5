"""What a run leaves: a table on the terminal and results.json; the plot is in plot.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ....run.machine import machine
from .. import results, settings_table
from .statistics import STAGES, Figures, conclude, step_seconds
from .training import BARE, Experiment, Record, transport_of

NOTES = (
    "Times are medians in ms. step: slowest rank, with quartiles. over none: median ratio to none round by round, "
    "with its 95 % interval from order statistics. exposed: step minus the step without a wrapper. "
    "compress, reduce, decompress: on a thread of their own, with GPUs on a stream, largely beside backward, so "
    "they do not add up to exposed; reduce includes waiting for the slower rank; torch does not tell its own. "
    "sent: MB per rank and step. grad. error: relative L2 distance to the exact average at the same weights. Error "
    "feedback adds what the last step lost to the next, which makes one step's error larger and the sum over steps "
    "closer."
)
HEADERS = (
    "step\n(quartiles)",
    "over none\n(95 %)",
    "ex-\nposed",
    "com-\npress",
    "reduce",
    "decom-\npress",
    "sent\nMB",
    "grad.\nerror",
    "accu-\nracy",
)
STAGES_AT = (3, 4, 5)  # columns that are left out where they do not fit


def print_table(console: Console, figures: Sequence[Figures]) -> None:
    """The table, its notes and the conclusion."""
    stages = ", ".join(STAGES)
    narrower = [
        (stages, _make_table(figures, STAGES_AT)),
        (f"{stages}, the quartiles", _make_table(figures, STAGES_AT, quartiles=False)),
        (f"{stages}, the quartiles, exposed", _make_table(figures, (2, *STAGES_AT), quartiles=False)),
    ]
    settings_table.print_table(console, _make_table(figures), NOTES, narrower)
    console.print()
    for sentence in conclude(figures):
        console.print(sentence)


def _make_table(figures: Sequence[Figures], without: Sequence[int] = (), quartiles: bool = True) -> Table:
    kept = [place for place in range(len(HEADERS)) if place not in without]
    headers = HEADERS if quartiles else ("\nstep", *HEADERS[1:])
    table = settings_table.make_table([headers[place] for place in kept])
    fastest = min(figures, key=lambda f: f.ratio.median).name
    for f in figures:
        cells = _row(f, quartiles)
        table.add_row(f.name, *(cells[place] for place in kept), style="bold" if f.name == fastest else None)
    table.add_row(BARE, f"{figures[0].compute:.1f}", style="dim")
    return table


def _row(f: Figures, quartiles: bool) -> list[str]:
    return [
        f"{f.step:.1f}" + (f" ({f.quartiles[0]:.0f}–{f.quartiles[1]:.0f})" if quartiles else ""),
        "1" if f.name == "none" else str(f.ratio),
        f"{f.exposed:.1f}",
        *(f"{f.stages[stage]:.1f}" if f.stages else "–" for stage in STAGES),
        f"{f.sent_bytes / 1e6:.3g}",
        f"{f.gradient_error:.0e}",
        f"{f.accuracy:.1%}",
    ]


def write_results(
    path: Path,
    command: Sequence[str],
    experiment: Experiment,
    ranks: Sequence[Mapping[str, Record]],
    figures: Sequence[Figures],
    seconds: float,
) -> None:
    """Everything measured, with what is needed to measure it again."""
    measured = {
        **results.describe(machine(experiment.device)),
        "command": list(command),
        "seconds": seconds,
        "experiment": asdict(experiment),
        "parameters": ranks[0][BARE].parameters,
        "transport": transport_of(ranks[0]),
        "conclusion": conclude(figures),
        "settings": {
            f.name: {
                **asdict(f),
                "step_seconds": step_seconds([rank[f.name] for rank in ranks]).tolist(),
                "gradient_errors": ranks[0][f.name].gradient_errors,
            }
            for f in figures
        },
        "bare": {"step_seconds": step_seconds([rank[BARE] for rank in ranks]).tolist()},
    }
    results.write(path, measured)
