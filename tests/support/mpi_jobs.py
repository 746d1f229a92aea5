"""What ranks do under mpirun: `mpirun -n 2 python -m tests.support.mpi_jobs JOB FOLDER TRANSPORT`.

Each writes FOLDER/RANK.json. Gradients go over TRANSPORT, "mpi" or, as they do unasked on one host, "shm". The job
"checks" runs every function of `CHECKS`, in order, and writes what each raised.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

from fastreduce import TransportError, all_reduce_gradients
from fastreduce import distributed as frdist
from fastreduce.reduction.streams import ThreadStream
from fastreduce.transports import (
    ENVIRONMENT_VARIABLE,
    GlooTransport,
    LocalTransport,
    Transport,
    connections,
    make_transport,
)
from fastreduce.transports.deadlines import GRACE_SECONDS
from fastreduce.transports.mpi import MpiTransport, communicator
from fastreduce.transports.two_level import two_levels
from tests.support.collective_cases import all_kinds, check_all_kinds
from tests.support.models import (
    SETTINGS,
    TWO_SHOT,
    Branches,
    MixedDtypes,
    OddShapes,
    Words,
    assert_same_bits,
    batch,
    grads_of,
    mlp,
    play,
    train,
    whole_,
    word_indices,
    wrap,
)
from tests.support.ranks import one_thread_and_poison
from tests.support.transport_cases import collect, expected

SECONDS = 120.0  # the default group's timeout
SHORT = 4.0
TIMEOUTS = {"stays_away": SHORT, "stops_and_the_other_goes_on": 10.0}  # of jobs that wait for it
STEPS = 3
TOPK = "topk:ratio=0.1,min_numel=16"


def _group() -> Any:
    return dist.group.WORLD


def _rank() -> int:
    return dist.get_rank()


def _over_gloo() -> Transport:
    return GlooTransport(_group())


def _same_everywhere(value: Any) -> None:
    """The same bits on every rank."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, value)
    assert_same_bits(value, everybody[0], f"rank {_rank()} against rank 0")


def _short_group() -> Any:
    return dist.new_group(timeout=timedelta(seconds=SHORT))


def launchers_environment() -> None:
    world, here = MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.size)
    found = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    assert found == [world.rank, world.size, here.rank, here.size]


def collectives_move_what_they_should() -> None:
    """At once, and in the pieces that are made where an int cannot count."""
    transport, usual = make_transport(_group()), communicator.BLOCK
    for size_of_block in (usual, 1000):
        communicator.BLOCK = size_of_block
        communicator._large.cache_clear()
        name, rank, size, *seen = collect(transport)
        assert (name, rank, size) == ("mpi", _rank(), dist.get_world_size())
        assert_same_bits(seen, expected(rank, size), f"rank {rank}, blocks of {size_of_block}")
    communicator.BLOCK = usual
    communicator._large.cache_clear()
    transport.close()


def collectives_in_place_work_beside_it() -> None:
    rank, size = _rank(), dist.get_world_size()
    seen = all_kinds(rank, size, torch.float32, "contiguous", False)
    check_all_kinds(rank, size, seen, torch.float32, "contiguous")


def every_setting_gives_what_gloo_gives() -> None:
    for setting, views in zip((*SETTINGS, "powersgd:rank=2", TOPK), itertools.cycle([False, True]), strict=False):
        options: Any = {"compression": setting, "bucket_cap_mb": 0.004, "gradient_as_bucket_view": views}
        ours = train("ours", mlp, _rank(), STEPS, **options)
        _same_everywhere(ours)
        if setting in (*TWO_SHOT, TOPK) or dist.get_world_size() == 2:
            over_gloo = train("ours", mlp, _rank(), STEPS, transport=_over_gloo(), **options)
            assert_same_bits(ours, over_gloo, f"{setting}, views: {views}")


