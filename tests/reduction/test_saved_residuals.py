"""What error feedback keeps survives restarts, by another number of ranks too."""

from __future__ import annotations

import copy
import io
import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from fastreduce import Compression, GradientReducer, SettingError
from fastreduce.reduction import saved_residuals
from fastreduce.transports import LocalTransport
from tests.support.bucket_pipelines import Buckets
from tests.support.models import Breaking, Grads, assert_same_bits, batch, bits, grads_of, mlp, wrap
from tests.support.ranks import RankPool
from tests.support.thread_ranks import backward_of_step, in_threads, make_reducer, seeded

FEEDBACK = "int8:error_feedback"


def _steps(model: Any, rank: int, first: int, last: int) -> list[Grads]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(first, last):
        optimizer.zero_grad()
        model(batch(rank, step, 4, 20)).square().mean().backward()
        optimizer.step()
        seen.append(grads_of(model.module))
    return seen


def _back_behind_one_that_raised(rank: int, world_size: int) -> tuple[list[int], Any, Any]:
    """Steps as ranks tell them behind a backward that raised on rank 0, and gradients when all go back then."""
    model: Any = wrap("ours", Breaking(20), compression=FEEDBACK, bucket_cap_mb=1e-4)
    _steps(model, rank, 0, 3)
    weights, saved = copy.deepcopy(model.module.state_dict()), model.reducer.state_dict()
    expected = _steps(model, rank, 3, 6)
    found = []
    for _ in range(2):
        with pytest.raises(ValueError, match="boom") if rank == 0 else nullcontext():
            model(batch(rank, 9, 4, 20), boom=rank == 0).square().mean().backward()
        if not found:
            found.append(model.reducer.state_dict()["schedule"]["step"])
        model.module.load_state_dict(weights)
        model.reducer.load_state_dict(saved)
    return found, _steps(model, rank, 3, 6), expected


def test_a_state_is_told_and_loaded_behind_the_step_that_raised_here(ranks2: RankPool):
    for found, resumed, expected in ranks2.run(_back_behind_one_that_raised):
        assert found == [7]
        assert_same_bits(resumed, expected)


@pytest.mark.parametrize(
    "after", [0, pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(ranks: RankPool, after: int):
    for uninterrupted, resumed in ranks.run(_resume, after):
        assert_same_bits(resumed, uninterrupted)


def _resume(rank: int, world_size: int, after: int) -> tuple[list[Grads], list[Grads]]:
    options = {"compression": FEEDBACK, "bucket_cap_mb": 0.004}
    torch.manual_seed(0)
    model = wrap("ours", mlp(), **options)
    _steps(model, rank, 0, after)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "reducer": model.reducer.state_dict()}, file)
    uninterrupted = _steps(model, rank, after, after + 4)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    torch.manual_seed(123)
    again = wrap("ours", mlp(), **options)
    again.module.load_state_dict(saved["model"])
    again.reducer.load_state_dict(saved["reducer"])
    return uninterrupted, _steps(again, rank, after, after + 4)


def test_without_loading_the_residuals_it_would_differ(ranks2: RankPool):
    assert ranks2.run(_resume_without) == [False, False]


def _resume_without(rank: int, world_size: int) -> bool:
    torch.manual_seed(0)
    model = wrap("ours", mlp(), compression=FEEDBACK)
    _steps(model, rank, 0, 3)
    weights = {name: value.clone() for name, value in model.module.state_dict().items()}
    uninterrupted = _steps(model, rank, 3, 5)
    again = wrap("ours", mlp(), compression=FEEDBACK)
    again.module.load_state_dict(weights)
    resumed = _steps(again, rank, 3, 5)
    pairs = zip(uninterrupted[-1].values(), resumed[-1].values(), strict=True)
    return all(torch.equal(bits(a), bits(b)) for a, b in pairs)  # type: ignore[arg-type]


