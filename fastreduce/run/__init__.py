"""Run an unedited script with our DDP in the place of torch's: `python -m fastreduce.run script.py …`.

Under torchrun: `torchrun --nproc_per_node=2 -m fastreduce.run script.py …`, or in one command
`fastreduce run --nproc_per_node=2 script.py …`. Under mpirun and srun it gives the script torchrun's variables.
"""

from __future__ import annotations

import importlib
import os
import shutil
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
    if why := why_not_found(kind, script[0]):
        _fail(why)
    if sys.flags.ignore_environment or sys.flags.no_site:
        _fail("Python's options -I, -E and -S keep ours from the script: start without them")
    os.environ.update(replacement.environment(replacement.record_in_memory(), owner=os.getpid()))
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    os.execv(sys.executable, [sys.executable, *options, str(WORKER), kind, *script])


def why_not_found(kind: str, name: str) -> str:
    """That there is no script, module or program of this name, where there is none; else ""."""
    if kind == "module":
        top, places = name.partition(".")[0], [os.getcwd(), *sys.path]
        found = any(finder.find_spec(top, places if finder is PathFinder else None) for finder in sys.meta_path)
    elif kind == "program":
        found = shutil.which(name) is not None
    else:
        found = os.path.exists(name)  # pathlib's raises where a name is too long
        if os.path.isdir(name) and not (Path(name) / "__main__.py").exists():
            return f"{name!r} is a folder without a __main__.py: give the script in it"
    return "" if found else f"there is no {kind} {name!r}"


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
