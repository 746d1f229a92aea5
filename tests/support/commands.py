"""Commands for tests: started in a process group of their own, ended with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
FASTREDUCE = (sys.executable, "-c", "from fastreduce.cli import main; main()")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")

Done = subprocess.CompletedProcess[str]


@contextlib.contextmanager
def started(
    *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, together: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A running command with pipes for its output, both in one if `together`; nothing of it is left afterwards.

    It gets `env`, or this process's environment with this tree as its Python path.
    """
    process = subprocess.Popen(
        [str(word) for word in command],
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


def with_environment(**more: str) -> dict[str, str]:
    """This process's environment, this tree as its Python path, and more."""
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port
