"""What a run leaves: a table on the terminal and results.json; the plot is in plot.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ....run.machine import machine
from .. import results, settings_table
from .statistics import STAGES, Figures, conclude, step_seconds
from .training import BARE, Experiment, Record, transport_of

NOTES = (
    "Times are medians in ms. step: slowest rank, with quartiles. over none: median ratio to none round by round, "
    "with its 95 % interval from order statistics. exposed: step minus the step without a wrapper. "
    "compress, reduce, decompress: on the communication thread, largely beside backward, so they do not add up "
    "to exposed; reduce includes waiting for the slower rank; torch does not tell its own. sent: MB per rank and "
    "step. grad. error: relative L2 distance to the exact average at the same weights. Error feedback adds what "
    "the last step lost to the next, which makes one step's error larger and the sum over steps closer."
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
WIDE = slice(3, 6)  # columns left out where they do not fit


def print_table(console: Console, figures: Sequence[Figures]) -> None:
    """The table, its notes and the conclusion."""
    rows = {f.name: _row(f) for f in figures}
    table = _make_table(figures, HEADERS, rows)
    fits = Measurement.get(console, console.options.update_width(1000), table).maximum <= console.width
    if not fits:
        headers = list(HEADERS)
        for cells in (headers, *rows.values()):
            del cells[WIDE]
        table = _make_table(figures, headers, rows)
    settings_table.print_table(console, table, NOTES)
    if not fits:
        console.print("The terminal is too narrow for compress, reduce, decompress: see results.json.", style="dim")
    console.print()
    for sentence in conclude(figures):
        console.print(sentence)


def _make_table(figures: Sequence[Figures], headers: Sequence[str], rows: Mapping[str, list[str]]) -> Table:
    table = settings_table.make_table(headers)
    fastest = min(figures, key=lambda f: f.ratio.median).name
    for name, cells in rows.items():
        table.add_row(name, *cells, style="bold" if name == fastest else None)
    table.add_row(BARE, f"{figures[0].compute:.1f}", style="dim")
    return table


def _row(f: Figures) -> list[str]:
    return [
        f"{f.step:.1f} ({f.quartiles[0]:.0f}–{f.quartiles[1]:.0f})",
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
