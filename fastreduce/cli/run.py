"""`fastreduce run`: torchrun, with torch's DistributedDataParallel replaced by ours in an unedited script."""

from __future__ import annotations

from typing import Annotated

import typer

from ..compression import Compression


def run(
    context: typer.Context,
    compression: Annotated[
        str | None, typer.Option(help="The setting, such as fp16; default: FASTREDUCE_COMPRESSION, or none.")
    ] = None,
) -> None:
    """Run an unedited script under torchrun with our DDP in the place of torch's.

    fastreduce run [--compression SPEC] [options of torchrun] script.py [arguments of the script]
    """
    from torch.distributed import run as torchrun

    if compression is not None:
        try:
            Compression.parse(compression)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--compression") from error
    arguments = torchrun.get_args_parser().parse_args(context.args)
    chosen = [] if compression is None else [f"--compression={compression}"]
    arguments.training_script_args = [*chosen, arguments.training_script, *arguments.training_script_args]
    arguments.training_script, arguments.module = "fastreduce.run", True
    torchrun.run(arguments)