def gradients_equal_torchs() -> None:
    for make in (mlp, MixedDtypes, OddShapes):
        ours = train("ours", make, _rank(), STEPS, bucket_cap_mb=0.004)
        _same_everywhere(ours)
        if dist.get_world_size() == 2:
            assert_same_bits(ours, train("torch", make, _rank(), STEPS, bucket_cap_mb=0.004), make.__name__)


def error_feedback_resumes() -> None:
    options: Any = {"compression": "int8:error_feedback"}
    x = [batch(_rank(), step, 4, 20) for step in range(4)]
    whole, first = (wrap("ours", _seeded(), **options) for _ in range(2))
    for step in range(4):
        whole.zero_grad()
        whole(x[step]).square().mean().backward()
        if step < 2:
            first.zero_grad()
            first(x[step]).square().mean().backward()
    second = wrap("ours", _seeded(), **options)
    second.reducer.load_state_dict(first.reducer.state_dict())
    for step in (2, 3):
        second.zero_grad()
        second(x[step]).square().mean().backward()
    assert_same_bits(grads_of(second.module), grads_of(whole.module))


def _seeded() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def unused_parameters_and_no_sync_end_as_over_gloo() -> None:
    """Branches that only some ranks use, local backwards, accumulation: whole numbers, so three ranks are exact."""
    used = ("abc", "a", "b")[_rank()]
    for ops in (
        ["f1:abc", "b1", f"f2:{used}", "b2", "z", f"f3:{used}", "b3"],
        ["(", "f1", "b1", ")", "f2", "b2", "z", "(", "f3", ")", "b3", "f4", "b4"],
        ["f1", "b1", "-", "f2", "b2", "+", "f3", "b3", "Z", "f4", "b4"],
    ):
        ours = play(wrap("ours", whole_(Branches())), ops, _rank())
        assert_same_bits(ours, play(wrap("ours", whole_(Branches()), transport=_over_gloo()), ops, _rank()))


def sparse_gradients_end_as_over_gloo() -> None:
    seen = []
    for transport in (None, _over_gloo()):
        model = wrap("ours", Words(), transport=transport)
        for step in range(2):
            model(word_indices(_rank(), step)).sum().backward()
        grads = grads_of(model.module)
        seen.append({name: grad.to_dense() for name, grad in grads.items()})
    assert_same_bits(*seen)


def all_reduce_gradients_stands_for_the_loop_of_allreduces() -> None:
    world = MPI.COMM_WORLD
    for step in range(2):
        by_loop, ours = _seeded(), _seeded()
        for model in (by_loop, ours):
            model(batch(_rank(), step, 4, 20)).square().mean().backward()
        for parameter in by_loop.parameters():
            world.Allreduce(MPI.IN_PLACE, parameter.grad.numpy(), op=MPI.SUM)
            parameter.grad.div_(world.size)
        all_reduce_gradients(ours.parameters())
        _same_everywhere(grads_of(ours))
        if world.size == 2:
            assert_same_bits(grads_of(ours), grads_of(by_loop))


def our_collectives_do_not_mix_with_the_users() -> None:
    """Ours and the user's on two threads, in another order on each rank."""
    transport, world, size = make_transport(_group()), MPI.COMM_WORLD, dist.get_world_size()
    ours, users = torch.ones(1000), torch.full((1000,), 10.0)

    def run_ours() -> None:
        for _ in range(20):
            transport.all_reduce(ours).wait()
            ours.div_(size)

    thread = threading.Thread(target=run_ours)
    if _rank() == 0:
        thread.start()
    for _ in range(20):
        world.Allreduce(MPI.IN_PLACE, users.numpy(), op=MPI.SUM)
        users.div_(size)
    if _rank() != 0:
        thread.start()
    thread.join()
    assert bool((ours == 1).all() and (users == 10).all())
    transport.close()


