"""NcclTransport without a GPU: its own code over a stand-in for CuPy's NCCL, between real processes."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fastreduce import BackendUnavailableError, TransportError, transports
from fastreduce.errors import DeviceError, TensorError
from fastreduce.transports import (
    GlooTransport,
    LocalTransport,
    NcclTransport,
    make_transport,
    nccl,
    register_transport,
)
from fastreduce.transports.nccl import library
from tests.support import nccl_cases as cases
from tests.support import nccl_stand_in as stand_in
from tests.support import random_models
from tests.support.nccl_cases import OnGpu, OnHost, caught, run_case, short_group, world
from tests.support.random_models import Block, Program
from tests.support.ranks import RankError, RankPool, run_ranks, with_time


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    return OnHost(str(tmp_path_factory.mktemp("nccl")))


def in_time(check: Callable[[OnHost], object], tmp_path: Path) -> None:
    """`check` where ranks that do not come are waited for 2 s; on a machine too busy for that, longer."""
    with_time(lambda seconds: check(OnHost(mkdtemp(dir=tmp_path), seconds)), 2.0)


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# The stand-in is like CuPy


def _cupy() -> Any:
    """CuPy's module; a CPU machine has it from the dev extra."""
    pytest.importorskip("cupy", reason="CuPy is not installed: pip install cupy-cuda13x")
    return importlib.import_module("cupy.cuda.nccl")


def _parameters(docstring: str) -> list[str]:
    """Names in a Cython signature, the first line of a docstring."""
    inside = docstring.strip().splitlines()[0].partition("(")[2].rpartition(")")[0]
    return [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]


METHODS = ("allReduce", "allGather", "send", "recv", "abort", "destroy")


def test_the_stand_in_has_the_signatures_of_cupy():
    cupys = _cupy()
    for name in (*METHODS, "check_async_error"):
        theirs = _parameters(getattr(cupys.NcclCommunicator, name).__doc__)
        assert list(inspect.signature(getattr(stand_in.NcclCommunicator, name)).parameters) == theirs, name
    theirs = _parameters(cupys.NcclCommunicator.__doc__)
    assert list(inspect.signature(stand_in.NcclCommunicator).parameters) == theirs
    for name in ("groupStart", "groupEnd"):
        assert _parameters(getattr(cupys, name).__doc__) == []
        assert not inspect.signature(getattr(stand_in, name)).parameters
    assert isinstance(cupys.get_version(), int)
    assert issubclass(cupys.NcclError, RuntimeError)


def test_numbers_are_those_of_cupy():
    cupys = _cupy()
    for name in (name for name in dir(stand_in) if name.startswith("NCCL_")):
        assert getattr(stand_in, name) == getattr(cupys, name), name
    for dtype, code in nccl.DTYPES.items():
        name = {torch.bfloat16: "BFLOAT16"}.get(dtype) or str(dtype).removeprefix("torch.").upper()
        assert code == getattr(cupys, f"NCCL_{name}"), dtype
    assert nccl.SUM == cupys.NCCL_SUM
    identifier = cupys.get_unique_id()
    assert type(identifier) is bytes and len(identifier) == 128


# What moves


CASES = [
    (3, cases.every_collective),
    (2, cases.every_collective),
    (3, cases.other_settings_reduce_as_over_gloo),
    (2, cases.other_settings_reduce_as_over_gloo),
    (2, cases.ddp_trains_alike),
    (3, cases.ddp_trains_alike),
    (2, cases.communicators_are_taken_again),
    (3, cases.groups_of_some_ranks),
]


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(size, case, id=f"{case.__name__}, {size} ranks", marks=[pytest.mark.long] * (i in (0, 3, 5)))
        for i, (size, case) in enumerate(CASES)
    ],
)
def test_ranks(size: int, case: Callable[..., None], place: OnHost, request: pytest.FixtureRequest):
    request.getfixturevalue(f"ranks{size}").run(run_case, case, place)


def test_one_rank(alone: None, place: OnHost):
    run_case(0, 1, cases.every_collective, place)


def test_random_floats_sum_as_over_gloo(ranks2: RankPool, place: OnHost):
    ranks2.run(run_case, cases.random_floats_sum_as_over_gloo, place)


