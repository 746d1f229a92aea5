"""Real ranks for tests: functions run in several processes that are joined over gloo.

`run_ranks(fn, world_size, *args)` starts fresh processes. A `RankPool` (fixtures `ranks2` and `ranks3`) keeps its
processes and runs many functions. In both, `fn` is defined at module level, is called as `fn(rank, world_size, *args)`
on every rank with the default process group up, and its return values come back in rank order. Whatever goes wrong on
a rank, its exit included, ends in one `RankError` that shows it.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import io
import multiprocessing.connection
import os
import random
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fastreduce import FastreduceError
from tests.support.fork_server import Forked, end_behind_handlers, server

T = TypeVar("T")

START_SECONDS = 150.0  # importing torch and joining, on a busy machine
RUN_SECONDS = 240.0  # of one function, likewise
EXIT_SECONDS = 60.0
GRACE_SECONDS = 2.0  # for the other ranks to report too, once one has failed

# For the fixture `ranks`: its own, and three on two hosts, which reduce in two levels.
OVER_HOSTS = pytest.mark.parametrize(
    "ranks",
    [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 21))],
    indirect=True,
    ids=["2 ranks", "3 ranks", "2+1 ranks"],
)


class RankError(AssertionError):
    """At least one rank raised, died, hung or did not exit cleanly."""


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = RUN_SECONDS,
    check_exit: bool = True,
    hosts: str = "",
) -> list[T]:
    """`fn(rank, world_size, *args)` on fresh processes; `timeout` counts from when all have joined."""
    with RankPool(world_size, check_exit, hosts) as pool:
        return pool.run(fn, *args, timeout=timeout)


class RankPool:
    """`world_size` processes that stay alive between runs; started at the first run after a failure too.

    `hosts` names the host of each rank by a letter: "aab" puts the third on a host of its own.
    """

    def __init__(self, world_size: int, check_exit: bool = True, hosts: str = "") -> None:
        self.world_size = world_size
        self.check_exit, self.hosts = check_exit, hosts
        self._processes: list[Forked] = []
        self._stack_files: list[Path] = []

    def run(self, fn: Callable[..., T], *args: Any, timeout: float = RUN_SECONDS) -> list[T]:
        """The values of `fn(rank, world_size, *args)` in rank order; a failure ends the processes."""
        try:
            if not self._processes:
                self._start()
                self._answers("joining", START_SECONDS)
            self._send((fn, args))
            return self._answers(fn.__name__, timeout)
        except BaseException:
            self.kill()
            raise

    def close(self) -> None:
        """End the processes as a script ends, each with exit code 0; without `check_exit` at once."""
        if not self.check_exit:
            self.kill()
            return
        self._send(None)
        deadline = time.monotonic() + EXIT_SECONDS
        codes = [process.poll(max(0.0, deadline - time.monotonic())) for process in self._processes]
        reports = [f"rank {rank}: {self._fate(rank)}" for rank, code in enumerate(codes) if code != 0]
        self.kill()
        if reports:
            raise RankError("ranks that did not exit cleanly:\n" + "\n".join(reports))

    def kill(self) -> None:
        """End the processes now; the next run starts new ones."""
        for process in self._processes:
            process.kill()
        for path in self._stack_files:
            path.unlink()
        self._processes, self._stack_files = [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()

    def _start(self) -> None:
        # The store lives here, so that it outlasts every rank; port 0 lets the system choose a free one.
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            handle, stack_file = tempfile.mkstemp(prefix=f"rank{rank}-", suffix=".stacks")
            os.close(handle)
            self._stack_files.append(Path(stack_file))
            host = self.hosts[rank] if self.hosts else ""
            self._processes.append(server(rank).fork(_work, rank, self.world_size, self._store.port, stack_file, host))

    def _send(self, job: Any) -> None:
        data = _dump(job)
        for process in self._processes:
            with contextlib.suppress(OSError):  # a dead rank is found where its answer or its end is read
                process.pipe.send_bytes(data)

    def _answers(self, doing: str, timeout: float) -> list[Any]:
        """One answer of each rank, or a `RankError` with what every rank that failed has to say."""
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(values) + len(failures) < self.world_size:
            waiting = {p.pipe: r for r, p in enumerate(self._processes) if r not in values and r not in failures}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    good, answer = _load(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].poll(EXIT_SECONDS)
                    good, answer = False, self._fate(rank)
                if good:
                    values[rank] = answer
                else:
                    failures[rank] = answer
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if len(values) < self.world_size:
            silent = [rank for rank in range(self.world_size) if rank not in values and rank not in failures]
            why = "one had failed" if failures else f"{timeout:g} s"
            reports = [f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures)]
            reports += [f"--- rank {rank}: no answer when {why} ---\n{self._fate(rank)}" for rank in silent]
            bad = sorted([*failures, *silent])
            raise RankError(f"{doing}: rank {', '.join(map(str, bad))} failed\n" + "\n".join(reports))
        return [values[rank] for rank in range(self.world_size)]

    def _fate(self, rank: int) -> str:
        """How a process ended, or where its threads are if it still runs."""
        code = self._processes[rank].poll()
        if code is None:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            return "still running\n" + _written(self._stack_files[rank])
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _written(path: Path) -> str:
    """What another process has written, once it writes no more."""
    deadline, text, before = time.monotonic() + EXIT_SECONDS, "", ""
    while (not text or text != before) and time.monotonic() < deadline:
        time.sleep(0.3)
        before, text = text, path.read_text()
    return text


def _work(pipe: Any, rank: int, world_size: int, port: int, stack_file: str, host: str) -> None:
    """The life of one rank: join, then run and answer until told to end (`None`)."""
    stacks = open(stack_file, "w")  # noqa: SIM115 (faulthandler needs it for good)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        one_thread_and_poison()
        if host:
            os.environ["FASTREDUCE_HOST"] = host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = dist.TCPStore("localhost", port, is_master=False)
        limit = datetime.timedelta(minutes=10)  # the parent's timeout comes first
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        answer = _dump((True, None))
    except BaseException:
        answer = _dump((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    environment = dict(os.environ)
    gc.collect()
    gc.freeze()  # the collection after each run need not walk through torch
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:  # the parent is gone
            os._exit(1)
        try:
            job = _load(job)
            if job is None:
                break
            fn, args = job
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            answer = _dump((True, fn(rank, world_size, *args)))
        except BaseException:
            answer = _dump((False, traceback.format_exc()))
        finally:
            os.environ.clear()
            os.environ.update(environment)
        del job
        fn = args = None
        gc.collect()
        gc.freeze()  # nor what a run has imported or compiled
        pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank:  # the first one shows that nothing goes wrong behind the exit handlers
        end_behind_handlers()


def message(call: Callable[[], Any]) -> str:
    """What a call raises, kind and text; any other exception than ours goes through."""
    try:
        call()
    except FastreduceError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def with_time(test: Callable[[float], object], seconds: float) -> None:
    """`test(seconds)`; where that fails, a warning of it, and the same with ten times as many.

    A group's short timeout, under which most calls of a test are to succeed, also ends what a busy machine holds up;
    and there a rank that is late by little does not stand out.
    """
    try:
        test(seconds)
    except Exception as error:
        warnings.warn(f"not with {seconds:g} s: {error}", stacklevel=2)
        test(10 * seconds)


def one_thread_and_poison() -> None:
    """One thread a process, and `torch.empty` full of NaN, so that a slot never written shows."""
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms would import triton: seconds
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def _dump(value: Any) -> bytes:
    """Pickled with tensors by value: nothing is shared between processes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)
