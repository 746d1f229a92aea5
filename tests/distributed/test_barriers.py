"""Barriers on real ranks: nobody leaves early, and who does not come is named."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import fastreduce.distributed as dist
from fastreduce import TransportError
from fastreduce.distributed import meetings
from fastreduce.transports.meeting import clear
from tests.support.commands import run_by_hand
from tests.support.ranks import RankPool, message


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


def _missing_ranks(rank: int, world_size: int) -> tuple[int, ...]:
    client, missing = dist.get_client(), tuple[int, ...]()
    if rank == 0:
        with pytest.raises(TransportError) as raised:
            dist.barrier(timeout=timedelta(seconds=0.3))
        missing = raised.value.missing
        client.user_set("failed", True)
    assert client.user_get("failed")
    dist.barrier()
    if rank == 0:
        client.user_pop("failed")
    dist.group_barrier()
    return missing


def test_the_error_of_a_barrier_has_the_ranks_that_did_not_come(ranks3: RankPool):
    assert ranks3.run(_missing_ranks) == [(1, 2), (), ()]


class _Stop(Exception):
    pass


def _interrupted(rank: int, world_size: int) -> int:
    """How many have left the first barrier when rank 0, which was interrupted in it once all had come, has left two."""

    def stop(*_: Any) -> None:
        raise _Stop

    def slowly(*arguments: Any) -> None:
        time.sleep(2)
        clear(*arguments)

    store, before = dist.get_client()._store, signal.signal(signal.SIGALRM, stop)
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(meetings, "clear", slowly)
        if rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(_Stop):
                dist.barrier()
        else:
            dist.barrier()
            store.add("left the first", 1)
        dist.barrier()
        signal.signal(signal.SIGALRM, before)
        return store.add("left the first", 0)


@pytest.mark.long
def test_an_interrupt_once_all_have_come_lets_nobody_into_the_next_one_alone(ranks2: RankPool):
    assert ranks2.run(_interrupted) == [1, 1]


def _without_a_word(rank: int, world_size: int, raises: bool) -> float:
    """Seconds of a barrier in which the others leave without a word, or nobody finds the store any more."""

    def gone(*_: Any) -> None:
        if raises:
            raise TransportError("the store is gone")

    start = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank or raises:
            patch.setattr(meetings, "clear", gone)
        dist.barrier(timeout=timedelta(seconds=1.5))
    return time.monotonic() - start


@pytest.mark.parametrize("raises", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_barrier_to_which_all_came_ends_well_and_within_its_timeout(raises: bool):
    with RankPool(2) as ranks:  # of which a meeting stays as it is
        assert max(ranks.run(_without_a_word, raises)) < 4


LAST = """
import os, time
import fastreduce.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep(3)  # the others look for it at intervals that grow
dist.barrier()
os._exit(0)
"""


DIES = """
import os, sys, time
import torch
import fastreduce.distributed as dist
from fastreduce import TransportError

dist.init_process_group("gloo")
group, pair = dist.new_group([1, 2, 3]), dist.new_group([1, 2])
rank = dist.get_rank()
if rank == 2:
    time.sleep(1)
    os._exit(9)
waits = {
    "all": dist.barrier,
    "some": lambda: rank and dist.barrier(group),
    "recv": lambda: dist.recv(torch.zeros(1), 2),
    "any": lambda: rank == 1 and dist.recv(torch.zeros(1), group=pair),
}
try:
    waits[sys.argv[1]]()
except TransportError as error:
    print(error, flush=True)
if rank == 0:
    time.sleep(5)  # else the store is gone
os._exit(0)
"""
GONE = "rank 2 is gone: its process has ended, or has closed its connections"


@pytest.mark.parametrize(
    "what", ["some", *(pytest.param(what, marks=pytest.mark.long) for what in ("all", "recv", "any"))]
)
def test_who_has_ended_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str):
    """The others waited for the group's timeout, half an hour, where torch's own barrier over gloo takes a second."""
    call = "recv" if what in ("recv", "any") else "barrier"
    if call == "recv":
        monkeypatch.setenv("FASTREDUCE_DEBUG", "1")
    script = tmp_path / "train.py"
    script.write_text(DIES)
    done = run_by_hand(script, what, ranks=4)
    assert done[2].returncode == 9
    for rank in {"some": (1, 3), "any": (1,)}.get(what, (0, 1, 3)):
        assert done[rank].stdout == f"{call} on rank {rank}: {GONE}\n"


LIVE = """
import os, time
from datetime import timedelta
import torch
import fastreduce.distributed as dist
from fastreduce import TransportError

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(4)
try:
    dist.all_reduce(torch.ones(2))
except TransportError:
    time.sleep(4 * (dist.get_rank() == 2))
    dist.barrier(timeout=timedelta(seconds=30))
    print("met", flush=True)
if dist.get_rank() == 0:
    time.sleep(2)  # else the store is gone
os._exit(0)
"""


@pytest.mark.long
def test_who_lives_behind_a_collective_that_timed_out_is_waited_for(tmp_path: Path):
    """gloo has closed all connections."""
    script = tmp_path / "train.py"
    script.write_text(LIVE)
    assert [done.stdout for done in run_by_hand(script, ranks=3)] == ["met\n"] * 3


DIFFERS = """
import os, time
from datetime import timedelta
import fastreduce.distributed as dist
from fastreduce import MismatchError
from fastreduce.distributed import rendezvous

limit = timedelta(seconds=20)
if os.environ["RANK"] == "0":
    store = rendezvous.open_store(rendezvous.find_address(None, 4), 0, 4, limit)
    time.sleep(3)
    os.environ["FASTREDUCE_DEBUG"] = "1"
try:
    dist.init_process_group("gloo", timeout=limit)
except MismatchError:
    os._exit(0)
"""


@pytest.mark.parametrize(
    "program", [LAST, pytest.param(DIFFERS, marks=pytest.mark.long)], ids=["barrier", "init_process_group"]
)
def test_the_store_stays_until_all_have_left(tmp_path: Path, program: str):
    script = tmp_path / "train.py"
    script.write_text(program)
    done = run_by_hand(script, ranks=4)
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * 4
