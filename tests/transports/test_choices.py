"""What ranks ask for, told before a transport is made: those that differ get one error, and nobody waits."""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastreduce import all_reduce_gradients, transports
from fastreduce.transports import GlooTransport, ShmTransport, choices, make_transport
from fastreduce.transports.hosts import nodes_of
from fastreduce.transports.messages import encode
from fastreduce.transports.ranks import client_of
from tests.support.commands import run_by_hand
from tests.support.models import wrap
from tests.support.ranks import RankPool, message, with_time

DIES = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from fastreduce import DistributedDataParallel, TransportError, all_reduce_gradients
from fastreduce.transports.shm import connection, segments

segments.FOLDER = Path(sys.argv[2])
dist.init_process_group("gloo")
model = nn.Linear(2, 2)
if "again" in sys.argv:
    first = DistributedDataParallel(nn.Linear(2, 2))
    first(torch.ones(1, 2)).sum().backward()
if dist.get_rank() == 1:
    if "connecting" in sys.argv:
        connection.ShmConnection._connect = lambda *arguments: os._exit(9)
        DistributedDataParallel(model)
    if "sharing" in sys.argv:
        connection.Segment.open = lambda *arguments: os._exit(9)
        DistributedDataParallel(model)
    time.sleep(2)
    os._exit(9)
try:
    all_reduce_gradients(model.parameters()) if "call" in sys.argv else DistributedDataParallel(model)
except TransportError as error:
    print(error, error.missing, flush=True)
if dist.get_rank() == 0:
    time.sleep(4)  # else the store is gone
os._exit(0)
"""


@pytest.mark.long
@pytest.mark.parametrize("when", ["connecting", "sharing", "first", "again", "call"])
def test_who_has_ended_before_a_wrapper_is_not_waited_for(tmp_path: Path, when: str):
    """The others waited for the group's timeout, half an hour."""
    script = tmp_path / "train.py"
    script.write_text(DIES)
    segments = tmp_path / "segments"
    segments.mkdir()
    first, ended, third = run_by_hand(script, when, str(segments), ranks=3)
    assert ended.returncode == 9
    for rank, done in ((0, first), (2, third)):
        failed = "connecting over shm" if when in ("connecting", "sharing") else "choosing a transport"
        assert f"rank {rank} of 3: {failed} failed. No word from rank 1: it has exited, " in done.stdout
        assert "(1,)" in done.stdout
    assert not list(segments.iterdir())


# What each of three ranks asks for by transport= and by FASTREDUCE_TRANSPORT, and what all are told.
Asked = tuple[Any, str]
SAME = "Ask for the same on every rank"
DIFFERING: dict[str, tuple[list[Asked], str]] = {
    "arguments": (
        [("shm", ""), ("gloo", ""), ("shm", "")],
        f"ranks differ in their transport: transport='shm' on rank 0, 2; transport='gloo' on rank 1. {SAME}",
    ),
    "variables": (
        [(None, "gloo"), (None, "gloo"), (None, "shm")],
        "ranks differ in their transport: FASTREDUCE_TRANSPORT=gloo on rank 0, 1; FASTREDUCE_TRANSPORT=shm on rank 2. "
        + SAME,
    ),
    "one asks": (
        [(None, ""), ("gloo", ""), (None, "two_level")],
        "ranks differ in their transport: nothing asked for on rank 0; transport='gloo' on rank 1; "
        f"FASTREDUCE_TRANSPORT=two_level on rank 2. {SAME}",
    ),
    "an object and names": (
        [(GlooTransport, ""), ("gloo", ""), (None, "")],
        "ranks differ in their transport: transport=GlooTransport(...) on rank 0; transport='gloo' on rank 1; "
        f"nothing asked for on rank 2. {SAME}",
    ),
    "objects": (
        [(GlooTransport, ""), (ShmTransport, ""), (GlooTransport, "")],
        "ranks differ in their transport: transport=GlooTransport(...) on rank 0, 2; transport=ShmTransport(...) on "
        f"rank 1. {SAME}",
    ),
}


def _made(asked: Asked, make: Any, group: dist.ProcessGroup) -> str:
    what, told = asked
    with patch.dict(os.environ, FASTREDUCE_TRANSPORT=told):
        return message(lambda: make(what(group) if isinstance(what, type) else what))