SETTINGS = [
    FEEDBACK,
    f"{FEEDBACK}=8bit",
    f"{FEEDBACK}=bf16",
    "powersgd:rank=1,min_compression_rate=1",
    "topk:ratio=0.1",
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_file_holds_of_a_state_what_it_tells_and_no_more(ranks2: RankPool, setting: str):
    for told, held in ranks2.run(_sizes, setting):
        assert held == told > 0


def _sizes(rank: int, world_size: int, setting: str) -> tuple[int, int]:
    """Bytes of a state's tensors, and of the storages that `torch.save` would write."""
    model = wrap("ours", mlp(), compression=setting)
    _steps(model, rank, 0, 3)
    state = model.reducer.state_dict()
    assert any(map(len, state["shard_residuals"])) == setting.startswith(FEEDBACK)
    tensors = [*state["residuals"].values(), *state["factors"].values(), *state["shard_residuals"]]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(each.nbytes for each in tensors), sum(storages.values())


def test_a_state_is_a_copy(ranks2: RankPool):
    assert ranks2.run(_copied) == [True, True]


def _copied(rank: int, world_size: int) -> bool:
    model = wrap("ours", mlp(), compression=FEEDBACK)
    _steps(model, rank, 0, 3)
    state = model.reducer.state_dict()
    kept = {name: value.clone() for name, value in state["residuals"].items()}
    shards = [value.clone() for value in state["shard_residuals"]]
    _steps(model, rank, 3, 6)
    return all(torch.equal(state["residuals"][n], v) for n, v in kept.items()) and all(
        map(torch.equal, state["shard_residuals"], shards)
    )


def states_of(world_size: int, setting: str = FEEDBACK) -> list[dict[str, Any]]:
    """What the ranks of an old run have saved, after some steps in threads."""

    def run(rank: int, transport: Any) -> dict[str, Any]:
        model = seeded(mlp)
        reducer = make_reducer(model, transport, setting)
        for step in range(4):
            backward_of_step(model, reducer, batch(rank, step, 4, 20))
        return reducer.state_dict()

    return in_threads(world_size, run)


def reducers_of(world_size: int, use: Any, setting: str = FEEDBACK) -> list[Any]:
    """`use(rank, reducer)` on the ranks of a new run."""

    def run(rank: int, transport: Any) -> Any:
        model = seeded(mlp)
        reducer = make_reducer(model, transport, setting)
        value = use(rank, reducer)
        for step in range(2):  # and it trains on
            reducer.rebuild_buckets()
            output = model(batch(rank, step, 4, 20))
            reducer.arm()
            reducer.watch([output])
            output.square().mean().backward()
        return value

    return in_threads(world_size, run)


@pytest.mark.parametrize(("old", "new"), [(3, 2), (2, 3), (4, 1), (1, 2)])
def test_another_world_size_loads_the_mean_of_all_old_residuals(old: int, new: int, caplog: pytest.LogCaptureFixture):
    states = states_of(old)
    mean = {n: torch.stack([s["residuals"][n] for s in states]).mean(0) for n in states[0]["residuals"]}
    of_shards = saved_residuals.of_shards(states, saved_residuals.alignments(states[0]))
    expected = {name: value + of_shards[name] for name, value in mean.items()}
    assert any(value.any() for value in mean.values()) and any(value.any() for value in of_shards.values())

    def load(rank: int, reducer: GradientReducer) -> dict[str, Any]:
        reducer.load_state_dict(states)
        return reducer.state_dict()

    caplog.set_level(logging.INFO, logger="fastreduce")
    for rank, loaded in enumerate(reducers_of(new, load)):
        assert_same_bits({n: loaded["residuals"][n] for n in expected}, expected, f"rank {rank}")
        assert (loaded["rank"], loaded["world_size"]) == (rank, new)
        assert all(not shard.any() for shard in loaded["shard_residuals"]), "they are part of the first stage"
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("fastreduce")]
    assert len(lines) == new, "one line a rank"
    assert f"{old} ranks" in lines[0] and f"on {new}" in lines[0] and "mean" in lines[0]


def test_at_the_same_world_size_the_list_of_all_states_serves_too():
    states = states_of(2)

    def load(rank: int, reducer: GradientReducer) -> dict[str, Any]:
        reducer.load_state_dict(states[::-1])
        return reducer.state_dict()

    for rank, loaded in enumerate(reducers_of(2, load)):
        assert_same_bits(loaded["residuals"], states[rank]["residuals"])
        assert_same_bits(loaded["shard_residuals"], states[rank]["shard_residuals"])


def _without(states: list[dict[str, Any]], *ranks: int) -> list[dict[str, Any]]:
    return [state for state in states if state["rank"] not in ranks]


def _renamed(state: dict[str, Any]) -> dict[str, Any]:
    def rename(name: str) -> str:
        return name.replace("6.weight", "other.weight")

    return {
        **state,
        "buckets": [[rename(name) for name in names] for names in state["buckets"]],
        "residuals": {rename(name): value for name, value in state["residuals"].items()},
    }


def _resized(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "residuals": {**state["residuals"], "6.weight": torch.zeros(3)}}