PROGRAMS = [
    Program(
        (Block("linear"), Block("embedding"), Block("gru"), Block("ragged", "float16")),
        "f0:abcd/ac/ab b0 s z ( f1:abcd b1 ) f2:ab b2 s z f3:abcd b3 s",
        find_unused=True,
        options={"bucket_cap_mb": 0.0002, "broadcast_buffers": False},
    ),
    Program(
        (
            Block("linear"),
            Block("wide", "bfloat16"),
            Block("empty"),
            Block("complex"),
            Block("channels_last", "float64"),
        ),
        "f0:abcde b0 s Z f1:abcde b1 s",
        "dict",
        options={"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True},
    ),
]


def _trains(rank: int, size: int, place: OnHost, program: Program, setting: str) -> list[str]:
    register_transport(world(), NcclTransport)
    try:
        return random_models.check(rank, size, program, setting)
    finally:
        transports._factories.clear()


@pytest.mark.parametrize("setting", ["none", "int8:error_feedback"])
def test_programs_train_as_with_torch(setting: str, ranks2: RankPool, place: OnHost):
    for program in PROGRAMS:
        problems = ranks2.run(run_case, _trains, place, program, setting)
        assert problems == [[], []]


@pytest.mark.long
def test_processes_end_cleanly_after_an_abort_and_with_a_transport_in_use(tmp_path: Path):
    def check(place: OnHost) -> None:
        text, _ = run_ranks(run_case, 2, cases.ends_cleanly, place)
        assert "No word from rank 1" in text

    in_time(check, tmp_path)


def _watchdogs() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "fastreduce-nccl-watchdog"}


def test_communicators_end_with_their_group(place: OnHost):
    before = _watchdogs()
    with place.installed():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        transport = NcclTransport(world())
        transport.all_reduce(torch.ones(3)).wait()
        made = _stand_in_of(transport)
        (watchdog,) = _watchdogs() - before
        dist.destroy_process_group()
        transport.close()
        del transport
        gc.collect()
        watchdog.join(timeout=100)
        assert not watchdog.is_alive()
        assert made.destroyed and not made.aborted


# Who does not come


