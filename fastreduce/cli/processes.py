"""Ranks on this machine: started, watched and ended together."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 2.0

Report = Callable[[Any], None]
RankFunction = Callable[..., Any]


class RanksFailedError(Exception):
    """A rank raised, died or hung; the message holds the first rank's traceback."""


def run_ranks(
    function: RankFunction,
    ranks: int,
    *args: object,
    on_report: Report = lambda _: None,
    stall_seconds: float = 300.0,
) -> list[Any]:
    """Run `function(rank, report, *args)` on ranks joined over gloo, one thread each.

    What a rank hands to `report` reaches `on_report` here. Every rank has ended when this returns or
    raises, whatever happened, Ctrl-C included.

    Raises:
        RanksFailedError: if a rank raised or died, or if no rank reported for `stall_seconds`.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    processes: list[SpawnProcess] = []
    pipes: list[Connection] = []
    # Children inherit an ignored SIGINT: Ctrl-C reaches this process alone, which ends them.
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, ranks, store.port, stall_seconds, theirs, function, args)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()  # so that a dead rank reads as end of file
            processes.append(process)
            pipes.append(ours)
        signal.signal(signal.SIGINT, interrupt)
        return _collect(processes, pipes, on_report, stall_seconds)
    finally:
        signal.signal(signal.SIGINT, interrupt)
        for process in processes:
            process.kill()
            process.join()


def _collect(
    processes: list[SpawnProcess], pipes: list[Connection], on_report: Report, stall_seconds: float
) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}  # in order of arrival: the first one is the cause
    limit = stall_seconds
    deadline = time.monotonic() + limit
    while len(values) + len(failures) < len(processes):
        silent = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in values and rank not in failures}
        ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = silent[pipe]
            kind, value = _receive(pipe, processes[rank])
            if kind == "report":
                on_report(value)
            elif kind == "value":
                values[rank] = value
            else:
                failures[rank] = value
                limit = GRACE_SECONDS
        deadline = time.monotonic() + limit if not failures else min(deadline, time.monotonic() + limit)
    if failures:
        raise RanksFailedError(_describe(failures))
    if len(values) < len(processes):
        raise RanksFailedError(f"no rank has reported anything for {stall_seconds:g} s: ranks hang")
    return [values[rank] for rank in range(len(processes))]


def _receive(pipe: Connection, process: SpawnProcess) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return (
            "failure",
            f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}",
        )
    return kind, value


def _describe(failures: dict[int, str]) -> str:
    """The first failure in full; the last lines of those that followed from it."""
    (first, text), *others = failures.items()
    lines = [f"rank {first} failed:", text.rstrip()]
    lines += [f"then rank {rank}: {other.rstrip().splitlines()[-1]}" for rank, other in others]
    return "\n".join(lines)


def _work(
    rank: int,
    ranks: int,
    port: int,
    stall_seconds: float,
    pipe: Connection,
    function: RankFunction,
    args: tuple[object, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            store=dist.TCPStore("localhost", port, is_master=False),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=stall_seconds),
        )
        message = "value", function(rank, lambda value: pipe.send(("report", value)), *args)
    except BaseException:
        message = "failure", traceback.format_exc()
    with contextlib.suppress(BrokenPipeError):  # the parent is gone
        pipe.send(message)
    # Not by way of the interpreter's end: there torch's own DDP over gloo aborts now and then.
    os._exit(0)
