"""Ranks on this machine as processes: started, joined, watched and ended together."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.util
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ..errors import RanksFailedError, SettingError
from .process_groups import init_process_group
from .rendezvous import LOOPBACK, serve

EXIT_SECONDS = 5.0  # for exit handlers, once a rank has handed over its value
FOREVER = timedelta(days=365)
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Group:
    """The ranks `first … first + here - 1` of `world_size`, which run on this machine, and where all of them meet.

    With `port` 0 a free one is taken, which only works where all ranks run here.
    """

    here: int
    world_size: int
    first: int = 0
    host: str = LOOPBACK
    port: int = 0
    timeout: timedelta = dist.default_pg_timeout

    @property
    def alone(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.world_size == self.here


def run_ranks(
    function: Callable[..., Any],
    group: Group,
    *args: object,
    on_report: Callable[[Any], None] | None = None,
    stall_seconds: float | None = None,
    start_method: str = "spawn",
) -> list[Any]:
    """Run `function` on ranks that have a process group; what they return, in rank order.

    It is called as `function(rank, report, *args)` with `on_report`, which sees here what a rank hands to `report`,
    and as `function(*args)` without. Values travel pickled, tensors in them by value. Ranks leave together, and every
    one has ended when this returns or raises, whatever happened, Ctrl-C included.

    Raises:
        RanksFailedError: if a rank raised or died, or if no rank reported for `stall_seconds`. Its cause is the
            rank's exception, where that can be pickled.
        SettingError: if the port is in use.
    """
    context: Any = multiprocessing.get_context(start_method)
    store = _serve(group) if group.first == 0 else None
    host, port = (group.host, group.port) if store is None else (LOOPBACK if group.alone else group.host, store.port)
    processes: list[Any] = []
    pipes: list[Connection] = []
    try:
        # Children inherit that interrupts are ignored: Ctrl-C reaches this process alone, which ends them.
        with _handlers_behind(start_method), _interrupts_ignored():
            for local_rank in range(group.here):
                ours, theirs = context.Pipe(duplex=False)
                rank = _Rank(group, local_rank, os.getpid(), host, port, on_report is not None, start_method)
                process = context.Process(target=_work, args=(rank, theirs, pickle.dumps((function, args))))
                process.start()
                theirs.close()  # so that a dead rank reads as end of file
                processes.append(process)
                pipes.append(ours)
        values = _collect(group.first, processes, pipes, on_report, stall_seconds)
        for process in processes:
            process.join(EXIT_SECONDS)
        return values
    finally:
        with _interrupts_ignored():
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _serve(group: Group) -> dist.TCPStore:
    """The store, on loopback where all ranks run here."""
    try:
        return serve(group.port, here_only=group.alone)
    except OSError as error:
        where = f"port {group.port} of {LOOPBACK if group.alone else 'this machine'}"
        raise SettingError(f"{where}: {error.strerror or error}; port=0 takes a free one on one machine") from error


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is ever interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _handlers_behind(start_method: str) -> Iterator[None]:
    """Let signals' handlers run behind the block: where one raised in it, a process would begin without its function.

    A fork needs no such thing, and inherits them.
    """
    if start_method == "fork" or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    known = {each: signal.getsignal(each) for each in signal.valid_signals()}
    handlers = {each: handler for each, handler in known.items() if callable(handler)}
    for each in handlers:
        signal.signal(each, lambda number, _: came.append(number))
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)


def _collect(
    first: int,
    processes: Sequence[Any],
    pipes: list[Connection],
    on_report: Callable[[Any], None] | None,
    stall_seconds: float | None,
) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(processes):
        waiting = {pipe: local for local, pipe in enumerate(pipes) if local not in values}
        ready = wait(list(waiting), stall_seconds)
        if not ready:
            raise RanksFailedError(f"no rank has reported anything for {stall_seconds:g} s: they hang")
        failures: list[tuple[str, BaseException | None]] = []
        for pipe in ready:
            assert isinstance(pipe, Connection)
            local = waiting[pipe]
            kind, value = _receive(pipe, processes[local])
            if kind == "report" and on_report is not None:
                on_report(value)
            elif kind == "value":
                values[local] = value
            else:
                text, error = value
                failures.append((f"rank {first + local} {text}", error))
        if failures:  # the first to arrive: others fail because of it
            raise RanksFailedError("\n".join(text for text, _ in failures)) from failures[0][1]
    return [values[local] for local in range(len(processes))]


def name_of_signal(number: int) -> str:
    """As `SIGTERM`; Linux's real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _receive(pipe: Connection, process: Any) -> tuple[str, Any]:
    try:
        data = pipe.recv_bytes()
    except (EOFError, OSError):
        process.join()
        code = process.exitcode or 0
        fate = f"was ended by {name_of_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        return "failure", (fate, None)
    kind, value = pickle.loads(data)  # of a pipe that only the process that was started here holds
    if kind == "failure":
        text, pickled = value
        error = None
        with contextlib.suppress(Exception):  # an exception that cannot be made anew from its arguments
            error = pickle.loads(pickled)
        return kind, (text, error)
    return kind, value


