"""What scripts touch beside training: logging data, introspection, other process groups, errors, arguments.

Everything runs with torch's class and with ours, on the same ranks, and is compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fastreduce
from fastreduce.torch_reducer import CPP_ONLY, TorchReducer
from tests.models import EXACT, Branches, Grads, assert_same_bits, grads_of, whole_, whole_batch, wrap
from tests.ranks import RankPool

KINDS = ("torch", "ours")


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Logging data


def _logged(rank: int, world_size: int, find: bool) -> dict[str, list[dict[str, Any]]]:
    """Logging data after construction and before some steps; where torch searches, its buckets are ours at once."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for kind in KINDS:
        model = wrap(kind, whole_(Branches()), find_unused_parameters=find, bucket_cap_mb=64 / 2**20)
        model._set_ddp_runtime_logging_sample_rate(4)
        seen[kind] = [model._get_ddp_logging_data()]
        for step in range(14):
            model(whole_batch(rank, step, 3, 4), use="abc" if step < 12 or not find else "a").sum().backward()
            if step in (0, 1, 5, 11, 13):
                seen[kind].append(model._get_ddp_logging_data())
    return seen


TIMES = {f"{what}_time" for what in ("forward_compute", "backward_compute", "backward_comm")}
TIMES |= {"backward_compute_comm_overlap_time"}


@pytest.mark.parametrize("find", [False, True])
def test_logging_data_has_torchs_keys_and_values(ranks2: RankPool, find: bool):
    for seen in ranks2.run(_logged, find):
        for ours, torchs in zip(seen["ours"], seen["torch"], strict=True):
            assert not torchs.keys() - ours.keys()
            for key, value in torchs.items():
                if (
                    key == "bucket_sizes"
                ):  # torch begins with one bucket, unless it searches; there its order is another
                    assert sorted(value.split(", ")) == sorted(ours[key].split(", ")) or (not find and "," not in value)
                elif key in ("has_rebuilt_buckets", "num_buckets_reduced") or key.startswith(("rebuilt", "prev_")):
                    pass  # compared below: torch never rebuilds where it searches
                elif key == "unused_parameter_size" or "_time" not in key:
                    assert ours[key] == value, key
        ours, torchs = seen["ours"][-1], seen["torch"][-1]
        assert ours["iteration"] == 12
        assert {k for k in ours if k in TIMES} == TIMES and all(ours[f"avg_{k}"] >= 0 for k in TIMES)
        if not find:
            for key in ("rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "has_rebuilt_buckets"):
                assert ours[key] == torchs[key], key
            assert ours["prev_iteration_grad_ready_order_indices"] == torchs["prev_iteration_grad_ready_order_indices"]
        assert ours["forward_compute_time_start"] <= ours["backward_compute_time_start"]
        assert ours["backward_compute_time_start"] <= ours["backward_comm_time_start"] <= ours["backward_comm_time_end"]


def test_times_are_taken_in_the_first_ten_steps_and_then_at_the_sample_rate(alone: None):
    model, sampled = wrap("ours", nn.Linear(4, 4)), []
    for step in range(1, 301):
        model(torch.ones(1, 4)).sum().backward()
        if model.logger._times is not None:
            sampled.append(step)
    assert sampled == [*range(1, 11), 100, 200, 300]


# Introspection


def test_what_only_the_cpp_reducer_has_is_an_attribute_error_that_says_what_to_use(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    cpp = {name for kind in (dist.Reducer, dist.Logger) for name in dir(kind) if not name.startswith("__")}
    for name, instead in CPP_ONLY.items():
        assert name in cpp and not hasattr(TorchReducer, name)
        with pytest.raises(AttributeError, match=r"only torch's C\+\+ reducer") as caught:
            getattr(model.reducer, name)
        assert instead in str(caught.value)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_thing'"):
        _ = model.reducer.no_such_thing


def test_everything_else_of_the_cpp_reducer_and_logger_is_there(alone: None):
    model = wrap("ours", nn.Linear(4, 4))
    mixed_precision = {"_autograd_hook", "_set_mixed_precision_param_dtype"}
    for ours, kind in ((model.reducer, dist.Reducer), (model.logger, dist.Logger)):
        for name in dir(kind):
            if not name.startswith("__") and not name.startswith("_pybind11") and name not in mixed_precision:
                assert hasattr(ours, name) or name in CPP_ONLY, name


# Another process group


def _regroup(rank: int, world_size: int, groups: list[list[int]], options: dict[str, Any]) -> dict[str, list[Grads]]:
    """Two steps in each group; a rank that is not in a group waits for the next."""
    made = [dist.new_group(ranks) if len(ranks) < world_size else dist.group.WORLD for ranks in groups]
    seen: dict[str, list[Grads]] = {}
    for kind in KINDS if "compression" not in options else ("ours",):
        model, seen[kind] = wrap(kind, whole_(Branches()), bucket_cap_mb=1e-6, **options), []
        for group, ranks in zip(made, groups, strict=True):
            model._update_process_group(group)
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


def _average(ranks: list[int], step: int) -> Grads:
    model = whole_(Branches())
    for rank in ranks:
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return {name: None if g is None else g / len(ranks) for name, g in grads_of(model).items()}


@pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
@pytest.mark.parametrize("world_size", GROUPS)
def test_the_process_group_can_shrink_and_grow_as_torchs(request: pytest.FixtureRequest, world_size: int, views: bool):
    groups = GROUPS[world_size]
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    for rank, seen in enumerate(pool.run(_regroup, groups, {"gradient_as_bucket_view": views})):
        assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
        expected = [_average(ranks, step) for ranks in groups if rank in ranks for step in range(3)]
        assert_same_bits(seen["ours"], expected, f"rank {rank}")


def test_the_process_group_can_change_under_compression(ranks3: RankPool):
    results = ranks3.run(_regroup, GROUPS[3], {"compression": "int8:error_feedback"})
    last = [seen["ours"][-1] for seen in results]
    assert_same_bits(last[1], last[0])
    assert_same_bits(last[2], last[0])


def _regroup_after_a_failure(rank: int, world_size: int) -> Grads:
    """Rank 2 takes no part in a backward that the others have begun: they give up and go on without it."""
    from datetime import timedelta

    small = dist.new_group([0, 1])
    short = dist.new_group([0, 1, 2], timeout=timedelta(seconds=2))
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


def test_survivors_go_on_in_a_smaller_group_after_a_peer_has_failed(ranks3: RankPool):
    first, second, _ = ranks3.run(_regroup_after_a_failure, timeout=60)
    assert_same_bits(first, _average([0, 1], 5))
    assert_same_bits(second, first)


def test_a_transport_of_the_users_cannot_be_regrouped(alone: None):
    model = wrap("ours", nn.Linear(2, 2), transport=fastreduce.transports.LocalTransport())
    with pytest.raises(fastreduce.SettingError, match="wrap the module again"):
        model._update_process_group(dist.group.WORLD)
