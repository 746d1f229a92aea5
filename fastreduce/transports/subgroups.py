"""Some of the ranks of a process group, to whom a transport is to belong; errors name them by their whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from .store_client import StoreClient


@dataclass(frozen=True, eq=False)
class Subgroup:
    """Ranks of a process group, of which this process is one.

    Args:
        rank: the place of this one among them.
        names: their ranks in the whole group, ascending.
        of: how many ranks the whole group has.
        world_ranks: their ranks in the default group.
        store: where they meet, and nobody else.
        timeout: the whole group's.
        absent: tells at once which of `names` are gone; without it those that wait ask each other, which takes time.
    """

    rank: int
    names: tuple[int, ...]
    of: int
    world_ranks: tuple[int, ...]
    store: StoreClient
    timeout: timedelta
    absent: Callable[[], Sequence[int]] | None = None


Ranks = dist.ProcessGroup | Subgroup


def place_in(ranks: Ranks) -> tuple[int, int]:
    """The place of this process, and the number of ranks."""
    if isinstance(ranks, Subgroup):
        return ranks.rank, len(ranks.names)
    return dist.get_rank(ranks), dist.get_world_size(ranks)


def names_of(ranks: Ranks) -> Sequence[int]:
    """What users know each as: its rank in the whole group."""
    return ranks.names if isinstance(ranks, Subgroup) else range(dist.get_world_size(ranks))


def world_ranks_of(ranks: Ranks) -> list[int]:
    """The rank of each in the default group."""
    return list(ranks.world_ranks) if isinstance(ranks, Subgroup) else dist.get_process_group_ranks(ranks)


def own_name(ranks: Ranks) -> str:
    """This rank, as errors begin."""
    rank, size = place_in(ranks)
    return f"rank {names_of(ranks)[rank]} of {ranks.of if isinstance(ranks, Subgroup) else size}"


def who_is_gone(ranks: Ranks) -> Callable[[], Sequence[int]] | None:
    """What tells at once which of the ranks are gone, where somebody knows."""
    return ranks.absent if isinstance(ranks, Subgroup) else None
