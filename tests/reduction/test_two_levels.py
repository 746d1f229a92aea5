"""Buckets in two levels: bits, bounds, what error feedback keeps; between threads, and on ranks that name hosts."""

from __future__ import annotations

import datetime
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import Tensor, nn

from fastreduce import Compression, MismatchError, load_checkpoint, save_checkpoint, transports
from fastreduce.reduction import saved_residuals
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.wires.node_level import parts_of
from fastreduce.transports import Transport, TwoLevelTransport, make_transport, two_level
from tests.reduction.residuals.test_applied import SETUPS, steps
from tests.reduction.test_piecewise import PICKED, TIMEOUT, left_behind
from tests.reduction.test_switched_histories import switching_steps
from tests.support import tolerances
from tests.support.histories import Setup, Step, check_law, of_trainings, train
from tests.support.models import SETTINGS, assert_same_bits, batch, grads_of, wrap
from tests.support.ranks import RankPool, message, with_time
from tests.support.thread_ranks import backward_of_step, in_threads, make_reducer, on_nodes, seeded

FEEDBACK = "int8:error_feedback"
FLAT = "int8:error_feedback,flat"
SIZES = (300, 7, 1300, 0, 1)
HISTORIES = 3  # looked at; more in a hunt: each takes a second
ONE, OTHER = [[0, 1, 2, 3, 4]], [[4, 2], [1, 0, 3]]  # cuts into buckets


# One reduction, between threads


