"""Another process group under a wrapper, with torch's class and with ours, on the same ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

import fastreduce
from fastreduce.reduction.telemetry import watch
from tests.support.models import (
    EXACT,
    Branches,
    Grads,
    assert_same_bits,
    average_of_whole,
    grads_of,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool, with_time

KINDS = ("torch", "ours")


def _regroup(rank: int, world_size: int, groups: list[list[int]], options: dict[str, Any]) -> dict[str, list[Grads]]:
    """Two steps in each group; a rank that is not in a group waits for the next."""
    made = [dist.new_group(ranks) if len(ranks) < world_size else dist.group.WORLD for ranks in groups]
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS if "compression" not in options else ("ours",):
        model, seen[kind] = wrap(kind, whole_(Branches()), bucket_cap_mb=1e-6, **options), []
        for group, ranks in zip(made, groups, strict=True):
            model._update_process_group(group)
            if kind == "ours" and rank in ranks:  # one rank alone tells nobody where it is
                assert (model.reducer.recorder in watch._watch._places) == (len(ranks) > 1)
            for step in range(3):
                model.zero_grad()
                if rank in ranks:
                    (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
                    seen[kind].append(grads_of(model.module))
        if kind == "ours" and rank in ranks:
            logged = model._get_ddp_logging_data()
            assert (logged["has_rebuilt_buckets"], logged["world_size"]) == (1, len(ranks))
        dist.barrier()
    return seen


GROUPS = {2: [[0, 1], [0], [0, 1]], 3: [[0, 1, 2], [0, 2], [1, 2], [1], [0, 1, 2]]}


@pytest.mark.parametrize(
    ("world_size", "views"),
    [
        pytest.param(2, False, id="2-own", marks=pytest.mark.long),
        pytest.param(2, True, id="2-views"),
        pytest.param(3, False, id="3-own"),
        pytest.param(3, True, id="3-views", marks=pytest.mark.long),
    ],
)
def test_the_process_group_can_shrink_and_grow_as_torchs(request: pytest.FixtureRequest, world_size: int, views: bool):
    groups = GROUPS[world_size]
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    for rank, seen in enumerate(pool.run(_regroup, groups, {"gradient_as_bucket_view": views})):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
        expected = [average_of_whole(Branches, step, ranks) for ranks in groups if rank in ranks for step in range(3)]
        assert_same_bits(seen["ours"], expected, f"rank {rank}")


def test_the_process_group_can_change_under_compression(ranks3: RankPool):
    results = ranks3.run(_regroup, GROUPS[3], {"compression": "int8:error_feedback"})
    last = [seen["ours"][-1] for seen in results]
    assert_same_bits(last[1], last[0])
    assert_same_bits(last[2], last[0])


def _regroup_after_a_failure(rank: int, world_size: int, seconds: float) -> Grads:
    """Rank 2 takes no part in a backward that the others have begun: they give up and go on without it."""
    small = dist.new_group([0, 1])
    short = dist.new_group([0, 1, 2], timeout=timedelta(seconds=seconds))
    model = wrap("ours", whole_(Branches()), process_group=short, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    if rank != 2:
        loss = model(whole_batch(rank, 3, 3, 4)).sum()
        with pytest.raises(fastreduce.TransportError):
            loss.backward()
        model._update_process_group(small)
        for step in (4, 5):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    dist.barrier()
    return grads_of(model.module)


@pytest.mark.long
def test_survivors_go_on_in_a_smaller_group_after_a_peer_has_failed(ranks3: RankPool):
    def test(seconds: float) -> None:
        first, second, _ = ranks3.run(_regroup_after_a_failure, seconds)
        assert_same_bits(first, average_of_whole(Branches, 5, [0, 1]))
        assert_same_bits(second, first)

    with_time(test, 2.0)


def test_a_transport_of_the_users_cannot_be_regrouped(alone: None):
    model = wrap("ours", nn.Linear(2, 2), transport=fastreduce.transports.LocalTransport())
    with pytest.raises(fastreduce.SettingError, match="wrap the module again"):
        model._update_process_group(dist.group.WORLD)


@pytest.mark.parametrize("late", [True, False], ids=["unfrozen on all", "wrapped so on the newcomer"])
def test_ranks_that_come_together_average_the_same_parameters_in_one_order(ranks3: RankPool, late: bool):
    ranks3.run(_come_together, late)


def _come_together(rank: int, world_size: int, late: bool) -> None:
    """The third rank has trained by itself; what is unfrozen later comes behind what was trained at wrapping."""
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model = whole_(Branches())
    model.trunk.requires_grad_(rank == 2 and not late)
    ddp = wrap("ours", model, process_group=groups[rank // 2])
    for step in range(2):
        model.trunk.requires_grad_(step > 0 or (rank == 2 and not late))
        (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    ddp._update_process_group(dist.group.WORLD)
    for step in range(2, 5):
        ddp.zero_grad()
        if late:
            (ddp(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            expected = average_of_whole(lambda: whole_(Branches()), step, range(world_size))
            assert_same_bits(grads_of(model), expected, f"rank {rank}, step {step}")
        else:
            with pytest.raises(
                fastreduce.MismatchError, match=r"parameter 0 by .*'a.weight', rank 2 has 'trunk.weight'"
            ):
                ddp(whole_batch(rank, step, 3, 4))


def test_ranks_that_come_together_go_on_from_the_most_steps(ranks2: RankPool):
    ranks2.run(_unequally_far)


def _unequally_far(rank: int, world_size: int) -> None:
    """Compression begins at the fourth step: the rank that has had one comes to it with the other, that has three."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    ddp = wrap("ours", whole_(Branches()), process_group=groups[rank], compression="int8:warm_up=3")
    for step in range(1 + 2 * rank):
        ddp(whole_batch(rank, step, 3, 4)).sum().backward()
    ddp._update_process_group(dist.group.WORLD)
    ddp(whole_batch(rank, 3, 3, 4)).sum().backward()
    assert (ddp.reducer.step, str(ddp.compression)) == (4, "int8")
