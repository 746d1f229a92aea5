"""set_compression: another setting from a step on, with the bits of a checkpoint that is resumed under it."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from fastreduce import FastreduceError, SettingError, TransportError, load_checkpoint, save_checkpoint
from fastreduce.reduction.schedule import Schedule
from tests.support.models import assert_same_bits, batch, grads_of, mlp, wrap
from tests.support.ranks import RankPool, run_ranks
from tests.support.snapshots import FEEDBACK, Training, switch_and_resume

PAIRS = [
    (FEEDBACK, "none"),
    (FEEDBACK, "int4:error_feedback"),
    ("fp16:accumulate=wire", "none:accumulate=fp32"),
]
MORE_PAIRS = [
    ("none", FEEDBACK),
    ("none", "int8"),
    (FEEDBACK, "bf16"),
    (FEEDBACK, "fp16"),
    (FEEDBACK, "int8"),
    ("fp8:block=16,error_feedback", FEEDBACK),
]


# Bits of a checkpoint


@pytest.mark.parametrize(
    ("old", "new"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.long) for pair in MORE_PAIRS)]
)
def test_a_switch_has_the_bits_of_a_checkpoint_resumed_under_the_new_setting(
    ranks: RankPool, old: str, new: str, tmp_path: Path
):
    for rank, each in enumerate(ranks.run(_switched_and_resumed, old, new, BEFORE, tmp_path)):
        for before, (switched, resumed) in zip(BEFORE, each, strict=True):
            assert_same_bits(resumed, switched, f"rank {rank}, after {before}")


BEFORE = (0, 1, 3)


def _switched_and_resumed(rank: int, world_size: int, old: str, new: str, each: tuple[int, ...], folder: Path) -> Any:
    return [switch_and_resume(rank, world_size, old, new, before, folder / f"{before}.pt") for before in each]


def test_so_has_a_switch_of_bucket_size(ranks2: RankPool, tmp_path: Path):
    for before in (1, 2):
        for switched, resumed in ranks2.run(switch_and_resume, FEEDBACK, FEEDBACK, before, tmp_path / "s.pt", 0.0001):
            assert_same_bits(resumed, switched, f"after {before}")
            assert len(resumed[0]["reducer"]["buckets"]) > 4


def test_a_checkpoint_in_the_middle_of_it_all_goes_on(ranks: RankPool, tmp_path: Path):
    """Residuals are on their way out, another setting and another size of buckets are to come."""
    each = (2, 3, 5)
    for of_rank in ranks.run(_resume_in_between_each, each, tmp_path):
        for before, (uninterrupted, resumed) in zip(each, of_rank, strict=True):
            assert_same_bits(resumed, uninterrupted, f"after {before}")


def _resume_in_between_each(rank: int, world_size: int, each: tuple[int, ...], folder: Path) -> list[Any]:
    return [_resume_in_between(rank, world_size, before, folder / f"{before}.pt") for before in each]


def _resume_in_between(rank: int, world_size: int, before: int, path: Path) -> Any:
    training = Training(FEEDBACK, clips=True)
    training.steps(1)
    training.model.set_compression("none")
    training.model.set_compression("int4:error_feedback,warm_up=1", at=3, bucket_cap_mb=0.0001)
    training.steps(before - 1)
    save_checkpoint(path, **training.parts())
    training.steps(3)
    uninterrupted = training.all(), training.norms[before:]
    again = Training(FEEDBACK, seed=5, clips=True)
    load_checkpoint(path, **again.parts())
    again.steps(3)
    return uninterrupted, (again.all(), again.norms)


def test_a_checkpoint_of_an_older_version_loads(ranks2: RankPool):
    for resumed, uninterrupted in ranks2.run(_load_older):
        assert_same_bits(resumed, uninterrupted)


def _load_older(rank: int, world_size: int) -> Any:
    training = Training(FEEDBACK)
    training.steps(2)
    state = training.model.reducer.state_dict()
    del state["schedule"], state["caps"], state["orders"]
    again = Training(FEEDBACK)
    again.model.reducer.load_state_dict(state)
    again.model.module.load_state_dict(training.model.module.state_dict())
    found = []
    for each in (again.model, training.model):
        each.eval()
        each.zero_grad()
        each(batch(rank, 0, 5, 20)).square().mean().backward()
        found.append(grads_of(each.module))
    return found


# What is in force when


def _train(ddp: Any, rank: int, steps: int) -> list[str]:
    """The settings that buckets were averaged under, by step."""
    found = []
    for step in range(steps):
        ddp.zero_grad()
        ddp(batch(rank, step, 4, 20)).square().mean().backward()
        found.append(str(ddp.reducer.buckets.compression))
    return found


def _by_step(rank: int, world_size: int, setting: Any, *calls: tuple[int, str, int | None]) -> list[str]:
    ddp = wrap("ours", mlp(), compression=setting)
    found: list[str] = []
    for before, other, at in calls:
        found += _train(ddp, rank, before - len(found))
        ddp.set_compression(other, at=at)
    return found + _train(ddp, rank, 6 - len(found))


NONE, INT8, FP16 = "none", "int8", "fp16"


@pytest.mark.parametrize(
    ("setting", "calls", "expected"),
    [
        (NONE, [(0, INT8, None)], [INT8, INT8, INT8, INT8, INT8, INT8]),
        (NONE, [(2, INT8, None)], [NONE, NONE, INT8, INT8, INT8, INT8]),
        (NONE, [(2, INT8, 4)], [NONE, NONE, NONE, NONE, INT8, INT8]),
        (NONE, [(1, INT8, 2), (1, FP16, 4)], [NONE, NONE, INT8, INT8, FP16, FP16]),
        (NONE, [(1, INT8, 4), (1, FP16, 2)], [NONE, NONE, FP16, FP16, FP16, FP16]),
        (NONE, [(1, INT8, None), (1, NONE, None)], [NONE, NONE, NONE, NONE, NONE, NONE]),
        ("int8:warm_up=2", [], [NONE, NONE, INT8, INT8, INT8, INT8]),
        ("int8:warm_up=4", [(1, FP16, 2)], [NONE, NONE, FP16, FP16, FP16, FP16]),
        (FP16, [(1, "int8:warm_up=2", 2)], [FP16, FP16, NONE, NONE, INT8, INT8]),
    ],
)
def test_each_step_has_the_setting_that_was_set_for_it(ranks2: RankPool, setting: str, calls: Any, expected: Any):
    assert ranks2.run(_by_step, setting, *calls) == [expected, expected]


def _callable(step: int) -> str:
    return [NONE, INT8, INT8, FP16][min(step, 3)]


def test_a_callable_of_the_step_is_a_schedule(ranks2: RankPool):
    expected = [NONE, INT8, INT8, FP16, FP16, FP16]
    assert ranks2.run(_by_step, _callable) == [expected, expected]
    assert ranks2.run(_by_step, _callable, (2, INT8, 4)) == [[*expected[:4], INT8, INT8]] * 2


@pytest.mark.long
def test_a_callable_is_asked_again_after_a_thousand_steps(ranks2: RankPool):
    assert ranks2.run(_far) == [["none", "int8", "none"]] * 2


def _far(rank: int, world_size: int) -> list[str]:
    ddp = wrap("ours", torch.nn.Linear(20, 1), compression=lambda step: "int8" if 1001 <= step < 1003 else "none")
    settings = _train(ddp, rank, 1005)
    assert settings.index("int8") == 1001
    return [setting for setting, _ in itertools.groupby(settings)]


def test_a_wrapper_that_is_copied_goes_on_with_its_schedule(ranks2: RankPool):
    assert ranks2.run(_copied) == [["int8", "int8", "fp16"]] * 2


def _copied(rank: int, world_size: int) -> list[str]:
    ddp = wrap("ours", mlp(), compression="none")
    _train(ddp, rank, 1)
    ddp.set_compression("int8")
    ddp.set_compression("fp16", at=3)
    other = copy.deepcopy(ddp)
    return [str(other.compression), *_train(other, rank, 3)[1:]]


# Ranks that disagree


def _disagree(rank: int, world_size: int, how: str) -> tuple[str, list[str]]:
    ddp = wrap("ours", mlp(), compression=FEEDBACK)
    _train(ddp, rank, 2)
    kept = ddp.reducer.state_dict()
    try:
        if how == "setting":
            ddp.set_compression(["int8", "bf16"][rank])
        elif how == "step":
            ddp.set_compression("int8", at=3 + rank)
        elif how == "bucket size":
            ddp.set_compression("int8", bucket_cap_mb=1 + rank)
        elif how == "callable":
            ddp.set_compression(lambda step: "int8" if step > 5 + rank else "none")
        elif how == "one is no setting":
            ddp.set_compression(["int8", "int9"][rank])
        elif how == "one is past":
            ddp.set_compression("int8", at=[3, 1][rank])
        else:
            ddp.set_compression(["int8", None][rank])
        raised = ""
    except FastreduceError as error:
        raised = f"{type(error).__name__}: {error}"
    assert_same_bits(ddp.reducer.state_dict(), kept, "nothing has changed")
    return raised, _train(ddp, rank, 3)


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("setting", "rank 0 has int8, rank 1 has bf16", ""),
        ("step", "from step 3 on int8, rank 1 has int8:error_feedback, from step 4 on int8", ""),
        ("bucket size", "rank 0 has int8 in buckets of 1048576 B, rank 1 has int8 in buckets of 2097152 B", ""),
        ("callable", "rank 0 has none, from step 6 on int8, rank 1 has none, from step 7 on int8", ""),
        ("one is no setting", "rank 1 could not be set up: SettingError", "unknown compression 'int9'"),
        ("one is past", "rank 1 could not be set up: SettingError", "at=1: 2 steps have been reduced"),
    ],
)
def test_ranks_that_disagree_raise_on_every_rank_and_train_on(ranks2: RankPool, how: str, first: str, second: str):
    found = ranks2.run(_disagree, how)
    for rank, (raised, settings) in enumerate(found):
        text = second if rank and second else first
        assert text in raised and raised.startswith("SettingError" if rank and second else "MismatchError"), raised
        assert settings == [FEEDBACK] * 3


# What cannot be combined


def _refused(rank: int, world_size: int, how: str) -> list[str]:
    model = mlp()
    ddp = wrap("ours", model)
    texts = []
    try:
        if how == "hook":
            ddp.register_comm_hook(None, allreduce_hook)
            ddp.set_compression("int8")
        elif how == "join":
            with ddp.join():
                ddp.set_compression("int8")
        else:
            out = ddp(batch(rank, 0, 4, 20))
            model[0].weight.register_hook(lambda _: ddp.set_compression("int8"))
            out.square().mean().backward()
    except SettingError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("hook", "compression='int8' and a communication hook exclude each other"),
        ("join", r"set_compression('int8') within join()"),
        ("backward", "set_compression('int8') in a backward"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_both_names(ranks2: RankPool, how: str, text: str):
    for found in ranks2.run(_refused, how):
        assert len(found) == 1 and text in found[0], found


def _hooked(rank: int, world_size: int, old: str, new: Any, at: int | None, steps: int) -> str:
    ddp = wrap("ours", mlp(), compression=old)
    _train(ddp, rank, 1)
    ddp.set_compression(new, at=at, bucket_cap_mb=0.001)
    _train(ddp, rank, steps)
    try:
        ddp.register_comm_hook(None, allreduce_hook)
    except RuntimeError as error:
        return str(error)
    _train(ddp, rank, 3)
    return ""


@pytest.mark.parametrize(
    ("old", "new", "at", "steps", "text"),
    [
        ("int8", "none", None, 0, ""),
        ("int8", "none", None, 1, ""),
        (FEEDBACK, "none", None, 0, "error feedback keeps residuals"),
        (FEEDBACK, "none", None, 2, ""),
        ("none", "int8", 3, 0, "compression='int8' and a communication hook exclude each other"),
        ("none", "none", 3, 0, "a change of compression in step 3 and a communication hook exclude each other"),
    ],
)
def test_a_hook_comes_after_what_was_set(ranks2: RankPool, old: str, new: str, at: int | None, steps: int, text: str):
    for found in ranks2.run(_hooked, old, new, at, steps):
        assert found.startswith(text) and bool(found) == bool(text), found


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, name: str, parameter: torch.Tensor) -> str:
        return "int8"


def _odd(rank: int, world_size: int, how: str) -> tuple[str, int]:
    first = {f"ndim<{'9' * 5000}": "int8"} if how == "many digits" and rank else "none"
    try:
        ddp = wrap("ours", mlp(), compression=first)
        if how == "object":
            ddp.set_compression(_Unhashable())
        elif how == "object on one rank":
            ddp.set_compression(_Unhashable() if rank else "int8")
        else:
            ddp.set_compression("int8", bucket_cap_mb=float(how) if rank else 1)
    except (FastreduceError, ValueError) as error:
        return str(error), 0
    _train(ddp, rank, 1)
    return str(ddp.compression), len(ddp.reducer.plan.buckets)


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("object", ["callable _Unhashable"] * 2),
        ("object on one rank", ["ranks differ in compression: rank 0 has int8, rank 1 has callable _Unhashable"] * 2),
        ("nan", ["rank 1 could not be set up: SettingError: buckets of nan bytes", "buckets of nan bytes"]),
        ("-1", ["rank 1 could not be set up: SettingError: buckets of -1048576", "buckets of -1048576.0 bytes"]),
        ("many digits", ["rank 1 could not be set up: ValueError: Exceeds the limit", "Exceeds the limit"]),
        ("0", ["ranks differ in compression: rank 0 has int8 in buckets of 1048576 B, rank 1 has int8 in"] * 2),
    ],
)
def test_odd_arguments_of_one_rank_keep_nobody_waiting(ranks2: RankPool, how: str, texts: list[str]):
    for (found, _), text in zip(ranks2.run(_odd, how), texts, strict=True):
        assert found.startswith(text), found


def _in_buckets(rank: int, world_size: int, cap: float, new: str) -> list[Any]:
    torch.manual_seed(0)
    ddp = wrap("ours", mlp(), compression=FEEDBACK, bucket_cap_mb=cap)
    _train(ddp, rank, 3)
    ddp.set_compression(new)
    found = []
    for step in range(3, 6):
        _train(ddp, rank, 1) if step == 3 else ddp.zero_grad()
        ddp(batch(rank, step, 4, 20)).square().mean().backward()
        found.append(grads_of(ddp.module))
    return found


@pytest.mark.parametrize("new", ["int4:error_feedback", pytest.param("none:accumulate=fp32", marks=pytest.mark.long)])
def test_after_a_switch_too_results_do_not_tell_where_shards_lay(ranks2: RankPool, new: str):
    small, large = (ranks2.run(_in_buckets, cap, new) for cap in (0.001, 25.0))
    assert_same_bits(small, large)


def _given(rank: int, world_size: int) -> list[str]:
    ddp = wrap("ours", mlp(), compression="none", bucket_cap_mb=1)
    _train(ddp, rank, 1)
    said = []
    options: Any
    for options in ({"at": np.int64(4)}, {"bucket_cap_mb": np.float32(0.5)}):
        ddp.set_compression("int8", **options)
        said.append(ddp.reducer.schedule.description(["a"], [])["compression"])
    for options in ({"at": True}, {"at": 5.0}, {"at": "5"}, {"bucket_cap_mb": "1"}, {"bucket_cap_mb": {}}):
        try:
            ddp.set_compression("int8", **(options if rank else {}))
        except FastreduceError as error:
            said.append(str(error).replace("rank 1 could not be set up: SettingError: ", ""))
    return said


def test_numbers_of_numpy_are_numbers_and_what_is_none_is_named_on_every_rank(ranks2: RankPool):
    """A bucket size of "1" was told as a million ones, and one that cannot be multiplied to one rank alone."""
    first, second = ranks2.run(_given)
    assert first == second
    assert first == [
        "none, from step 4 on int8",
        "int8 in buckets of 524288 B",
        "at=True: 1 steps have been reduced; allowed: whole numbers from 1 on",
        "at=5.0: 1 steps have been reduced; allowed: whole numbers from 1 on",
        "at='5': 1 steps have been reduced; allowed: whole numbers from 1 on",
        "buckets of '1' bytes; allowed: finite numbers from 0 on",
        "buckets of {} bytes; allowed: finite numbers from 0 on",
    ]


def _alone(rank: int, world_size: int) -> str:
    ddp = wrap("ours", mlp(), transport="gloo")
    ddp(batch(rank, 0, 6, 20)).square().mean().backward()
    try:
        if rank:
            ddp.set_compression("fp16")
        ddp(batch(rank, 0, 6, 20)).square().mean().backward()
    except TransportError as error:
        return str(error)
    return ""


def test_a_rank_that_alone_sets_one_in_the_first_step_is_told_so():
    """It was told that the other had sent no digest, and that one that it had sent no order: not that calls differ."""
    first, second = run_ranks(_alone, 2, check_exit=False)
    assert first.startswith("rank 1 is in another call: it sent no order of its parameters")
    assert second.startswith("rank 0 is in another call: it sent no digest of its settings")
    assert "). Settings are compared where set_compression is called, which every rank does" in second


def _set_again(rank: int, world_size: int, path: Path, again: list[int]) -> str:
    def later(step: int) -> str:
        return FEEDBACK if step > 1 else "none"

    saved = wrap("ours", mlp(), compression="none")
    saved.set_compression(later)
    _train(saved, rank, 4)
    save_checkpoint(path, model=saved)
    loaded = wrap("ours", mlp(), compression="none")
    if rank in again:  # `set_compression` is called by all ranks
        loaded.reducer._agreed.schedule = loaded.reducer.schedule.with_setting(0, later, None)
    before = copy.deepcopy(loaded.module.state_dict()), loaded.reducer.state_dict()
    try:
        load_checkpoint(path, model=loaded)
    except FastreduceError as error:
        assert_same_bits((loaded.module.state_dict(), loaded.reducer.state_dict()), before, "nothing has changed")
        return f"{type(error).__name__}: {error}"
    return str(loaded.compression)


def test_a_snapshot_whose_callable_is_not_there_is_refused_on_every_rank(ranks2: RankPool, tmp_path: Path):
    """Weights were loaded, and residuals, buckets and the schedule left out, with a warning."""
    names = "the callable _set_again.<locals>.later, which a snapshot holds by name, was set by set_compression"
    for said in ranks2.run(_set_again, tmp_path / "a.pt", []):
        assert said.startswith(f"SettingError: {names}") and said.endswith("set it again, before loading")
    first, second = ranks2.run(_set_again, tmp_path / "a.pt", [0])
    assert first.startswith("CheckpointError: rank 1, ") and names in first and second.startswith("SettingError")
    assert ranks2.run(_set_again, tmp_path / "a.pt", [0, 1]) == [FEEDBACK] * 2


def test_callables_of_one_name_are_told_apart():
    """The one given at construction went on in the place of what was set later, or the other way round."""
    given, one, other = (lambda step, each=each: each for each in ("none", "int8", "fp16"))

    def schedule(*later: tuple[int, Any], step: int = 0) -> Schedule:
        made = Schedule(given)
        for at, setting in later:
            made = made.with_setting(at, setting, None)
        made.step = step
        return made

    def settings(resumed: Schedule) -> list[str]:
        return [str(setting) for setting in resumed.settings]

    before, after = (schedule((5, one), step=step).state() for step in (3, 6))
    assert settings(schedule((5, one)).resumed(before)) == ["none", "int8"]
    assert settings(schedule((0, one)).resumed(before)) == ["none", "int8"]
    assert settings(schedule((0, one)).resumed(after)) == ["int8"]
    for state in (before, after):
        with pytest.raises(SettingError, match=r"callable .*<lambda> of set_compression, which .* set it again"):
            schedule().resumed(state)
    two = schedule((5, one), (9, other), step=3).state()
    assert settings(schedule((5, one), (9, other)).resumed(two)) == ["none", "int8", "fp16"]
    with pytest.raises(SettingError, match=r"more than once by .* this one with at=9"):
        schedule((5, one)).resumed(two)
    with pytest.raises(SettingError, match=r"more than once by .* this one with at=5"):
        schedule((1, one), (2, other)).resumed(after)


def test_a_callable_that_is_over_keeps_no_schedule_from_being_pickled():
    schedule = Schedule(lambda step: "fp16")
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(schedule)
    state, switched = schedule.state(), schedule.with_setting(0, "int8", None)
    twin = pickle.loads(pickle.dumps(switched))
    assert str(twin.setting) == "int8" and twin.state() == switched.state()
    assert str(twin.resumed(switched.state()).setting) == "int8"
    with pytest.raises(SettingError, match="<lambda>, which a snapshot holds by name"):
        twin.resumed(state)
    back = pickle.loads(pickle.dumps(Schedule("fp16").with_setting(0, "int8", None))).with_setting(0, "fp16", None)
    assert str(back.resumed(back.state()).setting) == "fp16"