def _differ(rank: int, world_size: int) -> tuple[list[list[str]], list[str], float]:
    """What wrapping and averaging say in each case, over one group; then what one gets who asks in several ways."""
    group: Any = dist.new_group()
    tensors, start = [torch.ones(3)], time.monotonic()
    calls = (
        lambda asked: wrap("ours", nn.Linear(2, 2), process_group=group, transport=asked),
        lambda asked: all_reduce_gradients(tensors, group=group, transport=asked),
    )
    told = [[_made(asked[rank], call, group) for call in calls] for asked, _ in DIFFERING.values()]
    told += [[_made((what if rank == 1 else "gloo", ""), calls[0], group)] for what in ("tcp", 5)]
    assert [_made((GlooTransport, ""), call, group) for call in calls] == ["no error"] * 2
    seconds = time.monotonic() - start
    with patch.dict(os.environ, FASTREDUCE_TRANSPORT="gloo" if rank else "nccl"):  # which moves no CPU tensors
        names = [make_transport(group, "cpu", None if rank else "gloo").name]
    names += [make_transport(group).name, make_transport(group, "cpu", "shm").name]
    return told, names, seconds


def test_ranks_that_ask_for_others_are_told_what_all_ask_for(ranks3: RankPool):
    for rank, (told, names, seconds) in enumerate(ranks3.run(_differ)):
        *cases, unknown, number = told
        for seen, (_, expected) in zip(cases, DIFFERING.values(), strict=True):
            assert seen == [f"MismatchError: {expected}"] * 2
        why = "SettingError: transport='tcp': allowed: gloo, shm, mpi, nccl, two_level"
        assert unknown == [why if rank == 1 else f"MismatchError: rank 1 could not be set up: {why}"]
        assert number == [text.replace("'tcp'", "5") + ", or a Transport" for text in unknown]
        assert names == ["gloo", "shm", "shm"] and seconds < 200  # not the group's timeout


def _of_another_version(rank: int, world_size: int) -> tuple[list[str], float]:
    group: Any = dist.new_group()
    start = time.monotonic()
    with patch.object(choices, "__version__", "0.2.0" if rank == 1 else "0.3.0"):
        told = [
            message(lambda: wrap("ours", nn.Linear(2, 2), process_group=group)),
            # Rank 0 has an error of its own beside that.
            message(lambda: wrap("ours", nn.Linear(2, 2), process_group=group, transport="tcp" if rank == 0 else None)),
        ]
    told.append(message(lambda: wrap("ours", nn.Linear(2, 2), process_group=group)))
    with patch.object(choices, "__version__", "0.2.0" if rank == 1 else "0.3.0"):  # in a group whose hosts are known
        told.append(message(lambda: wrap("ours", nn.Linear(2, 2), process_group=group)))
    return told, time.monotonic() - start


def test_ranks_of_several_versions_do_not_train(ranks3: RankPool):
    for rank, (told, seconds) in enumerate(ranks3.run(_of_another_version)):
        differ = (
            "MismatchError: ranks differ in the version of fastreduce: 0.3.0 on rank 0, 2; 0.2.0 on rank 1. Install "
            "the same one on every host"
        )
        unknown = "SettingError: transport='tcp': allowed: gloo, shm, mpi, nccl, two_level"
        assert told == [differ, unknown if rank == 0 else differ, "no error", differ]
        assert seconds < 100  # not the group's timeout


def _asked_in_vain(rank: int, world_size: int) -> list[str]:
    """Rank 0 asks for something while the others do not come, then all ask, and two of them for what it asked for."""
    group: Any = dist.new_group()

    def ask(asked: str) -> str:
        return message(lambda: choices.agree(group, asked, f"transport={asked!r}"))

    told = [ask("")]
    if rank == 0:
        with patch.object(choices, "timeout_of", lambda _: datetime.timedelta(seconds=0.1)):
            assert "choosing a transport failed" in ask("gloo")
    dist.barrier()
    return [*told, ask("shm" if rank == 2 else "gloo")]


def test_who_has_asked_in_vain_counts_once_when_it_asks_again(ranks3: RankPool):
    differ = "MismatchError: ranks differ in their transport: transport='gloo' on rank 0, 1; transport='shm' on rank 2."
    told = f"{differ} {SAME}"
    assert ranks3.run(_asked_in_vain) == [["no error", told]] * 3


def _many(rank: int, world_size: int) -> str:
    return message(lambda: make_transport(dist.group.WORLD, "cpu", "shm" if rank == 2 else "gloo"))


def test_long_lists_of_ranks_are_cut(ranks3: RankPool):
    found = [choices.Choice("gloo", "transport='gloo'", "", "")] * 20
    assert choices._listed(found) == "transport='gloo' on rank 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert "transport='gloo' on rank 0, 1; transport='shm' on rank 2." in ranks3.run(_many)[0]


class OfSome(GlooTransport):
    """In MPI's place: what was registered, and serves some ranks of a group as well."""


