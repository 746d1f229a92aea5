"""What the thread that watches NCCL's communicators asks of CUDA, without a GPU."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fastreduce import TransportError
from fastreduce.transports import NcclTransport
from fastreduce.transports.meeting import AbsentError
from fastreduce.transports.nccl import library, watchdog
from fastreduce.transports.nccl.connection import NcclConnection
from tests.support import nccl_cases, nccl_stand_in
from tests.support.ranks import run_ranks


def test_a_watchdog_has_a_context_when_it_asks_the_driver_for_a_capture_mode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """torch's `set_device` gives a thread none for the GPU that is its current one anyway."""
    contexts: list[torch.device] = []
    modes, refuses = [], [False]

    def give_a_context(device: torch.device) -> tuple[int, int]:
        contexts.append(device)
        return 0, 0

    def exchange(mode: Any) -> int:
        if refuses[0] or not contexts:
            return 201  # CUDA_ERROR_INVALID_CONTEXT
        modes.append(mode._obj.value)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", give_a_context)
    library.Cuda().enter_watchdog(torch.device("cuda", 0))
    assert modes == [1] and not caplog.records
    refuses[0] = True
    library.Cuda().enter_watchdog(torch.device("cuda", 0))
    assert "NCCL's watchdog on cuda:0: the driver refuses its thread a capture mode" in caplog.text


@pytest.mark.long
def test_a_process_ends_behind_communicators_whose_group_is_gone(tmp_path: Path):
    """A thread that comes back from C++ when Python has gone aborts the process: seen on a GPU."""
    place = nccl_cases.OnHost(str(tmp_path))
    run_ranks(nccl_cases.run_case, 1, nccl_cases.lets_go_of_what_has_not_ended, place, 2.0)
    assert (tmp_path / "ended").exists()


def test_events_end_before_the_thread_counts_as_ended(tmp_path: Path):
    """At exit nobody waits for it from then on, and an event ends in C++, while Python's lock is free."""
    in_time: list[bool] = []

    class Event(nccl_stand_in.Event):
        def __del__(self) -> None:
            in_time.append(mine() in watchdog.running)

    place, before = nccl_cases.OnHost(str(tmp_path)), set(watchdog.running)
    with place.installed(), patch.object(nccl_stand_in, "Event", Event):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        transport = NcclTransport(nccl_cases.world())
        for _ in range(3):
            transport.all_reduce(torch.ones(3)).wait()
        mine = weakref.ref(*watchdog.running - before)
        thread = mine()._thread
        dist.destroy_process_group()
        transport.close()
        del transport
        gc.collect()
        thread.join(timeout=100)
    assert not thread.is_alive() and mine() is None
    assert in_time and all(in_time)


def _watched_by_none(rank: int, world_size: int, place: nccl_cases.OnHost) -> str:
    def refuse(self: object, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of memory")

    transport, wire = NcclTransport(nccl_cases.world()), torch.ones(4)
    with patch.object(nccl_stand_in.HostCuda, "enter_watchdog", refuse), pytest.raises(TransportError) as told:
        for _ in range(1000):
            transport.all_reduce(wire).wait()
            time.sleep(0.01)
    transport.close()
    return str(told.value)


@pytest.mark.long
def test_a_watchdog_that_cannot_begin_ends_the_connection(tmp_path: Path):
    """Else nobody would look, and a rank that is gone would be waited for without end."""
    for told in run_ranks(nccl_cases.run_case, 2, _watched_by_none, nccl_cases.OnHost(str(tmp_path))):
        assert "watching over NCCL failed: RuntimeError: CUDA error: out of memory" in told


def test_an_error_of_an_exchange_has_the_ranks_that_did_not_come():
    connection: Any = object.__new__(NcclConnection)
    vars(connection).update(_state=threading.Lock(), _failure=None, _calls_inside=0, _me="rank 0 of 3")
    with (
        patch.object(NcclConnection, "_meet", side_effect=AbsentError([1, 2], 3.0)),
        pytest.raises(TransportError, match="No word from rank 1, 2: ") as caught,
    ):
        connection.exchange(1)
    assert caught.value.missing == (1, 2)
