"""Two levels across two hosts: network namespaces, several ranks in each, and the bytes that cross between them."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from fastreduce.errors import TransportError
from fastreduce.transports import Nodes, TwoLevelTransport, make_transport, two_level
from fastreduce.transports.local import LocalTransport
from fastreduce.transports.shm import segments
from fastreduce.transports.store_client import StoreClient
from fastreduce.transports.two_level import _Connecting
from tests.support import two_nodes
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.threads import threads_of_all
from tests.support.transport_cases import collect, expected
from tests.support.two_level_job import SETTINGS


def test_places_in_columns():
    nodes = [(0, 3), (1,), (2, 4, 5)]
    seen = [Nodes.of(nodes, rank) for rank in range(6)]
    assert [(n.node, n.local_rank) for n in seen] == [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (2, 2)]
    assert {n.columns for n in seen} == {1} and {n.parts for n in seen} == {6}
    assert [n.column for n in seen] == [(0, 1, 2)] * 3 + [()] * 3
    assert [Nodes.of([(0, 1), (2, 3)], rank).column for rank in range(4)] == [(0, 2), (1, 3)] * 2
    assert str(seen[0]) == "0,3 | 1 | 2,4,5"


def test_who_asks_last_learns_whom_the_first_names_though_the_store_ends_with_its_process():
    """Rank 2 is gone; rank 0, which holds the store, ends once it knows; rank 1 waits for rank 0, and learns better."""
    held: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    notes = [StoreClient(dist.TCPStore("127.0.0.1", held.port), 60.0) for _ in range(2)]

    def missing(rank: int, misses: int) -> tuple[int, ...]:
        here: Any = _Connecting.__new__(_Connecting)
        here._whole, here._notes = LocalTransport(), notes[rank]
        here._whole.rank, here._whole.world_size = rank, 3
        named: tuple[int, ...] = here._missing(TransportError("", [misses]))
        return named

    def ends() -> tuple[int, ...]:
        nonlocal held
        try:
            return missing(0, misses=2)
        finally:
            del held

    notes[1].set("1", "0")  # before rank 0 has lost its patience, however busy the machine is
    with ThreadPoolExecutor() as threads, patch.object(two_level, "SOON_SECONDS", 60.0):
        first = threads.submit(ends)
        time.sleep(0.5)
        assert missing(1, misses=0) == first.result() == (2,)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [(2, 2), (2, 1)], ids=str)
def test_across_two_hosts(ranks: tuple[int, int], tmp_path: Path):
    """The same bits on every rank, in every run and for all sizes of buckets; averages within the bound; few bytes."""
    launch = ["-c", "from fastreduce.cli import main; main()", "launch", "WHERE"]
    command = [*launch, "-m", "tests.support.two_level_job", tmp_path]
    with two_nodes.or_skip(), two_nodes.two_nodes() as names:
        two_nodes.launch(names, command, timeout=300, ranks=ranks)
    found: list[Any] = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(sum(ranks))]
    for setting in SETTINGS:
        runs = [run for of_rank in found for run in of_rank[setting]["runs"]]
        assert {run["name"] for run in runs} == {"two_level"}
        assert len({run["digest"] for run in runs}) == 1, setting
        assert len({of_rank[setting]["flat"]["digest"] for of_rank in found}) == 1, f"{setting}, flat"
        assert max(run["worst"] for run in runs) <= 1, f"{setting}: {[run['worst'] for run in runs]}"
        for of_rank in (found[0], found[-1]):
            two, flat = of_rank[setting]["runs"][0]["bytes"], of_rank[setting]["flat"]["bytes"]
            # Of a wire W: in two levels W leaves a node; of a flat two-shot 2 W, or with a third rank 4/3 W; of gloo's
            # ring, which goes from a node to the other once, 2 (N-1)/N W.
            share = 3 / 4 if ranks == (2, 1) else 2 / 3 if setting == "none" else 1 / 2
            assert two <= 1.05 * flat * share, f"{setting}: {two} bytes, flat {flat}"


# On ranks that name their hosts


def _asked(group: Any) -> TwoLevelTransport:
    transport = make_transport(group, "cpu", "two_level")
    assert isinstance(transport, TwoLevelTransport)
    return transport


def _collected(rank: int, world_size: int) -> list[Any]:
    """What every collective gives over all ranks, those of the node, and those of the column."""
    transport = _asked(dist.group.WORLD)
    levels = transport.levels
    found = [collect(each) for each in (transport, *levels.sums)]
    transport.close()
    return found


@pytest.mark.long
def test_what_moves_on_each_level_is_what_should(ranks21: RankPool):
    places = [("shm", 0, 2), ("gloo", 0, 2)], [("shm", 1, 2), ("local", 0, 1)], [("local", 0, 1), ("gloo", 1, 2)]
    for rank, found in enumerate(ranks21.run(_collected)):
        assert [tuple(seen[:3]) for seen in found] == [("two_level", rank, 3), *places[rank]]
        for _, at, of, *seen in found:
            assert_same_bits(seen, expected(at, of), f"rank {rank}, {at} of {of}")


def _constructed(rank: int, world_size: int, folder: str, times: int) -> list[Any]:
    """Descriptors, threads and mapped segments after some and after many, beside two groups by turns."""
    process, seen, groups = psutil.Process(), [], [dist.group.WORLD, dist.new_group()]
    with patch.object(segments, "FOLDER", Path(folder)):
        for i in range(times):
            transport = _asked(groups[i % 2])
            levels, tensor = transport.levels, torch.ones(10)
            for level in levels.sums:
                level.all_reduce(tensor).wait()
            assert tensor[0] == (2 if rank == 1 else 3)  # which owns no column
            transport.close()
            if i in (9, times - 1):
                maps = Path("/proc/self/maps").read_text()
                seen.append((process.num_fds(), threads_of_all(), maps.count(segments.PREFIX)))
    return [*seen, os.listdir(folder)]


@pytest.mark.long
def test_many_constructions_leave_nothing(ranks21: RankPool, tmp_path: Path):
    for early, late, left in ranks21.run(_constructed, str(tmp_path), 100, timeout=300):
        assert early == late and left == []