@dataclass(frozen=True)
class _Rank:
    """What a new process needs to know."""

    group: Group
    local_rank: int
    parent: int  # a process id
    host: str
    port: int
    reports: bool
    start_method: str

    def join(self) -> dist.TCPStore:
        """Set environment and device up, and make the process group."""
        rank = self.group.first + self.local_rank
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.group.world_size),
            LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.group.here),
            MASTER_ADDR=self.host,
            MASTER_PORT=str(self.port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # as under torchrun, nobody here is to serve it
            TORCHELASTIC_RESTART_COUNT="0",
        )
        if self.group.alone:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        gpus = torch.cuda.device_count() >= self.group.here
        if gpus:
            torch.cuda.set_device(self.local_rank)
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=self.group.timeout)
        init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=self.group.world_size,
            timeout=self.group.timeout,
        )
        return store

    def leave(self, store: dist.TCPStore) -> None:
        """Meet the others, so that nobody waits for a rank that is gone; whether or not there is a group still."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        # No `meet`, whose ranks look now and then: the process with the store ends as soon as its own ranks have left.
        if store.add("left", 1) == self.group.world_size:
            store.set("all have left", "")
        # On one machine a rank that dies ends all: then waiting for one that still works needs no limit.
        store.wait(["all have left"], FOREVER if self.group.alone else self.group.timeout)


def _work(rank: _Rank, pipe: Connection, job: bytes) -> None:
    os.setsid()  # one signal reaches what the function starts, too
    # Under forkserver the server is the kernel's parent; it ends with ours.
    _end_with(os.getppid() if rank.start_method == "forkserver" else rank.parent)
    try:
        store = rank.join()
        function, args = pickle.loads(job)  # handed over by the process that started this one
        if rank.reports:
            args = (rank.group.first + rank.local_rank, lambda value: _send(pipe, ("report", value)), *args)
        data = pickle.dumps(("value", function(*args)))
        rank.leave(store)
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:
        sys.last_value = error  # as the interpreter has it: exit handlers tell those who wait for this rank
        data = pickle.dumps(("failure", (f"failed:\n{traceback.format_exc().rstrip()}", _pickled(error))))
    pipe.send_bytes(data)
    if rank.start_method == "fork":  # what the parent registered is not for this process
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    else:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: there torch's own DDP over gloo aborts now and then.
    os._exit(0)


def _send(pipe: Connection, message: tuple[str, Any]) -> None:
    pipe.send_bytes(pickle.dumps(message))


def _pickled(error: BaseException) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return b""


def _end_with(parent: int) -> None:
    """However it ends: without it, a rank would wait for its peers until their timeout.

    The kernel ends this process, whatever it is doing: a thread waits for its turn while kernels compile. The thread
    ends what the rank has started.
    """
    threading.Thread(target=_end_group_with_parent, daemon=True).start()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os.killpg(0, signal.SIGKILL)


def _end_group_with_parent() -> None:
    process = multiprocessing.parent_process()
    assert process is not None
    wait([process.sentinel])
    os.killpg(0, signal.SIGKILL)
