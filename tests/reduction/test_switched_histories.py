"""Settings switched at random: applied and exact gradients differ by what is kept, and by nothing else.

The histories of `test_applied`, whose steps may begin another setting, or another size of buckets. The settings are
those of which nothing else is lost: `none`, and those with error feedback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from fastreduce import Compression, GradientReducer
from fastreduce.transports import LocalTransport
from tests.reduction.residuals.test_applied import FEW, SETUPS, steps
from tests.reduction.test_saved_residuals import reducers_of, states_of
from tests.support.bucket_pipelines import Buckets
from tests.support.histories import NAMES, Setup, Step, check_law, of_trainings, train
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool

SETTINGS = [
    "none",
    "none",
    "none:accumulate=fp32",
    "int8:block=16,error_feedback",
    "int8:error_feedback",
    "int4:block=32,error_feedback",
    "fp8:block=64,error_feedback",
    "int4:error_feedback,warm_up=2",
    "a: none; *: int8:error_feedback",
    "b|c: int8:block=64,error_feedback; *: int4:block=32,error_feedback",
]


def switching_steps(world_size: int, settings: Sequence[str] = SETTINGS) -> st.SearchStrategy[Step]:
    def switched(
        step: Step, switch: str, cap: float | None, again: bool, halved: bool, late: bool, early: tuple[int, ...]
    ) -> Step:
        # After loading, an optimizer must be seen once: under `none` nobody looks (as in `train`).
        saved = step.saved and (switch.endswith(",error_feedback") or switch.startswith(("powersgd", "topk")))
        cap = cap if switch else None
        found = dataclasses.replace(step, switch=switch, switched_cap_mb=cap, saved=saved, early=early)
        return dataclasses.replace(found, looks_again=again, halved=halved, looks_late=late)

    flags = [FEW([False, False, True])] * 3
    caps, early = FEW([None, None, 1e-6, 1e-3]), FEW([(), (), (0,), (1,)])
    return st.builds(switched, steps(world_size), FEW(["", *settings]), caps, *flags, early)


def hunt(ranks: RankPool, examples: int) -> None:
    @of_trainings(examples)
    @given(SETUPS, st.lists(switching_steps(ranks.world_size), min_size=2, max_size=12))
    def search(setup: Setup, history: list[Step]) -> None:
        setup = dataclasses.replace(setup, way="ddp")
        check_law(setup, ranks.run(train, setup, history))

    search()


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_nothing_is_lost_by_switching(request: pytest.FixtureRequest, world_size: int):
    hunt(request.getfixturevalue(f"ranks{world_size}"), 6)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_over_many_histories(request: pytest.FixtureRequest, world_size: int):
    hunt(request.getfixturevalue(f"ranks{world_size}"), 250)


@pytest.mark.parametrize(
    ("history", "rest"),
    [
        ([Step(), Step(switch="none")], 0.0),
        ([Step(), Step(switch="none", ends="skip"), Step()], 0.0),
        ([Step(), Step(switch="none", used=("bc", "bc")), Step()], 0.0),
        ([Step(), Step(switch="none", clip="torch", max_norm=0.1)], 1e-4),
        ([Step(), Step(switch="none", micro_batches=2, ends="keep"), Step()], 0.0),
        ([Step(), Step(switch="bf16"), Step(switch="none")], 0.0),
    ],
    ids=["applied", "skipped", "unused", "clipped", "kept in .grad", "in 16 bits"],
)
def test_a_setting_without_error_feedback_adds_it_until_it_has_been_applied(
    ranks2: RankPool, history: list[Step], rest: float
):
    results = ranks2.run(train, Setup(), history)
    if not any(step.switch == "bf16" for step in history):
        check_law(Setup(), results)
    for result in results:
        kept = result["kept"]["residuals"]
        left = max([float(kept[name].abs().max()) for name in NAMES if name in kept], default=0.0)
        assert left <= 1e-5 if rest == 0 else left > rest


def test_what_only_one_rank_has_left_is_loaded_at_another_world_size():
    states = states_of(2)
    del states[0]["residuals"]["6.weight"]
    states[1]["units"]["6.weight"] = 0.5
    states = [{**state, "shard_residuals": [], "compression": "none", "settings": {}} for state in states]

    def load(rank: int, reducer: GradientReducer) -> dict[str, Any]:
        reducer.load_state_dict(states)
        return reducer.state_dict()

    for loaded in reducers_of(3, load, "none"):
        half = states[1]["residuals"]["6.weight"] / 2
        assert_same_bits(loaded["residuals"]["6.weight"], half)
        assert loaded["units"]["6.weight"] == 0.5


@pytest.mark.parametrize(
    "step",
    [
        Step(halved=True, looks_again=True),
        Step(looks_again=True, clip="torch", max_norm=0.1, looks_late=True),
        Step(looks_again=True, halved=True, clip="torch", max_norm=0.1, looks_late=True),
        Step(looks_again=True, clip="ours", max_norm=0.1, looks_late=True),
    ],
    ids=["by hand before a forward", "clipped between two", "both", "by ours between two"],
)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_what_gradients_are_multiplied_by_around_forwards_is_seen(ranks2: RankPool, step: Step, scaled: bool):
    setup = Setup(scaled=scaled, setting="int4:block=32")
    check_law(setup, ranks2.run(train, setup, [Step(), step, Step(), dataclasses.replace(step, seed=1)]))


@pytest.mark.parametrize("setting", ["none:accumulate=fp32", "int8:error_feedback", "topk:ratio=0.05"])
@pytest.mark.parametrize("early", [(), (0,), (1,)], ids=["all late", "rank 0 early", "rank 1 early"])
def test_ranks_of_which_one_has_thrown_averages_away_go_on_alike(
    ranks2: RankPool, setting: str, early: tuple[int, ...]
):
    """Where the others' are in `.grad` still, and are thrown away behind the switch."""
    setup = Setup(setting="int4:block=32", bucket_cap_mb=1.0)
    history = [Step(), Step(ends="skip"), Step(switch=setting, zero_late=True, early=early)]
    check_law(setup, ranks2.run(train, setup, history))


def test_a_remainder_that_is_made_for_another_rank_knows_whether_its_first_average_was_finite():
    """Else it would say of an infinite step that it counts, and what is kept of others would go by that."""
    for number in (1.0, torch.inf):
        bucket = Buckets(LocalTransport(), Compression.parse("int8"), ((12,),))
        bucket.pipelines[0].watches_for_others = True
        bucket.step([torch.full((12,), number)])
        kept = bucket.pipelines[0].kept
        assert kept is not None and bool(kept.finite) == (number == 1.0)


def test_where_nothing_tells_whether_an_average_is_finite_the_verdict_of_an_earlier_step_is_over():
    bucket = Buckets(LocalTransport(), Compression.parse("none"), ((12,),))
    bucket.pipelines[0].watches_for_others = True
    for _ in range(2):
        bucket.step([torch.ones(12)])
        kept = bucket.pipelines[0].kept
        assert kept is not None and bool(kept.finite)
        kept.finite = torch.zeros_like(kept.finite)  # as another bucket's has it
