"""Shares of the data: complete, balanced, and those of torch's DistributedSampler where it has the option."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from fastreduce import NotInitializedError, SettingError, ShardSampler, shard_range
from tests.support.ranks import RankPool

SIZES = st.integers(0, 50)
WORLDS = st.integers(1, 9)


@given(SIZES, WORLDS)
def test_ranges_follow_each_other_and_differ_by_one_at_most(n: int, world_size: int):
    shards = [shard_range(n, rank, world_size) for rank in range(world_size)]
    assert [i for shard in shards for i in shard] == list(range(n))
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_a_range_takes_rows_of_any_array():
    shard = shard_range(10, 1, 3)
    assert shard == range(4, 7)
    rows = np.arange(10)[shard.start : shard.stop]
    assert rows.tolist() == torch.arange(10)[shard].tolist() == [4, 5, 6]


@given(SIZES.filter(bool), WORLDS, st.booleans(), st.booleans(), st.integers(0, 5), st.integers(0, 3))
def test_indices_are_those_of_torchs_sampler(
    n: int, world_size: int, shuffle: bool, drop_last: bool, seed: int, epoch: int
):
    options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    for rank in range(world_size):
        ours = ShardSampler(n, rank=rank, world_size=world_size, **options)
        theirs = DistributedSampler(range(n), world_size, rank, **options)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs) == ours.indices().tolist()
        assert len(ours) == len(theirs) and ours.indices().dtype == np.int64


def test_ranks_and_sizes_come_from_the_default_group(ranks2: RankPool):
    assert ranks2.run(_defaults) == [(range(3), [0, 2, 4]), (range(3, 5), [1, 3, 0])]


def _defaults(rank: int, world_size: int) -> tuple[range, list[int]]:
    return shard_range(5), list(ShardSampler([None] * 5, shuffle=False))


@given(SIZES, WORLDS, WORLDS, st.booleans(), st.data())
def test_a_resumed_epoch_gives_what_was_left(n: int, old: int, new: int, drop_last: bool, data: Any):
    def sampler(rank: int, world_size: int) -> ShardSampler:
        return ShardSampler(n, rank=rank, world_size=world_size, drop_last=drop_last)

    first = [sampler(rank, old) for rank in range(old)]
    steps = data.draw(st.integers(0, len(first[0])))
    seen, states = [], []
    for each in first:
        each.set_epoch(3)
        iterator = iter(each)
        seen += [next(iterator) for _ in range(steps)]
        states.append(each.state_dict())
        rest = list(iterator)
        again = sampler(each.rank, old)
        again.load_state_dict(states[-1])
        again.set_epoch(3)
        assert len(again) == len(rest) and list(again) == rest
        assert len(list(again)) == len(first[0]), "the epoch after it is whole"
    assert states == states[:1] * old
    assert first[0].state_dict(taken=steps) == states[0]
    for rank in range(new):
        again = sampler(rank, new)
        again.load_state_dict(states[0])
        seen += again
    missed = n - len(set(seen))
    assert missed == 0 if not drop_last else missed < new + old


def test_numbers_of_samples_may_be_numpys():
    mine, numpys = (ShardSampler(n, rank=0, world_size=2) for n in (10, np.int64(10)))  # type: ignore[arg-type]
    assert list(mine) == list(numpys)


def test_an_epoch_that_is_over_leaves_nothing_behind():
    sampler = ShardSampler(5, rank=0, world_size=2)
    sampler.load_state_dict({"epoch": 1, "seed": 4, "begin": 4})
    sampler.set_epoch(2)
    assert len(list(sampler)) == 3
    assert sampler.state_dict() == {"epoch": 2, "seed": 4, "begin": 0}


def test_it_serves_torchs_loader():
    loader: DataLoader[int] = DataLoader(range(10), batch_size=2, sampler=ShardSampler(10, rank=1, world_size=2))
    assert [len(batch) for batch in loader] == [2, 2, 1] and len(loader) == 3


def test_an_error_without_a_group_says_so_once_where_another_process_raises_it_again():
    with pytest.raises(NotInitializedError) as found:
        shard_range(3)
    assert str(pickle.loads(pickle.dumps(found.value))) == str(found.value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shard_range(-1, 0, 1), SettingError, "n=-1"),
        (lambda: shard_range(3, 2, 2), SettingError, "rank=2, world_size=2"),
        (lambda: shard_range(3), NotInitializedError, "shard_range.*init_process_group\\) first, or pass rank="),
        (lambda: ShardSampler(3, rank=0), NotInitializedError, "ShardSampler.*init_process_group\\) first"),
        (lambda: ShardSampler(-3, rank=0, world_size=1), SettingError, "data=-3"),
        (lambda: ShardSampler(3, rank=-1, world_size=1), SettingError, "rank=-1"),
    ],
)
def test_bad_input_is_named(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