@pytest.mark.long
def test_a_rank_that_does_not_connect_is_named(ranks3: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        *waiting, absent = ranks3.run(run_case, cases.absent_from_connecting, place)
        assert absent == "nothing"
        for rank, text in enumerate(waiting):
            assert f"rank {rank} of 3: connecting over NCCL's store failed. No word from rank 2: " in text

    in_time(check, tmp_path)


def test_an_error_on_the_stream_is_raised_on_the_main_thread(ranks3: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        *waiting, absent = ranks3.run(run_case, cases.absent_on_a_stream, place)
        assert absent[0] == "nothing"
        for rank, (text, took) in enumerate(waiting):
            late = f"rank {rank} of 3: all_gather (collective 2, 48 bytes of torch.float32) over NCCL failed: "
            assert f"{late}it did not end within {place.timeout:g} s." in text or "gave up" in text, text
            assert "No word from rank 2: it has exited, takes no part" in text, text
            assert text.endswith("Bucket 3 holds a, b."), text
            assert place.timeout <= took + 1 < place.timeout + 100

    in_time(check, tmp_path)


def _slow_to_start(rank: int, size: int, place: OnHost, often: int) -> str:
    """What is told of the absent rank where the first communicators of a process take longer than the timeout."""
    start, first = stand_in.NcclCommunicator.__init__, often * [place.timeout + 1.0]

    def slowly(*args: Any) -> None:
        time.sleep(first.pop() if first else 0.0)
        start(*args)

    with patch.object(stand_in.NcclCommunicator, "__init__", slowly):
        return cases.absent_on_a_stream(rank, size, place)[0]


@pytest.mark.long
def test_how_long_nccl_takes_to_start_does_not_count_where_ranks_are_absent(ranks2: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        assert "No word from rank 1: " in ranks2.run(run_case, _slow_to_start, place, 1)[0]

    in_time(check, tmp_path)


@pytest.mark.long
def test_nor_does_each_start_where_ranks_share_a_gpu(ranks2: RankPool, tmp_path: Path):
    place = OnHost(str(tmp_path), timeout=0.5, starts=OnGpu.starts)
    assert "all_gather (collective 2, " in ranks2.run(run_case, _slow_to_start, place, 9)[0]


def _stand_in_of(transport: NcclTransport) -> stand_in.NcclCommunicator:
    (communicator,) = transport._communicators.values()
    made: stand_in.NcclCommunicator = communicator._made
    return made


def _absent_inside(rank: int, size: int, place: OnHost) -> tuple[str, bool]:
    """NCCL itself waits for the peer, inside the call: it is that call that raises."""
    transport, wire = NcclTransport(short_group(place)), torch.ones(4)
    transport.all_reduce(wire).wait()
    text = "nothing"
    if rank != size - 1:
        with pytest.raises(TransportError) as caught_here:
            transport.all_reduce(wire)
        text = str(caught_here.value)
        assert isinstance(caught_here.value.__context__, stand_in.NcclError)  # and not what came from outside
        cases.come_by()  # nothing more comes
    aborted = _stand_in_of(transport).aborted
    dist.barrier()
    transport.close()
    return text, aborted


def test_a_call_that_nccl_holds_up_raises_by_itself(ranks2: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        (text, aborted), absent = ranks2.run(run_case, _absent_inside, place)
        assert absent == ("nothing", False)
        assert aborted and f"it did not end within {place.timeout:g} s. No word from rank 1: " in text, text

    in_time(check, tmp_path)


@pytest.mark.parametrize(("end", "says"), [("close", "has ended, or takes no part any more"), ("abort", "gave up")])
def test_a_rank_that_has_left_is_not_waited_for(end: str, says: str, ranks3: RankPool, place: OnHost):
    *others, last = ranks3.run(run_case, cases.left_early, place, end)
    assert last == "nothing"
    for text in others:
        assert "all_gather (collective " in text, text
        assert f"rank {len(others)} {says}." in text or re.search(r"rank \d gave up\.", text), text


@pytest.mark.long
def test_a_rank_that_exits_is_named(place: OnHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.support.ranks.GRACE_SECONDS", 100.0)  # rank 0 is told when its timeout is over
    pool = RankPool(2)
    try:
        with pytest.raises(RankError) as caught_here:
            pool.run(run_case, cases.exits, place)
    finally:
        pool.kill()
    assert "told: rank 0 of 2: all_reduce (collective 2, 16 bytes" in str(caught_here.value)
    assert "No word from rank 1: " in str(caught_here.value)


def _async_error(rank: int, size: int, place: OnHost, error: Exception) -> str:
    transport, wire = NcclTransport(world()), torch.ones(4)
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        synchronize()
        if rank == 1:
            dist.barrier()
        transport.all_reduce(wire).wait()
        if rank == 0:
            _stand_in_of(transport).async_error = error
        text = caught(lambda: (synchronize(), cases.come_by()))
        assert caught(lambda: transport.all_reduce(wire)) == text
        if rank == 0:
            dist.barrier()
        transport.close()
    cases.works_again(world(), size, place)
    return text


# CuPy meets numbers that are newer than its list of them with KeyError.
@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_REMOTE_ERROR: remote process exited"), KeyError(8)])
def test_an_error_that_nccl_notices_is_raised_and_the_others_told(error: Exception, ranks2: RankPool, place: OnHost):
    first, second = ranks2.run(run_case, _async_error, place, error)
    assert "all_reduce (collective " in first and f"{type(error).__name__}: {error}. No word" in first
    assert "all_reduce (collective " in second and "rank 0 gave up." in second


def _told_elsewhere(rank: int, size: int, place: OnHost) -> tuple[str, bool]:
    """Of two transports that fail, one is closed before, and one has told another thread: the main thread is spared."""
    groups = [short_group(place), short_group(place)]
    closed, open_one = (NcclTransport(group) for group in groups)
    wire, said = torch.ones(4), [""]
    with place.asynchronous() as synchronize:
        for transport in (closed, open_one):
            transport.all_reduce(wire).wait()
        synchronize()
        connection = closed._lease.connection
        if rank == 0:
            for transport in (closed, open_one):
                transport.all_reduce(wire).wait()
            closed.close()

            def call_until_it_raises() -> None:
                while "failed" not in said[0]:
                    said[0] = caught(open_one.check)
                    time.sleep(0.01)

            thread = threading.Thread(target=call_until_it_raises)
            thread.start()
            thread.join()
            synchronize()  # ends once both watchdogs have aborted
            cases.come_by()
    dist.barrier()
    for transport in (closed, open_one):
        transport.close()
    for group in groups:
        cases.works_again(group, size, place)
    return said[0], connection.failed


@pytest.mark.long
def test_an_error_is_raised_once_and_not_after_close(ranks2: RankPool, tmp_path: Path):
    def check(place: OnHost) -> None:
        (text, failed), other = ranks2.run(run_case, _told_elsewhere, place)
        assert "did not end within" in text and failed
        assert other == ("", False)

    in_time(check, tmp_path)


# CUDA graphs


def _captured(rank: int, size: int, place: OnHost) -> int:
    transport, wire = NcclTransport(world()), torch.ones(4)
    stand_in.HostCuda.is_capturing = True
    try:
        with pytest.raises(TransportError, match="run a step before the capture"):
            transport.all_reduce(wire)
        stand_in.HostCuda.is_capturing = False
        transport.all_reduce(wire).wait()
        communicator = transport._communicators[wire.device]
        stand_in.HostCuda.is_capturing = True
        assert communicator.oldest() is None
        transport.all_reduce(wire).wait()
        watched = len(communicator._entries)
    finally:
        stand_in.HostCuda.is_capturing = False
    transport.close()
    return watched


def test_what_a_graph_captures_is_not_watched(ranks2: RankPool, place: OnHost):
    assert ranks2.run(run_case, _captured, place) == [0, 0]


# What is missing


def _library(**attributes: Any) -> types.ModuleType:
    module = types.ModuleType("cupy.cuda.nccl")
    vars(module).update(attributes)
    return module


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, r"NCCL library not available: CuPy cannot be imported \(.*\): pip install cupy-cuda1\dx"),
        (_library(available=False), r"NCCL library not available: CuPy finds no libnccl: pip install nvidia-nccl-cu1"),
        (
            _library(available=True, get_version=lambda: 2804),
            r"NCCL 2\.8\.4 is too old, fastreduce needs 2\.10\.0 or later: pip install --upgrade nvidia-nccl-cu1",
        ),
    ],
    ids=["no CuPy", "no NCCL", "an old one"],
)
def test_what_is_missing_is_said_with_what_helps(module: Any, says: str, alone: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", module)
    with pytest.raises(BackendUnavailableError) as caught_here:
        NcclTransport(world())
    assert re.search(says, str(caught_here.value)), str(caught_here.value)


def _on_one_gpu(rank: int, size: int, place: OnHost) -> list[str]:
    texts = []
    stand_in.HostCuda.gpu = "GPU-1234"
    wire = torch.ones(4)
    try:
        for variable, version in (("0", 23203), ("1", 22900), ("1", 23203)):
            os.environ[library.SHARING_VARIABLE] = variable
            stand_in.version = version
            transport = NcclTransport(world())
            try:
                transport.all_reduce(wire).wait()
                texts.append("works")
            except BackendUnavailableError as error:
                texts.append(str(error))
            transport.close()
    finally:
        stand_in.HostCuda.gpu, stand_in.version = None, 23203
    return texts


def test_two_ranks_on_one_gpu_need_permission(ranks2: RankPool, place: OnHost):
    for texts in ranks2.run(run_case, _on_one_gpu, place):
        assert texts.pop() == "works"
        for text in texts:
            assert "ranks 0 and 1 are on one GPU" in text and "torch.cuda.set_device" in text
            assert "export NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30.0 or later)" in text


# Wrong calls


def _wrong_calls(rank: int, size: int, place: OnHost) -> None:
    transport = NcclTransport(world())
    four, three = torch.ones(4), torch.ones(3)
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (DeviceError, "is on meta: move it with .cuda", lambda: transport.all_reduce(four.to("meta"))),
        (TensorError, "strides (1, 4); call contiguous", lambda: transport.all_gather(torch.ones(2, 4).t())),
        (TensorError, "cannot combine torch.bool; allowed: int8,", lambda: transport.all_reduce(four.bool())),
        (TensorError, "5 bytes do not split into 2 shards", lambda: transport.all_gather(torch.ones(5).byte())),
        (TensorError, "received has 3 elements; it needs 4", lambda: transport.all_to_all(three, four)),
    ]
    for kind, says, call in calls:
        with pytest.raises(kind, match=re.escape(says)):
            call()
    gloo = GlooTransport(world())
    far = torch.ones(4, device="meta")
    for call in (lambda: gloo.all_reduce(far), lambda: gloo.all_to_all(far, far), lambda: gloo.all_gather(far)):
        with pytest.raises(DeviceError, match=r"over gloo: .* on meta: use NcclTransport"):
            call()
        assert gloo._lease.number == -1, "it has connected, which waits for other ranks"


def test_wrong_calls_are_refused_before_anything_moves(ranks2: RankPool, place: OnHost):
    ranks2.run(run_case, _wrong_calls, place)


def _chosen(rank: int, size: int, place: OnHost) -> list[str]:
    return [type(make_transport(world(), device)).__name__ for device in ("cpu", "cuda:1", torch.device("cuda"))]


def test_the_device_chooses_the_transport(ranks2: RankPool, place: OnHost, alone: None):
    expected = ["ShmTransport", "NcclTransport", "NcclTransport"]
    assert ranks2.run(run_case, _chosen, place) == [expected, expected]
    assert type(make_transport(world(), "cuda")) is LocalTransport
