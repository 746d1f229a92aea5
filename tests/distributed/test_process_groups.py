"""Process groups: making, asking, meeting and destroying, on real ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

import fastreduce
import fastreduce.distributed as dist
from fastreduce import BackendUnavailableError, NotInitializedError, SettingError, TransportError
from fastreduce.distributed import functional, rendezvous
from fastreduce.distributed.rendezvous import FIXED_PORT
from tests.support.commands import free_port
from tests.support.ranks import RankPool, message, with_time

SECOND = timedelta(seconds=1)


# Initialising, asking, destroying


def _taken_over(rank: int, world_size: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    group = dist.new_group(list(range(world_size)))
    os.environ["LOCAL_RANK"] = "7"
    seen = {
        "numbers": (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_backend()),
        "main": dist.is_main_process(),
        "in the group": (dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group)),
        "again": [
            message(partial(dist.init_process_group, **options))
            for options in (
                {},
                {"backend": "gloo", "world_size": world_size, "rank": rank},
                {"backend": "mpi"},
                {"world_size": 5},
                {"rank": 1 - rank},
                {"timeout": SECOND},
            )
        ],
    }
    dist.destroy_process_group()
    seen["group is gone"] = group not in torch_dist.distributed_c10d._world.pg_map
    total = torch.ones(1)
    torch_dist.all_reduce(total)
    seen["the user's group works"] = total.item()
    return seen


def test_a_group_that_the_user_initialised_is_taken_over_and_left(ranks2: RankPool):
    for rank, seen in enumerate(ranks2.run(_taken_over)):
        assert seen["numbers"] == (rank, 2, 7, "gloo") and seen["main"] == (rank == 0)
        assert seen["in the group"] == (rank, 2, "gloo")
        *same, backend, size, other_rank, timeout = seen["again"]
        assert same == ["no error"] * 2
        for text, pieces in ((backend, "mpi gloo"), (size, "5 2"), (other_rank, f"{1 - rank} {rank}"), (timeout, "0:")):
            assert text.startswith(f"SettingError: init_process_group on rank {rank}") and "destroy" in text
            assert all(piece in text for piece in pieces.split())
        assert seen["group is gone"] and seen["the user's group works"] == 2


def _init_and_destroy(rank: int, world_size: int, method: str | None, environment: dict[str, str]) -> list[Any]:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size))
    seen: list[Any] = []
    for _ in range(3):
        numbers = {"world_size": world_size, "rank": rank} if method else {}
        dist.init_process_group("gloo", method, **numbers)
        tensor = torch.full((2,), float(rank + 1))
        dist.all_reduce(tensor)
        dist.barrier()
        model = dist.DistributedDataParallel(nn.Linear(2, 1))
        model(tensor[None]).sum().backward()
        average = model.module.weight.grad.tolist()
        seen.append((dist.is_initialized(), tensor.tolist(), average, dist.get_local_rank()))
        dist.destroy_process_group()
        seen.append(dist.is_initialized())
    return seen


@pytest.mark.parametrize("how", ["environment", "IPv6", "tcp", "file", "nothing"])
def test_ranks_find_each_other_and_init_again_after_destroy_works(bare2: RankPool, tmp_path: Path, how: str):
    method, environment = None, {}
    if how in ("environment", "IPv6"):
        if how == "IPv6" and not _has_ipv6():
            pytest.skip("this machine has no address ::1")
        environment = {"MASTER_ADDR": "::1" if how == "IPv6" else "127.0.0.1", "MASTER_PORT": str(free_port())}
    elif how == "tcp":
        method = f"tcp://localhost:{free_port()}"
    elif how == "file":
        method = f"file://{tmp_path}/store"
    else:
        with socket.socket() as other, pytest.MonkeyPatch.context() as patch:
            patch.delenv("MASTER_ADDR", raising=False)
            if other.connect_ex(("127.0.0.1", FIXED_PORT)) == 0:
                pytest.skip(f"another program listens on port {FIXED_PORT}")
    for rank, seen in enumerate(bare2.run(_init_and_destroy, method, environment)):
        expected = (True, [3.0, 3.0], [[3.0, 3.0]], rank)
        assert seen == [expected, False] * 3


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def _starts_at_second_try(rank: int, world_size: int, method: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        with pytest.raises(RuntimeError, match="nosuch0"):
            dist.init_process_group("gloo", method, world_size=world_size, rank=rank)
    dist.init_process_group("gloo", method, world_size=world_size, rank=rank)
    tensor = torch.full((2,), float(rank + 1))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def test_a_backend_that_did_not_start_can_be_started_again(bare2: RankPool):
    assert bare2.run(_starts_at_second_try, f"tcp://localhost:{free_port()}") == [[3.0, 3.0]] * 2


def _listeners(rank: int, world_size: int, port: int) -> list[str]:
    dist.init_process_group("gloo", f"tcp://localhost:{port}", world_size=world_size, rank=rank)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    found = [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    dist.destroy_process_group()
    return found


def test_a_rendezvous_on_localhost_listens_there_only(bare2: RankPool):
    assert bare2.run(_listeners, free_port())[0] == ["0100007F"]


def test_nccl_that_is_missing_is_an_error_and_gloo_works_afterwards():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        dist.init_process_group(backend="nccl", world_size=1, rank=0)
    except RuntimeError as error:
        assert "NCCL library not available" in str(error) and "install" in str(error)
        assert isinstance(error, BackendUnavailableError)
    assert not dist.is_initialized()
    dist.init_process_group(backend="gloo", world_size=1, rank=0)
    try:
        assert dist.is_initialized() and dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()
    assert not dist.is_initialized()


def test_the_default_backend_is_one_that_can_run(group_of_one: None):
    dist.destroy_process_group()
    dist.init_process_group(world_size=1)
    assert dist.get_backend() == ("nccl" if torch.cuda.is_available() else "gloo")


CALLS: dict[str, Callable[[], Any]] = {
    "get_rank": lambda: dist.get_rank(),
    "get_world_size": lambda: dist.get_world_size(),
    "get_backend": lambda: dist.get_backend(),
    "barrier": lambda: dist.barrier(),
    "new_group": lambda: dist.new_group([0]),
    "get_client": lambda: dist.get_client(),
    "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "all_gather": lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
    "send": lambda: dist.send(torch.ones(1), 1),
    "remote_send": lambda: dist.remote_send(torch.ones(1), 1),
    "remote_recv": lambda: dist.remote_recv(1),
    "all_reduce_sum": lambda: functional.all_reduce_sum(torch.ones(1)),
    "broadcast": lambda: functional.broadcast(torch.ones(1)),
    "bcast_list_": lambda: dist.bcast_list_([torch.ones(1)]),
    "make_allreduce_cb": lambda: dist.make_allreduce_cb("sum"),
    "all_reduce_gradients": lambda: dist.all_reduce_gradients([torch.ones(1)]),
    "DistributedDataParallel": lambda: dist.DistributedDataParallel(nn.Linear(1, 1)),
}


@pytest.mark.parametrize("name", CALLS)
def test_not_initialised_is_both_errors_and_names_the_call_to_make(name: str):
    for kind in (RuntimeError, ValueError, NotInitializedError):
        with pytest.raises(kind, match=rf"{name}.*call fastreduce\.distributed\.init_process_group"):
            CALLS[name]()


def test_what_works_without_a_process_group():
    assert not dist.is_initialized() and dist.is_main_process()
    dist.destroy_process_group()
    assert dist.synchronized(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": "ncll", "world_size": 1}, "'ncll'; allowed: nccl, gloo, mpi"),
        ({"backend": "cpu:glu", "world_size": 1}, "'cpu:glu'"),
        ({"init_method": "udp://x", "world_size": 2, "rank": 0}, "'udp://x'; allowed: env://"),
        ({"init_method": "tcp://localhost", "world_size": 2, "rank": 0}, "no tcp://host:port"),
        ({"init_method": "tcp://localhost:99999", "world_size": 2, "rank": 0}, "no tcp://host:port"),
        ({"init_method": "tcp://localhost:1?rank=x", "world_size": 2}, "'x' is no number"),
        ({"world_size": 2, "rank": 2}, "rank 2 of world_size 2"),
        ({"world_size": 0, "rank": 0}, "world_size 0"),
        ({"world_size": 2}, "RANK not set"),
        ({}, "WORLD_SIZE not set"),
        ({"world_size": 1, "timeout": 30}, "timedelta"),
        ({"world_size": 1, "rank": 0, "timeout": timedelta(seconds=-5)}, "is no datetime.timedelta of more than 0"),
        ({"world_size": 1, "rank": 0, "timeout": timedelta(0)}, "is no datetime.timedelta of more than 0"),
    ],
)
def test_bad_arguments_are_setting_errors(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SettingError) as caught:
        dist.init_process_group(**{"backend": "gloo", **options})
    assert says in str(caught.value) and not dist.is_initialized()


def test_where_nobody_listens_no_other_program_is_blamed(monkeypatch: pytest.MonkeyPatch):
    """torch's client may ask again for longer than it was told to: we end before it does."""
    monkeypatch.setattr(rendezvous, "GRACE_SECONDS", -0.8)
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(TransportError, match=f"rank 1: nobody serves {address} within 0:00:01; rank 0 should$"):
        dist.init_process_group("gloo", address, world_size=2, rank=1, timeout=SECOND)


