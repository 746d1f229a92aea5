"""Transports: the same collectives over gloo and between threads, and peers that do not come."""

from __future__ import annotations

import datetime
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastreduce import TransportError, all_reduce_gradients, transports
from fastreduce.transports import (
    GlooTransport,
    LocalTransport,
    ShmTransport,
    Transport,
    gloo,
    local_ranks,
    make_transport,
)
from fastreduce.transports.connections import Lease, drop_all
from tests.support import ranks as support
from tests.support.models import assert_same_bits, batch, wrap
from tests.support.ranks import RankPool, message, run_ranks, with_time
from tests.support.thread_ranks import in_threads
from tests.support.transport_cases import collect, expected


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.long), 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool


def _two_level(group: Any) -> Transport:
    return make_transport(group, "cpu", "two_level")


KINDS: dict[str, Callable[[Any], Transport]] = {"gloo": GlooTransport, "shm": ShmTransport, "two_level": _two_level}
PLACES = {"two_level": (3, "aab")}  # how many ranks, and their hosts; else two on one
DOING = {"two_level": r"over (gloo|shm)|a reduction in two levels"}


@pytest.fixture(params=["gloo", "shm", pytest.param("two_level", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def pool(request: pytest.FixtureRequest, kind: str) -> RankPool:
    """Ranks that live on, as many as a kind wants."""
    found: RankPool = request.getfixturevalue("ranks21" if kind == "two_level" else "ranks2")
    return found


def _run(kind: str, fn: Any, *args: Any, check_exit: bool = True) -> list[Any]:
    """On fresh ranks."""
    ranks, hosts = PLACES.get(kind, (2, ""))
    return run_ranks(fn, ranks, kind, *args, check_exit=check_exit, hosts=hosts)


def _collected(rank: int, world_size: int, kind: str) -> list[Any]:
    return collect(KINDS[kind](dist.group.WORLD))


def _closed(rank: int, world_size: int, kind: str) -> list[str]:
    """What every call says after close and abort, and after a close without a use."""
    seen = []
    for end, used in (("close", True), ("abort", True), ("close", False)):
        transport = KINDS[kind](dist.group.WORLD)
        if used:
            transport.exchange(0)
        getattr(transport, end)()
        transport.close()
        wire = torch.ones(2 * world_size)
        calls: list[Any] = [
            lambda t=transport, w=wire: t.all_reduce(w),
            lambda t=transport, w=wire: t.all_to_all(torch.empty_like(w), w),
            lambda t=transport, w=wire: t.all_gather(w),
            lambda t=transport: t.exchange(0),
        ]
        seen += [message(call) for call in calls]
    return seen


def test_a_closed_transport_says_so(pool: RankPool, kind: str):
    carries = "gloo" if kind == "two_level" else kind  # what goes over all ranks
    for rank, seen in enumerate(pool.run(_closed, kind)):
        me = f"rank {rank} of {pool.world_size}"
        assert seen == [f"TransportError: {me}: this {carries} transport is closed"] * 12


def _connections_to_the_store(rank: int, world_size: int) -> list[int]:
    """With one transport, and with three more over groups of their own."""
    store: Any = dist.distributed_c10d._get_default_store()
    port = store._underlying_non_prefix_store.port
    counts = []
    for group in (dist.group.WORLD, *(dist.new_group() for _ in range(3))):
        transport = GlooTransport(group)  # type: ignore[arg-type]
        assert transport.exchange(rank) == list(range(world_size))
        here = psutil.Process().net_connections("tcp")
        counts.append(sum(bool(each.raddr) and each.raddr.port == port for each in here))
        transport.close()
    return counts


def test_all_groups_share_one_connection_to_the_store(ranks2: RankPool):
    for first, *more in ranks2.run(_connections_to_the_store):
        assert more == [first] * 3


def _lazily(rank: int, world_size: int) -> list[float]:
    """gloo asks for addresses when it first talks to a rank, long after its group was made."""
    transport = GlooTransport(dist.group.WORLD)  # type: ignore[arg-type]
    gc.collect()
    tensor = torch.full((3,), float(rank + 1))
    transport.all_reduce(tensor).wait()
    return tensor.tolist()


def test_gloo_may_connect_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    assert run_ranks(_lazily, 2) == [[3.0] * 3] * 2


def _again(rank: int, world_size: int) -> list[list[int]]:
    """Connections of one name in one store, one after the other."""
    told = []
    for _ in range(4):
        connection = gloo.GlooConnection(dist.group.WORLD, "again")  # type: ignore[arg-type]
        told.append(connection.exchange(rank))
        connection.abort()
    return told


def test_a_connection_that_is_made_again_in_the_same_store_asks_for_no_stale_address():
    """As groups are that take the place of a destroyed one; torch's own, made so, reach for a listener that is gone."""
    assert run_ranks(_again, 2) == [[[0, 1]] * 4] * 2


def _two_under_way(rank: int, world_size: int, kind: str, seconds: float) -> list[str]:
    """What two collectives under way say when rank 1 does not come to them."""
    transport = KINDS[kind](dist.new_group(timeout=datetime.timedelta(seconds=seconds)))
    transport.exchange(rank)
    works = [] if rank == 1 else [transport.all_gather(torch.ones(world_size)) for _ in range(2)]
    told = [message(work.wait) for work in works]
    transport.abort()
    return told


def test_all_that_fails_with_the_first_names_who_is_missing_too(kind: str):
    def test(seconds: float) -> None:
        first, *_ = _run(kind, _two_under_way, seconds, check_exit=False)
        assert len(first) == 2 and all("No word from rank 1: it has exited" in text for text in first), first

    with_time(test, 2.0)


@pytest.mark.parametrize("kind", ["gloo", pytest.param("shm", marks=pytest.mark.long)])
def test_what_moves_is_what_should(ranks: RankPool, kind: str):
    for rank, (name, at, size, *seen) in enumerate(ranks.run(_collected, kind)):
        assert (name, at, size) == (kind, rank, ranks.world_size)
        assert_same_bits(seen, expected(rank, size), f"rank {rank}")


def _gathers_late(rank: int, world_size: int) -> list[list[float]]:
    transport, wires = GlooTransport(dist.group.WORLD), torch.zeros(3, world_size)
    wires[:, rank] = torch.tensor([1.0, 2.0, 3.0]) + 10 * rank
    gathers = [transport.late_all_gather() for _ in wires]
    sent = torch.full((world_size,), float(rank))
    received = torch.empty_like(sent)
    works = [] if rank else [transport.all_to_all(received, sent)]
    for i in (2, 0, 1) if rank else (0, 1, 2):
        works.append(gathers[i](wires[i]))
    works += [transport.all_to_all(received, sent)] if rank else []
    for work in works:
        work.wait()
    return [*wires.tolist(), received.tolist()]


def test_a_gather_that_begins_late_has_its_place_among_the_collectives(ranks: RankPool):
    """Each rank begins them in an order of its own, and before or behind a collective that comes after them."""
    size = ranks.world_size
    expected = [[i + 10.0 * rank for rank in range(size)] for i in (1, 2, 3)] + [[float(r) for r in range(size)]]
    assert ranks.run(_gathers_late) == [expected] * size


@pytest.mark.parametrize("world_size", [1, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 5))])
def test_threads_move_what_gloo_moves(world_size: int):
    for rank, (name, at, size, *seen) in enumerate(in_threads(world_size, lambda _, t: collect(t))):
        assert (name, at, size) == ("local", rank, world_size)
        assert_same_bits(seen, expected(rank, world_size), f"rank {rank}")


def test_one_rank_alone_needs_nobody():
    _, rank, size, *seen = collect(LocalTransport())
    assert_same_bits(seen, expected(rank, size))


def test_a_thread_that_closes_after_its_last_collective_disturbs_nobody():
    def run(rank: int, transport: LocalTransport) -> int:
        for _ in range(3):
            transport.all_reduce(torch.ones(4)).wait()
        transport.close()
        return rank

    for _ in range(30):
        assert in_threads(3, run) == [0, 1, 2]


def test_a_thread_that_does_not_come_is_a_transport_error():
    here, _ = local_ranks(2, timeout=0.2)
    with pytest.raises(TransportError, match="rank 0"):
        here.all_reduce(torch.ones(4)).wait()


# gloo: our own group


def test_our_collectives_do_not_mix_with_the_users(pool: RankPool, kind: str):
    for good in pool.run(_mixed, kind):
        assert good


def _mixed(rank: int, world_size: int, kind: str) -> bool:
    """Ours and the user's on two threads, in another order on each rank."""
    transport = KINDS[kind](dist.group.WORLD)
    ours, users = torch.full((1000,), rank + 1.0), torch.full((1000,), rank + 10.0)

    def run_ours() -> None:
        for _ in range(20):
            transport.all_reduce(ours).wait()
            ours.div_(world_size)

    thread = threading.Thread(target=run_ours)
    if rank == 0:
        thread.start()
        time.sleep(0.05)
    for _ in range(20):
        dist.all_reduce(users)
        users.div_(world_size)
    if rank != 0:
        thread.start()
    thread.join()
    mean = (world_size - 1) / 2
    return bool((ours == 1 + mean).all() and (users == 10 + mean).all())


def test_many_groups_of_ours_stand_beside_each_other(request: pytest.FixtureRequest, kind: str):
    three: RankPool = request.getfixturevalue("ranks21" if kind == "two_level" else "ranks3")
    assert three.run(_many, kind) == [[6.0 * (i + 1) for i in range(4)]] * 3


def _many(rank: int, world_size: int, kind: str) -> list[float]:
    transports = [KINDS[kind](dist.group.WORLD) for _ in range(4)]
    values = [torch.full((3,), (rank + 1.0) * (i + 1)) for i in range(4)]
    for value, transport in zip(values, transports, strict=True):
        transport.all_reduce(value).wait()
    for transport in transports:
        transport.close()
    return [float(value[0]) for value in values]


# Leases


class _Made:
    """A connection of one rank."""

    def __init__(self, group: Any, name: str) -> None:
        self.name, self.failed, self.done = name, False, list[str]()

    def begin(self) -> None:
        self.done.append("begin")

    def leave(self) -> None:
        self.done.append("leave")

    def abort(self) -> None:
        self.failed = True

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        return [value]


def test_a_connection_is_leased_by_one_transport_at_a_time_until_it_has_failed(group_of_one: None):
    def lease() -> Lease[_Made]:
        return Lease("a test", dist.group.WORLD, _Made)

    first, second, third = lease(), lease(), lease()
    made = first.connection
    assert made is first.connection and (made.name, second.connection.name) == ("0", "1")
    first.close()
    first.close()
    with pytest.raises(TransportError, match="rank 0 of 1: this a test transport is closed"):
        _ = first.connection
    assert third.connection is made and made.done == ["begin", "leave", "begin"]
    third.close()
    made.failed = True  # while nobody leases it
    aborted = lease()
    assert aborted.connection.name == "2"
    aborted.abort()
    fresh = lease()
    assert fresh.connection.name == "3"
    fresh.close()
    drop_all("another kind")
    again = lease()
    assert again.connection is not made and again.connection.done == ["begin", "leave", "begin"]
    again.close()
    drop_all("a test")
    assert lease().connection.name == "4" and second.connection.failed


def _interrupted_amid_leasing(rank: int, world_size: int, kind: str) -> None:
    """Rank 0 has come to the control connection, and a signal comes while it waits there for rank 1's free ones."""
    group = dist.new_group()
    kept = KINDS[kind](group)
    kept.all_reduce(torch.ones(3)).wait()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    with pytest.raises(KeyboardInterrupt if rank == 0 else TransportError):
        KINDS[kind](group).all_reduce(torch.ones(3)).wait()
    signal.signal(signal.SIGALRM, before)
    for transport in (kept, KINDS[kind](group)):
        ours = torch.full((3,), rank + 1.0)
        transport.all_reduce(ours).wait()
        assert (ours == 3).all()


@pytest.mark.parametrize("kind", [pytest.param("gloo", marks=pytest.mark.long), "shm"])
def test_an_interrupt_while_a_connection_is_leased_leaves_the_next_one_a_way(ranks2: RankPool, kind: str):
    ranks2.run(_interrupted_amid_leasing, kind, timeout=60)


def test_a_lease_that_is_collected_while_another_looks_for_a_connection_gives_its_own_back(group_of_one: None):
    leases = [Lease("a test", dist.group.WORLD, _Made) for _ in range(4)]
    taken = [lease.connection for lease in leases]
    leases[0].close()
    leases[1].close()

    class Collects(_Made):
        """Another lease ends while it is asked, as where garbage is collected."""

        @property
        def failed(self) -> bool:
            leases[2].close()
            return False

        @failed.setter
        def failed(self, _: bool) -> None: ...

    taken[0].__class__ = Collects
    again = Lease("a test", dist.group.WORLD, _Made)
    assert again.connection is taken[0]
    drop_all("a test")


def test_the_older_name_is_the_same_class():
    assert transports.TorchProcessGroup is GlooTransport


# Peers that do not come: fresh processes, since their groups are broken afterwards

SHORT = 3.0


def _absent(rank: int, world_size: int, kind: str, seconds: float) -> list[tuple[str, float]]:
    """One case after the other, each in a group of its own whose rank 1 stays away in the end."""
    os.environ["FASTREDUCE_TRANSPORT"] = kind
    found = []
    for case in (_absent_from_construction, _absent_from_function, _absent_from_backward, _absent_from_two_shot):
        group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        start, text = time.monotonic(), ""
        try:
            case(rank, group)
        except TransportError as error:
            text = str(error)
        found.append((text, time.monotonic() - start))
        dist.barrier()  # rank 1 is alive, but elsewhere
    return found


def _absent_from_construction(rank: int, group: Any) -> None:
    if rank != 1:
        wrap("ours", nn.Linear(4, 4), process_group=group)


def _absent_from_function(rank: int, group: Any) -> None:
    gradients = [torch.ones(5), torch.ones(6)]
    all_reduce_gradients(gradients, "fp16", group=group)
    if rank != 1:
        all_reduce_gradients(gradients, "fp16", group=group)


def _absent_from_backward(rank: int, group: Any, **options: Any) -> None:
    body = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 5))
    model = wrap("ours", body, process_group=group, **options)
    for step in range(3 + (rank != 1)):
        model(batch(rank, step, 4, 20)).sum().backward()


