"""fastreduce.distributed: process groups, collectives in place and returning, debug mode, on real ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

import fastreduce
import fastreduce.distributed as dist
from fastreduce import (
    BackendUnavailableError,
    DeviceError,
    FastreduceError,
    NotInitializedError,
    SettingError,
    TensorError,
    TransportError,
)
from fastreduce.distributed import ReduceOp, functional
from fastreduce.distributed.rendezvous import FIXED_PORT
from tests.models import assert_same_bits, whole_batch
from tests.ranks import RankPool

SECOND = timedelta(seconds=1)


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool


@pytest.fixture(scope="module")
def bare2() -> Iterator[RankPool]:
    """Two ranks without a process group, which must exit cleanly."""
    with RankPool(2, check_exit=True) as pool:
        pool.run(_leave)
        yield pool


def _leave(rank: int, world_size: int) -> None:
    torch_dist.destroy_process_group()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", world_size=1, rank=0)
    yield
    dist.destroy_process_group()
    assert not dist.is_initialized()


def message(call: Callable[[], Any]) -> str:
    """What a call raises."""
    try:
        call()
    except FastreduceError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


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
        local_rank = dist.get_local_rank() if "file" not in str(method) else None
        seen.append((dist.is_initialized(), tensor.tolist(), model.module.weight.grad.tolist(), local_rank))
        dist.destroy_process_group()
        seen.append(dist.is_initialized())
    return seen


@pytest.mark.parametrize("how", ["environment", "tcp", "file", "nothing"])
def test_ranks_find_each_other_and_init_again_after_destroy_works(bare2: RankPool, tmp_path: Path, how: str):
    method, environment = None, {}
    if how == "environment":
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
        expected = (True, [3.0, 3.0], [[3.0, 3.0]], None if how == "file" else rank)
        assert seen == [expected, False] * 3


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


def test_the_default_backend_is_one_that_can_run(alone: None):
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
    ],
)
def test_bad_arguments_are_setting_errors(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SettingError) as caught:
        dist.init_process_group(**{"backend": "gloo", **options})
    assert says in str(caught.value) and not dist.is_initialized()


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


def _clash(rank: int, world_size: int, method: str, what: str) -> str:
    numbers = {"world_size": world_size, "rank": rank}
    if what == "rank":
        numbers["rank"] = 0
    elif rank == 1:
        numbers["world_size"] = 3
    return message(lambda: dist.init_process_group("gloo", method, timeout=SECOND, **numbers))


@pytest.mark.parametrize("what", ["rank", "world size"])
def test_ranks_that_come_with_wrong_numbers_are_told(bare2: RankPool, tmp_path: Path, what: str):
    told = sorted(bare2.run(_clash, f"file://{tmp_path}/store", what))
    if what == "rank":
        assert "another process has joined as rank 0" in told[0] + told[1]
        assert "rank 1 did not arrive" in told[0] + told[1]
    else:
        assert told[0].startswith("MismatchError: ") and "world size 2" in told[0] and "world size 3" in told[0]
        assert "did not arrive" in told[1]


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


# Meeting


def _meet(rank: int, world_size: int) -> list[int]:
    client = dist.get_client()
    store = client._store
    seen = []
    for step in range(20):
        store.add(f"came {step}", 1)
        dist.barrier()
        seen.append(store.add(f"came {step}", 0))
    return seen


def test_nobody_leaves_a_barrier_before_all_have_come(ranks: RankPool):
    assert ranks.run(_meet) == [[ranks.world_size] * 20] * ranks.world_size


def _missing(rank: int, world_size: int) -> list[str]:
    client = dist.get_client()
    said = []
    if rank == 0:
        said.append(message(lambda: dist.barrier(timeout=timedelta(seconds=0.3))))
        client.user_set("given up", True)
    assert client.user_get("given up")
    said.append(message(dist.barrier))
    if rank == 0:
        client.user_pop("given up")
    dist.group_barrier()
    return said


def test_a_barrier_names_who_did_not_come_and_serves_again(ranks3: RankPool):
    first, *others = ranks3.run(_missing)
    assert first == [
        "TransportError: barrier on rank 0: of 3 ranks, rank 1, 2 did not arrive within 0.3 s",
        "no error",
    ]
    assert others == [["no error"]] * 2


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
    seen.append(client._store.check(["from 0"]))

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


def _short_timeout(rank: int, world_size: int, method: str) -> list[str]:
    dist.init_process_group("gloo", method, timeout=SECOND, world_size=world_size, rank=rank)
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
    first, _ = bare2.run(_short_timeout, f"file://{tmp_path}/store")
    client, barrier, receive, collective = first
    assert "user_get on rank 0: no rank has set 'what nobody sets'" in client
    assert "barrier on rank 0: of 2 ranks, rank 1 did not arrive within 1 s" in barrier
    assert receive.startswith("TransportError: remote_recv on rank 0 failed")
    assert collective.startswith("TransportError: all_reduce on rank 0 failed")


# Collectives in place

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def data(rank: int, step: int = 0, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """Whole numbers `[3, 4]`, exact under every operation, in several layouts."""
    tensor = whole_batch(rank, step, 3, 4).to(dtype)
    if layout == "transposed":
        tensor = tensor.t().contiguous().t()
    elif layout == "apart":
        tensor = torch.stack([tensor, torch.full_like(tensor, 99)], -1)[..., 0]
    return tensor


def _all_kinds(rank: int, world_size: int, dtype: torch.dtype, layout: str, async_op: bool) -> dict[str, Any]:
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        work = function(*args, async_op=async_op, **kwargs)
        if not async_op:
            assert work is None
            return
        assert isinstance(work, torch_dist.Work)
        future = work.get_future() if function is not dist.reduce_scatter else None  # torch's has none over gloo
        assert work.wait() and work.wait()
        if future:
            future.wait()
        assert work.is_completed() and work.is_success()

    make = partial(data, dtype=dtype, layout=layout)
    seen: dict[str, Any] = {}
    ops = [ReduceOp.SUM, ReduceOp.AVG]
    if not dtype.is_complex:
        ops += [ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    for op in ops:
        for name, function in (("all_reduce", dist.all_reduce), ("reduce", partial(dist.reduce, dst=1))):
            tensor = make(rank)
            call(function, tensor, op=op)
            seen[f"{name} {op}"] = tensor
        output = make(rank, 9)
        call(dist.reduce_scatter, output, [make(rank, step) for step in range(world_size)], op=op)
        seen[f"reduce_scatter {op}"] = output
    tensor = make(rank)
    call(dist.broadcast, tensor, src=1)
    seen["broadcast"] = tensor
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.all_gather, listed, make(rank))
    seen["all_gather"] = listed
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.gather, make(rank), listed if rank == 1 else None, dst=1)
    seen["gather"] = listed
    tensor = make(rank, 9)
    call(dist.scatter, tensor, [make(rank, step) for step in range(world_size)] if rank == 1 else None, src=1)
    seen["scatter"] = tensor
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.all_to_all, listed, [make(rank, step) for step in range(world_size)])
    seen["all_to_all"] = listed
    tensor = make(rank)
    if rank == 0:
        dist.send(tensor, 1, tag=3)
    elif rank == 1:
        assert dist.recv(tensor, 0, tag=3) == 0
    seen["recv"] = tensor
    return seen


def _reduced(op: str, tensors: list[Tensor]) -> Tensor:
    stacked = torch.stack(tensors)
    if op == "PRODUCT":
        return stacked.prod(0)
    if op in ("MIN", "MAX"):
        return stacked.amin(0) if op == "MIN" else stacked.amax(0)
    total = stacked.sum(0)
    if op == "AVG":
        exact = total.is_floating_point() or total.is_complex()
        total = total.div(len(tensors), rounding_mode=None if exact else "trunc")
    return total


@pytest.mark.parametrize(
    ("dtype", "layout", "async_op"),
    [(dtype, "contiguous", False) for dtype in DTYPES]
    + [(torch.float32, "contiguous", True), (torch.float32, "transposed", False)]
    + [(torch.float32, "apart", False), (torch.float64, "apart", True)],
)
def test_collectives_write_into_the_callers_tensors(ranks: RankPool, dtype: torch.dtype, layout: str, async_op: bool):
    size = ranks.world_size
    make = partial(data, dtype=dtype, layout=layout)
    for rank, seen in enumerate(ranks.run(_all_kinds, dtype, layout, async_op)):
        for name, found in seen.items():
            kind, _, op = name.partition(" ")
            op = op.removeprefix("RedOpType.")
            untouched = make(rank, 9)
            expected: Any = {
                "all_reduce": lambda op=op: _reduced(op, [make(r) for r in range(size)]),
                "reduce": lambda op=op, r=rank: _reduced(op, [make(r) for r in range(size)]) if r == 1 else make(r),
                "reduce_scatter": lambda op=op, r=rank: _reduced(op, [make(s, r) for s in range(size)]),
                "broadcast": lambda: make(1),
                "all_gather": lambda: [make(r) for r in range(size)],
                "gather": lambda r=rank, u=untouched: [make(s) for s in range(size)] if r == 1 else [u] * size,
                "scatter": lambda r=rank: make(1, r),
                "all_to_all": lambda r=rank: [make(s, r) for s in range(size)],
                "recv": lambda r=rank: make(0) if r == 1 else make(r),
            }[kind]()
            contiguous = [t.contiguous() for t in expected] if isinstance(expected, list) else expected.contiguous()
            assert_same_bits(found, contiguous, f"rank {rank}: {name}")


def _gaps(rank: int, world_size: int) -> Tensor:
    base = torch.full((3, 4), float(rank + 1))
    dist.all_reduce(base[:, ::2])
    return base


def test_elements_between_those_of_a_strided_tensor_are_not_touched(ranks2: RankPool):
    for rank, base in enumerate(ranks2.run(_gaps)):
        assert (base[:, ::2] == 3).all() and (base[:, 1::2] == rank + 1).all()


def _uneven(rank: int, world_size: int) -> list[list[float]]:
    came = [torch.zeros(10 * source + rank) for source in range(world_size)]
    dist.all_to_all(came, [torch.full((10 * rank + to,), float(rank)) for to in range(world_size)])
    return [t.tolist() for t in came]


def test_all_to_all_takes_different_sizes(ranks2: RankPool):
    for rank, came in enumerate(ranks2.run(_uneven)):
        assert came == [[float(source)] * (10 * source + rank) for source in range(2)]


BAD: dict[str, tuple[Callable[[], Any], type[FastreduceError], str]] = {
    "op": (lambda: dist.all_reduce(torch.ones(1), "sum"), SettingError, "unknown op 'sum'; allowed: ReduceOp.SUM"),
    "no op": (lambda: dist.reduce(torch.ones(1), 0, 7), SettingError, "unknown op 7"),
    "src": (lambda: dist.broadcast(torch.ones(1), 2), SettingError, "src=2 is not in the group; its ranks: 0 to 0"),
    "dst": (lambda: dist.reduce(torch.ones(1), -1), SettingError, "dst=-1"),
    "itself": (lambda: dist.send(torch.ones(1), 0), SettingError, "dst=0 is this rank itself"),
    "from itself": (lambda: dist.recv(torch.ones(1), 0), SettingError, "src=0 is this rank itself"),
    "device": (lambda: dist.all_reduce(torch.ones(1, device="meta")), DeviceError, "tensor 0 is on meta"),
    "devices": (
        lambda: dist.all_gather([torch.ones(1, device="meta")], torch.ones(1)),
        DeviceError,
        "tensor 1 is on meta",
    ),
    "sparse": (lambda: dist.all_reduce(torch.ones(1).to_sparse()), TensorError, "sparse"),
    "no tensor": (lambda: dist.all_reduce([1.0]), TensorError, "a list"),
    "too many": (
        lambda: dist.all_gather([torch.ones(1)] * 2, torch.ones(1)),
        TensorError,
        "2 tensors for a group of 1",
    ),
    "shape": (lambda: dist.all_gather([torch.ones(2)], torch.ones(1)), TensorError, "(2,), torch.float32; needed: "),
    "dtype": (lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1).int()]), TensorError, "int32; needed: "),
    "no list": (lambda: dist.gather(torch.ones(1)), SettingError, "gather_list is None; rank 0 passes one"),
    "lists": (lambda: dist.all_to_all([], [torch.ones(1)]), TensorError, "output_list has 0 tensors"),
    "bool average": (lambda: dist.all_reduce(torch.ones(1).bool(), ReduceOp.AVG), TensorError, "bool"),
    "axis": (lambda: functional.reduce_scatter_sum(torch.ones(3), axis=1), TensorError, "(3,) does not divide"),
    "root": (lambda: functional.gather(torch.ones(1), dst=4), SettingError, "dst=4"),
    "nothing": (lambda: functional.scatter(None), SettingError, "None on the rank that it comes from"),
    "array": (lambda: functional.all_reduce_sum([1.0]), TensorError, "a list, not a torch tensor"),
    "remote": (lambda: dist.remote_send(torch.ones(1), 0), SettingError, "remote_send on rank 0: dest_rank=0"),
    "list src": (lambda: dist.bcast_list_([torch.ones(1)], src=3), SettingError, "bcast_list_ on rank 0: src=3"),
    "method": (lambda: dist.make_allreduce_cb("max"), SettingError, "'max'; allowed: mean, sum"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_an_error_that_names_call_and_rank(alone: None, case: str):
    call, kind, says = BAD[case]
    with pytest.raises(kind) as caught:
        call()
    assert says in str(caught.value)
    assert "rank 0" in str(caught.value) or case == "method"


def test_one_process_alone_runs_the_same_code(alone: None):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank()) == (0, 1, 0)
    tensor = torch.ones(2)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
        dist.all_reduce(tensor, op)
    dist.broadcast(tensor, src=0)
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, tensor)
    dist.reduce_scatter(tensor, gathered)
    dist.barrier()
    assert tensor.tolist() == [1.0, 1.0]
    dist.bcast_list_([tensor])
    for name in FUNCTIONS:
        leaf = torch.ones(2, 2, requires_grad=True)
        getattr(functional, name)(leaf).sum().backward()
        assert leaf.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]], name
    model = dist.DistributedDataParallel(nn.Linear(2, 1), device_ids=[None], find_unused_parameters=True)
    model(tensor[None]).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]


# FASTREDUCE_DEBUG=1

DIFFERENT: dict[str, tuple[Callable[[int], Any], list[str]]] = {
    "shape": (lambda r: dist.all_reduce(torch.ones(2 + r)), ["all_reduce", "(2,)", "(3,)"]),
    "dtype": (lambda r: dist.broadcast(torch.ones(2).to([torch.float32, torch.float16][r])), ["float16", "float32"]),
    "op": (lambda r: dist.all_reduce(torch.ones(2), [ReduceOp.MAX, ReduceOp.MIN][r]), ["MAX", "MIN"]),
    "src": (lambda r: dist.broadcast(torch.ones(2), src=r), ["src=0", "src=1"]),
    "call": (lambda r: [dist.all_reduce, dist.broadcast][r](torch.ones(2)), ["all_reduce:", "broadcast:"]),
    "gather": (
        lambda r: dist.all_gather([torch.ones(1 + r)] * 2, torch.ones(1 + r)),
        ["all_gather", "(1,)", "(2,)"],
    ),
    "gradients": (
        lambda r: functional.all_reduce_sum(torch.ones(1, requires_grad=r == 0)),
        ["all_reduce_sum", "requires grad", "requires no grad"],
    ),
}


def _different(rank: int, world_size: int, case: str) -> str:
    os.environ["FASTREDUCE_DEBUG"] = "1"
    said = message(lambda: DIFFERENT[case][0](rank))
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    return said


@pytest.mark.parametrize("case", DIFFERENT)
def test_debug_mode_finds_ranks_that_differ_before_the_call(ranks2: RankPool, case: str):
    first, second = ranks2.run(_different, case, timeout=20)
    assert first == second and first.startswith("MismatchError: ")
    for piece in ["rank 0 has", "rank 1 has", *DIFFERENT[case][1]]:
        assert piece in first


def _debugged(rank: int, world_size: int) -> None:
    os.environ["FASTREDUCE_DEBUG"] = "1"
    _all_kinds(rank, world_size, torch.float32, "contiguous", True)
    dist.new_group([0, 1])
    for name in FUNCTIONS:
        leaf = torch.ones(world_size, 2, requires_grad=True)
        getattr(functional, name)(leaf).sum().backward()


def test_debug_mode_lets_everything_pass_that_is_right(ranks: RankPool):
    ranks.run(_debugged)


# Returning forms and their gradients


def _equal_parts(inputs: list[Tensor], axis: int) -> list[list[Tensor]]:
    return [list(x.split(x.shape[axis] // len(inputs), axis)) for x in inputs]


def _zeros_but_first(value: Tensor, size: int) -> list[Tensor]:
    return [value] + [torch.zeros_like(value)] * (size - 1)


def _total(xs: list[Tensor]) -> Tensor:
    return reduce(torch.add, xs)


COMPOSED: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all_reduce_sum": lambda xs: [_total(xs)] * len(xs),
    "all_reduce_max": lambda xs: [torch.stack(xs).amax(0)] * len(xs),
    "all_reduce_min": lambda xs: [torch.stack(xs).amin(0)] * len(xs),
    "all_gather": lambda xs: [torch.cat(xs)] * len(xs),
    "all_gather axis=1": lambda xs: [torch.cat(xs, 1)] * len(xs),
    "reduce_scatter_sum": lambda xs: _equal_parts([_total(xs)] * len(xs), 0)[0],
    "reduce_scatter_sum axis=1": lambda xs: _equal_parts([_total(xs)] * len(xs), 1)[0],
    "reduce_sum": lambda xs: _zeros_but_first(_total(xs), len(xs)),
    "gather": lambda xs: _zeros_but_first(torch.cat(xs), len(xs)),
    "gather axis=1": lambda xs: _zeros_but_first(torch.cat(xs, 1), len(xs)),
    "broadcast": lambda xs: [xs[0]] * len(xs),
    "scatter": lambda xs: _equal_parts(xs, 0)[0],
    "scatter axis=1": lambda xs: _equal_parts(xs, 1)[0],
    "all_to_all": lambda xs: [torch.cat(part) for part in zip(*_equal_parts(xs, 0), strict=True)],
    "all_to_all split_axis=1 concat_axis=0": lambda xs: [
        torch.cat(part) for part in zip(*_equal_parts(xs, 1), strict=True)
    ],
}
FUNCTIONS = sorted({case.split()[0] for case in COMPOSED})
FROM_ROOT = ("broadcast", "scatter")


def function_of(case: str) -> Callable[[Tensor], Tensor]:
    name, *options = case.split()
    return partial(getattr(functional, name), **{k: int(v) for k, v in (option.split("=") for option in options)})


def leaf_of(rank: int) -> Tensor:
    return (whole_batch(rank, 0, 6, 12).double() * 6).requires_grad_()  # six: ties share by two and by three


def loss_of(out: Tensor, rank: int) -> Tensor:
    weight = whole_batch(rank, 1, *out.shape).double()
    return (out * weight * out.detach() + out * 6).sum()


def _returning(rank: int, world_size: int, case: str) -> tuple[Tensor, Tensor | None]:
    leaf = leaf_of(rank)
    out = function_of(case)(leaf)
    loss_of(out, rank).backward()
    return out.detach(), leaf.grad


@pytest.mark.parametrize("case", COMPOSED)
def test_values_and_gradients_are_those_of_one_process(ranks: RankPool, case: str):
    leaves = [leaf_of(r) for r in range(ranks.world_size)]
    outs = COMPOSED[case](leaves)
    sum(loss_of(out, r) for r, out in enumerate(outs)).backward()
    for rank, (out, grad) in enumerate(ranks.run(_returning, case)):
        assert_same_bits(out, outs[rank].detach(), case)
        if case.split()[0] in FROM_ROOT and rank > 0:
            assert grad is not None and not grad.any()
        else:
            assert_same_bits(grad, leaves[rank].grad, case)


def _gradcheck(rank: int, world_size: int, case: str) -> bool:
    """Rank 0 checks the sum of all losses against its inputs; before each pass it tells the others to join in."""
    torch.manual_seed(3)
    inputs = torch.randn(world_size, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6 * world_size, 6 * world_size, dtype=torch.float64)
    end, forward, backward = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)

    def total(x: Tensor) -> Tensor:
        out = function_of(case)(functional.scatter(x)[0].tanh())
        loss = (out * weight[: out.shape[0], : out.shape[1]]).square().sum()
        return functional.reduce_sum(loss.reshape(1))

    def watched(x: Tensor) -> Tensor:
        dist.broadcast(forward)
        out = total(x)
        out.register_hook(lambda _: dist.broadcast(backward) and None)
        return out

    if rank == 0:
        passed = torch.autograd.gradcheck(watched, [inputs], check_undefined_grad=False, fast_mode=True)
        dist.broadcast(end)
        return passed
    order = torch.zeros(1)
    while dist.broadcast(order) or order.item():
        if order.item() == 1:
            out = total(inputs)
        else:
            out.backward(torch.ones_like(out), retain_graph=True)
    return True


@pytest.mark.parametrize("case", COMPOSED)
def test_gradients_are_the_slopes_of_the_sum_of_all_losses(ranks2: RankPool, case: str):
    assert ranks2.run(_gradcheck, case) == [True, True]


def _twice(rank: int, world_size: int) -> tuple[Tensor, Tensor | None]:
    """Gradients of gradients: the square of a sum over ranks."""
    leaf = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    out = functional.all_reduce_sum(leaf * leaf)
    (first,) = torch.autograd.grad((out * out).sum(), leaf, create_graph=True)
    first.sum().backward()
    return first.detach(), leaf.grad


def test_gradients_have_gradients(ranks2: RankPool):
    leaves = [torch.full((2,), r + 1.0, dtype=torch.float64, requires_grad=True) for r in range(2)]
    out = sum(leaf * leaf for leaf in leaves)
    first = torch.autograd.grad(2 * (out * out).sum(), leaves, create_graph=True)
    sum(g.sum() for g in first).backward()
    for rank, (once, twice) in enumerate(ranks2.run(_twice)):
        assert_same_bits((once, twice), (first[rank].detach(), leaves[rank].grad))


def _without_input(rank: int, world_size: int) -> list[Any]:
    seen: list[Any] = []
    weight = torch.ones(4, 2, dtype=torch.float16, requires_grad=True)
    for function in (functional.broadcast, functional.scatter):
        out = function(weight if rank == 0 else None)
        seen.append((out.shape, out.dtype, out.requires_grad))
        out.sum().backward()
        with torch.no_grad():
            seen.append(function(weight if rank == 0 else None).requires_grad)
    numbers = functional.broadcast(torch.arange(3) if rank == 0 else None)
    seen += [numbers.tolist(), None if weight.grad is None else weight.grad.tolist()]
    return seen


def test_only_the_rank_it_comes_from_needs_an_input(ranks2: RankPool):
    for rank, seen in enumerate(ranks2.run(_without_input)):
        assert seen[:4] == [((4, 2), torch.float16, True), False, ((2, 2), torch.float16, True), False]
        assert seen[4] == [0, 1, 2]
        assert seen[5] == ([[3.0, 3.0]] * 4 if rank == 0 else None)


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


def test_a_parameter_on_another_device_is_named_with_both(alone: None):
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=r"'1\.weight' is on meta.*on cpu"):
            dist.DistributedDataParallel(model)