def _gradient(rank: int, i: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(SIZES[i], generator=torch.Generator().manual_seed(100 * rank + i)).to(dtype)


def _averages(
    rank: int, transport: Transport, setting: str, groups: Sequence[Sequence[int]], dtype: torch.dtype
) -> list[Tensor]:
    compression = Compression.parse(setting)
    specs = [ParameterSpec(str(i), n, dtype, torch.device("cpu")) for i, n in enumerate(SIZES)]
    parts = [parts_of(transport, compression)] * len(groups)
    plan = build_plan(specs, groups, alignment=compression.alignment, shards=transport.world_size, parts=parts)
    found = {}
    for bucket in plan.buckets:
        pipeline = BucketPipeline(bucket, compression, transport)
        grads = [_gradient(rank, slot.parameter, dtype) for slot in bucket.slots]
        averages = [torch.full_like(grad, torch.nan) for grad in grads]
        pipeline.run(grads, averages, [0] if rank else [])
        assert (pipeline.used_by_any > 0).all()
        found.update((slot.parameter, average) for slot, average in zip(bucket.slots, averages, strict=True))
        none_used = list(range(len(grads)))
        pipeline.run(grads, averages, none_used)
        assert (pipeline.used_by_any == 0).all()
    return [found[i] for i in range(len(SIZES))]


@pytest.mark.parametrize(
    ("counts", "dtype"),
    [
        pytest.param((2, 2), torch.float32, marks=pytest.mark.long),
        ((2, 2), torch.bfloat16),
        pytest.param((2, 1), torch.float32, marks=pytest.mark.long),
        ((3, 1), torch.float32),
        pytest.param((3, 2), torch.float64, marks=pytest.mark.long),
        pytest.param((1, 2, 2), torch.float16, marks=pytest.mark.long),
        pytest.param((3, 3), torch.float16, marks=pytest.mark.long),
        pytest.param((16, 1), torch.float32, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_averages_are_within_the_bound_and_the_same_bits_everywhere(counts: tuple[int, ...], dtype: torch.dtype):
    """On every rank, and for every cut into buckets, where our kernels sum; between two nodes for all settings."""
    for setting in SETTINGS:
        one, other = (
            in_threads(
                on_nodes(counts), lambda r, t, setting=setting, groups=groups: _averages(r, t, setting, groups, dtype)
            )
            for groups in (ONE, OTHER)
        )
        for rank in range(sum(counts)):
            assert_same_bits(one[rank], one[0], f"{setting}, rank {rank}")
            if len(counts) == 2 or Compression.parse(setting).two_shot:
                assert_same_bits(other[rank], one[0], f"{setting}, rank {rank}, other buckets")
        for i in range(len(SIZES)):
            grads = [_gradient(rank, i, dtype) for rank in range(sum(counts))]
            exact = torch.stack([grad.double() for grad in grads]).mean(0)
            bound = tolerances.error_bound(setting, grads, two_levels=True)
            assert ((one[0][i].double() - exact).abs() <= bound).all(), f"{setting}, parameter {i}"


def test_nothing_overflows_that_is_no_overflow_as_an_average():
    """And what is no number does, in that step alone."""

    def run(rank: int, transport: Transport) -> list[tuple[list[float], bool]]:
        specs = [ParameterSpec("a", 4, torch.float32, torch.device("cpu"))]
        setting = Compression.parse("fp16")
        plan = build_plan(specs, [[0]], alignment=128, shards=3, parts=[parts_of(transport, setting)])
        pipeline, found = BucketPipeline(plan.buckets[0], setting, transport), []
        for value in (3e38, torch.inf if rank == 1 else 1.0, 2e38):
            gradient = torch.full((4,), value)
            pipeline.run([gradient], [gradient])
            assert pipeline.finite is not None
            found.append((gradient.tolist(), bool(pipeline.finite)))
        return found

    for before, amid, behind in in_threads(on_nodes((2, 1)), run):
        assert before == (pytest.approx([3e38] * 4, rel=1e-3), True)
        assert not any(map(math.isfinite, amid[0])) and not amid[1]
        assert behind == (pytest.approx([2e38] * 4, rel=1e-3), True)


@pytest.mark.parametrize("setting", [FEEDBACK, "int4:error_feedback=8bit", "fp8:error_feedback=bf16"])
def test_a_rank_without_a_column_launches_no_kernel_for_what_it_does_not_keep(setting: str):
    """It has no residuals. The plain kernels look at sizes; to compiled ones an empty tensor's address means none."""
    with patch.dict(os.environ, FASTREDUCE_KERNELS="reference"):
        in_threads(on_nodes((2, 1)), lambda r, t: make_reducer(seeded(_model), t, setting).close())


# What error feedback keeps, moved to other ranks and nodes, between threads


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 7))


def _trained(rank: int, transport: Transport, states: list[Any] | None, setting: str, count: int = 4) -> Any:
    """The state after some steps, and what it was at their beginning, with the last gradients."""
    model = seeded(_model)
    reducer = make_reducer(model, transport, setting)
    if states is not None:
        own = [state for state in states if state["rank"] == rank and len(states) == transport.world_size]
        reducer.load_state_dict(own[0] if own else states)
    before = reducer.state_dict()
    for step in range(count):
        backward_of_step(model, reducer, batch(rank, step, 4, 20))
    return before, reducer.state_dict(), [p.grad.clone() for p in model.parameters()]


def _kept(states: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What all ranks together add to the next average."""
    found = saved_residuals.of_shards(states, saved_residuals.alignments(states[0]))
    for name in states[0]["residuals"]:
        mean = torch.stack([state["residuals"][name].double() for state in states]).mean(0)
        found[name] = mean + found.get(name, torch.zeros(())).double()
    return found


PLACES: dict[str, Any] = {
    "2+2": lambda: on_nodes((2, 2)),
    "2+1": lambda: on_nodes((2, 1)),
    "3+1": lambda: on_nodes((3, 1)),
    "4": lambda: 4,
    "2": lambda: 2,
}


SHORT = [("2+2", "2+1"), ("2+2", "4"), ("3+1", "2+2"), ("3+1", "2"), ("4", "3+1")]


@pytest.mark.parametrize(
    ("was", "to"),
    [
        pytest.param(was, to, marks=[pytest.mark.long] * ((was, to) not in SHORT))
        for was in ("2+2", "3+1", "4")
        for to in PLACES
    ],
)
def test_residuals_move_to_other_nodes(was: str, to: str):
    old = [after for _, after, _ in in_threads(PLACES[was](), lambda r, t: _trained(r, t, None, FEEDBACK))]
    kept = _kept(old)
    assert all(value.abs().max() > 0 for value in kept.values())
    new = in_threads(PLACES[to](), lambda r, t: _trained(r, t, old, FEEDBACK, 1))
    loaded = _kept([before for before, _, _ in new])
    for name, value in kept.items():
        # Means and sums over a few ranks, in FP32.
        assert (loaded[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    for _, _, gradients in new:
        assert_same_bits(gradients, new[0][2])


@pytest.mark.parametrize(
    "setting", [FEEDBACK, pytest.param(f"{FEEDBACK}=8bit", marks=pytest.mark.long)], ids=["fp32", "8bit"]
)
@pytest.mark.parametrize("counts", [(2, 2), (2, 1), pytest.param((3, 3), marks=pytest.mark.long)], ids=str)
def test_a_resumed_training_has_the_same_bits(counts: tuple[int, ...], setting: str):
    def run(rank: int, transport: Transport) -> list[Any]:
        return _trained(rank, transport, None, setting)[1]

    saved = in_threads(on_nodes(counts), run)
    for before, state in zip(
        in_threads(on_nodes(counts), lambda r, t: _trained(r, t, saved, setting)), saved, strict=True
    ):
        assert_same_bits(before[0]["residuals"], state["residuals"])
        assert_same_bits(before[0]["shard_residuals"], state["shard_residuals"])


def _switched(rank: int, transport: Transport, cap: int, new: str) -> list[Tensor]:
    """Averages under error feedback, then under another setting."""
    model = seeded(_model)
    reducer = make_reducer(model, transport, FEEDBACK, bucket_caps=[cap])
    found: list[Tensor] = []
    for step in range(3):
        if step == 2:
            reducer.set_compression(new)
        reducer.switch_if_due()
        backward_of_step(model, reducer, batch(rank, step, 4, 20))
        found += [p.grad.clone() for p in model.parameters()]
    return found


@pytest.mark.parametrize("new", ["none:accumulate=fp32", FLAT, "topk:min_numel=100"])
@pytest.mark.parametrize("counts", [(2, 2), pytest.param((3, 2), marks=pytest.mark.long)], ids=str)
def test_no_column_tells_in_the_bits_of_a_setting_that_follows(counts: tuple[int, ...], new: str):
    """What is left of error feedback is one rank's of the node, whatever the size of buckets; that rank adds it."""
    found = [in_threads(on_nodes(counts), lambda r, t, cap=cap: _switched(r, t, cap, new)) for cap in (1, 1 << 20)]
    for averages in (*found[0], *found[1]):
        assert_same_bits(averages, found[0][0])


# On real ranks


@pytest.fixture(scope="module", params=["aabb", pytest.param("aab", marks=pytest.mark.long)])
def nodes(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Ranks that name their hosts."""
    with RankPool(len(request.param), hosts=request.param) as made:
        yield made


def test_nothing_is_lost_over_random_histories(nodes: RankPool):
    """Unused parameters, clipping, accumulation, `all_reduce_gradients`, hooks, checkpoints."""

    @of_trainings(HISTORIES)
    @given(SETUPS, st.lists(steps(nodes.world_size), min_size=1, max_size=8))
    def search(setup: Setup, history: list[Step]) -> None:
        check_law(setup, nodes.run(train, setup, history))

    search()


@pytest.mark.parametrize(
    ("early", "setting"),
    [
        pytest.param((rank,), setting, id=f"rank {rank} early-{setting}", marks=[pytest.mark.long] * (rank != of_short))
        for rank in range(3)
        for setting, of_short in (("none:accumulate=fp32", 0), ("int4:block=32,error_feedback", 1))
    ],
)
def test_a_rank_of_a_node_that_has_zeroed_averages_in_place_goes_on_as_the_others(
    nodes: RankPool, setting: str, early: tuple[int, ...]
):
    """The others of its node have theirs in `.grad` still, and throw them away behind the switch."""
    history = [Step(ends="skip"), Step(zero_late=True, early=early, to_none=False, switch=setting)]
    check_law(Setup(), nodes.run(train, Setup(), history))


@pytest.mark.long
def test_nothing_is_lost_by_switching(nodes: RankPool):
    """Settings, warm-ups and sizes of buckets in mid-run, flat ones too."""

    @of_trainings(HISTORIES)
    @given(st.lists(switching_steps(nodes.world_size), min_size=2, max_size=8), st.sampled_from(["", FLAT]))
    def search(history: list[Step], extra: str) -> None:
        if extra:
            history = [*history, Step(switch=extra), Step(), Step(switch=FEEDBACK), Step()]
        check_law(Setup(), nodes.run(train, Setup(), history))

    search()


def _whole(rank: int, world_size: int) -> dict[str, Any]:
    """Trainings with many buckets: ranks that are late by turns, some that join early, another size of buckets."""
    found: dict[str, Any] = {}
    for cap in (0.0002, 0.002, 25.0):
        torch.manual_seed(0)
        ddp = wrap(
            "ours", nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)]), compression=FEEDBACK, bucket_cap_mb=cap
        )
        found["name"] = ddp.reducer.transport.name
        late = random.Random(rank)
        for parameter in ddp.parameters():
            parameter.register_hook(lambda _, late=late: time.sleep(late.choice([0, 0, 0.004])))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(3 + rank):
                optimizer.zero_grad()
                ddp(batch(rank, step, 4, 16)).square().mean().backward()
                optimizer.step()
        found[str(cap)] = [p.detach().clone() for p in ddp.parameters()]
        found[f"bytes {cap}"] = ddp.reducer.sent_bytes
    return found


@pytest.mark.long
def test_late_ranks_and_joined_ranks_train_to_the_same_bits_whatever_the_buckets(nodes: RankPool):
    found = nodes.run(_whole)
    for of_rank in found:
        assert of_rank["name"] == "two_level"
        for cap in ("0.0002", "0.002", "25.0"):
            assert_same_bits(of_rank[cap], found[0]["25.0"], cap)


def _snapshot(rank: int, world_size: int, path: Path) -> list[dict[str, Tensor]]:
    """What is kept where error feedback is over, saved and loaded; all but a node's first rank keep nothing."""
    ddp = wrap("ours", nn.Linear(16, 16), compression=FEEDBACK)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        ddp(batch(rank, step, 4, 16)).square().mean().backward()
        optimizer.step()
    ddp.set_compression("none")
    ddp(batch(rank, 2, 4, 16))
    save_checkpoint(path, model=ddp)
    found = [ddp.reducer.state_dict()["residuals"]]
    other = wrap("ours", nn.Linear(16, 16), compression="none")
    load_checkpoint(path, model=other)
    return [*found, other.reducer.state_dict()["residuals"]]


def test_a_snapshot_holds_what_only_some_ranks_keep(nodes: RankPool, tmp_path: Path):
    found = nodes.run(_snapshot, tmp_path / "snapshot.pt")
    for saved, loaded in found:
        assert_same_bits(loaded, saved)
    firsts = (0, 2)  # of each node
    assert [bool(saved) for saved, _ in found] == [rank in firsts for rank in range(len(found))]


def _both_ways(rank: int, world_size: int, cases: Sequence[tuple[str, torch.dtype]]) -> None:
    """Sums of a node piece by piece in shared memory, and whole, over gloo: everything they leave, by bits."""
    pieces = make_transport(dist.new_group())
    with patch.object(transports, "SPARE", 1 << 40):
        whole = make_transport(dist.new_group())
        assert isinstance(whole, TwoLevelTransport) and isinstance(pieces, TwoLevelTransport)
        names = [each.levels.sums.within.name for each in (pieces, whole)]
    assert names == (["shm", "gloo"] if len(pieces.nodes.here) > 1 else ["local"] * 2)
    for setting, dtype in cases:
        found, expected = (left_behind(rank, each, setting, dtype) for each in (pieces, whole))
        assert_same_bits(found, expected, f"{setting} of {dtype}, rank {rank} of {world_size}")


@pytest.mark.long
def test_nodes_sum_pieces_to_the_bits_of_whole_flats(nodes: RankPool):
    dtypes = (("none", torch.float64), ("fp16", torch.bfloat16), ("int4", torch.float16))
    nodes.run(_both_ways, [*((setting, torch.float32) for setting in ("none", *PICKED)), *dtypes], timeout=TIMEOUT)


def _with_other_kernels_on_rank_0(rank: int, world_size: int) -> list[Any]:
    other = {"FASTREDUCE_KERNELS": "reference"} if rank == 0 else {}
    with patch.dict(os.environ, other):
        ddp = wrap("ours", nn.Linear(40, 40), compression="int8")
        ddp(batch(rank, 0, 4, 40)).square().mean().backward()
    return [ddp.reducer.transport.name, *grads_of(ddp)]


@pytest.mark.long
def test_a_rank_with_other_kernels_sums_with_those_of_its_node(nodes: RankPool):
    found = nodes.run(_with_other_kernels_on_rank_0)
    assert found[0][0] == "two_level"
    for of_rank in found:
        assert_same_bits(of_rank[1:], found[0][1:])


def _chosen(rank: int, world_size: int) -> dict[str, Any]:
    """What is chosen over the ranks of two hosts, of hosts with one rank each, and of one; asked for by name; full."""

    def name(group: Any, asked: str | None = None) -> str:
        return make_transport(group, "cpu", asked).name

    told: list[str] = []
    os.environ.pop("FASTREDUCE_TRANSPORT", None)
    both, alone, together = dist.new_group(), dist.new_group(), dist.new_group()
    found = {"both": name(both), "asked": name(both, "gloo")}
    with patch.dict(os.environ, FASTREDUCE_TRANSPORT="gloo"):
        found["told"] = name(both)
    with patch.dict(os.environ, FASTREDUCE_HOST=f"alone {rank}"):
        found["alone"] = name(alone)
    with patch.dict(os.environ, FASTREDUCE_HOST="together"):
        found["together"] = name(together)
    if rank == 0:
        found["by one rank"] = make_transport(both, "cpu", alone=True).name
    with patch.object(transports, "SPARE", 1 << 40), patch.object(two_level.logger, "info", _noted(told)):
        full = make_transport(both)
        assert isinstance(full, TwoLevelTransport)
        found["full"] = full.levels.sums.within.name
        full.close()
    return {**found, "log": " ".join(told)}


def _noted(told: list[str]) -> Callable[..., None]:
    return lambda text, *args: told.append(text % args)


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["aabb"], indirect=True)
def test_two_levels_are_chosen_where_there_are_several_hosts_and_one_has_several_ranks(nodes: RankPool):
    for rank, found in enumerate(nodes.run(_chosen)):
        log = found.pop("log")
        assert found.pop("by one rank", "two_level") == "two_level"
        assert found == {
            "both": "two_level",
            "asked": "gloo",
            "told": "gloo",
            "alone": "gloo",
            "together": "shm",
            "full": "gloo",
        }
        assert re.search(r"within this host gradients go over gloo: .* no room", log), log
        assert rank or "in two levels: gloo within a node, gloo between nodes 0,1 | 2,3" in log, log


def _differing(rank: int, world_size: int) -> str:
    try:
        wrap("ours", nn.Linear(3, 3), compression="int8:flat" if rank == 3 else "int8")
    except MismatchError as error:
        return str(error)
    return ""


def _absent(rank: int, world_size: int, seconds: float) -> str:
    """What a rank says of rank 3, which takes no part in the third backward."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
    ddp = wrap("ours", nn.Linear(3, 3), compression="int8", process_group=group)
    for _ in range(2):  # and the order of buckets is known
        ddp(torch.ones(2, 3)).sum().backward()
    text = "" if rank == 3 else message(lambda: ddp(torch.ones(2, 3)).sum().backward())
    dist.barrier()
    return text


@pytest.mark.long
def test_ranks_that_differ_are_told_and_a_rank_that_does_not_come_is_named_by_all():
    nodes = RankPool(4, hosts="aabb")
    for text in nodes.run(_differing):
        assert "ranks differ in" in text and "rank 0 has int8, rank 3 has int8:flat" in text, text

    def test(seconds: float) -> None:
        told = nodes.run(_absent, seconds)
        for rank in range(3):
            assert f"rank {rank} of 4: " in told[rank] and "Bucket 0 holds" in told[rank], told[rank]
            assert "o word from rank 3: it has exited" in told[rank], told[rank]

    with_time(test, 4.0)
    nodes.kill()
