"""Run an unedited script with our DDP in the place of torch's: `python -m fastreduce.run script.py …`.

Under torchrun: `torchrun --nproc_per_node=2 -m fastreduce.run script.py …`, or in one command
`fastreduce run --nproc_per_node=2 script.py …`. Under mpirun and srun it gives the script torchrun's variables.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

from ..compression import ENVIRONMENT_VARIABLE
from ..environment.engines import translate
from ..policy import Policy
from . import replacement

USAGE = "usage: python -m fastreduce.run [--compression SPEC] (script.py | -m module) [arguments of the script]"
WORKER = Path(__file__).parent / "worker.py"


def replace_torchs_class() -> None:
    """Let torch's DistributedDataParallel be ours in this process from now on, by whatever name and in subclasses.

    For notebooks and tests; `fastreduce run` does it in every process that a script starts.
    """
    torchs_module = importlib.import_module(replacement.TORCHS_MODULE)
    replacement.replace(torchs_module)
    replacement.take_name(torchs_module)


def restore_torchs_class() -> None:
    """Let it be torch's again; what has become ours stays so."""
    replacement.restore(importlib.import_module(replacement.TORCHS_MODULE))


def main(arguments: list[str] | None = None) -> NoReturn:
    """Become the script: the same process starts anew, as part of a run.

    Raises:
        SystemExit: with a message, if there is no such script or setting.
    """
    setting, kind, script = _parse(sys.argv[1:] if arguments is None else arguments)
    if setting is not None:
        os.environ[ENVIRONMENT_VARIABLE] = setting
    try:
        Policy.of(None)
        replacement.seed()
        translate()
    except ValueError as error:
        _fail(str(error))
    if kind == "module" and PathFinder.find_spec(script[0].partition(".")[0], [os.getcwd(), *sys.path]) is None:
        _fail(f"there is no module {script[0]!r}")
    if kind == "script" and not Path(script[0]).exists():
        _fail(f"there is no script {script[0]!r}")
    if sys.flags.ignore_environment or sys.flags.no_site:
        _fail("Python's options -I, -E and -S keep ours from the script: start without them")
    os.environ.update(replacement.environment(replacement.record_in_memory(), owner=os.getpid()))
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *options, str(WORKER), kind, *script])


def _parse(arguments: list[str]) -> tuple[str | None, str, list[str]]:
    """The setting, "script" or "module", and its name with its arguments, which are taken as they are."""
    setting, kind = None, "script"
    while arguments and arguments[0].startswith("-"):
        option, *arguments = arguments
        name, equals, value = option.partition("=")
        if name == "--compression" and (equals or arguments):
            setting = value if equals else arguments.pop(0)
        elif option in ("-h", "--help"):
            print(USAGE)
            sys.exit()
        elif option == "-m":
            kind = "module"
            break
        elif option == "--":
            break
        else:
            arguments = []
    if not arguments:
        print(USAGE, file=sys.stderr)
        sys.exit(2)
    return setting, kind, arguments


def _fail(message: str) -> NoReturn:
    print(f"fastreduce run: {message}", file=sys.stderr)
    sys.exit(2)
