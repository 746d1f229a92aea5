"""The built-in comparison: one small network on scikit-learn's digits under every setting, side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from .... import Compression, FastreduceError
from ....distributed.processes import Group, run_ranks
from ....environment.cores import usable_cores
from ....errors import RanksFailedError
from ....ops import backends
from ...ending import SignalError, fail, need, signals_end_ranks, signals_wait, writing
from ...report import write_page
from ..progress import make_bar
from ..results import over
from .training import BARE, Experiment, Record, train, transport_of

__all__ = ["Experiment", "check", "run"]

ROUNDS = 40
RANKS_PER_CORE = 4
STALL_SECONDS = 300.0


def run(experiment: Experiment, out: Path, console: Console, function: Callable[..., Any] = train) -> None:
    """Run `function` on the ranks and report what they saw.

    Raises:
        typer.Exit: with code 1 if a rank failed, after its traceback has been printed; with 128 + the signal if this
            process was ended by one.
    """
    from . import plot, report, statistics

    start = time.monotonic()
    try:
        with signals_end_ranks(), _Watch(experiment, console) as watch:
            group = Group(experiment.ranks, experiment.ranks)
            records = run_ranks(function, group, experiment, on_report=watch.on_report, stall_seconds=STALL_SECONDS)
    except RanksFailedError as error:
        fail(str(error), 1)
    except SignalError as error:
        fail(str(error), error.code)
    with signals_wait():
        figures = statistics.summarise(experiment, records)
        seconds = time.monotonic() - start
        report.print_table(console, figures)
        with writing():
            report.write_results(out / "results.json", sys.argv, experiment, records, figures, seconds)
            plot.draw(out / "compare.png", figures, _title(experiment, records[0]))
            written = write_page(out)
        said = f"\n{seconds:.0f} s, {over(transport_of(records[0]))}. {written}"
        console.print(said, soft_wrap=True)


def check(settings: list[str], ranks: int, device: str) -> tuple[str, ...]:
    """The settings in canonical form, with `none`, which the others are held against; or an error and exit code 2."""
    need("sklearn", "scipy", "matplotlib")
    try:
        specs = list(dict.fromkeys(str(Compression.parse(spec)) for spec in settings))
        backends.choose(torch.device(device))
    except FastreduceError as error:
        fail(str(error))
    if device == "cuda" and ranks > torch.cuda.device_count():
        fail(f"--ranks {ranks} needs as many GPUs, and torch sees {torch.cuda.device_count()}; or take --device cpu")
    most = RANKS_PER_CORE * usable_cores()
    if ranks > most:
        fail(f"--ranks {ranks} is more than this machine can time: at most {most}, {RANKS_PER_CORE} per core")
    return tuple(specs if "none" in specs else ["none", *specs])


class _Watch:
    """A progress bar on a terminal; elsewhere a line for each quarter of the rounds."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._experiment, self._console, self._round = experiment, console, 0
        self._bar = make_bar(console, MofNCompleteColumn(), TextColumn("steps,"))
        total = len(experiment.contenders) * experiment.steps_each
        self._task = self._bar.add_task("starting ranks", total=total)

    def __enter__(self) -> _Watch:
        e = self._experiment
        self._console.print(
            f"--device {e.device} --ranks {e.ranks} --width {e.width} --rounds {e.rounds} --steps {e.steps}, "
            f"side by side: {', '.join(e.contenders)}.",
        )
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_report(self, done: tuple[int, int]) -> None:
        """Rank 0 has taken so many steps in a round; round 0 is the warm-up."""
        round_number, steps = done
        rounds = self._experiment.rounds
        text = f"round {round_number} of {rounds}" if round_number else "warming up"
        self._bar.update(self._task, advance=steps, description=text)
        begun = round_number != self._round
        if begun and round_number % -(-rounds // 4) == 0 and not self._console.is_terminal:
            self._console.print(text)
        self._round = round_number


def _title(experiment: Experiment, records: Mapping[str, Record]) -> str:
    megabytes = records[BARE].parameters * 4 / 1e6
    cores = f"{experiment.ranks} ranks on {usable_cores()} cores"
    where = f"{experiment.ranks} GPUs" if experiment.device == "cuda" else cores
    return (
        f"{where}, {over(transport_of(records))}, {records[BARE].parameters:,} parameters "
        f"({megabytes:.1f} MB of gradients), {experiment.batch} digits per rank and step"
    )