@pytest.mark.long
def test_a_port_in_use_and_ranks_that_do_not_come_are_named():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"rank 0: cannot listen at {address}.*MASTER_PORT"):
            dist.init_process_group("gloo", address, world_size=2, rank=0, timeout=SECOND)
    address = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(TransportError, match=f"rank 1: nobody serves {address}.*rank 0"):
        dist.init_process_group("gloo", address, world_size=2, rank=1, timeout=SECOND)
    for _ in range(2):  # it may be tried again
        with pytest.raises(
            TransportError, match=f"{address} on rank 0: of 3 ranks, rank 1, 2 did not arrive within 1 s"
        ):
            dist.init_process_group("gloo", address, world_size=3, rank=0, timeout=SECOND)
    assert not dist.is_initialized()


def _clash(rank: int, world_size: int, method: str, what: str, seconds: float) -> list[str]:
    numbers = {"world_size": world_size, "rank": rank}
    backend = "gloo"
    if what == "rank":
        numbers["rank"] = 0
    elif rank == 1 and what == "world size":
        numbers["world_size"] = 3
    elif rank == 1:
        backend = "cpu:gloo" if what == "backend" else backend
    if rank == 1 and what == "debug mode":
        os.environ["FASTREDUCE_DEBUG"] = "1"
    start = time.monotonic()
    said = [message(lambda: dist.init_process_group(backend, method, timeout=timedelta(seconds=seconds), **numbers))]
    assert what == "rank" or time.monotonic() - start < seconds
    os.environ.pop("FASTREDUCE_DEBUG", None)
    if what != "rank":  # all were told, so all may try again
        dist.init_process_group("gloo", method, timeout=timedelta(seconds=seconds), world_size=2, rank=rank)
        torch_dist.barrier()  # gloo connects in turn: who leaves at once cuts the other's connection
        dist.destroy_process_group()
    return said


