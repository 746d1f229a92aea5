"""Barriers on real ranks: nobody leaves early, and who does not come is named."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import fastreduce.distributed as dist
from tests.support.commands import PYTHON, finish, free_port, started, with_environment
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


LAST = """
import os, time
import fastreduce.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 0:
    time.sleep(3)  # the others look for it at intervals that grow
dist.barrier()
os._exit(0)
"""


def test_the_store_stays_until_all_have_left_a_barrier(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(LAST)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4", "GLOO_SOCKET_IFNAME": "lo"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(started(PYTHON, script, env=with_environment(**env, RANK=str(rank)), together=True))
            for rank in range(4)
        ]
        done = [finish(rank, 100) for rank in ranks]
    assert [(one.returncode, one.stdout) for one in done] == [(0, "")] * 4
