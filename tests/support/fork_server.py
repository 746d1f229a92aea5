"""Processes that begin with torch imported: a server imports it once, and forks itself.

Importing torch takes seconds, a fork milliseconds. What comes of a fork is a process as any other: it has the
environment that its owner has now, random seeds of its own and a pipe to its owner, and ends as an interpreter ends,
with exit handlers. Only the seed of `hash` is its server's: processes that must not agree by chance have several.

The workers of pytest-xdist share servers. A launcher that such a server has begun has one of its own, forked before the
launcher has threads: the ranks that it starts begin as forks too, and are its grandchildren.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import numba
import numpy as np

LENGTH = struct.Struct("Q")
PR_SET_PDEATHSIG = 1


class Forked:
    """A process of a server's, and this end of its pipe. Only its own end closes the other one."""

    def __init__(self, pid: int, pipe: Connection[Any, Any], status: int) -> None:
        self.pid, self.pipe, self._status = pid, pipe, Connection(status, writable=False)
        self._code: int | None = None

    def poll(self, timeout: float | None = 0.0) -> int | None:
        """The exit code, minus the signal's number for a signal, or None if it still runs after `timeout` seconds."""
        if self._code is None and wait([self._status], timeout):
            (self._code,) = struct.unpack("i", os.read(self._status.fileno(), 4))
            self._status.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as `poll`; `subprocess.TimeoutExpired` if it still runs after `timeout` seconds."""
        code = self.poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    @property
    def returncode(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.poll()

    def terminate(self) -> None:
        """Ask the process to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End the process now, and wait for it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # not yet taken from the system: the server tells its end first
            self.poll(None)
        self.pipe.close()


class ForkServer:
    """This end of a channel to a process that forks itself whenever it is told to."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._channel, self._process = channel, process
        self._lock = threading.Lock()

    @classmethod
    def started(cls, listener: socket.socket | None = None) -> ForkServer:
        """A process with torch and fastreduce imported, which ends with this one; others find it at `listener`."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        # Whoever asks torch for GPUs would start CUDA here, and no fork could use it then.
        path, nvml = os.pathsep.join([root, *sys.path]), "PYTORCH_NVML_BASED_CUDA_CHECK"
        files = [each.fileno() for each in (theirs, listener) if each is not None]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", *map(str, files)],
            env={**os.environ, "PYTHONPATH": path, nvml: "1"},
            pass_fds=files,
        )
        theirs.close()
        return cls(ours, process)

    @classmethod
    def found(cls, address: str) -> ForkServer:
        """One that another process has started."""
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(address)
        return cls(channel)

    def fork(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        output: tuple[int, int] = (1, 2),
    ) -> Forked:
        """A process that calls `function(pipe, *args)`, defined at module level, and ends with what it returns.

        It gets `env`, or this process's environment, and writes into the files `output`, or where this one writes.
        """
        ours, theirs = Pipe()
        status, to_status = os.pipe()
        job = pickle.dumps(
            (dict(os.environ if env is None else env), os.getcwd(), sys.path, pickle.dumps((function, args)))
        )
        with self._lock:
            socket.send_fds(self._channel, [LENGTH.pack(len(job))], [theirs.fileno(), to_status, *output])
            self._channel.sendall(job)
            (pid,) = LENGTH.unpack(_read(self._channel.fileno(), LENGTH.size))
        theirs.close()
        os.close(to_status)
        return Forked(pid, ours, status)

    def close(self) -> None:
        """End the server, if this process has started it; what it has forked goes on."""
        self._channel.close()
        if self._process is not None:
            self._process.wait()


_servers: dict[int, ForkServer] = {}
_starting = threading.Lock()
_shared: list[str] = []


@functools.cache
def share() -> list[str]:
    """Start the servers, and tell where other processes find them: by `use`, before they ask for one."""
    addresses = []
    for rank in range(2):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0fastreduce-fork-server-{os.getpid()}-{rank}")
            listener.listen()
            _servers[rank] = ForkServer.started(listener)
            addresses.append(listener.getsockname().decode())
    return addresses


def use(addresses: list[str]) -> None:
    """Let `server` be those that another process shares."""
    _shared[:] = addresses


def server(rank: int = 0) -> ForkServer:
    """This process's server for such ranks: even and odd ones have seeds of `hash` of their own."""
    with _starting:
        if rank % 2 not in _servers:
            _servers[rank % 2] = ForkServer.found(_shared[rank % 2]) if _shared else ForkServer.started()
        return _servers[rank % 2]


@atexit.register
def _end_servers() -> None:
    while _servers:
        _servers.popitem()[1].close()


class _Job(NamedTuple):
    data: bytes
    pipe: int
    output: list[int]


