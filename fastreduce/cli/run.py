"""`fastreduce run`: `fastreduce launch` of an unedited script, with torch's DistributedDataParallel replaced."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser
from pathlib import Path

import typer

from ..compression import ENVIRONMENT_VARIABLE
from ..environment.engines import find_place
from ..environment.variables import writable_folder
from ..policy import Policy
from ..reduction.telemetry.trace import VARIABLE as TRACE
from ..run import main, replacement, worker
from .launch import make_parser, parse, start
from .launch.torchs_launcher import fail, say
from .trace import merge_after_run, stamps
from .variables import check_variables

OF_A_RANK = ("compression", "trace", "module", "script", "training_script", "training_script_args")  # options


def run_parser() -> ArgumentParser:
    """That of `launch`, with the setting."""
    parser = make_parser(run)
    help_ = (
        "The setting, such as fp16; without it what the environment variable FASTREDUCE_COMPRESSION says, or none. A "
        "script that gives our class a compression= has that one."
    )
    parser.add_argument("--compression", metavar="SPEC", help=help_)
    help_ = "A folder for traces of every step: a file for each rank, and trace.json of all, for Perfetto."
    parser.add_argument("--trace", metavar="DIR", help=help_)
    parser._option_string_actions["--nproc-per-node"].help = "Ranks on this machine; without it one."
    return parser


def run(context: typer.Context) -> None:
    """Run an unedited script with our DDP in the place of torch's, in it and in every Python that it starts.

    fastreduce run [--compression SPEC] [--trace DIR] [options of torchrun]
                   [--gpus N] script.py [its arguments]
    """
    options = parse(run_parser(), context.args)
    try:
        if options.compression is not None:
            Policy.of(options.compression)
            os.environ[ENVIRONMENT_VARIABLE] = options.compression
    except ValueError as error:
        fail(f"--compression: {error}")
    try:
        if options.trace is not None:
            writable_folder(options.trace, f"--trace {options.trace}")
            os.environ[TRACE] = os.path.abspath(options.trace)
        check_variables()
        place = find_place()
    except ValueError as error:
        fail(str(error))
    alone = options.nproc_per_node is None and options.gpus is None
    a_rank = alone and options.nnodes == "1:1" and not options.no_python and "RANK" not in os.environ
    if a_rank and place is not None and place.world_size > 1:  # of those that mpirun or srun has started
        plain = vars(run_parser().parse_args([options.training_script]))
        given = [name for name, value in vars(options).items() if value != plain.get(name)]
        if others := [f"--{name.replace('_', '-')}" for name in given if name not in OF_A_RANK]:
            fail(f"{', '.join(others)}: {place}, and a rank that is there already takes --compression, --trace and -m")
        main(["-m"] * options.module + [options.training_script, *options.training_script_args])
    if alone:  # as torchrun; the script may start its own ranks
        options.nproc_per_node = "1"
        os.environ[worker.ALONE] = "1"
    with tempfile.TemporaryDirectory(prefix="fastreduce-run-") as folder:
        record = Path(folder) / "wrapped"
        record.touch()
        os.environ.update(replacement.environment(str(record)))
        before = stamps(Path(options.trace)) if options.trace is not None else {}
        code = start(options)
        wrapped = replacement.summary(record, alone)
    if options.trace is not None:
        say(merge_after_run(Path(options.trace), before))
    if wrapped or code == 0:  # a run that failed before has said why
        say(wrapped or replacement.NONE_WRAPPED)
    raise typer.Exit(code)
