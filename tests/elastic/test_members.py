"""One process of an elastic job among others: what it is called, what it sends, and what it writes and loads."""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastreduce
from fastreduce import (
    DistributedDataParallel,
    NotInitializedError,
    SettingError,
    TransportError,
    elastic,
    load_checkpoint,
    save_checkpoint,
)
from fastreduce.checkpoint import snapshot_file
from fastreduce.elastic import generations, state
from fastreduce.transports import Transport, local_ranks
from tests.elastic.test_law import Group


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def _wrapped(transport: Transport | None = None, setting: str = "none") -> Any:
    """A module, and a group of who trains over a transport."""
    ddp: Any = DistributedDataParallel(nn.Linear(4, 3), elastic=True, compression=setting)
    if transport is not None:
        ddp.reducer.group = group = Group(random.Random(0))
        group.transport, group.commit = transport, lambda: None  # type: ignore[method-assign]
    return ddp


def _train(ddp: Any, steps: int) -> None:
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(2, 4)).square().sum().backward()


def test_counters_are_named_by_the_launchers_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each process is a default group by itself, where all are rank 0."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("FASTREDUCE_COUNTERS", str(tmp_path))
    ddp = _wrapped(local_ranks(1)[0])
    _train(ddp, 1)
    ddp.reducer.close()
    assert {path.name.partition(".")[0] for path in tmp_path.iterdir()} == {"rank2"}


def test_modules_of_ours_are_there_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    """As the documentation and our messages write them, behind `import fastreduce`."""
    for name in ("distributed", "elastic", "fsdp", "hooks"):
        monkeypatch.delattr(fastreduce, name, raising=False)
        assert getattr(fastreduce, name) is sys.modules[f"fastreduce.{name}"]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fastreduce.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_a_process_is_a_member_once():
    members = elastic.join(_wrapped(), store=dist.HashStore(), least=1, timeout=5)
    with pytest.raises(SettingError, match="another module of this process"):
        elastic.join(_wrapped(), store=dist.HashStore(), least=1, timeout=5)
    members.leave()
    elastic.join(_wrapped(), store=dist.HashStore(), least=1, timeout=5).leave()


def test_who_could_not_join_does_not_train_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(elastic, "START_SECONDS", 0.2)
    ddp = _wrapped()
    with pytest.raises(TransportError, match="1 of 2 processes came"):
        elastic.join(ddp, store=dist.HashStore(), least=2, timeout=5)
    with pytest.raises(NotInitializedError, match=r"fastreduce\.elastic\.join") as found:
        ddp(torch.ones(2, 4))
    assert "init_process_group" not in str(found.value), "which would not help"
    elastic.join(ddp, store=dist.HashStore(), least=1, timeout=5).leave()


def test_who_has_ended_before_anybody_began_does_not_count(monkeypatch: pytest.MonkeyPatch):
    """One that was lost and started again would be two, and might train alone."""
    monkeypatch.setattr(elastic, "START_SECONDS", 0.5)
    store = dist.HashStore()
    for told in (r"1 of 2 .*join\)$", r"1 of 2 .*; 1 more came and ended", r"1 of 2 .*; 2 more came"):
        with pytest.raises(TransportError, match=told):
            elastic.join(_wrapped(), store=store, least=2, timeout=5)


def test_who_waits_to_join_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(elastic, "START_SECONDS", 2.0)
    monkeypatch.setattr(generations, "TELL_SECONDS", 0.5)
    ddp, told = _wrapped(), list[str]()
    asking = threading.Timer(0.5, lambda: told.append(ddp.reducer.flight_record().doing))
    asking.start()
    with pytest.raises(TransportError, match="1 of 2 processes came"):
        elastic.join(ddp, store=dist.HashStore(), least=2, timeout=5)
    asking.join()
    assert told[0].startswith("waiting for other ranks"), told
    assert caplog.text.count("1 of 2 processes are here, 0 came and ended; waiting for the others, for 2 s in all") == 1


def test_a_store_that_is_gone_is_told_once(caplog: pytest.LogCaptureFixture):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    members = elastic.join(_wrapped(), store=f"127.0.0.1:{store.port}", least=1, timeout=5)
    del store
    deadline = time.monotonic() + 20.0
    while "Training goes on until" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert caplog.text.count("Training goes on until") == 1
    members.leave()


@pytest.mark.long  # torch's store looks up the name of who connects
def test_a_store_may_have_an_address_of_six():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    try:
        socket.create_connection(("::1", store.port)).close()
    except OSError as error:
        pytest.skip(f"nobody answers at ::1 here: {error}")
    elastic.join(_wrapped(), store=f"[::1]:{store.port}", least=1, timeout=5).leave()