def collectives_go_on_while_the_main_thread_computes() -> None:
    """Nobody on the main thread calls MPI or waits, and the job ends."""
    transport, stream = make_transport(_group()), ThreadStream()
    size = dist.get_world_size()
    wire = torch.ones(size * 1_000_000)
    received = torch.empty_like(wire).view(size, -1)

    def begin() -> Callable[[], None]:
        transport.all_to_all(received, wire).wait()
        return transport.all_gather(wire).wait

    job = stream.submit(begin)
    matrix, deadline = torch.ones(64, 64), time.monotonic() + SECONDS
    while not job.done and time.monotonic() < deadline:
        matrix = matrix.mm(matrix).clamp(max=1)
    assert job.done
    job.result()
    stream.close()
    transport.close()


def communicators_are_used_again() -> None:
    made = []
    for _ in range(3):
        transports = [MpiTransport(_group()) for _ in range(2)]
        for number, transport in enumerate(transports):
            assert transport.exchange([_rank(), number]) == [[r, number] for r in range(dist.get_world_size())]
        made.append([transport._lease.number for transport in transports])
        for transport in transports[:: 1 if _rank() else -1]:
            transport.close()
    assert made[0] == made[1] == made[2], made
    with _raises(TransportError, "closed"):
        transport.all_reduce(torch.ones(1))


def ever_new_sizes_are_received_in_the_same_memory() -> None:
    transport, size = MpiTransport(_group()), dist.get_world_size()
    transport._lease.connection._spare.clear()  # of another transport that had the connection before
    for numel in [*range(10, 60), *range(60, 10, -1)]:
        tensors = [torch.full((n,), _rank() + 1.0, dtype=torch.float64) for n in (numel, numel + 7)]
        for work in [transport.all_reduce(tensor) for tensor in tensors]:
            work.wait()
        assert all((tensor == size * (size + 1) / 2).all() for tensor in tensors), numel
    spare = transport._lease.connection._spare
    assert len(spare) <= len(tensors), len(spare)
    transport.close()


def groups_of_some_ranks_use_mpi_too() -> None:
    """Groups that the user makes, with torch or with us."""
    last = dist.get_world_size() - 1
    makes: list[Any] = [dist.new_group, frdist.new_group, partial(frdist.new_group, backend="mpi")]
    for ranks, make in zip(([0, last], [last, 0], [0]), makes, strict=True):
        group = make(ranks)
        if _rank() in ranks:
            assert frdist.get_backend(group) == "mpi"
            transport = make_transport(group)
            assert type(transport) is (LocalTransport if len(ranks) == 1 else MpiTransport)
            assert transport.exchange(_rank()) == sorted(ranks)
            value = torch.full((5,), 1.0 + _rank(), dtype=torch.float16)
            transport.all_reduce(value).wait()
            assert value.tolist() == [sum(1.0 + rank for rank in ranks)] * 5


def two_levels_end_as_over_gloo() -> None:
    """Two ranks on one host and the third on another, which take turns as last to come."""
    if dist.get_world_size() < 3:
        return
    seen = []
    with unasked(FASTREDUCE_HOST=f"node {_rank() // 2}"):
        for transport in (None, two_levels(_group(), [[0, 1], [2]], GlooTransport, 1)):
            ddp = wrap(
                "ours",
                _seeded(),
                process_group=dist.new_group(),
                transport=transport,
                compression="int8:error_feedback",
            )
            assert ddp.reducer.transport.name == "two_level"
            for step in range(STEPS):
                time.sleep(0.01 * (_rank() == step))
                ddp.zero_grad()
                ddp(batch(_rank(), step, 4, 20)).square().mean().backward()
            seen.append(grads_of(ddp.module))
    assert_same_bits(*seen)
    _same_everywhere(seen[0])


@contextlib.contextmanager
def unasked(**environment: str) -> Iterator[None]:
    """The transport is chosen."""
    with patch.dict(os.environ, environment):
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
        yield


def ranks_of_one_host_share_memory_unless_they_ask_for_mpi() -> None:
    for setting in ("none", "int8:error_feedback"):
        seen = []
        for asked in (None, "mpi"):
            with unasked():
                ddp = wrap("ours", _seeded(), compression=setting, transport=asked)
            assert ddp.reducer.transport.name == (asked or "shm")
            for step in range(STEPS):
                ddp.zero_grad()
                ddp(batch(_rank(), step, 4, 20)).square().mean().backward()
            seen.append(grads_of(ddp.module))
        assert_same_bits(seen[0], seen[1], setting)