BAD_STATES: dict[str, tuple[Any, str]] = {
    "a rank is missing": (lambda: _without(states_of(3), 1), r"ranks \[0, 2\] of 3"),
    "of this rank there is none": (lambda: _without(states_of(2), 0), r"rank 0 of 2 needs"),
    "one state of another world size": (lambda: states_of(3)[0], r"ranks \[0\] of 3"),
    "nothing": (list, "given: ranks"),
    "several compressions": (lambda: [*states_of(1, "int4:error_feedback"), *states_of(2)], "'int8:error_feedback'"),
    "other names": (lambda: [_renamed(state) for state in states_of(2)], "'6.weight' is only in this reducer"),
    "other sizes": (lambda: [_resized(state) for state in states_of(2)], "'6.weight' has 3 elements"),
}


@pytest.mark.parametrize("case", BAD_STATES)
def test_a_state_that_does_not_fit_is_a_setting_error_and_nothing_is_loaded(case: str):
    make, message = BAD_STATES[case]
    bad = make()

    def load(rank: int, reducer: GradientReducer) -> tuple[bool, str]:
        if rank == 1 and case == "of this rank there is none":
            return True, message
        before = reducer.state_dict()
        try:
            reducer.load_state_dict(bad)
        except SettingError as error:
            assert_same_bits(reducer.state_dict(), before)
            return True, str(error)
        return False, "loaded"

    for refused, text in reducers_of(2, load):
        assert refused, text
        assert text == message or pytest.raises(SettingError, match=message).matches(SettingError(text)), text


def _of(names: str) -> GradientReducer:
    """A reducer of parameters with names of one letter, of which capitals have sparse gradients."""
    parameters = [nn.Parameter(torch.zeros(4, 2)) for _ in names]
    sparse = [i for i, name in enumerate(names) if name.isupper()]
    return GradientReducer(parameters, list(names), LocalTransport(), Compression.parse("none"), sparse=sparse)


def _state_of(names: str) -> dict[str, Any]:
    """One in which the first parameter fires twice, and arrives last."""
    state = _of(names).state_dict()
    last = len(names) - 1
    return {**state, "reduced_once": True, "order": [last, 0, 0], "fires": [2] + last * [1]}


def test_a_parameter_with_a_sparse_gradient_more_or_less_is_a_setting_error():
    old = {key: value for key, value in _state_of("abE").items() if key != "settings"}
    for state, names, message in (
        (_state_of("abE"), "ab", "parameter 'E' is only in the state"),
        (_state_of("ab"), "aEb", "parameter 'E' is only in this reducer"),
        (_state_of("aEb"), "aFb", "parameter 'E' is only in the state"),
        (old, "ab", "the state is of 3 parameters, this reducer of 2"),
    ):
        reducer = _of(names)
        before = reducer.state_dict()
        with pytest.raises(SettingError, match=f"^{message}$"):
            reducer.load_state_dict(state)
        assert_same_bits(reducer.state_dict(), before)


def test_a_state_follows_parameters_to_other_places():
    state = _state_of("abE")
    for names, order, fires in (("abE", [2, 0, 0], [2, 1, 1]), ("Eba", [0, 2, 2], [1, 1, 2])):
        reducer = _of(names)
        reducer.load_state_dict(state)
        found = reducer.state_dict()
        assert (found["order"], found["fires"], found["buckets"]) == (order, fires, state["buckets"])
    reducer = _of("abE")
    reducer.load_state_dict({key: value for key, value in state.items() if key != "settings"})  # an older one
    assert reducer.state_dict()["fires"] == [2, 1, 1]


def test_settings_without_feedback_save_and_load_the_layout_only():
    states = states_of(2, "fp16")
    assert states[0]["residuals"] == {} and states[0]["shard_residuals"] == []
    reducers_of(2, lambda rank, reducer: reducer.load_state_dict(states[rank]), "fp16")


def test_what_is_saved_amid_averages_that_nobody_has_applied_is_the_same_when_it_is_saved_again():
    bucket = Buckets(LocalTransport(), Compression.parse("int4:error_feedback"), ((300,),))
    (pipeline,), (parameter,) = bucket.pipelines, bucket.parameters
    kept = pipeline.feedback
    assert kept is not None
    for step in range(2):
        parameter.grad = batch(0, step, 300)
        pipeline.run([parameter.grad], [parameter.grad])
        kept.follow([parameter], [], pipeline.magnitudes)
        if step == 0:
            torch.optim.SGD([parameter], 1.0).step()
    kept.look()
    kept.commit()  # as a reduction begins with it
    first, again = kept.settled(), kept.settled()
    assert_same_bits(again[:2], first[:2])