@pytest.mark.parametrize(
    ("what", "first", "second"),
    [
        ("world size", "backend gloo, world size 2", "backend gloo, world size 3"),
        ("backend", "backend gloo, world size 2", "backend cpu:gloo, world size 2"),
        ("debug mode", "backend gloo, world size 2", "backend gloo, world size 2, FASTREDUCE_DEBUG=1"),
    ],
)
def test_ranks_that_ask_for_different_groups_are_told_on_every_rank(
    bare2: RankPool, tmp_path: Path, what: str, first: str, second: str
):
    address = f"file://{tmp_path}/store"
    for rank, (told,) in enumerate(bare2.run(_clash, address, what, 100.0)):
        assert told.startswith(f"MismatchError: init_process_group on rank {rank} at {address}: ranks differ: rank ")
        assert f"rank 0 has {first}" in told and f"rank 1 has {second}" in told


def test_ranks_that_come_as_the_same_rank_are_told(bare2: RankPool, tmp_path: Path):
    def test(seconds: float) -> None:
        told = sorted(text for (text,) in bare2.run(_clash, f"file://{tmp_path}/store {seconds:g}", "rank", seconds))
        assert "another process has joined as rank 0" in told[0] + told[1]
        assert "rank 1 did not arrive" in told[0] + told[1]

    with_time(test, 1.0)


