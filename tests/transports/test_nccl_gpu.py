"""NcclTransport on a real GPU, with the cases of test_nccl.py; pytest and tests/support/ranks.py are enough to run it.

One rank always; two and four share the GPU under NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later). Without the
project's pytest plugins: `pytest -c /dev/null --rootdir . --noconftest tests/transports/test_nccl_gpu.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastreduce.errors import BackendUnavailableError, DeviceError
from fastreduce.transports import NcclTransport
from fastreduce.transports.nccl import library
from tests.support import gpu_pools
from tests.support import nccl_cases as cases
from tests.support.gpu_pools import HAS_GPU, MANY
from tests.support.nccl_cases import OnGpu, caught, come_by, run_case, world
from tests.support.ranks import RankError, RankPool, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not HAS_GPU, reason="no CUDA device"),
]

pools, ranks, several = gpu_pools.pools, gpu_pools.of_each([1, *MANY]), gpu_pools.of_each(MANY)
PLACE = OnGpu()
SECONDS = 90.0  # CUDA and NCCL start in every rank


@pytest.mark.parametrize(
    "case",
    [
        cases.every_collective,
        cases.other_settings_reduce_as_over_gloo,
        cases.ddp_trains_alike,
        cases.communicators_are_taken_again,
    ],
    ids=lambda case: case.__name__,
)
def test_ranks(case: Callable[..., None], ranks: RankPool):
    ranks.run(run_case, case, PLACE, timeout=SECONDS)


@pytest.mark.parametrize("size", MANY[:1])
def test_random_floats_sum_as_over_gloo(size: int, pools: Callable[[int], RankPool]):
    pools(size).run(run_case, cases.random_floats_sum_as_over_gloo, PLACE, timeout=SECONDS)


def test_groups_of_some_ranks(several: RankPool):
    several.run(run_case, cases.groups_of_some_ranks, PLACE, timeout=SECONDS)


@pytest.mark.parametrize("size", [1, *MANY[:1]])
def test_processes_end_cleanly_after_an_abort_and_with_a_transport_in_use(size: int):
    run_ranks(run_case, size, cases.ends_cleanly, PLACE, timeout=SECONDS)


def _graphs(rank: int, size: int, place: OnGpu) -> None:
    """A collective in a graph, captured while the watchdog looks, replayed on other values."""
    transport, wire = NcclTransport(world()), torch.ones(1000, device=place.device)
    with place.asynchronous() as synchronize:
        for _ in range(20):
            transport.all_reduce(wire).wait()
            wire.fill_(1)
            graph = torch.cuda.CUDAGraph()
            synchronize()
            with torch.cuda.graph(graph):
                transport.all_reduce(wire).wait()
            for _ in range(3):
                wire.fill_(2)
                graph.replay()
            synchronize()
            assert bool((wire == 2 * size).all())
            wire.fill_(1)
    transport.close()


def test_graphs_are_captured_while_the_watchdog_looks(ranks: RankPool):
    ranks.run(run_case, _graphs, PLACE, timeout=SECONDS)


def _streams(rank: int, size: int, place: OnGpu) -> None:
    """Nothing but the current stream orders a collective: what is before and after it on that stream fits."""
    transport = NcclTransport(world())
    with place.asynchronous():
        for step in range(20):
            wire = torch.full((1 << 20,), float(rank + step), device=place.device)
            transport.all_reduce(wire).wait()
            wire.mul_(2)
            expected = 2.0 * sum(r + step for r in range(size))
            assert bool((wire == expected).all())
    transport.close()


def test_the_current_stream_orders_what_happens(ranks: RankPool):
    ranks.run(run_case, _streams, PLACE, timeout=SECONDS)


def _aborted(rank: int, size: int, place: OnGpu) -> None:
    transport, wire = NcclTransport(world()), torch.ones(4, device=place.device)
    transport.all_reduce(wire).wait()
    torch.cuda.synchronize()
    transport.abort()
    assert "closed" in caught(lambda: transport.all_reduce(wire))
    dist.barrier()
    cases.works_again(world(), size, place)


def test_a_new_communicator_stands_after_an_abort(ranks: RankPool):
    ranks.run(run_case, _aborted, PLACE, timeout=SECONDS)


def _on_the_cpu(rank: int, size: int, place: OnGpu) -> None:
    with pytest.raises(DeviceError, match=r"this one is on cpu: move it with \.cuda"):
        NcclTransport(world()).all_reduce(torch.ones(3))


def test_tensors_on_the_cpu_are_refused(ranks: RankPool):
    ranks.run(run_case, _on_the_cpu, PLACE, timeout=SECONDS)


# Who does not come


def test_a_rank_that_does_not_connect_is_named(several: RankPool):
    *waiting, _ = several.run(run_case, cases.absent_from_connecting, PLACE, timeout=SECONDS)
    for text in waiting:
        assert f"connecting over NCCL's store failed. No word from rank {several.world_size - 1}: " in text


def test_an_error_on_the_stream_is_raised_on_the_main_thread(several: RankPool):
    *waiting, _ = several.run(run_case, cases.absent_on_a_stream, PLACE, timeout=SECONDS)
    for text, _ in waiting:
        assert "all_gather (collective 2, " in text, text
        assert f"No word from rank {several.world_size - 1}: " in text and text.endswith("Bucket 3 holds a, b."), text


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_rank_that_has_left_is_not_waited_for(end: str, several: RankPool):
    *others, _ = several.run(run_case, cases.left_early, PLACE, end, timeout=SECONDS)
    for text in others:
        assert "all_gather (collective " in text, text


@pytest.mark.parametrize("size", MANY[:1])
def test_a_rank_that_exits_is_named(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.support.ranks.GRACE_SECONDS", SECONDS)  # rank 0 is told when its timeout is over
    pool = RankPool(size)
    try:
        with pytest.raises(RankError) as caught_here:
            pool.run(run_case, cases.exits, PLACE, timeout=SECONDS)
    finally:
        pool.kill()
    assert "told: rank 0 of 2: all_reduce (collective 2, " in str(caught_here.value)


def _no_permission(rank: int, size: int, place: OnGpu) -> str:
    os.environ[library.SHARING_VARIABLE] = "0"
    try:
        NcclTransport(world()).all_reduce(torch.ones(3, device=place.device))
    except BackendUnavailableError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("size", [2])
def test_two_ranks_on_one_gpu_need_permission(size: int, pools: Callable[[int], RankPool]):
    for text in pools(size).run(run_case, _no_permission, PLACE, timeout=SECONDS):
        assert "ranks 0 and 1 are on one GPU, cuda:0 of " in text


def _outlasts(rank: int, size: int, place: OnGpu) -> Any:
    """Nothing is raised for a collective that waits long behind work on its stream, within the timeout."""
    transport, wire = NcclTransport(world()), torch.ones(4, device=place.device)
    with place.asynchronous() as synchronize:
        transport.all_reduce(wire).wait()
        for _ in range(10):
            torch.cuda._sleep(int(2e8))
            transport.all_reduce(wire).wait()
        synchronize()
        come_by()
    transport.close()


def test_a_long_queue_is_no_failure(ranks: RankPool):
    ranks.run(run_case, _outlasts, PLACE, timeout=SECONDS)
