"""Barriers on real ranks: nobody leaves early, and who does not come is named."""

from __future__ import annotations

from datetime import timedelta

import fastreduce.distributed as dist
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
