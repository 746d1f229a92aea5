"""How a script's ranks are started: options that commands share, and what is made of them."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Annotated

import typer

from ... import FastreduceError
from ...environment.engines import find_place
from ...run import why_not_found
from .. import output
from ..ending import fail

PANEL = "Where else ranks run"

LaunchOption = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND",
        help="Start ranks by this command, to which theirs is added, such as 'mpirun -n 4' or 'srun -n 4'.",
        rich_help_panel=PANEL,
    ),
]
NnodesOption = Annotated[
    int,
    typer.Option(
        min=1,
        envvar="PET_NNODES",
        help="Nodes, on each of which the same command runs, with --ranks of its own; the first one measures and "
        "writes.",
        rich_help_panel=PANEL,
    ),
]
NodeRankOption = Annotated[
    int | None,
    typer.Option(min=0, envvar="PET_NODE_RANK", help="Which of them this is, from 0.", rich_help_panel=PANEL),
]
MasterAddrOption = Annotated[
    str | None,
    typer.Option(envvar="PET_MASTER_ADDR", help="The first node's name or address.", rich_help_panel=PANEL),
]
MasterPortOption = Annotated[
    int,
    typer.Option(min=1, max=65535, envvar="PET_MASTER_PORT", help="A free port of it.", rich_help_panel=PANEL),
]
MASTER_PORT = 29500
MOST_ROUNDS = 100_000  # their turns are listed beforehand


@dataclass(frozen=True)
class Nodes:
    """On how many nodes the same command is run, which of them this is, and where the first one listens."""

    count: int
    rank: int
    address: str
    port: int


def check_timeout(seconds: float) -> None:
    """An error and exit code 2, where --timeout is less than a second, or nan."""
    if not seconds >= 1:
        fail(f"--timeout {seconds:g}: give seconds, 1 or more")


def find_nodes(count: int, rank: int | None, address: str | None, port: int) -> Nodes | None:
    """Those of the options; None where there is one, or an error and exit code 2."""
    if count == 1:
        return None
    if rank is None:
        fail(f"--nnodes {count}: say which of them this is, by --node-rank 0 to {count - 1}")
    if rank >= count:
        fail(f"--node-rank {rank} with --nnodes {count}: give 0 to {count - 1}, which of them this is")
    if address is None:
        fail(f"--nnodes {count}: say where the first one is, by --master-addr")
    return Nodes(count, rank, address, port)


def read_launch(launch: str | None, ranks: int | None, nodes: Nodes | None) -> tuple[str, ...]:
    """The words of --launch; or an error and exit code 2, also where this process is a launcher's rank."""
    if launch is None:
        if started := _started_by():
            words = "srun -n 4" if started.startswith("srun") else "mpirun -n 4"
            fail(
                f"{started}: {output.command} starts ranks itself, for each training anew; --launch '{words}' says how"
            )
        return ()
    try:
        found = tuple(shlex.split(launch))
    except ValueError as error:
        fail(f"--launch {launch}: {error}")
    if ranks is not None or nodes is not None:
        other = "--ranks" if nodes is None else "--nnodes"
        fail(f"--launch and {other} both say what is started: give one of them")
    if why := why_not_found("program", found[0] if found else ""):
        fail(f"--launch {launch}: {why}")
    return found


def _started_by() -> str:
    """Which launcher has made this process one of several ranks, and which; "" where none has."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        return f"torchrun says rank {os.environ.get('RANK')} of {os.environ['WORLD_SIZE']}"
    try:
        place = find_place()
    except FastreduceError as error:
        fail(str(error))
    return str(place) if place is not None and place.world_size > 1 else ""