def _absent_from_two_shot(rank: int, group: Any) -> None:
    _absent_from_backward(rank, group, compression="int8", bucket_cap_mb=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["gloo", "shm"], indirect=True)
def test_a_peer_that_does_not_come_is_named_with_operation_bucket_and_parameters_and_processes_end(kind: str):
    with_time(lambda seconds: _check_absent(kind, seconds), SHORT)


def _check_absent(kind: str, seconds: float) -> None:
    here, elsewhere, *third = _run(kind, _absent, seconds)
    assert [text for text, _ in elsewhere] == [""] * 4
    construction, function, backward, two_shot = (text for text, _ in here)
    for i, (text, took) in enumerate(here):
        doing = DOING.get(kind, f"over {kind}") if i else "choosing a transport"
        assert re.search(rf"rank 0 of {3 if third else 2}: .*({doing}) failed", text), text
        assert "No word from rank 1: it has exited, takes no part" in text, text
        assert took < seconds + 100  # not the ten minutes of the group around it
    if kind != "two_level":
        first = "all_reduce" if kind == "shm" else "all_to_all"  # tensors as they lie are averaged in one there
        assert first in function and "all_reduce" in backward and first in two_shot
    assert "Bucket 0 holds tensor 0, tensor 1" in function
    assert "Bucket 0 holds" in backward and "Bucket" not in construction
    assert all(name in backward for name in ("0.weight", "0.bias", "1.weight", "1.bias"))
    assert "Bucket 0 holds 1." in two_shot


