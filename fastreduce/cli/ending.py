"""How a command ends early: by a signal, or with a message."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

import typer

from . import output, variables

LOGS = "logs"  # the folder beside results
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
_PACKAGES = {"sklearn": "scikit-learn"}  # what a module is installed by, where the names differ


class SignalError(Exception):
    """The signal that this process received.

    Attributes:
        code: the exit code that follows from it.
    """

    def __init__(self, received: signal.Signals) -> None:
        super().__init__(f"{received.name}: all ranks were ended")
        self.received, self.code = received, 128 + received


@contextlib.contextmanager
def signals_end_ranks() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and a closed terminal raise here, so that ranks are ended and waited for."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SignalError(signal.Signals(number))

    with _handled_by(leave):
        yield


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """Let a signal that comes meanwhile end the command behind this, and a second one at once.

    Raises:
        typer.Exit: with 128 + the signal that came.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        said = f"{signal.Signals(number).name}: what was measured is written first; once more ends at once"
        typer.echo(f"fastreduce {output.command}: {said}", err=True)

    with _handled_by(note):
        yield
    if received:
        raise typer.Exit(128 + received[0])


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # else of nohup, or &
    before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def fail(message: str, code: int = 2) -> NoReturn:
    """End the command with a message."""
    typer.echo(f"fastreduce {output.command}: {message}", err=True)
    raise typer.Exit(code)


def need(*modules: str) -> None:
    """End the command if some of the modules are not installed."""
    lacking = [_PACKAGES.get(module, module) for module in modules if find_spec(module) is None]
    if lacking:
        are = "is" if len(lacking) == 1 else "are"
        fail(f"{' and '.join(lacking)} {are} missing: pip install {' '.join(lacking)}")


def check_variables() -> None:
    """End the command if one of our environment variables is wrong, by which every training would fail."""
    try:
        variables.check_variables()
    except ValueError as error:
        fail(str(error))


def make_folder(out: Path, files: Iterable[str]) -> None:
    """Make the folder for `files` of results, or end the command before it measures what it could not write."""
    with writing(2), contextlib.suppress(FileExistsError):
        out.mkdir(parents=True, exist_ok=True)
    for path, wants_folder in [(out, True), (out / LOGS, True), *((out / name, False) for name in files)]:
        if not path.exists():
            continue
        if path.is_dir() != wants_folder:
            fail(f"cannot write to {path}: it is {'no' if wants_folder else 'a'} folder")
        if not os.access(path, os.W_OK):
            fail(f"cannot write to {path}: permission denied")


@contextlib.contextmanager
def writing(code: int = 1) -> Iterator[None]:
    """Around what writes results: end the command with a message where it cannot, because the disk is full, say."""
    try:
        yield
    except OSError as error:
        fail(f"cannot write to {error.filename or 'the folder for results'}: {error.strerror}", code)
