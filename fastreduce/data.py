"""Which part of the data a rank trains on, for loaders that are not torch's."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .errors import SettingError, no_group


def shard_range(n: int, rank: int | None = None, world_size: int | None = None) -> range:
    """This rank's contiguous part of `range(n)`; parts differ in length by one at most, longer ones first.

    `data[shard.start : shard.stop]` takes the rows without a copy.

    Args:
        n: how many there are.
        rank: whose part; None means this process's rank in the default group.
        world_size: number of parts; None means that of the default group.

    Raises:
        SettingError: if `n` is negative, or `rank` is not in `[0, world_size)`.
        NotInitializedError: if a None must come from the default group, and there is none.
    """
    rank, world_size = _rank_and_size("shard_range", rank, world_size)
    if n < 0:
        raise SettingError(f"n={n}: cannot share out a negative number")
    each, longer = divmod(n, world_size)
    start = rank * each + min(rank, longer)
    return range(start, start + each + (rank < longer))


def epoch_order(n: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The order of the samples in an epoch, int64: that of torch's DistributedSampler."""
    if not shuffle:
        return np.arange(n, dtype=np.int64)
    order: np.ndarray[Any, np.dtype[np.int64]] = torch.randperm(
        n, generator=torch.Generator().manual_seed(seed + epoch), device="cpu"
    ).numpy()
    return order


class ShardSampler:
    """Indices of this rank's samples, shuffled anew in every epoch: torch's DistributedSampler for any loader.

    Where torch's has the option too, the indices are the same: rank r takes every world_size-th of the epoch's
    order, beginning with the r-th. Iterate over it, or take `indices()` as a NumPy array. `state_dict` keeps the
    place within an epoch, so that training goes on there, also on another number of ranks. Where ranks come and go
    while it trains, `fastreduce.elastic.BatchSampler` deals batches out.

    Args:
        data: the number of samples, or what has that length.
        shuffle: whether every epoch has an order of its own; otherwise it is 0, 1, 2, …
        seed: of the shuffling, the same on every rank.
        drop_last: whether what is left over at the end is dropped, so that ranks get equally many; otherwise the
            epoch's first samples are taken once more.
        rank: whose samples; None means this process's rank in the default group.
        world_size: number of ranks; None means that of the default group.

    Raises:
        SettingError: if the number of samples is negative, or `rank` is not in `[0, world_size)`.
        NotInitializedError: if a None must come from the default group, and there is none.
    """

    def __init__(
        self,
        data: int | Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.n = len(data) if isinstance(data, Sized) else operator.index(data)
        if self.n < 0:
            raise SettingError(f"data={data}: the number of samples cannot be negative")
        self.rank, self.world_size = _rank_and_size("ShardSampler", rank, world_size)
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0
        self._begin = 0  # samples of the epoch that all ranks together had before a resumption
        self._taken = 0  # what this rank's iterator has given since

    def __len__(self) -> int:
        left = max(0, self.n - self._begin)
        return left // self.world_size if self.drop_last else -(-left // self.world_size)

    def indices(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """This rank's indices in this epoch, int64; after `load_state_dict`, those that are still to come."""
        order = epoch_order(self.n, self.shuffle, self.seed, self.epoch)
        end = self._begin + len(self) * self.world_size
        return np.resize(order, end)[self._begin + self.rank :: self.world_size] if end else order[:0]

    def __iter__(self) -> Iterator[int]:
        indices = self.indices().tolist()
        self._taken = 0
        for index in indices:
            self._taken += 1
            yield index
        self._begin, self._taken = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle for `epoch` from now on; a place within that epoch that was loaded is kept."""
        if epoch != self.epoch:
            self.epoch, self._begin, self._taken = epoch, 0, 0

    def state_dict(self, taken: int | None = None) -> dict[str, int]:
        """Epoch, seed, and how far it has come.

        Args:
            taken: samples that this rank has trained on since the iteration began; None means those that the
                iterator has given, which are more if a loader fetches ahead.
        """
        given = self._taken if taken is None else taken
        return {"epoch": self.epoch, "seed": self.seed, "begin": self._begin + given * self.world_size}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from `state_dict`: the next iteration gives what is left of that epoch.

        On another number of ranks too: they share out what is left.
        """
        self.epoch, self.seed, self._begin = state["epoch"], state["seed"], state["begin"]
        self._taken = 0


def _rank_and_size(call: str, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if (rank is None or world_size is None) and not dist.is_initialized():
        raise no_group(call, "pass rank= and world_size=")
    rank = dist.get_rank() if rank is None else rank
    world_size = dist.get_world_size() if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise SettingError(f"rank={rank}, world_size={world_size}: a rank is 0 or more, and less than world_size")
    return rank, world_size
