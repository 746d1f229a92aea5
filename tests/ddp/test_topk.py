"""Trainings under top-k: what is owed, and everything that a wrapper does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ddp.test_powersgd import hooked, hunt, many_ways
from tests.reduction.residuals.test_applied import steps
from tests.reduction.test_switched_histories import switching_steps
from tests.support.models import assert_same_bits, equal_on_all
from tests.support.ranks import RankPool
from tests.support.snapshots import switch_and_resume

SPEC = "topk:ratio=0.05,min_numel=100"
SPECS = (SPEC, "topk:ratio=0.01,min_numel=1", "topk:ratio=0.3,min_numel=1")
SWITCHES = ["none", "int8:block=16,error_feedback", *SPECS, f"b|c: {SPECS[1]}; *: int8:error_feedback"]


def test_applied_and_exact_gradients_differ_by_what_is_kept(ranks2: RankPool):
    hunt(ranks2, 1, steps(2), SPECS)
    hunt(ranks2, 1, switching_steps(2, SWITCHES), SPECS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_many_histories_of_two(ranks2: RankPool):
    hunt(ranks2, 40, steps(2), SPECS)
    hunt(ranks2, 40, switching_steps(2, SWITCHES), SPECS)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_over_many_histories_of_three(ranks3: RankPool):
    hunt(ranks3, 30, steps(3), SPECS)
    hunt(ranks3, 30, switching_steps(3, SWITCHES), SPECS)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SPEC, SPEC),
        pytest.param(SPEC, "int8", marks=pytest.mark.long),
        pytest.param("int8:error_feedback", SPEC, marks=pytest.mark.long),
        pytest.param("powersgd:rank=2", SPEC, marks=pytest.mark.long),
        pytest.param(SPEC, "powersgd:rank=2", marks=pytest.mark.long),
        pytest.param(f"{SPEC},warm_up=2", f"{SPEC},warm_up=2", marks=pytest.mark.long),
    ],
)
def test_a_checkpoint_goes_on_bit_for_bit_under_the_same_setting_or_another(
    ranks2: RankPool, old: str, new: str, tmp_path: Path
):
    for (kept, _), (resumed, _) in ranks2.run(switch_and_resume, old, new, 3, tmp_path / "snapshot.pt"):
        for part in ("model", "optimizer"):
            assert_same_bits(resumed[part], kept[part], part)
        assert_same_bits(resumed["reducer"]["residuals"], kept["reducer"]["residuals"])


def test_every_rank_has_the_same_bits_however_it_trains(ranks2: RankPool):
    first, second = ranks2.run(many_ways, SPEC)
    joined = first.pop("joined"), second.pop("joined")
    assert all(each is not None and each.isfinite().all() for each in joined[1].values())
    found = equal_on_all([first, second])
    for name in ("shm", "views", "small buckets", "statistics"):
        assert_same_bits(found[name], found["gloo"], name)
    assert found["unused on both"][0]["second.weight"] is None
    assert found["unused on one rank"][0]["second.weight"].any()


@pytest.mark.long
def test_the_hook_for_torchs_class_has_the_same_bits(ranks2: RankPool):
    for hook, ours in ranks2.run(hooked, SPEC):
        assert_same_bits(hook, ours)
