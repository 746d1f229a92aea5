"""Residuals in 8 bits and in BF16: their bytes, the law that they keep, and the way from one to another."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fastreduce import Compression, GradientReducer, SettingError
from fastreduce.reduction import saved_residuals
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.residuals.rows import BASE, Rows
from fastreduce.transports import LocalTransport
from tests.reduction.residuals.test_applied import FEW, SETUPS, steps
from tests.reduction.test_saved_residuals import reducers_of, states_of
from tests.reduction.test_switched_histories import switching_steps
from tests.support import tolerances
from tests.support.histories import Setup, Step, check_law, of_trainings, train
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

FEEDBACK = "int8:error_feedback"
KEPT_IN = {"8bit": tolerances.KEPT_IN_8_BITS, "bf16": tolerances.U[torch.bfloat16]}


# Memory


def _bytes_of(setting: str, numel: int) -> int:
    """What a bucket of one parameter keeps on one rank of one."""
    compression = Compression.parse(setting)
    specs = [ParameterSpec("a", numel, torch.float32, torch.device("cpu"))]
    (bucket,) = build_plan(specs, [[0]], alignment=compression.alignment, shards=1).buckets
    feedback = BucketPipeline(bucket, compression, LocalTransport()).feedback
    assert feedback is not None
    rows = (feedback._kept.first, feedback._kept.second)
    for each, kept in zip(rows, (feedback.residuals, feedback.shard_residuals), strict=True):
        assert each.rows is kept and each.base is None
    holders = (feedback, feedback._kept, *rows)
    tensors = [value for part in holders for value in vars(part).values() if isinstance(value, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    ("kept_in", "of_a_row"), [("true", 4.0), ("bf16", 2.0), ("8bit", 1.0 + 1 / 32)], ids=["fp32", "bf16", "8bit"]
)
def test_a_row_takes_so_many_bytes_a_parameter(kept_in: str, of_a_row: float):
    """Two rows of gradients' residuals, and on one rank as many of averages'."""
    numel = 1 << 20
    for setting in ("int8", "int4"):
        found = _bytes_of(f"{setting}:error_feedback={kept_in}", numel) / numel / 4
        assert of_a_row - 1 / 32 <= found <= of_a_row + 1e-3, setting
    assert _bytes_of("int8:block=16,error_feedback=8bit", numel) / numel / 4 <= 1.1


# Rows


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_a_row_keeps_what_is_not_written(dtype: torch.dtype):
    rows = Rows(64, 160, torch.zeros(1, dtype=torch.int32), 32, dtype, (2,))
    given_ = torch.randn(2, 160, generator=torch.Generator().manual_seed(0))
    rows.write(1, given_)
    first = rows.read(1).clone()
    share = {torch.uint8: tolerances.KEPT_IN_8_BITS, torch.bfloat16: 2.0**-9, torch.float32: 0.0}[dtype]
    assert float((first - given_).abs().max()) <= share * float(given_.abs().max())
    assert_same_bits(rows.read(1, slice(33, 71)), first[:, 33:71])
    with rows.changing(1) as values:
        values[:, 32:64] += 0.0
    assert_same_bits(rows.read(1), first)
    rows.write(1, torch.ones(2, 10), rows.part(96, 106))
    assert_same_bits(rows.read(1, slice(32, 42)), torch.ones(2, 10))
    untouched = [slice(0, 32), slice(64, 160)]
    assert_same_bits([rows.read(1, part) for part in untouched], [first[:, part] for part in untouched])
    rows.clear(1, slice(64, 96))
    assert not rows.read(1, slice(64, 96)).any() and rows.read(1, slice(96, 160)).any()
    rows.scale(4.0)
    assert_same_bits(rows.read(1, slice(96, 160)), 4 * first[:, 96:])
    rows.keep_base(64, 128)  # of row 0, which counts
    rows.write(0, given_)
    rows.restore_base(64, 128)
    assert not rows.read(0, slice(0, 64)).any() and rows.read(0, slice(64, 160)).any() and not rows.read(BASE).any()


# The law


def _hunt(ranks: RankPool, examples: int, history: Any) -> None:
    @of_trainings(examples)
    @given(SETUPS, FEW(["8bit", "8bit", "bf16"]), st.lists(history, min_size=1, max_size=12))
    def search(setup: Setup, kept_in: str, history: list[Step]) -> None:
        setup = dataclasses.replace(setup, kept_in=kept_in)
        if any(step.switch for step in history):
            setup = dataclasses.replace(setup, way="ddp", setting="int8:block=16", kept_in="8bit")
        check_law(setup, ranks.run(train, setup, history))

    search()


SWITCHES = [
    "none",
    FEEDBACK,
    f"{FEEDBACK}=8bit",
    f"{FEEDBACK}=bf16",
    "int8:block=16,error_feedback=8bit",
    f"a: none; *: {FEEDBACK}=8bit",
]


def test_applied_and_exact_gradients_differ_by_what_is_kept(ranks2: RankPool):
    _hunt(ranks2, 2, switching_steps(2, SWITCHES))


@pytest.mark.long
def test_one_rank_alone_keeps_the_law():
    with RankPool(1) as ranks:
        _hunt(ranks, 4, steps(1))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_over_many_histories(request: pytest.FixtureRequest, world_size: int):
    ranks = request.getfixturevalue(f"ranks{world_size}")
    _hunt(ranks, 20, steps(world_size))
    _hunt(ranks, 20, switching_steps(world_size, SWITCHES))


# Saved, loaded and switched


def _kept(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state["residuals"].items()}


@pytest.mark.parametrize(
    ("given_", "to"),
    [
        ("8bit", "8bit"),
        ("true", "8bit"),
        *(pytest.param(*way, marks=pytest.mark.long) for way in (("8bit", "true"), ("8bit", "bf16"), ("true", "bf16"))),
    ],
)
def test_a_state_goes_on_in_another_dtype(given_: str, to: str):
    """Rounded once in each of the two: where averages' residuals become part of the others, and where they go."""
    states = states_of(2, f"{FEEDBACK}={given_}")
    share = KEPT_IN.get(given_, 0.0) + KEPT_IN.get(to, 0.0) if to != given_ else 0.0

    def load(rank: int, reducer: GradientReducer) -> dict[str, Any]:
        reducer.load_state_dict(states[rank])
        reducer.switch_if_due()
        return reducer.state_dict()

    moved = states
    if to != given_:  # averages' residuals are part of the others' then: the same on every rank, of both
        of_shards = saved_residuals.of_shards(states, saved_residuals.alignments(states[0]))
        moved = [{**s, "residuals": {n: v + of_shards[n] for n, v in s["residuals"].items()}} for s in states]
    for rank, loaded in enumerate(reducers_of(2, load, f"{FEEDBACK}={to}")):
        assert any(value.any() for value in loaded["residuals"].values())
        for name, value in loaded["residuals"].items():
            expected = moved[rank]["residuals"][name]
            bound = share * float(expected.abs().max()) + 2.0**-20 * float(expected.abs().max()) * (to != given_)
            assert float((value - expected).abs().max()) <= bound, name
        if to == given_:
            assert_same_bits(loaded["shard_residuals"], states[rank]["shard_residuals"])


@pytest.mark.long
def test_another_world_size_loads_the_mean_in_8_bits():
    states = states_of(3, f"{FEEDBACK}=8bit")
    of_shards = saved_residuals.of_shards(states, saved_residuals.alignments(states[0]))
    mean = {n: torch.stack([s["residuals"][n] for s in states]).mean(0) + of_shards[n] for n in of_shards}

    def load(rank: int, reducer: GradientReducer) -> dict[str, Any]:
        reducer.load_state_dict(states)
        return reducer.state_dict()

    for loaded in reducers_of(2, load, f"{FEEDBACK}=8bit"):
        for name, value in mean.items():
            bound = tolerances.KEPT_IN_8_BITS * float(value.abs().max())
            assert 0 < float((loaded["residuals"][name] - value).abs().max()) <= bound


def test_states_that_differ_only_in_what_residuals_were_kept_in_are_of_one_compression():
    (state,) = states_of(1, f"{FEEDBACK}=8bit")
    assert saved_residuals.pick([state], 0, 1, FEEDBACK) is state
    with pytest.raises(SettingError, match="saved under 'int8:error_feedback=8bit'"):
        saved_residuals.pick([state], 0, 1, "int8:block=64,error_feedback=8bit")
