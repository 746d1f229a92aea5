"""Run an unedited script with our DDP in the place of torch's: `python -m fastreduce.run script.py …`.

Under torchrun: `torchrun --nproc_per_node=2 -m fastreduce.run script.py …`, or in one command
`fastreduce run --nproc_per_node=2 script.py …`.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.nn.parallel
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from .compression import ENVIRONMENT_VARIABLE, Compression
from .ddp import DistributedDataParallel

USAGE = "usage: python -m fastreduce.run [--compression SPEC] script.py [arguments of the script]"


def replace_torchs_class() -> None:
    """Let `torch.nn.parallel.DistributedDataParallel` be ours from now on.

    The name in `torch.nn.parallel.distributed` stays torch's: Dynamo finds the active module by it. A wrapper
    that a script or a framework makes by that name warns.
    """
    torch.nn.parallel.DistributedDataParallel = DistributedDataParallel  # type: ignore[misc]
    construct = TorchDDP.__init__

    @functools.wraps(construct)
    def warn_and_construct(self: TorchDDP, *args: Any, **kwargs: Any) -> None:
        if type(self) is TorchDDP:
            warnings.warn(
                "this is torch's own DistributedDataParallel: it was imported from torch.nn.parallel.distributed, "
                "where fastreduce does not replace it. Pass fastreduce.DistributedDataParallel (docs/frameworks.md)",
                stacklevel=2,
            )
        construct(self, *args, **kwargs)

    TorchDDP.__init__ = warn_and_construct  # type: ignore[method-assign]


def main(arguments: list[str] | None = None) -> None:
    """Replace torch's class, say so on rank 0, and run the script as `__main__`.

    Raises:
        SystemExit: with a message, if there is no such script or setting.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--compression"] and len(arguments) > 1:
        os.environ[ENVIRONMENT_VARIABLE] = arguments[1]
        arguments = arguments[2:]
    elif arguments and arguments[0].startswith("--compression="):
        os.environ[ENVIRONMENT_VARIABLE] = arguments[0].partition("=")[2]
        arguments = arguments[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(USAGE)
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"fastreduce run: there is no script {str(script)!r}")
    try:
        setting = Compression.resolve(None)
    except ValueError as error:
        sys.exit(f"fastreduce run: {error}")

    replace_torchs_class()
    if os.environ.get("RANK", "0") == "0":
        print(
            f"fastreduce: torch's DistributedDataParallel is ours in {script.name}, compression {setting}", flush=True
        )
    sys.argv = arguments
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