def the_others_find_what_is_not_a_number() -> None:
    for setting in SETTINGS:
        tensor = torch.full((300,), torch.inf if _rank() == 0 else 1.0)
        all_reduce_gradients([tensor], setting)
        assert not tensor.isfinite().any(), setting


# What breaks a communicator comes last


def who_does_not_come_is_named() -> None:
    """The last rank stays away: from connecting, from a collective, from a backward."""
    last = dist.get_world_size() - 1
    group = _short_group()
    if _rank() != last:
        with _raises(TransportError, f"connecting over MPI failed: rank {last} did not come within {SHORT:g} s"):
            MpiTransport(group).exchange(0)
    dist.barrier()

    transport = make_transport(_short_group())
    transport.exchange(0)
    if _rank() != last:
        wire = torch.ones(1000 * dist.get_world_size())
        where = f"rank {_rank()} of {last + 1}: all_to_all over MPI failed"
        with _raises(TransportError, f"{where}: rank {last} did not come within {SHORT:g} s"):
            transport.all_to_all(torch.empty_like(wire), wire).wait()
    dist.barrier()

    model = wrap("ours", _seeded(), process_group=_short_group())
    for step in range(3):
        model(batch(_rank(), step, 4, 20)).sum().backward()
    if _rank() != last:
        where = f"all_reduce over MPI failed: rank {last} did not come within {SHORT:g} s. Bucket 0 holds "
        with _raises(TransportError, where, "0.weight"):
            model(batch(_rank(), 3, 4, 20)).sum().backward()
    dist.barrier()


def who_waits_in_an_earlier_collective_is_not_blamed() -> None:
    """The last rank stays away; rank 0 waits for it in the first of two, the others in the second."""
    last = dist.get_world_size() - 1
    transport = make_transport(_short_group())
    transport.exchange(0)
    if _rank() != last:
        works = [transport.all_gather(torch.ones(last + 1)) for _ in range(min(_rank() + 1, 2))]
        with _raises(TransportError, f"all_gather over MPI failed: rank {last} did not come within {SHORT:g} s"):
            works[-1].wait()
    dist.barrier()


def who_has_left_is_not_waited_for() -> None:
    for end in ("close", "abort"):
        transport = make_transport(_group())
        transport.exchange(0)
        if _rank() == 0:
            getattr(transport, end)()
        else:
            with _raises(TransportError, "all_gather over MPI failed: rank 0 has ended, or takes no part any more"):
                transport.all_gather(torch.ones(dist.get_world_size())).wait()
            transport.close()
        dist.barrier()


def what_was_aborted_ends_here_too() -> None:
    transport = make_transport(_short_group())
    transport.exchange(0)
    if _rank() == 0:
        work, found = transport.all_gather(torch.ones(dist.get_world_size())), list[BaseException]()

        def wait() -> None:
            try:
                work.wait()
            except TransportError as error:
                found.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        transport.abort()
        thread.join()
        assert "aborted" in str(found[0])
    dist.barrier()


@contextlib.contextmanager
def _raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """pytest.raises without pytest's start-up time."""
    start = time.monotonic()
    try:
        yield
    except kind as error:
        assert all(text in str(error) for text in texts), f"{error} has not {texts}"
        assert time.monotonic() - start < SECONDS / 2
    else:
        raise AssertionError(f"{kind} was not raised")


