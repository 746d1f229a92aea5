"""What one rank has begun or prepared alone, as where a backward raises there, and the transport that comes next."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastreduce.transports import GlooTransport, ShmTransport
from fastreduce.transports.connections import Lease, drop_all
from tests.support.ranks import RankPool


def _left_alone(rank: int, world_size: int, kind: str) -> list[float]:
    """What the second of two transports moves; to the first, rank 1 has not come."""
    group = dist.new_group()
    received, wire = torch.zeros(world_size, 4), torch.full((4 * world_size,), float(rank + 1))
    transport: GlooTransport | ShmTransport = GlooTransport(group) if "gloo" in kind else ShmTransport(group)
    transport.exchange(None)
    if rank == 0 and isinstance(transport, GlooTransport) and kind == "gloo, prepared":
        transport.late_all_gather()
    elif rank == 0:
        transport.all_to_all(torch.zeros_like(received), torch.zeros_like(wire))
    transport.close()
    transport = GlooTransport(group) if "gloo" in kind else ShmTransport(group)
    transport.all_to_all(received, wire).wait()
    transport.close()
    return received[:, 0].tolist()


@pytest.mark.parametrize("kind", ["gloo", "gloo, prepared", "shm"])
def test_what_is_left_alone_does_not_reach_the_next_transport(ranks2: RankPool, kind: str):
    assert ranks2.run(_left_alone, kind) == [[1.0, 2.0]] * 2


class _Fewer:
    """A connection of a rank that has not come to the two that another one has made."""

    failed = False

    def __init__(self, group: Any, name: str) -> None:
        self.name = name

    def begin(self) -> None: ...

    def leave(self) -> None: ...

    def abort(self) -> None: ...

    def exchange(self, value: Any, operation: str = "exchange") -> list[Any]:
        return [value, [[], 2]]


def test_a_new_connection_has_a_name_that_no_rank_has_used(group_of_one: None):
    lease = Lease("a test", dist.group.WORLD, _Fewer)
    assert lease.connection.name == "2"
    lease.close()
    drop_all("a test")