def test_a_cache_that_has_grown_elsewhere_stays_as_it_is():
    modules = [nn.Linear(4, 3), nn.Linear(4, 3)]
    for size, module in enumerate(modules, 2):
        module.register_buffer("cache", torch.full((size,), float(size)), persistent=False)
        module.register_buffer("scale", torch.tensor(float(size)), persistent=False)
    here, there = (state.Model(DistributedDataParallel(module, elastic=True), averages=False) for module in modules)
    here.load_state_dict(there.state_dict())
    assert (modules[0].cache == 2).all() and modules[0].scale == 3  # type: ignore[operator]


class Part:
    """What has a state that only pickle could send."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": np.float64(1.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_a_state_that_cannot_be_sent_is_told_to_who_comes_and_ends_no_training(caplog: pytest.LogCaptureFixture):
    def send(transport: Transport) -> str:
        try:
            state.send({"part": Part()}, 7, transport, 0, print if transport.rank == 1 else None)
        except SettingError as error:
            return str(error)
        return "nothing"

    with ThreadPoolExecutor(2) as threads:
        source, newcomer = threads.map(send, local_ranks(2))
    assert source == "nothing" and "float(x)" in caplog.text
    assert newcomer.startswith("rank 0 cannot send its state") and "float(x)" in newcomer


@pytest.mark.parametrize("while_it_writes", [False, True])
def test_one_that_was_left_out_changes_no_snapshot_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, while_it_writes: bool
):
    """It was stopped, beats again, and is the first member as far as it knows."""
    ddp, path, others = _wrapped(), tmp_path / "run.pt", tmp_path / "run.pt.12345678.unfinished"
    members = elastic.join(ddp, store=dist.HashStore(), least=1, timeout=5)
    save_checkpoint(path, model=ddp, epoch=1)
    written, write = path.read_bytes(), snapshot_file.write

    def go_on_without_it() -> None:
        group = ddp.reducer.group
        group._meetings._propose(generations.Generation(group.generation.number + 1, (77,), {}, (), ""))
        others.touch()

    def write_while_others_go_on(value: Any, file: Path) -> None:
        write(value, file)
        go_on_without_it()

    if while_it_writes:
        monkeypatch.setattr(snapshot_file, "write", write_while_others_go_on)
    else:
        go_on_without_it()
    with pytest.raises(TransportError, match="have gone on without it: start it again"):
        save_checkpoint(path, model=ddp, epoch=2)
    assert sorted(tmp_path.iterdir()) == [path, others] and path.read_bytes() == written
    members.leave()


def test_one_that_was_left_out_leaves_no_residuals(tmp_path: Path):
    ddp, path = _wrapped(setting="int8:error_feedback"), tmp_path / "run.pt"
    members = elastic.join(ddp, store=dist.HashStore(), least=1, timeout=5)
    save_checkpoint(path, model=ddp)
    there, group = sorted(tmp_path.iterdir()), ddp.reducer.group
    group._meetings._propose(generations.Generation(group.generation.number + 1, (77,), {}, (), ""))
    with pytest.raises(TransportError, match="have gone on without it"):
        save_checkpoint(path, model=ddp)
    assert sorted(tmp_path.iterdir()) == there and len(there) == 2
    members.leave()


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_the_first_member_writes_a_checkpoint_that_another_job_goes_on_from(tmp_path: Path, setting: str):
    path = tmp_path / "run.pt"

    def train_and_save(ddp: Any) -> list[Path]:
        _train(ddp, 3)
        told = ddp._get_ddp_logging_data()
        assert (told["rank"], told["world_size"]) == (ddp.reducer.transport.rank, 2)
        if ddp.reducer.transport.rank:
            save_checkpoint(path, model=ddp)
            assert not path.exists()
        return []

    wrapped = [_wrapped(transport, setting) for transport in local_ranks(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(train_and_save, wrapped))
    save_checkpoint(path, model=wrapped[0])
    torch.manual_seed(5)
    ddp = _wrapped(setting=setting)
    drawn = torch.get_rng_state()
    load_checkpoint(path, model=ddp)
    members = elastic.join(ddp, store=dist.HashStore(), least=1, timeout=5)
    assert members.step == 3
    assert torch.equal(ddp.module.weight, wrapped[0].module.weight)
    assert torch.equal(torch.get_rng_state(), drawn), "all would draw the same data"
    _train(ddp, 1)
    assert members.step == 4
    members.leave()