CHECKS: tuple[Callable[[], None], ...] = (
    launchers_environment,
    collectives_move_what_they_should,
    collectives_in_place_work_beside_it,
    every_setting_gives_what_gloo_gives,
    gradients_equal_torchs,
    error_feedback_resumes,
    unused_parameters_and_no_sync_end_as_over_gloo,
    sparse_gradients_end_as_over_gloo,
    all_reduce_gradients_stands_for_the_loop_of_allreduces,
    our_collectives_do_not_mix_with_the_users,
    collectives_go_on_while_the_main_thread_computes,
    communicators_are_used_again,
    ever_new_sizes_are_received_in_the_same_memory,
    groups_of_some_ranks_use_mpi_too,
    two_levels_end_as_over_gloo,
    ranks_of_one_host_share_memory_unless_they_ask_for_mpi,
    the_others_find_what_is_not_a_number,
    who_does_not_come_is_named,
    who_waits_in_an_earlier_collective_is_not_blamed,
    who_has_left_is_not_waited_for,
    what_was_aborted_ends_here_too,
)


def checks() -> dict[str, str]:
    """What each check raised; a rank that fails leaves the others waiting, for `SECONDS` at most."""
    found = {}
    for check in CHECKS:
        start = time.monotonic()
        try:
            check()
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = f"rank {_rank()}: {traceback.format_exc()}"
        print(f"{check.__name__}: {time.monotonic() - start:.2f} s", flush=True)
    return found


# How a job ends: the last rank does something that the others do not


def _train_until(event: Callable[[], None]) -> dict[str, Any]:
    model = wrap("ours", _seeded(), compression="fp16")
    for step in itertools.count():
        model(batch(_rank(), step, 4, 20)).sum().backward()
        if step == 3 and _rank() == dist.get_world_size() - 1:
            Path(sys.argv[2], "event").write_text(str(time.time()))
            event()
    raise AssertionError


def _raise() -> None:
    raise ValueError("boom")


def raises() -> Any:
    return _train_until(_raise)


def raises_in_a_thread() -> Any:
    def event() -> None:
        thread = threading.Thread(target=_raise)
        thread.start()
        thread.join()
        threading.Event().wait()  # for good

    return _train_until(event)


def exits() -> Any:
    return _train_until(lambda: sys.exit(3))


def stops_and_the_other_goes_on() -> Any:
    """The script of the one that is left catches the error, and ends as if all were well."""
    try:
        return _train_until(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    except TransportError as error:
        return {"raised": str(error)}


def saves_behind_a_failure() -> Any:
    """One gives a collective up, all go on, and that one is busy for long when the others end."""
    transport = make_transport(_group())
    transport.exchange(0)
    if _rank() == 0:
        transport.abort()
    else:
        with contextlib.suppress(TransportError):
            transport.all_gather(torch.ones(dist.get_world_size())).wait()
    dist.barrier()
    time.sleep(0 if _rank() else GRACE_SECONDS + 2)
    return connections.failed_here.is_set()


def finalizes_early() -> Any:
    """All end MPI, and train on."""
    model = wrap("ours", _seeded(), compression="fp16")
    model(batch(_rank(), 0, 4, 20)).sum().backward()
    rank = _rank()
    MPI.Finalize()
    try:
        model(batch(rank, 1, 4, 20)).sum().backward()
    except TransportError as error:
        return str(error)


def stays_away() -> Any:
    raise AssertionError("rank 0 joined")


JOBS: dict[str, Callable[[], Any]] = {
    job.__name__: job
    for job in (
        checks,
        raises,
        raises_in_a_thread,
        exits,
        stops_and_the_other_goes_on,
        saves_behind_a_failure,
        finalizes_early,
        stays_away,
    )
}


def main() -> None:
    name, folder, transport = sys.argv[1:]
    if transport != "shm":
        os.environ[ENVIRONMENT_VARIABLE] = transport
    rank = MPI.COMM_WORLD.rank
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    one_thread_and_poison()
    if name == "stays_away" and rank != 0:
        Path(folder, "event").write_text(str(time.time()))
        MPI.COMM_WORLD.recv(source=0)  # for good
    frdist.init_process_group("mpi", timeout=timedelta(seconds=TIMEOUTS.get(name, SECONDS)))
    Path(folder, f"{rank}.json").write_text(json.dumps(JOBS[name]()))
    dist.destroy_process_group()
    sys.exit(0)


if __name__ == "__main__":
    main()