def _start_again(rank: int, world_size: int, port: int, seconds: float) -> list[Any]:
    """Initialise as three processes of torchrun's, each in the place of the one before; agents count apart."""
    found = []
    for attempt in range(3):
        rendezvous._stores.clear()  # what a new process does not have
        rendezvous._generations.clear()
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(attempt * rank)}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in agent.items():
                patch.setenv(name, value)
            numbers = {"world_size": world_size, "rank": rank}
            dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=timedelta(seconds=seconds), **numbers)
        total = torch.ones(1)
        torch_dist.all_reduce(total)
        found.append(total.item())
        torch_dist.barrier()
        dist.destroy_process_group()
    return found


def test_ranks_start_again_where_agents_keep_the_store_and_count_restarts_apart(bare2: RankPool):
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert bare2.run(_start_again, store.port, 60.0) == [[2.0] * 3] * 2


@pytest.mark.long
def test_the_ranks_that_do_not_start_again_are_named(monkeypatch: pytest.MonkeyPatch):
    store = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for rank, absent in ((0, "rank 1, 2"), (1, "rank 0")):
        with pytest.raises(TransportError, match=f"on rank {rank}: of 3 ranks, {absent} did not arrive within 1 s"):
            address = f"tcp://127.0.0.1:{store.port}"
            dist.init_process_group("gloo", address, world_size=3, rank=rank, timeout=SECOND)


def test_the_device_is_the_local_rank_bounded_by_the_visible_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "5")
    for local_rank, visible, expected in (
        ("1", 2, "cuda:1"),
        ("1", 1, "cuda:0"),
        ("3", 2, "cuda:1"),
        ("0", 8, "cuda:0"),
    ):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=visible: n)
        assert str(dist.get_local_device()) == expected
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert dist.get_local_device().type == "cpu"
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert dist.get_local_rank() == 2
    monkeypatch.delenv("OMPI_COMM_WORLD_LOCAL_RANK")
    with pytest.raises(SettingError, match="LOCAL_RANK is not set"):
        dist.get_local_rank()


# Groups of some ranks, clients, timeouts


def _groups(rank: int, world_size: int) -> dict[str, Any]:
    group = dist.new_group([2, 0])
    seen: dict[str, Any] = {"numbers": (dist.get_rank(group), dist.get_world_size(group))}
    tensor = torch.full((2,), float(rank + 1))
    if rank == 1:
        seen["outside"] = [message(lambda: dist.all_reduce(tensor, group=group)), message(lambda: dist.barrier(group))]
    else:
        dist.all_reduce(tensor, group=group)
        dist.group_barrier(group)
        other = torch.full((1,), float(rank))
        dist.broadcast(other, src=2, group=group)
        seen["sum"], seen["from 2"] = tensor.tolist(), other.item()
        seen["not in it"] = message(lambda: dist.broadcast(other, src=1, group=group))
    seen["bad"] = [message(partial(dist.new_group, r)) for r in ([0, 3], [1, 1], [])]
    seen["bad backend"] = message(lambda: dist.new_group([0], backend="smoke"))
    dist.destroy_process_group(group)
    dist.barrier()
    return seen


