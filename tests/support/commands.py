"""Commands for tests: started in a session of their own, ended with all that they started.

Those whose first word is `fastreduce`, `torchrun` or `python` (with a script) are begun by a fork server, with torch
imported, and so are the ranks that they launch; what else they start begins as anywhere. Tests of how a command or its
ranks begin name an interpreter, or INSTALLED.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from tests.support.fork_server import run_command, server

ROOT = Path(__file__).parents[2]
FASTREDUCE, TORCHRUN, PYTHON = "fastreduce", "torchrun", "python"
INSTALLED = Path(sys.executable).with_name("fastreduce")
"""The command as users have it: it and its ranks are begun by the system, and import torch."""
STACKS_SECONDS = 10.0  # for a process to write its stacks

Done = subprocess.CompletedProcess[str]


class Forked:
    """A running command that a fork server has begun, which alone can wait for it; of `Popen` what tests use."""

    def __init__(self, args: list[str], cwd: Path | None, env: Mapping[str, str], together: bool) -> None:
        self.args = args
        out, to_out = os.pipe()
        err, to_err = (-1, to_out) if together else os.pipe()
        self._forked = server().fork(run_command, args[0], args[1:], cwd, env=env, output=(to_out, to_err))
        for file in {to_out, to_err}:
            os.close(file)
        self._forked.pipe.recv()  # it has a session of its own
        self.pid = self._forked.pid
        self.stdout = open(out)  # noqa: SIM115
        self.stderr = None if together else open(err)  # noqa: SIM115
        self._readers: list[threading.Thread] = []
        self._texts: dict[int, str] = {}

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the signal's number for a signal; None while it runs."""
        return self._forked.poll()

    def poll(self) -> int | None:
        """As `returncode`."""
        return self._forked.poll()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or `subprocess.TimeoutExpired`."""
        return self._forked.wait(timeout)

    def send_signal(self, number: int) -> None:
        """Send a signal to the command alone, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the command alone."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """All that it writes, until it has ended; what was read when `subprocess.TimeoutExpired` is raised is kept."""
        pipes = [pipe for pipe in (self.stdout, self.stderr) if pipe is not None]
        if not self._readers:
            for i, pipe in enumerate(pipes):
                self._readers.append(threading.Thread(target=self._read, args=(i, pipe), daemon=True))
                self._readers[-1].start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._texts[0], self._texts.get(1)

    def _read(self, i: int, pipe: TextIO) -> None:
        self._texts[i] = pipe.read()


Running = subprocess.Popen[str] | Forked


@contextlib.contextmanager
def started(
    *command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, together: bool = False
) -> Iterator[Running]:
    """A running command with pipes for its output, both in one if `together`; nothing of it is left afterwards.

    It gets `env`, or this process's environment with this tree as its Python path.
    """
    arguments = [str(word) for word in command]
    env = with_environment() if env is None else env
    process: Running
    if arguments[0] in (FASTREDUCE, TORCHRUN, PYTHON):
        process = Forked(arguments, cwd, env, together)
    else:
        process = subprocess.Popen(
            arguments,
            cwd=cwd,
            env=env,
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


def end(process: Running) -> None:
    """End a command and what it started, in whatever groups."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it may end at any time
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            os.killpg(process.pid, signal.SIGKILL)  # what outlived its own parent, too
    process.wait()


def _abort_all(process: Running) -> str:
    """Let a command and what it has started write their Python stacks to stderr; returns how busy they were.

    From the innermost on, each alone, while the others are stopped: a launcher ends its ranks, and they end with it.
    """
    told, started = [f"load {os.getloadavg()[0]:.1f}"], list[psutil.Process]()
    with contextlib.suppress(psutil.NoSuchProcess):
        command = psutil.Process(process.pid)
        started = [command, *command.children(recursive=True)]
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.suspend()
            spent = each.cpu_times()
            told.append(f"{spent.user + spent.system:.1f} s of processors: {each.pid} {command_line(each)}")
    for each in reversed(started):
        with contextlib.suppress(psutil.NoSuchProcess):
            # To the main thread, whose stack stands still then: another one that read it in use was ended by SIGSEGV.
            ctypes.CDLL(None).tgkill(each.pid, each.pid, signal.SIGABRT)
            each.resume()
            deadline = time.monotonic() + STACKS_SECONDS
            while each.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.02)
            each.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what outlived its own parent, too
    return "\n".join(told)


def finish(process: Running, seconds: float) -> Done:
    """The end of a command, within `seconds`; else the test fails with what it has written, and where it was."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        busy = _abort_all(process)
        end(process)
        out, err = process.communicate()
        pytest.fail(f"{process.args!r}: still running after {seconds:g} s\n{busy}\n{out}{err or ''}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(
    *command: object,
    seconds: float = 300,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    together: bool = False,
) -> Done:
    """Run a command to its end, within `seconds`; arguments as in `started`."""
    with started(*command, cwd=cwd, env=env, together=together) as process:
        return finish(process, seconds)


def run_by_hand(script: Path, *arguments: object, ranks: int) -> list[Done]:
    """The ends of ranks that no launcher holds together, each within 100 s; rank 0 has the store."""
    env = with_environment(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo"
    )
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(PYTHON, script, *arguments, env={**env, "RANK": str(rank)}, together=True))
            for rank in range(ranks)
        ]
        return [finish(process, 100) for process in processes]


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
    """A port that nobody uses now, of those that the system gives to nobody: else a rank beside it may get it."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(given // 2, given)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
