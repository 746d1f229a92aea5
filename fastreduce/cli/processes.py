"""Ranks on this machine: started, watched and ended together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

Report = Callable[[Any], None]
RankFunction = Callable[..., Any]


class RanksFailedError(Exception):
    """A rank raised, died or hung; the message holds the rank and its traceback."""


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
    while len(values) < len(processes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in values}
        ready = wait(list(waiting), stall_seconds)
        if not ready:
            raise RanksFailedError(f"no rank has reported anything for {stall_seconds:g} s: they hang")
        failures = []
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            kind, value = _receive(pipe, processes[rank])
            if kind == "report":
                on_report(value)
            elif kind == "value":
                values[rank] = value
            else:
                failures.append(f"rank {rank} {value}")
        if failures:  # the first to arrive: others fail because of it
            raise RanksFailedError("\n".join(failures))
    return [values[rank] for rank in range(len(processes))]


def _receive(pipe: Connection, process: SpawnProcess) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        fate = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return "failure", fate
    return kind, value


def _work(
    rank: int,
    ranks: int,
    port: int,
    stall_seconds: float,
    pipe: Connection,
    function: RankFunction,
    args: tuple[object, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
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
        message = "failure", f"failed:\n{traceback.format_exc().rstrip()}"
    pipe.send(message)
    # Not by way of the interpreter's end: there torch's own DDP over gloo aborts now and then.
    os._exit(0)


def _end_with_parent() -> None:
    """However it ended: without it, a rank would wait for its peers until their timeout."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