def test_groups_of_some_ranks(ranks3: RankPool):
    for rank, seen in enumerate(ranks3.run(_groups)):
        if rank == 1:
            assert seen["numbers"] == (-1, -1)
            assert all(f"rank {rank}: this rank is not in the group" in text for text in seen["outside"])
        else:
            assert seen["numbers"] == (rank // 2, 2)
            assert seen["sum"] == [4.0, 4.0] and seen["from 2"] == 2.0
            assert seen["not in it"].endswith("src=1 is not in the group; its ranks: 0, 2")
        assert all(text.startswith("SettingError: new_group on rank ") for text in seen["bad"])
        assert "'smoke'; allowed" in seen["bad backend"]


def _client(rank: int, world_size: int) -> list[Any]:
    client = dist.get_client()
    client.user_set(f"from {rank}", {"rank": rank, "tensor": torch.ones(2)})
    seen: list[Any] = [client.user_get(f"from {r}")["rank"] for r in range(world_size)]
    dist.barrier()
    if rank == 1:
        seen.append(client.user_pop("from 0")["tensor"].tolist())
    dist.barrier()
    seen.append(client._store.has("from 0"))

    @dist.synchronized
    def work(n: int) -> int:
        client._store.add("worked", 1)
        return n

    seen.append(work(n=4))
    seen.append(client._store.add("worked", 0))
    return seen


def test_the_client_and_synchronized(ranks2: RankPool):
    first, second = ranks2.run(_client)
    assert first == [0, 1, False, 4, 2]
    assert second == [0, 1, [1.0, 1.0], False, 4, 2]


def _short_timeout(rank: int, world_size: int, method: str, seconds: float) -> list[str]:
    dist.init_process_group("gloo", method, timeout=timedelta(seconds=seconds), world_size=world_size, rank=rank)
    said = [message(lambda: dist.get_client().user_get("what nobody sets"))]
    if rank == 0:
        said += [
            message(dist.barrier),
            message(lambda: dist.remote_recv(1)),
            message(lambda: dist.all_reduce(torch.ones(1))),
        ]
        dist.get_client().user_set("end", True)
    else:
        while "end" in message(lambda: dist.get_client().user_get("end")):
            pass
    dist.destroy_process_group()
    return said


def test_the_timeout_of_the_group_holds_for_every_call(bare2: RankPool, tmp_path: Path):
    def test(seconds: float) -> None:
        first, _ = bare2.run(_short_timeout, f"file://{tmp_path}/store {seconds:g}", seconds)
        client, barrier, receive, collective = first
        assert "user_get on rank 0: no rank has set 'what nobody sets'" in client
        assert f"barrier on rank 0: of 2 ranks, rank 1 did not arrive within {seconds:g} s" in barrier
        assert receive.startswith("TransportError: remote_recv on rank 0 failed")
        assert collective.startswith("TransportError: all_reduce on rank 0 failed")

    with_time(test, 1.0)


# The drop-in class from here


def _drop_in(rank: int, world_size: int) -> list[list[float]]:
    seen = []
    for arguments, options in (
        ([], {"device_ids": [None]}),
        ([[rank]], {}),
        ([], {"find_unused_parameters": True, "gradient_as_bucket_view": True, "compression": "fp16"}),
    ):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        with pytest.warns(UserWarning, match="dropped") if arguments else contextlib.nullcontext():
            ddp = dist.DistributedDataParallel(model, *arguments, **options)
        ddp(torch.full((1, 3), rank + 1.0)).sum().backward()
        seen.append(model.weight.grad[0].tolist())
    return seen


def test_the_drop_in_class_is_here_too(ranks2: RankPool):
    assert dist.DistributedDataParallel is fastreduce.DistributedDataParallel
    assert ranks2.run(_drop_in) == [[[1.5] * 3] * 3] * 2


def test_a_parameter_on_another_device_is_named_with_both(group_of_one: None):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=r"'0\.weight' is on cpu, parameter '1\.weight' is on meta"):
            dist.DistributedDataParallel(model)
