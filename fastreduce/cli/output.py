"""Where commands print, and what becomes of one whose output cannot be written."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from typing import Any, TextIO, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

PLAIN_WIDTH = 118  # where output goes to a file, an issue or a CI log

command = ""  # the name of the one that runs, which every message begins with


def make_console() -> Console:
    """Of the terminal's width, or of a fixed one where output is no terminal; text is printed as it is."""
    width = None if Console().is_terminal else PLAIN_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


class Output:
    """stdout, until it cannot be written: that is said once, and the command goes on, for its results go to files.

    Attributes:
        failed: whether it could not be written.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.failed = False

    def write(self, text: str) -> int:
        """As a file."""
        try:
            return self._file.write(text)
        except OSError as error:
            self._leave(error)
            return len(text)

    def flush(self) -> None:
        """As a file."""
        try:
            self._file.flush()
        except OSError as error:
            self._leave(error)

    def _leave(self, error: OSError) -> None:
        self.failed = True
        with contextlib.suppress(OSError):
            typer.echo(f"fastreduce: cannot write to stdout: {error.strerror}", err=True)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())  # where the rest goes, what is in its buffer too
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _raises(file: io.TextIOWrapper) -> bool:
    """Whether writing a letter that the file's encoding lacks is an error."""
    # In the C locale, where UTF-8 is left as it is: it lacks none, and bytes of names that are no text come out.
    escapes = file.errors == "surrogateescape" and codecs.lookup(file.encoding).name != "utf-8"
    return escapes or file.errors == "strict"


class Commands(TyperGroup):
    """Commands that print to an `Output`, and whose messages begin with their name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names."""
        global command
        found = super().resolve_command(ctx, args)
        command = found[0] or ""
        return found

    def main(self, *args: Any, **options: Any) -> Any:
        """Run one of them; the exit code is not 0 where what it printed could not be written."""
        before = sys.stdout
        if before is None:  # closed by whoever has started this
            return super().main(*args, **options)
        strict = before if isinstance(before, io.TextIOWrapper) and _raises(before) else None
        errors = "" if strict is None else strict.errors
        if strict is not None:  # no letter that a console lacks costs what was measured
            strict.reconfigure(errors="replace")
        output = Output(before)
        sys.stdout = cast(TextIO, output)
        try:
            return super().main(*args, **options)
        except SystemExit as end:
            output.flush()
            if output.failed and not end.code:
                raise SystemExit(1) from None
            raise
        finally:
            sys.stdout = before
            if strict is not None:
                strict.reconfigure(errors=errors)
