"""`fastreduce compare`: the same training under several compression settings, side by side."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer.core import TyperCommand

from ... import Compression, FastreduceError
from ...distributed.processes import Group, run_ranks
from ...errors import RanksFailedError
from ...ops import backends
from .training import BARE, Experiment, Record, train

DEFAULT_SETTINGS = ["none", "fp16", "bf16", "int8", "int8:error_feedback"]
RANKS_PER_CORE = 4
STALL_SECONDS = 300.0
PLAIN_WIDTH = 118  # where output goes to a file or a CI log


class Device(str, Enum):
    """Where networks are trained."""

    cpu = "cpu"
    cuda = "cuda"


class CompareCommand(TyperCommand):
    """Lets `--settings` take several values: `--settings none fp16` is `--settings none --settings fp16`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--settings` before each further value; the command has no positional arguments."""
        spread: list[str] = []
        inside = False
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            if word == "--settings" and following.startswith("-"):
                ctx.fail("--settings needs at least one setting")
            if word.startswith("-"):
                inside = word.partition("=")[0] == "--settings"
            elif inside and spread[-1] != "--settings":
                spread.append("--settings")
            spread.append(word)
        return super().parse_args(ctx, spread)


def compare(
    settings: Annotated[
        list[str],
        typer.Option(
            metavar="SPEC ...",
            help="Settings: none, fp16, bf16, int8, fp8, int4, with options as in int8:block=64,error_feedback.",
        ),
    ] = DEFAULT_SETTINGS,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes on this machine, one thread each.", show_default="one a GPU; without GPUs 2"
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(help="Where to train.", show_default="cuda where there is a GPU", show_choices=True)
    ] = None,
    width: Annotated[
        int, typer.Option(min=1, help="Channels of the network; gradients have 4,500 × width² bytes.")
    ] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Images per rank and step.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; from 6 on, ratios have an interval.")] = 40,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round and setting.")] = 3,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of the weights, the batches and the held-out digits.")
    ] = 0,
    out: Annotated[Path, typer.Option(help="Where results.json and compare.png go.")] = Path("out/compare"),
) -> None:
    """Train under several compression settings side by side, and say whether compressing pays here.

    Starts the ranks on this machine and trains a small convolutional network on scikit-learn's
    handwritten digits under each setting, with torch's own DistributedDataParallel (plain, and with its
    fp16 hook) beside them. In every round each setting takes the same batches and as many steps, in an
    order that changes from round to round, so that whatever disturbs the machine hits all alike.

    Prints a table of step times, gradient errors and accuracy, and writes results.json and compare.png.
    """
    where = (device or (Device.cuda if torch.cuda.is_available() else Device.cpu)).value
    ranks = ranks or (max(1, torch.cuda.device_count()) if where == "cuda" else 2)
    specs = _check(settings, ranks, where)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"cannot write to {out}: {error.strerror}")
    if not os.access(out, os.W_OK):
        _fail(f"cannot write to {out}: permission denied")
    experiment = Experiment(specs, ranks, width, batch, rounds, steps, seed, where)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    run(experiment, out, console)


def run(experiment: Experiment, out: Path, console: Console, function: Callable[..., Any] = train) -> None:
    """Run `function` on the ranks and report what they saw.

    Raises:
        typer.Exit: with code 1 if a rank failed, after its traceback has been printed; with 128 + the signal if this
            process was ended by one.
    """
    from . import plot, report, statistics

    start = time.monotonic()
    try:
        with _signals_end_ranks(), _Watch(experiment, console) as watch:
            group = Group(experiment.ranks, experiment.ranks)
            records = run_ranks(function, group, experiment, on_report=watch.on_report, stall_seconds=STALL_SECONDS)
    except RanksFailedError as error:
        _fail(str(error), code=1)
    except _SignalError as error:
        _fail(f"{error.received.name}: all ranks were ended", code=128 + error.received)
    figures = statistics.summarise(experiment, records)
    seconds = time.monotonic() - start
    report.print_table(console, figures)
    report.write_results(out / "results.json", sys.argv, experiment, records, figures, seconds)
    plot.draw(out / "compare.png", figures, _title(experiment, records[0]))
    console.print(f"\n{seconds:.0f} s. Wrote {out / 'results.json'} and {out / 'compare.png'}.", highlight=False)


def _check(settings: list[str], ranks: int, device: str) -> tuple[str, ...]:
    """The settings in canonical form, with `none`, which the others are held against; or an error and exit code 2."""
    for module, package in (("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")):
        if find_spec(module) is None:
            _fail(f"{package} is missing: pip install {package}")
    try:
        specs = list(dict.fromkeys(str(Compression.parse(spec)) for spec in settings))
        backends.choose(torch.device(device))
    except FastreduceError as error:
        _fail(str(error))
    if device == "cuda" and ranks > torch.cuda.device_count():
        _fail(f"--ranks {ranks} needs as many GPUs, and torch sees {torch.cuda.device_count()}; or take --device cpu")
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0))
    if ranks > most:
        _fail(f"--ranks {ranks} is more than this machine can time: at most {most}, {RANKS_PER_CORE} per core")
    return tuple(specs if "none" in specs else ["none", *specs])


class _SignalError(Exception):
    """The signal that this process received."""

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(received.name)
        self.received = received


@contextlib.contextmanager
def _signals_end_ranks() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise here, so that ranks are ended and waited for."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise _SignalError(signal.Signals(number))

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"fastreduce compare: {message}", err=True)
    raise typer.Exit(code)


class _Watch:
    """A progress bar on a terminal; elsewhere a line for each quarter of the rounds."""

    def __init__(self, experiment: Experiment, console: Console) -> None:
        self._experiment, self._console, self._round = experiment, console, 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps,"),
            TimeElapsedColumn(),
            TextColumn("so far,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        total = len(experiment.contenders) * experiment.steps_each
        self._task = self._bar.add_task("starting ranks", total=total)

    def __enter__(self) -> _Watch:
        e = self._experiment
        self._console.print(
            f"--device {e.device} --ranks {e.ranks} --width {e.width} --rounds {e.rounds} --steps {e.steps}, "
            f"side by side: {', '.join(e.contenders)}.",
            highlight=False,
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
    cores = f"{experiment.ranks} ranks on {len(os.sched_getaffinity(0))} cores"
    where = f"{experiment.ranks} GPUs" if experiment.device == "cuda" else cores
    return (
        f"{where}, {records[BARE].parameters:,} parameters "
        f"({megabytes:.1f} MB of gradients), {experiment.batch} digits per rank and step"
    )
