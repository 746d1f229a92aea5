"""How ranks come together: interrupted, with a store that was handed over, where names do not resolve."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import fastreduce.distributed as dist
from fastreduce import SettingError
from fastreduce.cli.compare.script.nodes import FirstNode
from fastreduce.cli.compare.script.trainings import TrainingError
from fastreduce.cli.compare.starting import Nodes
from fastreduce.distributed import backends, process_groups, processes
from tests.support.ranks import RankPool


@pytest.fixture
def left() -> Iterator[None]:
    yield
    if torch_dist.is_initialized():
        dist.destroy_process_group()


def _interrupted(rank: int, world_size: int, method: str) -> list[str]:
    def init() -> str:
        dist.init_process_group("gloo", method, timeout=timedelta(seconds=30), rank=rank, world_size=world_size)
        return "joined"

    said = []
    if rank == 0:
        main = threading.main_thread().ident
        assert main is not None
        timer = threading.Timer(1.0, signal.pthread_kill, [main, signal.SIGINT])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        timer.start()
        try:
            said.append(init())
        except KeyboardInterrupt:
            said.append("interrupted")
        finally:
            timer.join()
            signal.signal(signal.SIGINT, before)
    else:
        time.sleep(3)
    said.append(init())
    dist.destroy_process_group()
    return said


@pytest.mark.long
def test_who_was_interrupted_while_it_waited_can_make_the_same_call_again(bare2: RankPool, tmp_path: Any):
    found = bare2.run(_interrupted, f"file://{tmp_path}/store", timeout=60)
    assert found == [["interrupted", "joined"], ["joined"]]


@pytest.mark.parametrize(
    ("given", "local_rank", "handed", "chosen"),
    [
        (3, None, True, [3]),
        (torch.device("cuda", 2), "1", False, [torch.device("cuda", 2)]),
        (None, "1", True, [torch.device("cuda", 1)]),
        (None, None, True, []),
        (None, None, False, SettingError),
        (None, "one", True, SettingError),
    ],
)
def test_the_gpu_is_the_one_given_or_the_local_ranks_where_that_is_known(
    given: Any, local_rank: str | None, handed: bool, chosen: Any, monkeypatch: pytest.MonkeyPatch, left: None
):
    """`init_process_group` itself, but for what comes behind the choice."""
    found = list[Any]()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    for name, value in {"is_available": True, "is_initialized": False, "device_count": 4}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    monkeypatch.setattr(backends, "check_available", lambda names: None)
    monkeypatch.setattr(process_groups, "count_on_host", lambda hosts, rank: None)

    class ChosenError(Exception):
        pass

    def behind(*_: Any, **__: Any) -> None:
        raise ChosenError

    monkeypatch.setattr(torch_dist, "init_process_group", behind)
    where: dict[str, Any] = {"store": torch_dist.HashStore()} if handed else {}
    with pytest.raises(ChosenError if isinstance(chosen, list) else chosen):
        dist.init_process_group("nccl", **where, rank=0, world_size=1, device_id=given)
    assert not isinstance(chosen, list) or found == chosen


@pytest.mark.timeout(60)
def test_who_holds_the_store_asks_for_no_name_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """One that does not resolve, or not from here; others reach it by addresses of either kind."""
    for by in ("launcher", "compare"):
        with socket.create_server(("", 0)) as taken:
            port = taken.getsockname()[1]
        store: Any
        if by == "compare":
            store = FirstNode(Nodes(2, 0, "no-such-host.invalid", port))._store
        else:
            store = processes._serve(processes.Group(1, 2, host="no-such-host.invalid", port=port))
        for address in ["127.0.0.1", *["::1"] * socket.has_dualstack_ipv6()]:
            socket.create_connection((address, port), 5).close()
        torch_dist.TCPStore("127.0.0.1", port, is_master=False).set("key", by)
        assert store.get("key") == by.encode()
        with pytest.raises(TrainingError, match=f"cannot listen on no-such-host.invalid, port {port}: Address already"):
            FirstNode(Nodes(2, 0, "no-such-host.invalid", port))


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_local_rank_that_is_no_number_is_told(variable: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv(variable, "one")
    with pytest.raises(SettingError, match=f"get_local_rank: {variable}='one'; allowed: a number"):
        dist.get_local_rank()