def _one_of_three_is_absent(rank: int, world_size: int, kind: str, seconds: float) -> str:
    os.environ["FASTREDUCE_TRANSPORT"] = kind
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    model = wrap("ours", nn.Linear(20, 30), process_group=group, compression="int8")
    text = ""
    try:
        for step in range(3 + (rank != 1)):
            model(batch(rank, step, 4, 20)).sum().backward()
    except TransportError as error:
        text = str(error)
    dist.barrier()
    return text


@pytest.mark.long
def test_of_three_ranks_only_the_absent_one_is_named(kind: str):
    def test(seconds: float) -> None:
        hosts = PLACES.get(kind, (3, ""))[1]
        first, absent, third = run_ranks(_one_of_three_is_absent, 3, kind, seconds, hosts=hosts)
        assert absent == ""
        for text in (first, third):
            assert "No word from rank 1: it has exited" in text, text

    with_time(test, SHORT)


def _dies(rank: int, world_size: int, kind: str) -> str:
    os.environ["FASTREDUCE_TRANSPORT"] = kind
    model = wrap("ours", nn.Linear(20, 30), compression="int8")
    for step in range(3):
        model(batch(rank, step, 4, 20)).sum().backward()
    if rank == 1:
        os._exit(0)
    try:
        model(batch(rank, 3, 4, 20)).sum().backward()
    except TransportError as error:
        return str(error)
    return "nothing"


def test_a_peer_that_dies_is_a_transport_error_at_once(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support, "GRACE_SECONDS", 100.0)  # until the others have told, too
    ranks, hosts = PLACES.get(kind, (2, ""))
    pool = RankPool(ranks, hosts=hosts)
    try:
        with pytest.raises(AssertionError) as caught:
            pool.run(_dies_and_tells, kind)
    finally:
        pool.kill()
    assert "TransportError told" in str(caught.value), str(caught.value)


def _dies_and_tells(rank: int, world_size: int, kind: str) -> None:
    text = _dies(rank, world_size, kind)
    assert re.search(f"({DOING.get(kind, f'over {kind}')}) failed", text), text
    assert "Bucket 0 holds weight, bias" in text or "Bucket 0 holds bias, weight" in text, text
    raise AssertionError(f"TransportError told: {text}")
