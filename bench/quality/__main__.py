"""`python -m bench.quality`: is training under each setting as good as under `none`?

Every task trains under every setting from every seed, with SGD and AdamW, on 2 and 4 ranks. The losses at the end, on
what is held out, are tested for equivalence with those of `none`, by two one-sided tests paired by seed. Each training
is a row, written when it has ended; a command that is repeated trains what is missing, so further settings or seeds
cost only themselves. Table and picture are made from all rows.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn
from rich.table import Table

from fastreduce import SettingError
from fastreduce.cli.compare.progress import make_bar
from fastreduce.cli.ending import SignalError, signals_end_ranks
from fastreduce.policy import Policy

from .. import json_lines
from ..gpu.lines import commit
from ..tables import markdown, of_commits
from . import training, verdicts
from .picture import draw
from .tasks import BATCH, OPTIMIZERS, TASKS
from .training import Training
from .verdicts import BASE, SETTINGS, Findings, Row

RESULTS = Path(__file__).parents[1] / "results"


def plan(
    settings: Sequence[str], ranks: Sequence[int], tasks: Sequence[str], seeds: int, quick: bool
) -> list[Training]:
    """Ranks by ranks, seed by seed, so that what is there can be paired whenever it ends."""
    return [
        Training(task, optimizer, size, setting, seed, 20 if quick else TASKS[task].steps)
        for size in ranks
        for seed in range(seeds)
        for task in tasks
        for optimizer in OPTIMIZERS
        for setting in dict.fromkeys([BASE, *settings])
    ]


def read(path: Path) -> dict[Training, Row]:
    """The rows of a file by what was trained."""
    fields = Training.__dataclass_fields__
    return {Training(**{name: row[name] for name in fields}): row for row in json_lines.read(path)}


def run(missing: Sequence[Training], path: Path, jobs: int, console: Console) -> None:
    """Train in so many processes; each row is appended when it is there. A signal lets those under way come to an end.

    Raises:
        SignalError: then.
    """
    made_by = {"commit": commit()}
    with make_bar(console, MofNCompleteColumn()) as bar:
        task = bar.add_task("trainings", total=len(missing))

        def keep(done: Future[dict[str, Any]]) -> None:
            if not done.cancelled() and done.exception() is None:
                json_lines.append(path, [{**done.result(), **made_by}])
                bar.advance(task)

        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawning, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
            try:
                with signals_end_ranks():
                    futures = [pool.submit(training.train, each) for each in missing]
                    for future in futures:
                        future.add_done_callback(keep)
                    for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                        future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def report(rows: Sequence[Row], missing: int, margin: float, out: Path, console: Console) -> None:
    """Print the summary, and write quality.md and quality.png."""
    findings = verdicts.summarise(rows, margin / 100)
    heading, *lines = verdicts.summary(findings)
    table = Table(*heading, box=box.SIMPLE)
    for line in lines:
        table.add_row(*(cell.replace("**", "").strip("`") for cell in line))
    console.print(table)
    (out / "quality.md").write_text(page(findings, rows, missing, margin))
    draw(out / "quality.png", findings, margin)
    console.print(
        f"{len(rows)} trainings, {missing} missing, by commit: {of_commits(row['commit'] for row in rows)}; "
        f"each case: {out / 'quality.md'} and quality.png",
        soft_wrap=True,
    )


def page(findings: Findings, rows: Sequence[Row], missing: int, margin: float) -> str:
    """All tables, and how to read them."""
    seeds = Counter(findings.seeds.values())
    text = PAGE.format(
        rows=len(rows),
        minutes=sum(row["seconds"] for row in rows) / 60,
        missing=f" ({missing} of those asked for are missing)" if missing else "",
        seeds=", ".join(
            f"{count} cases by {number} seed{'s' * (number > 1)}"
            for number, count in sorted(seeds.items(), reverse=True)
        ),
        commits=of_commits(row["commit"] for row in rows),
        margin=margin,
        summary=markdown(verdicts.summary(findings)),
    )
    for ranks in findings.ranks:
        text += f"\n## {ranks} ranks\n\n{markdown(verdicts.by_case(findings, ranks))}"
    return f"{text}\n## vNMSE\n\n{markdown(verdicts.errors(findings))}"


PAGE = """# No worse?

Made by `python -m bench.quality` out of quality.jsonl: {rows} trainings{missing}, {minutes:.0f} minutes of one
process. Losses at the end, on what is held out, against those of `none`: {seeds}.
Rows by commit: {commits}.

Equal (`=`): the 90 % interval of the mean difference, paired by seed, lies within {margin:g} % of `none`'s mean loss,
which two one-sided tests at 5 % say. Higher, lower: it lies beyond. Open (`?`): neither; in parentheses how many seeds
would decide with a power of 80 %, if difference and scatter are those seen. Differences are in percent. Of cases whose
difference is just the margin, one in twenty is called equal.

Tasks are in [bench/quality/tasks.py](../quality/tasks.py), what follows for a choice in
[which setting](../../docs/which-setting.md#is-the-training-as-good). Ranks are threads of one process; a test says that
they train by the bits of processes. Bytes an element: what a rank sends over the elements that an all-reduce sends,
flags and padding of so small a model included. vNMSE: the squared error of the averages that the optimizer gets over
the squares of exact ones, the mean of ten steps of each training; under error feedback that counts what is only late.
Both are the GPT's.

{summary}"""


def main(
    settings: Annotated[list[str] | None, typer.Argument(help="Settings; by default all that the docs name.")] = None,
    ranks: Annotated[list[int], typer.Option(min=2, help="Ranks; repeat it for more.")] = [2, 4],  # noqa: B006
    task: Annotated[list[str], typer.Option(help=f"Of {', '.join(TASKS)}; repeat it for more.")] = list(TASKS),  # noqa: B006
    seeds: Annotated[int, typer.Option(min=1, help="Seeds.")] = 5,
    margin: Annotated[float, typer.Option(min=0.0, help="Percent of none's loss.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at a time, each on one core.")] = 1,
    train: Annotated[bool, typer.Option(help="Train what is missing, or only show what is there.")] = True,
    quick: Annotated[bool, typer.Option(help="20 steps of each; nothing is added to bench/results.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where rows, table and picture are.", show_default="bench/results")
    ] = None,
) -> None:
    """Train what is missing, print which settings are no worse than none, and write quality.md and quality.png."""
    if unknown := [name for name in task if name not in TASKS]:
        raise typer.BadParameter(f"no task {unknown[0]!r}; allowed: {', '.join(TASKS)}")
    if uneven := [size for size in ranks if BATCH % size]:
        raise typer.BadParameter(f"{uneven[0]} ranks do not share a batch of {BATCH} evenly")
    try:
        for setting in settings or []:
            Policy.of(setting)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None
    out = out or (Path("out/quality") if quick else RESULTS)
    out.mkdir(parents=True, exist_ok=True)
    path, console, code = out / "quality.jsonl", Console(), 0
    if not console.is_terminal:
        console = Console(width=170)
    planned = plan(settings or SETTINGS, ranks, task, seeds, quick)
    done = read(path)
    try:
        if train:
            run([each for each in planned if each not in done], path, jobs, console)
    except SignalError as ended:
        code = ended.code
    except SettingError as error:  # a policy with a key that matches no parameter of a task
        raise typer.BadParameter(str(error)) from None
    done = read(path)
    rows = verdicts.longest(done.values())
    if any(row["setting"] != BASE for row in rows):
        report(rows, sum(each not in done for each in planned), margin, out, console)
    raise typer.Exit(code)


if __name__ == "__main__":
    typer.run(main)
