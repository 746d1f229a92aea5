"""Commands for tests: started in a session of their own, ended with all that they started.

Those whose first word is `fastreduce`, `torchrun` or `python` (with a script) are begun by a fork server, with torch
imported; what they start themselves begins as anywhere. Tests of how a command begins name an interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.fork_server import run_command, server

ROOT = Path(__file__).parents[2]
FASTREDUCE, TORCHRUN, PYTHON = "fastreduce", "torchrun", "python"

Done = subprocess.CompletedProcess[str]


class Forked(subprocess.Popen[str]):
    """A running command that a fork server has begun, which alone can wait for it.

    What `Popen` does with pipes is wanted, and only by its own methods can it be had: their arguments here are those of
    Python 3.10 to 3.14.
    """

    def _execute_child(self, args: list[str], *more: Any) -> None:
        cwd, env, out, error = more[4], more[5], more[12], more[14]
        self._forked = server().fork(run_command, args[0], args[1:], cwd, env=env, output=(out, error))
        self._forked.pipe.recv()
        self.pid, self._child_created = self._forked.pid, True
        self._close_pipe_fds(*more[9:15])  # type: ignore[attr-defined]

    def _internal_poll(self, **_: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.poll()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._forked.poll(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode


@contextlib.contextmanager
def started(
    *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, together: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A running command with pipes for its output, both in one if `together`; nothing of it is left afterwards.

    It gets `env`, or this process's environment with this tree as its Python path.
    """
    arguments = [str(word) for word in command]
    process = (Forked if arguments[0] in (FASTREDUCE, TORCHRUN, PYTHON) else subprocess.Popen)(
        arguments,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)} if env is None else env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if together else subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def end(process: subprocess.Popen[str]) -> None:
    """End a command and what it started, in whatever groups."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it may end at any time
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.killpg(process.pid, signal.SIGKILL)  # what outlived its own parent, too
    process.wait()


def finish(process: subprocess.Popen[str], seconds: float) -> Done:
    """The end of a command, within `seconds`; else the test fails with what it has written."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        pytest.fail(f"{process.args!r}: still running after {seconds:g} s\n{out}{err or ''}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(
    *command: object,
    seconds: float = 100,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    together: bool = False,
) -> Done:
    """Run a command to its end, within `seconds`; arguments as in `started`."""
    with started(*command, cwd=cwd, env=env, together=together) as process:
        return finish(process, seconds)


def command_line(process: psutil.Process) -> str:
    """A process's command line; "" for one that has ended meanwhile, waited for or not."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def with_environment(**more: str) -> dict[str, str]:
    """This process's environment, this tree as its Python path, and more."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
