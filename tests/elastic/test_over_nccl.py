"""What an elastic training asks of NCCL's transport, over a stand-in for CuPy's NCCL, between real processes."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastreduce import DistributedDataParallel, TransportError, elastic
from fastreduce.elastic import membership, state
from fastreduce.elastic.generations import Generation
from fastreduce.elastic.membership import Membership
from fastreduce.transports import LocalTransport, NcclTransport
from fastreduce.transports.ranks import Subgroup, client_of
from tests.support import nccl_cases as cases
from tests.support.nccl_cases import OnHost, caught, run_case, short_group, world
from tests.support.ranks import RankPool, with_time


def _looks(rank: int, size: int, place: OnHost) -> str:
    """A peer does not come; who waits by looking is not interrupted, and is told when it looks."""
    transport, wire = NcclTransport(short_group(place), interrupts=False), torch.ones(4)
    text = "nothing"
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        synchronize()
        if rank == 0:
            transport.all_reduce(wire).wait()
            while not transport._lease.connection.failed:
                time.sleep(0.01)
            cases.come_by()  # nothing comes
            text = caught(transport.check)
    dist.barrier()
    transport.close()
    return text


def test_who_begins_again_is_not_interrupted(ranks2: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        text, absent = ranks2.run(run_case, _looks, place)
        assert absent == "nothing"
        assert f"did not end within {place.timeout:g} s. No word from rank 1: " in text, text

    with_time(lambda seconds: check(OnHost(mkdtemp(dir=tmp_path), seconds)), 2.0)


def test_an_abort_that_takes_long_ends_nothing_of_the_next_generation(monkeypatch: pytest.MonkeyPatch):
    ended: list[Any] = []

    class Transport(LocalTransport):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def abort(self) -> None:
            ended.append(self.name)
            if self.name == "GPUs of 1":  # meanwhile the main thread goes on with those who are left
                begin(2)

    def begin(number: int) -> None:
        there.generation = Generation(number, (0,), {}, (), "")
        there._control, there.transport = Transport(f"hosts of {number}"), Transport(f"GPUs of {number}")
        there._group = f"beside {number}"

    there: Any = Membership.__new__(Membership)
    monkeypatch.setattr(membership, "abort_beside", ended.append)
    begin(1)
    there.abort(1)
    assert ended == ["hosts of 1", "GPUs of 1", "beside 1"]
    there.abort(1)
    assert len(ended) == 3
    there.abort(2)
    assert ended[3:] == ["hosts of 2", "GPUs of 2", "beside 2"]


def test_a_step_that_fails_though_nobody_is_lost_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch):
    """NCCL finds no network, or no room in /dev/shm: it will find none the next time, either."""
    looks: list[int] = []

    class Broken(LocalTransport):
        def check(self) -> None:
            looks.append(1)
            assert len(looks) < 50, "it goes on for ever"
            raise TransportError("NCCL_ERROR_SYSTEM_ERROR")

    monkeypatch.setattr(Membership, "_connect", lambda *_: Broken())
    ddp: Any = DistributedDataParallel(nn.Linear(3, 3), elastic=True)
    members = elastic.join(ddp, store=dist.HashStore(), timeout=10.0, least=1)
    try:
        with pytest.raises(TransportError, match="rank 0 of 1: step 0 has failed 6 times, though nobody") as raised:
            ddp(torch.ones(1, 3)).sum().backward()
        before: BaseException | None = raised.value
        while before is not None and "NCCL_ERROR_SYSTEM_ERROR" not in str(before):
            before = before.__context__
        assert before is not None
    finally:
        members.leave()
        dist.destroy_process_group()


def test_states_are_read_and_loaded_on_the_gpu_that_is_the_current_one(monkeypatch: pytest.MonkeyPatch):
    of_thread = threading.local()  # as in CUDA

    @contextlib.contextmanager
    def using(device: int) -> Iterator[None]:
        of_thread.device = device
        yield

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(of_thread, "device", 0))
    monkeypatch.setattr(torch.cuda, "device", using)
    of_thread.device = 3
    assert state._together(torch.cuda.current_device, LocalTransport()) == 3


def _some_known(rank: int, size: int, place: OnHost) -> str:
    """Ranks 0 and 2 of three; somebody knows that 2 is gone."""
    if rank == 1:
        return "nothing"
    gone: list[int] = []
    store = client_of(world()).at(f"some of {size}", 30.0)
    some = Subgroup(rank // 2, (0, 2), 3, (0, 2), store, datetime.timedelta(seconds=30), absent=lambda: gone)
    transport, wire = NcclTransport(some), torch.full((4,), rank + 1.0)
    assert (transport.rank, transport.world_size) == (rank // 2, 2)
    transport.all_reduce(wire).wait()
    assert wire.tolist() == [4.0] * 4
    gone += [2]
    text = "nothing" if rank == 2 else caught(lambda: transport.exchange(0))
    transport.close()
    return text


def test_ranks_of_a_group_are_named_as_users_know_them_and_the_gone_are_not_waited_for(
    ranks3: RankPool, tmp_path: Path
):
    begun = time.monotonic()
    first, _, _ = ranks3.run(run_case, _some_known, OnHost(str(tmp_path)))
    assert first.startswith("rank 0 of 3: exchange over NCCL's store failed. No word from rank 2: "), first
    assert time.monotonic() - begun < 25.0
