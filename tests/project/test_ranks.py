"""The ranks that other tests stand on: order, failures, hangs, exits, sizes, state."""

from __future__ import annotations

import atexit
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.fork_server import server
from tests.support.ranks import RankError, RankPool, run_ranks


def _sum_of_ranks(rank: int, world_size: int, start: int) -> tuple[int, float]:
    total = torch.tensor([float(start + rank)])
    dist.all_reduce(total)
    return rank, total.item()


def _fail_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        raise ValueError(f"boom from {rank}")
    dist.barrier()


def _sleep_on(rank: int, world_size: int, bad: int) -> int:
    if rank == bad:
        time.sleep(600)
    return os.getpid()


def _die_on(rank: int, world_size: int, bad: int) -> None:
    if rank == bad:
        os._exit(3)


def _abort_at_exit(rank: int, world_size: int) -> int:
    if rank == 1:
        atexit.register(os.abort)
    return rank


def _twice(rank: int, world_size: int, values: torch.Tensor) -> torch.Tensor:
    return values * (rank + 1)


def _disturb(rank: int, world_size: int) -> float:
    os.environ["LEFT_BEHIND"] = "1"
    return torch.rand(()).item()


def _look(rank: int, world_size: int) -> tuple[bool, float, bool, int]:
    poisoned = bool(torch.empty(1000).isnan().all())
    return "LEFT_BEHIND" in os.environ, torch.rand(()).item(), poisoned, torch.get_num_threads()


def _hash(rank: int, world_size: int) -> int:
    return hash("a text")


def _begun_with(pipe: Connection, folder: str) -> int:
    pipe.send((os.environ.get("LEFT_BEHIND"), os.getcwd(), random.random()))
    atexit.register(Path(folder, "ended").touch)
    return 3


def test_a_fork_has_its_owners_environment_and_ends_as_a_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server()  # which stands before the environment changes
    monkeypatch.setenv("LEFT_BEHIND", "1")
    monkeypatch.chdir(tmp_path)
    processes = [server().fork(_begun_with, str(tmp_path)) for _ in range(2)]
    (variable, folder, first), (_, _, second) = (process.pipe.recv() for process in processes)
    assert [process.poll(100) for process in processes] == [3, 3]
    assert (variable, folder) == ("1", str(tmp_path)) and first != second
    assert tmp_path.joinpath("ended").exists()


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="hash has the seed of PYTHONHASHSEED")
def test_ranks_do_not_agree_on_the_order_of_a_set_by_chance(ranks2: RankPool):
    first, second = ranks2.run(_hash)
    assert first != second


@pytest.mark.long
def test_values_come_in_rank_order_and_the_ranks_are_joined():
    assert run_ranks(_sum_of_ranks, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_an_exception_is_shown_with_its_rank_and_the_next_run_is_good():
    with RankPool(2) as pool:
        with pytest.raises(RankError) as failed:
            pool.run(_fail_on, 1)
        message = str(failed.value)
        assert "--- rank 1 ---" in message and "ValueError: boom from 1" in message and "_fail_on" in message
        assert "rank 0: no answer when one had failed" in message and "barrier" in message
        assert pool.run(_sum_of_ranks, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_is_ended_in_time_and_shown():
    with RankPool(2) as pool:
        pids = pool.run(_sleep_on, -1)
        start = time.monotonic()
        with pytest.raises(RankError, match=r"(?s)rank 0: no answer when 1 s .*_sleep_on"):
            pool.run(_sleep_on, 0, timeout=1)
        assert time.monotonic() - start < 100  # of ten minutes
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_rank_that_dies_is_shown():
    with RankPool(2) as pool, pytest.raises(RankError, match=r"rank 1 ---\nended with exit code 3"):
        pool.run(_die_on, 1)


@pytest.mark.long
def test_an_abort_at_exit_is_a_failure_unless_waived():
    with pytest.raises(RankError, match=r"not exit cleanly:\nrank 1: ended by SIGABRT"):
        run_ranks(_abort_at_exit, 2)
    assert run_ranks(_abort_at_exit, 2, check_exit=False) == [0, 1]


def test_large_values_travel_both_ways(ranks2: RankPool):
    values = torch.arange(4_000_000, dtype=torch.float32)  # 16 MB
    for rank, answer in enumerate(ranks2.run(_twice, values)):
        assert torch.equal(answer, values * (rank + 1))


def test_every_run_starts_from_the_same_state(ranks2: RankPool):
    first = ranks2.run(_disturb)
    torch.manual_seed(0)
    expected = torch.rand(()).item()
    assert first == [expected] * 2
    assert ranks2.run(_look) == [(False, expected, True, 1)] * 2