def _read(file: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(file, size - len(data))
        if not more:
            raise EOFError("the fork server, or its owner, is gone")
        data += more
    return data


def _serve(owner: socket.socket, listener: socket.socket | None = None) -> _Job | None:
    """Fork whenever the owner or a client says so: a job in each process that comes of it, None in the end."""
    running: dict[int, tuple[int, int]] = {}  # a pidfd → the process, and where its exit code goes
    clients = {owner.fileno(): owner}
    listening = [] if listener is None else [listener.fileno()]
    while True:
        ready, _, _ = select.select([*listening, *clients, *running], [], [])
        for file in running.keys() & ready:
            pid, to_status = running.pop(file)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with contextlib.suppress(BrokenPipeError):  # nobody asks
                os.write(to_status, struct.pack("i", code))
            os.close(file)
            os.close(to_status)
        for file in clients.keys() & ready:
            header, files, _, _ = socket.recv_fds(clients[file], LENGTH.size, 4)
            if not header and file == owner.fileno():
                return None
            if not header:
                clients.pop(file).close()
                continue
            pipe, to_status, *output = files
            data = _read(file, *LENGTH.unpack(header))
            pid = os.fork()
            if not pid:
                for other in (to_status, *running, *(each for _, each in running.values())):
                    os.close(other)
                for each in (*clients.values(), *([] if listener is None else [listener])):
                    each.close()  # themselves: at its end a socket would close what has its number by then
                return _Job(data, pipe, output)
            for other in (pipe, *output):
                os.close(other)
            running[os.pidfd_open(pid)] = pid, to_status
            clients[file].sendall(LENGTH.pack(pid))
        if listener is not None and listening[0] in ready:
            client, _ = listener.accept()
            clients[client.fileno()] = client


def _fastreduce() -> None:
    from fastreduce.cli import main

    main()


def _torchrun() -> None:
    from torch.distributed.run import main

    main()


COMMANDS = {"fastreduce": _fastreduce, "torchrun": _torchrun}


def _get_ready() -> None:
    """What a rank would import and read until its first wrapper stands."""
    for name in (
        "torch._dynamo",
        "torch.distributed.run",
        "fastreduce.distributed",
        "fastreduce.transports.shm.connection",
        "fastreduce.cli",
        "psutil",
    ):
        importlib.import_module(name)
    importlib.import_module("fastreduce.ops.backends").load("numba_cpu")
    target = importlib.import_module("numba.core.registry").cpu_target
    target.typing_context.refresh()
    target.target_context.refresh()
    gc.collect()
    gc.freeze()  # nobody walks through all that when a fork ends
    gc.enable()


def end_behind_handlers() -> NoReturn:
    """End this process as an interpreter ends, up to its exit handlers.

    To take Python apart behind them takes 0.4 s of a core where torch is imported, much of it copies of the server's
    memory.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _hush() -> None:
    """Triton's library tells of hundreds of leaks where objects are frozen."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def run_as_script(pipe: object, script: str, arguments: list[str], output: str) -> None:
    """For `ForkServer.fork`: run a module's or a file's code as Python does, with all that it prints in a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    _run_script([script, *arguments])


def _run_script(words: list[str]) -> None:
    sys.argv, (script, *_) = words, words
    if script == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main))
    elif script.endswith(".py"):
        sys.path.insert(0, os.path.dirname(script))
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def run_command(pipe: Connection, command: str, arguments: list[str], folder: str | None) -> None:
    """For `ForkServer.fork`: a command in `folder`, in a session of its own, of which it tells its owner."""
    os.setsid()
    pipe.send(None)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if folder is not None:
        os.chdir(folder)
    if command == "python":
        _run_script(arguments)
    else:
        if command == "torchrun" or arguments[:1] in (["launch"], ["run"]):
            _fork_ranks()
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = ModuleType("__main__")
        COMMANDS[command]()


def _fork_ranks() -> None:
    """Let the Python processes that torch's launcher starts in this process begin as forks of what it is now."""
    ours, theirs = socket.socketpair()
    if not os.fork():
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        job = _serve(theirs)
        if job is None:
            os._exit(0)
        sys.exit(_begin(job))  # type: ignore[arg-type]
    theirs.close()
    ranks = ForkServer(ours)

    def start(args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, **more: Any) -> Any:
        if args[0] != sys.executable:
            return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, **more)
        output = (1 if stdout is None else stdout.fileno(), 2 if stderr is None else stderr.fileno())
        return ranks.fork(run_rank, list(args[1:]), env=env, output=output)

    name = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    importlib.import_module(name).Popen = start  # type: ignore[attr-defined]


def run_rank(pipe: object, words: list[str]) -> None:
    """For `ForkServer.fork`: what a launcher starts as `python WORDS`, and before it what `fastreduce run` does."""
    os.setsid()
    if words[0] == "-u":
        words = words[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from fastreduce.run import replacement, worker

    if worker.LAUNCHER in os.environ:
        os.environ[worker.LAUNCHER] = str(os.getppid())  # which ends with the launcher
    if replacement.STARTUP in sys.path:
        sys.path.remove(replacement.STARTUP)
        replacement.join_run()
        for name, do in replacement._when_loaded.items():
            if name in sys.modules:
                do(sys.modules[name])
    _run_script(words[1:] if words[0] == "-m" else words)


def _begin(job: _Job) -> object:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate(job.output, 1):
        os.dup2(file, number)
        os.close(file)
    atexit.register(_hush)  # called last
    environment, folder, path, call = pickle.loads(job.data)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *path]
    random.seed()
    np.random.seed()
    numba.config.reload_config()
    function, args = pickle.loads(call)
    return function(Connection(job.pipe), *args)


def main() -> object:
    """The exit status of each process that it forks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # a fifth of what importing takes
    owner, *listener = (socket.socket(fileno=int(file)) for file in sys.argv[1:])
    _get_ready()
    job = _serve(owner, *listener)
    if job is None:
        os._exit(0)
    return _begin(job)


if __name__ == "__main__":
    sys.exit(main())  # type: ignore[arg-type]
