"""`fastreduce compare`: a user's own training under several settings, or a small built-in one, side by side."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperCommand

from ... import FastreduceError
from ...distributed.launcher import MOST_RANKS
from ...policy import Policy
from ...run.contestants import TORCHS
from ..ending import check_variables, fail, make_folder
from ..output import make_console
from . import digits, starting
from .script.plan import ROUNDS, make_plan

DEFAULT_SETTINGS = ["none", "fp16", "bf16", "int8", "int8:error_feedback"]
FILES = ("results.json", "compare.png", "report.html")
SCRIPT, BUILT_IN = "Of a script", "Of the built-in network"


class Device(str, Enum):
    """Where networks are trained."""

    cpu = "cpu"
    cuda = "cuda"


class CompareCommand(TyperCommand):
    """Lets `--settings` take several values, and leaves what stands behind the script to the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat `--settings` before each further value; put `--` before the script, or the module behind `-m`."""
        takes_value = {opt for p in self.params for opt in p.opts if not getattr(p, "is_flag", False)}
        spread: list[str] = []
        inside = value = False
        for place, word in enumerate(args):
            if value:
                value = False
            elif word in ("-m", "--"):
                return super().parse_args(ctx, [*spread, "--", *(args[place:] if word == "-m" else args[place + 1 :])])
            elif word.startswith("-"):
                inside = word.partition("=")[0] == "--settings"
                value = word in takes_value
                following = args[place + 1] if place + 1 < len(args) else "-"
                if word == "--settings" and following.startswith("-"):
                    ctx.fail("--settings needs at least one setting")
            elif inside and (_is_setting(word) or not (word.endswith(".py") or os.path.exists(word))):
                spread.append("--settings")
            else:
                return super().parse_args(ctx, [*spread, "--", *args[place:]])
            spread.append(word)
        return super().parse_args(ctx, spread)


def compare(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[[-m] SCRIPT [ARGUMENTS]]",
            help="A training script and its arguments, in which {seed}, {setting} and {out} are filled in; without it "
            "a small built-in network.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str],
        typer.Option(
            metavar="SPEC ...",
            help="Settings: none, fp16, bf16, int8, fp8, int4, powersgd, topk; options as int8:block=64,error_feedback;"
            " of a script also torch, torch:fp16 and torch:bf16, torch's own class alone and with its hooks.",
        ),
    ] = DEFAULT_SETTINGS,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_RANKS,
            help="Processes on this machine. Of a script: 1 is one process, which may start ranks itself.",
            show_default="one a GPU; without GPUs 2",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=starting.MOST_ROUNDS,
            help="Rounds; from 6 on, ratios have an interval. Of a script: 0 takes no times.",
            show_default="40; of a script 20",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps per round and setting.")] = 3,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**32 - 1, help="The first seed; of the built-in network also that of its digits."),
    ] = 0,
    out: Annotated[Path, typer.Option(help="Where results.json, compare.png and report.html go.")] = Path(
        "out/compare"
    ),
    train: Annotated[
        str | None,
        typer.Option(
            metavar="STEPS|whole",
            help="Train under each setting of --settings and each seed, for so many steps or until the script ends, "
            "and test whether losses are equal.",
            rich_help_panel=SCRIPT,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=10_000, help="Seeds, for --train.", rich_help_panel=SCRIPT)] = 3,
    margin: Annotated[
        float,
        typer.Option(help="Percent of none's loss, up to which a loss counts as equal.", rich_help_panel=SCRIPT),
    ] = 1.0,
    target: Annotated[
        float | None, typer.Option(help="A loss: how soon is it reached?", rich_help_panel=SCRIPT)
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a training that takes no step and prints nothing is ended.",
            rich_help_panel=SCRIPT,
        ),
    ] = 300.0,
    metric_line: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help=r"The metric is the number in parentheses in the last line that matches, as in 'accuracy ([\d.]+)'.",
            rich_help_panel=SCRIPT,
        ),
    ] = None,
    metric_file: Annotated[
        str | None,
        typer.Option(
            metavar="PATH[:KEY]",
            help="The metric is the number in this file, or in JSON the value of the key; {seed}, {setting} and {out} "
            "are filled in.",
            rich_help_panel=SCRIPT,
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING",
            help="Whoever is timed, let the optimizer see the averages of this setting, so that training goes on as "
            "under it alone.",
            rich_help_panel=SCRIPT,
        ),
    ] = None,
    launch: starting.LaunchOption = None,
    nnodes: starting.NnodesOption = 1,
    node_rank: starting.NodeRankOption = None,
    master_addr: starting.MasterAddrOption = None,
    master_port: starting.MasterPortOption = starting.MASTER_PORT,
    device: Annotated[
        Device | None,
        typer.Option(
            help="Where to train.",
            show_default="cuda where there is a GPU",
            show_choices=True,
            rich_help_panel=BUILT_IN,
        ),
    ] = None,
    width: Annotated[
        int,
        typer.Option(
            min=1, help="Channels of the network; gradients have 4,500 × width² bytes.", rich_help_panel=BUILT_IN
        ),
    ] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Images per rank and step.", rich_help_panel=BUILT_IN)] = 16,
) -> None:
    """Train under several compression settings, and say whether compressing pays here.

    With a script: starts its ranks, here or by --launch or --nnodes elsewhere, unedited, with our
    DistributedDataParallel in the place of torch's. For speed, one training in which settings take turns in rounds,
    beside torch's own class with and without its hooks, a step that reduces nothing, and none once more as a control.
    With --train, for quality, a training for each setting and seed, and a test whether losses are equal within
    --margin.

    Without: a small convolutional network on scikit-learn's handwritten digits under each setting, beside torch's own
    class (plain, and with its fp16 hook), with gradient errors and accuracy.

    Prints a table and a verdict for each setting, and writes results.json, compare.png and report.html.
    """
    if wrong := _given(context, [BUILT_IN] if words else [SCRIPT, starting.PANEL]):
        fail(f"{', '.join(wrong)}: for {'the built-in network' if words else 'a script'} only")
    check_variables()
    console = make_console()
    if words:
        plan = make_plan(
            words,
            settings,
            ranks=ranks,
            rounds=ROUNDS if rounds is None else rounds,
            steps=steps,
            seed=seed,
            out=out,
            train=train,
            seeds=seeds,
            margin=margin,
            target=target,
            timeout=timeout,
            metric_line=metric_line,
            metric_file=metric_file,
            weights_from=weights_from,
            launch=launch,
            nodes=starting.find_nodes(nnodes, node_rank, master_addr, master_port),
        )
        from .script import measure  # which needs scipy and matplotlib, as make_plan has seen

        make_folder(out, FILES)
        measure.run(plan, console)
        return
    where = (device or (Device.cuda if torch.cuda.is_available() else Device.cpu)).value
    ranks = ranks or (max(1, torch.cuda.device_count()) if where == "cuda" else 2)
    if rounds == 0:
        fail("--rounds 0: for a script only")
    specs = digits.check(settings, ranks, where)
    make_folder(out, FILES)
    digits.run(
        digits.Experiment(specs, ranks, width, batch, digits.ROUNDS if rounds is None else rounds, steps, seed, where),
        out,
        console,
    )


def _is_setting(word: str) -> bool:
    """Also where a folder has its name, as the checkpoints of a setting may."""
    try:
        Policy.of(word)
    except FastreduceError:
        return word in TORCHS
    return True


def _given(context: typer.Context, panels: Collection[str]) -> list[str]:
    """The options under these headings of --help that stand on the command line."""
    options: list[Any] = [each for each in context.command.params if getattr(each, "rich_help_panel", "") in panels]
    sources = {each.opts[0]: context.get_parameter_source(each.name) for each in options}
    return [option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
