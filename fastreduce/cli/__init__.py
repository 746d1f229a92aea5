"""The command line: a file for each command, or a folder where it is a large one."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import __version__
from .advise import advise
from .compare import CompareCommand, compare
from .doctor import doctor
from .launch import LaunchCommand, launch
from .output import Commands
from .report import report
from .run import run
from .trace import trace

main = typer.Typer(
    name="fastreduce",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
main.command(cls=CompareCommand)(advise)
main.command(cls=CompareCommand)(compare)
main.command()(doctor)
main.command()(report)
main.command(cls=LaunchCommand)(run)
main.command(cls=LaunchCommand)(launch)
main.command()(trace)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fastreduce {__version__}")
        raise typer.Exit


@main.callback()
def _fastreduce(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Average gradients across data-parallel ranks, compressed where that pays."""