def _two_levels(rank: int, world_size: int) -> dict[str, str]:
    """What asking for two levels gives, by who shares a host with whom."""

    def made(hosts: str, device: str = "cpu", alone: bool = False) -> str:
        with patch.dict(os.environ, FASTREDUCE_HOST=hosts[rank]):
            group: Any = dist.new_group()
            return message(lambda: make_transport(group, device, "two_level", alone))

    found = {"one": made("aaa"), "each": made("abc"), "two": made("aab"), "alone": made("aab", alone=True)}
    found["cuda"] = made("aab", "cuda")
    found["mpi"] = message(lambda: make_transport(dist.group.WORLD, "cpu", "mpi"))
    with patch.dict(os.environ, FASTREDUCE_HOST="aab"[rank]):
        group: Any = dist.new_group()
        transports.register_transport(group, lambda group: GlooTransport(group))
        found["registered"] = message(lambda: make_transport(group, "cpu", "two_level"))
        of_some: Any = dist.new_group()
        transports.register_transport(of_some, OfSome)
        found["in two levels"] = make_transport(of_some).name
        found["on a GPU"] = type(make_transport(of_some, "cuda")).__name__
        chosen: Any = dist.new_group()
        made_here = make_transport(chosen, "cpu", "two_level")
        found["name"] = made_here.name
        if rank == 0:
            found["loaded"] = make_transport(chosen, "cpu", "two_level", alone=True).name
    return found


def test_two_levels_can_be_asked_for_and_are_refused_with_the_reason(ranks3: RankPool):
    for rank, found in enumerate(ranks3.run(_two_levels)):
        refused = f"BackendUnavailableError: rank {rank} of 3: transport='two_level': "
        assert found["two"] == "no error" and found["name"] == "two_level"
        assert found.pop("loaded", "two_level") == "two_level"
        assert found["one"].startswith(f"{refused}all ranks run on one host") and "transport='shm'" in found["one"]
        assert found["each"].startswith(f"{refused}each rank runs on a host of its own")
        assert found["alone"].startswith(f"{refused}ranks have not told their hosts yet")
        assert found["registered"].startswith(f"{refused}what is registered for these ranks")
        assert "moves tensors on cpu, and these are on cuda" in found["cuda"]
        assert found["mpi"].startswith("BackendUnavailableError: transport='mpi': MPI moves gradients in a job that")
        assert found["in two levels"] == "two_level"
        assert found["on a GPU"] == "OfSome"  # shared memory holds no CUDA tensors


# Hosts


def _told(rank: int, world_size: int) -> list[Any]:
    """The nodes of two groups, of which the second is told apart, and of the first one again: told once."""
    world, pair = dist.group.WORLD, dist.new_group()
    one = nodes_of(choices.agree(world, "", ""))
    with patch.dict(os.environ, FASTREDUCE_HOST=f"node {rank % 2}"):
        two = nodes_of(choices.agree(pair, "", ""))
        return [one, two, nodes_of(choices.agree(world, "", ""))]


def test_ranks_tell_each_other_their_hosts(ranks3: RankPool):
    assert ranks3.run(_told) == [[[[0, 1, 2]], [[0, 2], [1]], [[0, 1, 2]]]] * 3


def _unheard(rank: int, world_size: int, seconds: float) -> list[str]:
    """What is said where rank 1 does not come, and where it sends something else."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    told = [message(lambda: make_transport(group)) if rank == 0 else ""]
    garbled: Any = dist.new_group()
    host = "../../etc" if rank == 1 else choices.this_host()  # type: ignore[attr-defined]
    with patch.object(choices, "this_host", lambda: host):
        return [*told, message(lambda: make_transport(garbled))]


@pytest.mark.long
def test_who_does_not_come_or_sends_something_else_is_named(ranks2: RankPool):
    def test(seconds: float) -> None:
        for rank, (absent, garbled) in enumerate(ranks2.run(_unheard, seconds)):
            assert rank == 1 or "rank 0 of 2: choosing a transport failed. No word from rank 1: it has exited" in absent
            assert f"rank {rank} of 2: choosing a transport failed. rank 1 sent " in garbled, garbled
            assert "which is no message of fastreduce: '../../etc' is no host" in garbled, garbled

    with_time(test, 2.0)


def _start_again(rank: int, world_size: int) -> list[list[bool]]:
    """Choose twice, in the place of processes of which rank 0 was killed while it waited for the others."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=20))
    mine = choices.Choice("", "", "", choices.this_host())  # type: ignore[attr-defined]
    if rank == 0:
        left = client_of(group).at("fastreduce/choices")
        left.add(mine.key, 1)
        left.set("note of 0", encode(list(mine)).decode())
        left.add("count", 1)
    dist.barrier()
    with patch.dict(os.environ, TORCHELASTIC_USE_AGENT_STORE="True"):
        time.sleep(0.5 * rank)  # rank 0 waits
        return [[host == mine.host for host in choices.agree(group, "", "")] for _ in range(2)]


def test_what_a_killed_process_has_left_is_not_taken_for_a_rank_that_comes(ranks2: RankPool):
    assert ranks2.run(_start_again) == [[[True] * 2] * 2] * 2
