"""DistributedDataParallel on real ranks, beside torch's class with the same seed, data and processes.

On two ranks `none` must give torch's bits. On three it does so too where whole numbers keep every sum exact
(tests/support/models.py), and is within the order of summation otherwise.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fastreduce
from fastreduce import errors
from tests.support import tolerances
from tests.support.commands import ROOT
from tests.support.models import (
    EXACT,
    SETTINGS,
    TWO_SHOT,
    Branches,
    Breaking,
    Checkpointed,
    Grads,
    Heads,
    MixedDtypes,
    Normed,
    OddShapes,
    assert_same_bits,
    batch,
    bits,
    grads_of,
    in_memory_order,
    local_grads,
    mlp,
    play,
    train,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import RankPool, run_ranks

MODELS = {"mlp": mlp, "mixed dtypes": MixedDtypes, "odd shapes": OddShapes}
WIDE = {"wide": lambda: mlp(300, 4)}  # more than the first bucket's 1 MiB
CAPS = {"one bucket": 25.0, "several": 0.004, "one parameter each": 1e-6}


@pytest.fixture(params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{request.param}")
    return pool


@pytest.fixture(params=[False, True], ids=["own", "views"])
def views(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[(2, False), (3, True)], ids=["2 ranks", "3 ranks with views"])
def ranks_views(request: pytest.FixtureRequest) -> tuple[RankPool, bool]:
    """Both numbers of ranks and both kinds of gradients, in two cases."""
    world_size, views = request.param
    return request.getfixturevalue(f"ranks{world_size}"), views


@pytest.fixture(params=[(2, True), (3, False)], ids=["2 ranks with views", "3 ranks"])
def ranks_views_crossed(request: pytest.FixtureRequest) -> tuple[RankPool, bool]:
    """The other two cases."""
    world_size, views = request.param
    return request.getfixturevalue(f"ranks{world_size}"), views


def _equal_on_all(results: list[Any]) -> Any:
    """What all ranks returned, which must be the same bits."""
    for rank, other in enumerate(results[1:], 1):
        assert_same_bits(other, results[0], f"rank {rank} against rank 0")
    return results[0]


# Plain training


def _train_both(rank: int, world_size: int, model: str, options: dict[str, Any]) -> list[Grads]:
    make = {**MODELS, **WIDE}[model]
    ours = train("ours", make, rank, **options)
    assert_same_bits(ours, train("torch", make, rank, **options), f"rank {rank}, {model}")
    return ours


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_and_parameters_equal_those_of_torch_bit_for_bit_over_steps(
    ranks2: RankPool, model: str, caps: str, views: bool
):
    options = {"steps": 5, "bucket_cap_mb": CAPS[caps], "gradient_as_bucket_view": views}
    _equal_on_all(ranks2.run(_train_both, model, options))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_in_place_and_to_none_equal_torch(ranks2: RankPool, views: bool, set_to_none: bool):
    options = {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": views, "set_to_none": set_to_none}
    for model in MODELS:
        _equal_on_all(ranks2.run(_train_both, model, options))


def test_torchs_default_caps_equal_torch(ranks2: RankPool):
    _equal_on_all(ranks2.run(_train_both, "wide", {"width": 300, "steps": 3}))


def _train(rank: int, world_size: int, kind: str, model: str, options: dict[str, Any]) -> list[Grads]:
    return train(kind, MODELS[model], rank, **options)


@pytest.mark.parametrize("model", MODELS)
def test_three_ranks_agree_with_torch_within_the_order_of_summation(ranks3: RankPool, model: str, views: bool):
    options = {"steps": 3, "lr": 0.0, "bucket_cap_mb": 0.004, "gradient_as_bucket_view": views}
    ours = _equal_on_all(ranks3.run(_train, "ours", model, options))
    torchs = _equal_on_all(ranks3.run(_train, "torch", model, options))
    for step, of_ranks in enumerate(local_grads(MODELS[model], 0, 3, 3)):
        for name in of_ranks[0]:
            grads = [g[name] for g in of_ranks]
            far = (in_memory_order(ours[step][name]) - in_memory_order(torchs[step][name])).abs()
            assert (far <= tolerances.order_of_summation(grads)).all(), f"step {step}, {name}"  # type: ignore[arg-type]


# Compression


@pytest.mark.parametrize("setting", SETTINGS)
def test_averages_are_within_the_formats_bound_and_the_same_on_all_ranks(ranks: RankPool, setting: str):
    for model, make in MODELS.items():
        options = {"steps": 3, "lr": 0.0, "bucket_cap_mb": 0.004, "compression": setting}
        found = _equal_on_all(ranks.run(_train, "ours", model, options))
        steps = 1 if "error_feedback" in setting else 3
        worst = 0.0
        for step, of_ranks in enumerate(local_grads(make, 0, steps, ranks.world_size)):
            for name in of_ranks[0]:
                grads = [g[name] for g in of_ranks]
                exact = torch.stack([in_memory_order(g) for g in grads]).mean(0)
                far = (in_memory_order(found[step][name]) - exact).abs()
                bound = tolerances.error_bound(setting, grads)  # type: ignore[arg-type]
                assert (far <= bound).all(), f"{model}, step {step}, {name}: {far.max()} over {bound.max()}"
                if far.numel():
                    worst = max(worst, float((far / bound.clamp_min(1e-300)).max()))
        assert worst > 0.1, f"{model}: the bound is too loose to say anything"


@pytest.mark.parametrize("setting", SETTINGS)
def test_replicas_stay_bitwise_equal_through_training(ranks3: RankPool, setting: str):
    options = {"steps": 6, "bucket_cap_mb": 0.004, "compression": setting, "gradient_as_bucket_view": True}
    _equal_on_all(ranks3.run(_train, "ours", "mlp", options))


@pytest.mark.parametrize("setting", TWO_SHOT)
def test_two_shot_results_depend_neither_on_bucket_size_nor_on_views_nor_on_the_run(ranks3: RankPool, setting: str):
    expected: Any = None
    for caps, views in ((25.0, False), (25.0, False), (0.004, True), (1e-6, False)):
        options = {"compression": setting, "bucket_cap_mb": caps, "gradient_as_bucket_view": views}
        found = ranks3.run(_train, "ours", "mlp", options)[0]
        expected = expected or found
        assert_same_bits(found, expected, f"{setting} at {caps} MiB")


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_gets_better_under_every_setting(ranks2: RankPool, setting: str):
    first, last = ranks2.run(_losses, setting)[0]
    assert last < 0.5 * first


def _losses(rank: int, world_size: int, setting: str) -> tuple[float, float]:
    torch.manual_seed(0)
    model = wrap("ours", mlp(), compression=setting, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(batch(rank, 0, 8, 20)) - 0.5).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("setting", ["none", "fp16", "int8:error_feedback"])
def test_the_reference_kernels_train_to_the_same_bits(ranks2: RankPool, setting: str):
    options = {"compression": setting, "bucket_cap_mb": 0.004}
    for model in MODELS:
        assert_same_bits(
            ranks2.run(_train_with_kernels, "reference", model, options),
            ranks2.run(_train_with_kernels, "numba_cpu", model, options),
        )


def _train_with_kernels(rank: int, world_size: int, kernels: str, model: str, options: dict[str, Any]) -> list[Grads]:
    os.environ["FASTREDUCE_KERNELS"] = kernels
    return train("ours", MODELS[model], rank, **options)


# When a backward is reduced


def _play_both(rank: int, world_size: int, ops: str, options: dict[str, Any], forward: dict[str, Any]) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        mine = {k: v for k, v in options.items() if not k.startswith("torch:")}
        if kind == "torch":
            mine.update({k.removeprefix("torch:"): v for k, v in options.items() if k.startswith("torch:")})
        seen[kind] = play(wrap(kind, whole_(Branches()), **mine), ops.split(), rank, **forward)
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}: {ops}")
    return seen["ours"]


def _synced(results: list[list[Grads]]) -> list[bool]:
    """For every backward, whether all ranks ended it with the same gradients."""
    return [
        all(torch.equal(bits(a), bits(b)) for other in seen[1:] for a, b in _pairs(seen[0], other))
        for seen in zip(*results, strict=True)
    ]


def _pairs(a: Grads, b: Grads) -> list[tuple[Tensor, Tensor]]:
    assert [g is None for g in a.values()] == [g is None for g in b.values()]
    return [(x, y) for x, y in zip(a.values(), b.values(), strict=True) if x is not None and y is not None]


NO_SYNC = {
    "forward and backward outside": ("f1 b1 z f2 b2", "11"),
    "forward and backward inside": ("( f1 b1 ) z ( f2 b2 )", "00"),
    "forward inside, backward outside": ("f1 b1 z ( f2 ) b2", "10"),
    "forward outside, backward inside": ("f1 b1 z f2 ( b2 )", "11"),
    "forward outside, backward inside, in the first step": ("f2 ( b2 )", "1"),
    "three micro steps, then a synced one": ("( f1 b1 f2 b2 f3 b3 ) f4 b4 z ( f5 b5 ) f6 b6", "000101"),
    "a synced step, then a local one on top, then a synced one": ("f1 b1 ( f2 b2 ) f3 b3", "101"),
    "nested": ("( ( f1 b1 ) f2 b2 ) f3 b3", "001"),
    "entered before the first forward": ("( f1 b1 ) f2 b2 ( f3 ) b3", "010"),
    "require_backward_grad_sync set by hand": ("- f1 b1 + f2 b2 z - f3 + b3 z f4 - b4 +", "0101"),
    "accumulated without no_sync": ("f1 b1 f2 b2 f3 b3", "111"),
    "zeroed in place": ("f1 b1 Z ( f2 b2 ) f3 b3 Z f4 b4", "1011"),
    "two forwards, two backwards": ("f1 b1 z f2 f3 b2 b3", "110"),
    "a local and a synced forward, backwards in the other order": ("f1 b1 z ( f2 ) f3 b3 b2", "110"),
}


@pytest.mark.parametrize("order", NO_SYNC)
def test_no_sync_is_torchs_in_every_order(ranks_views: tuple[RankPool, bool], order: str):
    ranks, views = ranks_views
    ops, synced = NO_SYNC[order]
    results = ranks.run(_play_both, ops, {"gradient_as_bucket_view": views, "bucket_cap_mb": 1e-6}, {})
    assert _synced(results) == [s == "1" for s in synced]


def test_the_second_backward_of_one_forward_stays_local_as_torchs(ranks: RankPool, views: bool):
    results = ranks.run(_play_both, "f1 r1 b1 z f2 r2 z b2 f3 b3", {"gradient_as_bucket_view": views}, {})
    assert _synced(results) == [True, False, True, False, True]


def test_a_backward_of_the_bare_module_stays_local_and_takes_no_part(ranks: RankPool):
    results = ranks.run(_play, "m1 b1 z f2 b2 z m3 b3 z f4 b4", {})
    assert _synced(results) == [False, True, False, True]
    for rank, seen in enumerate(results):
        bare = whole_(Branches())
        (bare(whole_batch(rank, 3, 3, 4)).sum() * EXACT).backward()
        assert_same_bits(seen[2], grads_of(bare))


def _play(rank: int, world_size: int, ops: str, options: dict[str, Any]) -> list[Grads]:
    return play(wrap("ours", whole_(Branches()), **options), ops.split(), rank)


def test_a_bare_backward_between_forward_and_backward_equals_torch(ranks2: RankPool):
    ranks2.run(_play_both, "f1 b1 z m2 f3 b3 z f4 b4", {}, {})


# Parameters without a gradient


UNUSED = {
    "the same on all ranks": ("f1:a b1 z f2:ab b2 z f3:b b3 f4:ab b4", None),
    "kept from the last step": ("f1:abc b1 f2:a b2 f3:ac b3 Z f4:b b4", None),
    "other ones on other ranks": ("f1:! b1 z f2:! b2 f3:! b3 Z f4:! b4", ("a", "b", "ac")),
    "on one rank only": ("f1:! b1 z f2:! b2 f3:! b3", ("abc", "ab", "abc")),
    "used under no_sync only": ("( f1:ab b1 ) f2:b b2 z ( f3:a b3 ) f4:b b4 z f5:b b5", None),
    "used under no_sync by one rank only": ("( f1:! b1 ) f2:b b2 z ( f3:! b3 ) f4:b b4 f5:b b5", ("ab", "b", "b")),
    "from the third step on": ("f1:a b1 z f2:a b2 z f3:abc b3 z f4:abc b4 z f5:a b5", None),
    "stale and unused, then used by one rank": ("f1:abc b1 f2:a b2 f3:! b3 f4:a b4", ("abc", "a", "a")),
}


@pytest.mark.parametrize("case", UNUSED)
def test_unused_parameters_end_as_with_torchs_search(ranks_views: tuple[RankPool, bool], case: str):
    _check_unused(*ranks_views, case, ours_finds=False)


@pytest.mark.parametrize("case", UNUSED)
def test_find_unused_parameters_is_accepted_and_changes_nothing(ranks_views_crossed: tuple[RankPool, bool], case: str):
    _check_unused(*ranks_views_crossed, case, ours_finds=True)


def _check_unused(ranks: RankPool, views: bool, case: str, ours_finds: bool) -> None:
    ops, by_rank = UNUSED[case]
    options = {
        "gradient_as_bucket_view": views,
        "bucket_cap_mb": 1e-6,
        "find_unused_parameters": ours_finds,
        "torch:find_unused_parameters": True,
    }
    results = ranks.run(_play_unused, ops, by_rank, options)
    assert all(_synced(results)[i] for i in range(len(results[0])) if "(" not in ops)


def _play_unused(
    rank: int, world_size: int, ops: str, by_rank: tuple[str, ...] | None, options: dict[str, Any]
) -> list[Grads]:
    if by_rank:
        ops = ops.replace(":!", f":{by_rank[rank]}")
    return _play_both(rank, world_size, ops, options, {})


@pytest.mark.parametrize("setting", SETTINGS)
def test_used_flags_travel_under_every_setting(ranks_views: tuple[RankPool, bool], setting: str):
    ranks, views = ranks_views
    results = ranks.run(_flags, setting, views)
    _equal_on_all([seen for seen, _ in results])
    seen, stale = results[0]
    first, second = seen
    assert [name for name, grad in first.items() if grad is None] == ["c.weight"]
    assert all(grad is not None for grad in second.values())
    for _, stale in results:
        assert stale == 7.0


def _flags(rank: int, world_size: int, setting: str, views: bool) -> tuple[list[Grads], float]:
    model = wrap("ours", Branches(), compression=setting, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    use = "a" if rank == 0 else "b"
    seen = []
    for step, name in enumerate((use, use + "c" if rank == 0 else use)):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4), use=name).sum().backward()
        seen.append(grads_of(model.module))
    for parameter in model.module.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(7.0)
    model(whole_batch(rank, 3, 3, 4), use=use).sum().backward()
    return seen, float(model.module.c.weight.grad.mean())


@pytest.mark.parametrize("find", [False, True])
def test_losses_over_disjoint_parts_of_one_forward_may_have_a_backward_each(ranks: RankPool, find: bool):
    for seen in ranks.run(_two_parts, find):
        for step, grads in enumerate(seen):
            model = whole_(Heads())
            for rank in range(ranks.world_size):
                outputs = model(whole_batch(rank, step, 3, 4))
                ((outputs["first"] + outputs["rest"][0]).sum() * EXACT).backward()
            average = {name: g / ranks.world_size for name, g in grads_of(model).items() if g is not None}
            assert_same_bits(grads, average, f"step {step}")


def _two_parts(rank: int, world_size: int, find: bool) -> list[Grads]:
    seen: dict[str, list[Grads]] = {}
    for kind in ("ours",) if find else ("torch", "ours"):  # torch's search takes one backward only
        model, seen[kind] = wrap(kind, whole_(Heads()), find_unused_parameters=find), []
        for step in range(4):
            model.zero_grad()
            outputs = model(whole_batch(rank, step, 3, 4))
            (outputs["first"].sum() * EXACT).backward(retain_graph=find)
            (outputs["rest"][0].sum() * EXACT).backward()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen.get("torch", seen["ours"]))
    return seen["ours"]


def test_a_second_backward_with_first_and_further_gradients_is_refused(ranks2: RankPool):
    for message in ranks2.run(_overlapping):
        assert "a.weight" in message and "trunk" in message and "Sum the losses" in message


def _overlapping(rank: int, world_size: int) -> str:
    """Both losses go through the trunk, only the second one through branch a: torch's class cannot do it either."""

    class Split(Branches):
        def forward(self, x: Tensor, use: str = "") -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.trunk(x)
            return self.b(x), self.a(x)

    model = wrap("ours", whole_(Split()))
    first, second = model(whole_batch(rank, 0, 3, 4))
    first.sum().backward(retain_graph=True)
    with pytest.raises(errors.ReducerError) as caught:
        second.sum().backward()
    return str(caught.value)


# Checkpointing


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointed_layers_equal_torch_and_the_average(
    ranks_views: tuple[RankPool, bool], reentrant: bool, twice: bool, static: bool
):
    ranks, views = ranks_views
    results = ranks.run(_checkpointed, reentrant, twice, static, views)
    found = _equal_on_all(results)
    for step, grads in enumerate(found):
        assert_same_bits(grads, _average_of_whole(lambda: Checkpointed(False, twice), step, ranks.world_size))


def _checkpointed(rank: int, world_size: int, reentrant: bool, twice: bool, static: bool, views: bool) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        model = whole_(Checkpointed(reentrant, twice))
        fixed = static or (kind == "torch" and reentrant)  # torch needs it where a backward runs inside another
        model = wrap(kind, model, static_graph=fixed, gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
        seen[kind] = []
        for step in range(4):
            model.zero_grad()
            (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    return seen["ours"]


def _average_of_whole(make: Any, step: int, world_size: int) -> Grads:
    """The average over ranks by one process, exact in whole numbers."""
    model = whole_(make())
    for rank in range(world_size):
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return {name: None if g is None else g / world_size for name, g in grads_of(model).items()}


def test_a_reentrant_checkpoint_in_the_last_layers_does_not_end_the_backward_early(ranks2: RankPool):
    _equal_on_all(ranks2.run(_checkpoint_last))


def _checkpoint_last(rank: int, world_size: int) -> list[Grads]:
    """The inner backward of the checkpoint is the first to fire a hook, and ends before the others have."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.last, self.first(x), use_reentrant=True)  # type: ignore[no-any-return]

    model = wrap("ours", whole_(Model()))
    seen = []
    for step in range(3):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        seen.append(grads_of(model.module))
    return seen


# Backwards that are not plain


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("skip", [False, True], ids=["alike", "at different depths"])
def test_a_backward_that_raises_on_all_ranks_leaves_nothing_behind(ranks2: RankPool, views: bool, skip: bool):
    results = ranks2.run(_broken, views, skip, timeout=30)
    for grads, _ in results:
        assert_same_bits(grads, _average_of_whole(Breaking, 9, 2))
    assert results[0][1] > 0, "nothing had been launched: the test shows nothing"


def _broken(rank: int, world_size: int, views: bool, skip: bool) -> tuple[Grads, int]:
    model = wrap("ours", whole_(Breaking()), gradient_as_bucket_view=views, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    with pytest.raises(ValueError, match="boom"):
        model(whole_batch(rank, 3, 3, 4), boom=True, skip=skip and rank == 0).sum().backward()
    launched = len(model.reducer._launches)
    model.zero_grad()
    (model(whole_batch(rank, 9, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module), launched


def test_a_backward_that_raises_on_one_rank_gives_the_others_nan_and_training_goes_on(ranks: RankPool):
    for poisoned, grads in ranks.run(_broken_on_one, timeout=30):
        assert poisoned
        assert_same_bits(grads, _average_of_whole(Breaking, 9, ranks.world_size))


def _broken_on_one(rank: int, world_size: int) -> tuple[bool, Grads]:
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    model.zero_grad()
    poisoned = True
    loss = model(whole_batch(rank, 3, 3, 4), boom=rank == 0).sum()
    if rank == 0:
        with pytest.raises(ValueError, match="boom"):
            loss.backward()
    else:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        poisoned = bool(model.module.a.weight.grad.isnan().all())
    model.zero_grad()
    (model(whole_batch(rank, 9, 3, 4)).sum() * EXACT).backward()
    return poisoned, grads_of(model.module)


def test_a_wrapper_that_is_dropped_in_a_broken_state_leaves_nothing_and_does_not_disturb_the_next(ranks2: RankPool):
    for grads, threads in ranks2.run(_broken_and_dropped, timeout=40):
        assert_same_bits(grads, _average_of_whole(Breaking, 9, 2))
        assert threads == 0


def _broken_and_dropped(rank: int, world_size: int) -> tuple[Grads, int]:
    """Rank 1 has sent more buckets than rank 0 when both raise and give the wrapper up."""
    before = communication_threads()
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in range(3):
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    with pytest.raises(ValueError, match="boom"):
        model(whole_batch(rank, 3, 3, 4), boom=True, skip=rank == 0).sum().backward()
    del model
    gc.collect()
    threads = threads_left_over(before)
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in (7, 8, 9):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module), threads


def test_a_first_backward_that_raises_leaves_nothing_behind(ranks: RankPool):
    for grads in ranks.run(_broken_first):
        assert_same_bits(grads, _average_of_whole(Breaking, 9, ranks.world_size))


def _broken_first(rank: int, world_size: int) -> Grads:
    model = wrap("ours", whole_(Breaking()), bucket_cap_mb=1e-6)
    for step in range(2):
        with pytest.raises(ValueError, match="boom"):
            model(whole_batch(rank, step, 3, 4), boom=True).sum().backward()
    for step in (3, 4, 9):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module)


def test_autograd_grad_reduces_nothing_and_the_backward_after_it_does(ranks: RankPool):
    results = ranks.run(_autograd_grad)
    for step, (inner, grads) in enumerate(_equal_on_all([steps for steps, _ in results])):
        assert inner == [None] * 7
        assert_same_bits(grads, _average_of_whole(Branches, step, ranks.world_size))
    for _, equal in results:
        assert equal


def _autograd_grad(rank: int, world_size: int) -> tuple[list[tuple[list[Any], Grads]], bool]:
    model, seen, equal = wrap("ours", whole_(Branches()), bucket_cap_mb=1e-6), [], True
    for step in range(4):
        model.zero_grad()
        x = whole_batch(rank, step, 3, 4).requires_grad_()
        loss = model(x).sum() * EXACT
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        of_parameters = torch.autograd.grad(loss, list(model.module.parameters()), retain_graph=True)
        inner = [p.grad for p in model.module.parameters()]
        bare = whole_(Branches())
        expected = torch.autograd.grad(bare(x).sum() * EXACT, [x, *bare.parameters()])
        equal = equal and all(map(torch.equal, (of_input, *of_parameters), expected))
        loss.backward()
        seen.append((inner, grads_of(model.module)))
    return seen, equal


class SideOutput(nn.Module):
    """Keeps its loss to itself: no output hook runs in the backward of `side`."""

    side: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x))
        self.side = y.sum() * EXACT
        return y * 2


@pytest.mark.parametrize("grad_before", [False, True], ids=["alone", "after autograd.grad"])
def test_a_loss_that_is_no_output_of_the_forward_is_reduced_too(ranks: RankPool, grad_before: bool):
    for seen in ranks.run(_side, grad_before):
        for step, grads in enumerate(seen):
            model = whole_(SideOutput())
            for rank in range(ranks.world_size):
                model(whole_batch(rank, step, 3, 4))
                model.side.backward()
            assert_same_bits(
                grads, {n: g / ranks.world_size for n, g in grads_of(model).items() if g is not None}, f"step {step}"
            )


def _side(rank: int, world_size: int, grad_before: bool) -> list[Grads]:
    model, seen = wrap("ours", whole_(SideOutput()), bucket_cap_mb=1e-6), []
    for step in range(4):
        model.zero_grad()
        x = whole_batch(rank, step, 3, 4).requires_grad_()
        output = model(x)
        if grad_before:
            torch.autograd.grad(output.sum(), x, retain_graph=True)
        model.module.side.backward()
        seen.append(grads_of(model.module))
    return seen


def test_a_backward_that_creates_a_graph_is_averaged(ranks2: RankPool):
    _equal_on_all(ranks2.run(_create_graph))


@pytest.mark.filterwarnings("ignore:Using backward")
def _create_graph(rank: int, world_size: int) -> list[Grads]:
    model, seen = wrap("ours", mlp(), bucket_cap_mb=1e-6), []
    for step in range(3):
        model.zero_grad()
        x = batch(rank, step, 4, 20).requires_grad_()
        loss = model(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()  # the gradient penalty
        seen.append(grads_of(model.module))
        model.zero_grad()
        model(x).square().mean().backward(create_graph=True)
        seen.append(grads_of(model.module))
        model.zero_grad()
    return seen


def test_outputs_in_containers_are_watched(ranks: RankPool):
    _equal_on_all(ranks.run(_containers))


def _containers(rank: int, world_size: int) -> list[Grads]:
    model, seen = wrap("ours", whole_(Heads())), []
    for step in range(3):
        model.zero_grad()
        outputs = model(whole_batch(rank, step, 3, 4))
        ((outputs["first"] + outputs["rest"][0]).sum() * EXACT).backward()
        seen.append(grads_of(model.module))
    return seen


def test_user_hooks_run_before_ours_and_what_they_leave_is_averaged(ranks: RankPool, views: bool):
    results = ranks.run(_user_hooks, views)
    mean = sum(range(1, ranks.world_size + 1)) / ranks.world_size
    for weight, bias, seen in results:
        assert (weight == mean).all()  # replaced by a post-accumulate hook: rank + 1
        assert (bias == 4 * mean).all()  # doubled twice by tensor hooks
        assert seen == [1.0, 1.0], "hooks of the user see the local gradient"


def _user_hooks(rank: int, world_size: int, views: bool) -> tuple[Tensor, Tensor, list[float]]:
    layer = nn.Linear(3, 2)
    model = wrap("ours", layer, gradient_as_bucket_view=views)
    seen: list[float] = []

    def replace(parameter: Tensor) -> None:
        parameter.grad = torch.full_like(parameter, rank + 1)

    def look(grad: Tensor) -> Tensor:
        seen.append(float(grad[0]) / (rank + 1))
        return grad * 2

    layer.weight.register_post_accumulate_grad_hook(replace)
    layer.bias.register_hook(look)
    layer.bias.register_hook(lambda grad: grad * 2)
    for _ in range(2):
        model.zero_grad()
        (model(torch.ones(1, 3)) * (rank + 1)).sum().backward()
    return layer.weight.grad.clone(), layer.bias.grad.clone(), seen  # type: ignore[union-attr]


# Views, layouts, buffers


def test_with_views_gradients_lie_in_one_buffer_per_bucket_and_stay_there(ranks2: RankPool):
    for kept in ranks2.run(_addresses, True):
        assert kept["buckets"] == 1 and kept["storages"] == 1
        assert kept["same"], "gradients moved between steps"
    for kept in ranks2.run(_addresses, False):
        assert kept["storages"] == 8


def _addresses(rank: int, world_size: int, views: bool) -> dict[str, Any]:
    model = wrap("ours", mlp(), gradient_as_bucket_view=views)
    addresses = []
    for step in range(5):
        model.zero_grad(set_to_none=step < 3)
        model(batch(rank, step, 4, 20)).square().mean().backward()
        addresses.append([p.grad.data_ptr() for p in model.module.parameters()])
    storages = {p.grad.untyped_storage().data_ptr() for p in model.module.parameters()}
    return {
        "buckets": len(model.reducer.plan.buckets),
        "storages": len(storages),
        "same": addresses[1:] == addresses[1:2] * 4,
    }


def test_gradients_keep_the_strides_of_their_parameters(ranks2: RankPool, views: bool):
    for same in ranks2.run(_strides, views):
        assert same


def _strides(rank: int, world_size: int, views: bool) -> bool:
    model = wrap("ours", OddShapes(), gradient_as_bucket_view=views)
    good = True
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 20)).sum().backward()
        conv, matrix = model.module.conv.weight, model.module.matrix
        good = good and conv.grad.stride() == conv.stride() and matrix.grad.stride() == matrix.stride()
    return good and conv.grad.is_contiguous(memory_format=torch.channels_last)


def test_channels_last_models_equal_torch(ranks2: RankPool, views: bool):
    _equal_on_all(ranks2.run(_channels_last, views))


def _channels_last(rank: int, world_size: int, views: bool) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 3), nn.Flatten(), nn.Linear(80, 3))
        model = wrap(
            kind, body.to(memory_format=torch.channels_last), gradient_as_bucket_view=views, bucket_cap_mb=0.001
        )  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen[kind] = []
        for step in range(4):
            optimizer.zero_grad()
            images = batch(rank, step, 2, 3, 8, 8).to(memory_format=torch.channels_last)
            model(images).square().mean().backward()
            optimizer.step()
            seen[kind].append(grads_of(model.module))
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    return seen["ours"]


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_go_the_way_they_go_in_torch(ranks: RankPool, broadcast: bool):
    results = ranks.run(_buffers, broadcast)
    for ours, torchs in results:
        for name, (mine, other) in enumerate(zip(ours, torchs, strict=True)):
            assert_same_bits(mine, other, f"step {name}")
    if broadcast:
        _equal_on_all([ours[-1]["seen"] for ours, _ in results])
    else:
        assert len({float(ours[-1]["seen"]) for ours, _ in results}) == ranks.world_size


def _buffers(rank: int, world_size: int, broadcast: bool) -> tuple[list[dict], list[dict]]:
    seen: dict[str, list[dict]] = {}
    for kind in ("torch", "ours"):
        torch.manual_seed(0)
        model, seen[kind] = wrap(kind, Normed(), broadcast_buffers=broadcast, bucket_cap_mb=1e-6), []
        for step in range(3):
            model.zero_grad()
            model(batch(rank, step, 6, 20)).square().mean().backward()
            buffers = {name: b.clone() for name, b in model.module.named_buffers()}
            seen[kind].append({**buffers, "seen": model.module.seen})
    return seen["ours"], seen["torch"]


def test_grad_scaler_skips_on_all_ranks_when_one_overflows(ranks2: RankPool):
    for setting in ("none", "fp16", "int8:error_feedback"):
        results = ranks2.run(_scaled, setting)
        _equal_on_all([(weights, scales) for weights, scales in results])
        weights, scales = results[0]
        assert scales == [1024.0, 512.0, 512.0], "the second step overflowed on rank 1 only"
        assert torch.equal(weights[1], weights[0]) and not torch.equal(weights[2], weights[1])


def _scaled(rank: int, world_size: int, setting: str) -> tuple[list[Tensor], list[float]]:
    layer = nn.Linear(20, 20)
    model = wrap("ours", layer, compression=setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    weights, scales = [], []
    for step in range(3):
        optimizer.zero_grad()
        x = batch(rank, step, 4, 20)
        if step == 1 and rank == 1:
            x[0, 3] = 3e38
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        weights.append(layer.weight.detach().clone())
        scales.append(scaler.get_scale())
    return weights, scales


@pytest.mark.parametrize("no_sync", [False, True], ids=["every backward reduces", "no_sync"])
def test_the_scale_of_accumulation_under_autocast_is_torchs(ranks2: RankPool, no_sync: bool):
    """Four micro-steps a step; the fifth of twelve overflows on rank 1."""
    for of_kinds in ranks2.run(_scaled_accumulation, no_sync):
        torchs_scales, torchs_weights = of_kinds["torch"]
        assert torchs_scales == [65536.0, 32768.0, 32768.0]
        assert_same_bits(of_kinds["none"][1], torchs_weights)
        for setting, (scales, weights) in of_kinds.items():
            assert scales == torchs_scales, setting
            assert torch.equal(weights[1], weights[0]) and not torch.equal(weights[2], weights[1]), setting


def _scaled_accumulation(rank: int, world_size: int, no_sync: bool) -> dict[str, tuple[list[float], list[Tensor]]]:
    seen = {}
    for setting in ("torch", "none", "fp16", "int8:error_feedback"):
        torch.manual_seed(0)
        layer = nn.Linear(20, 20)
        options = {} if setting == "torch" else {"compression": setting}
        model = wrap("ours" if options else "torch", layer, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        scales, weights = [], []
        for micro in range(1, 13):
            x = batch(rank, micro, 4, 20)
            if micro == 5 and rank == 1:
                x[0, 3] = 3e38
            with model.no_sync() if no_sync and micro % 4 else contextlib.nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(x).float().mean() / 4
                scaler.scale(loss).backward()
            if micro % 4 == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
                weights.append(layer.weight.detach().clone())
        seen[setting] = (scales, weights)
    return seen


# The class


def test_it_is_torchs_class_and_passes_attributes_and_state_through(ranks2: RankPool):
    for good in ranks2.run(_surface):
        assert good == []


def _surface(rank: int, world_size: int) -> list[str]:
    bad = []
    model = wrap("ours", mlp(), compression="fp16", gradient_as_bucket_view=True)
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        bad.append("isinstance")
    for step in range(2):
        model(batch(rank, step, 4, 20)).sum().backward()
    if [n.removeprefix("module.") for n in model.state_dict()] != list(model.module.state_dict()):
        bad.append("state_dict")
    data = model._get_ddp_logging_data()
    if data["world_size"] != 2 or data["compression"] != "fp16" or data["backend_name"] != "gloo":
        bad.append(f"logging data {data}")
    copied = pickle.loads(pickle.dumps(model))
    deep = copy.deepcopy(model)
    for other in (copied, deep):
        grads = []
        for m in (model, other):
            m.zero_grad()
            m(batch(rank, 5, 4, 20)).sum().backward()
            grads.append(grads_of(m.module))
        assert_same_bits(grads[1], grads[0])
        if str(other.compression) != "fp16":
            bad.append("compression of a copy")
    return bad


def test_device_ids_of_a_cpu_module_are_dropped_with_a_warning(ranks2: RankPool):
    for text in ranks2.run(_device_ids):
        assert "device_ids" in text and "CPU" in text


def _device_ids(rank: int, world_size: int) -> str:
    with pytest.warns(UserWarning, match="dropped") as caught:
        model = wrap("ours", nn.Linear(2, 2), device_ids=[rank], output_device=rank)
    model(torch.ones(1, 2)).sum().backward()
    return str(caught[0].message)


def test_frozen_and_ignored_parameters_are_left_alone(ranks2: RankPool):
    for frozen, ignored in ranks2.run(_frozen):
        assert frozen is None
        assert ignored in (4.0, 8.0)  # rank's own: not averaged to 6
    assert len({ignored for _, ignored in ranks2.run(_frozen)}) == 2


def _frozen(rank: int, world_size: int) -> tuple[Any, float]:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    body[0].weight.requires_grad_(False)
    fastreduce.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(body, ["1.bias"])
    model = wrap("ours", body)
    (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return body[0].weight.grad, float(body[1].bias.grad[0])  # type: ignore[index, arg-type]


def test_shared_parameters_are_averaged_once(ranks2: RankPool):
    for grads in ranks2.run(_shared):
        expected = _average_of_whole(lambda: _tie(Branches()), 2, 2)
        assert_same_bits(grads, expected)


def _tie(model: Branches) -> Branches:
    model.b.weight = model.a.weight
    return model


def _shared(rank: int, world_size: int) -> Grads:
    model = wrap("ours", whole_(_tie(Branches())), bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
    return grads_of(model.module)


def test_two_wrapped_models_train_beside_each_other(ranks2: RankPool):
    _equal_on_all(ranks2.run(_two_models))


def _two_models(rank: int, world_size: int) -> list[Grads]:
    one = wrap("ours", mlp(), compression="int8", bucket_cap_mb=0.004)
    two = wrap("ours", mlp(29, 3), bucket_cap_mb=0.004)
    seen = []
    for step in range(4):
        one.zero_grad()
        two.zero_grad()
        two(one(batch(rank, step, 4, 20))[:, :29]).square().mean().backward()  # one backward through both
        seen += [grads_of(one.module), grads_of(two.module)]
    return seen


def communication_threads() -> int:
    return sum(thread.name.startswith("fastreduce") for thread in threading.enumerate())


def threads_left_over(before: int) -> int:
    """Communication threads beyond those of `before`, after what they need to end."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and communication_threads() > before:
        time.sleep(0.01)
    return communication_threads() - before


def test_model_reducer_and_thread_go_when_the_wrapper_is_deleted(ranks2: RankPool):
    for left, threads in ranks2.run(_deleted):
        assert left == []
        assert threads == 0


def _deleted(rank: int, world_size: int) -> tuple[list[str], int]:
    before = communication_threads()
    module = mlp()
    model = wrap("ours", module, bucket_cap_mb=1e-6)
    for step in range(3):
        model.zero_grad()
        model(batch(rank, step, 4, 20)).sum().backward()
    assert communication_threads() == before + 1, "a thread to look for"
    references = {
        "module": weakref.ref(module),
        "wrapper": weakref.ref(model),
        "reducer": weakref.ref(model.reducer),
        "weight": weakref.ref(module[0].weight),
        "pipeline": weakref.ref(model.reducer.pipelines[0]),
    }
    del module, model
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None], threads_left_over(before)


def test_after_close_backward_is_local_and_the_wrapped_module_goes_on(ranks2: RankPool):
    for rank, (averaged, local, threads) in enumerate(ranks2.run(_closed)):
        assert averaged == 6.0 and local == 4.0 * (rank + 1) and threads == 0


def _closed(rank: int, world_size: int) -> tuple[float, float, int]:
    before = communication_threads()
    layer = nn.Linear(4, 4)
    model = wrap("ours", layer, bucket_cap_mb=1e-6)
    for _ in range(3):
        model.zero_grad()
        (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    averaged = float(layer.bias.grad[0])  # type: ignore[index]
    model.reducer.close()
    layer.zero_grad()
    (layer(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return averaged, float(layer.bias.grad[0]), threads_left_over(before)


# World size 1


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_rank_trains_under_every_setting(alone: None, setting: str, views: bool):
    for model, make in MODELS.items():
        options = {"lr": 0.0, "steps": 3, "compression": setting, "gradient_as_bucket_view": views}
        found = train("ours", make, 0, **options)
        for step, (grads,) in enumerate(local_grads(make, 0, 1 if "feedback" in setting else 3, 1)):
            if setting.startswith("none"):
                assert_same_bits(found[step], grads, f"{model}, step {step}")
            for name, grad in grads.items():
                far = (in_memory_order(found[step][name]) - in_memory_order(grad)).abs()
                assert (far <= tolerances.error_bound(setting, [grad])).all(), f"{model}, {name}"  # type: ignore[list-item]


def test_one_rank_moves_nothing(alone: None):
    model = fastreduce.DistributedDataParallel(mlp(), compression="fp16")
    assert model.reducer.transport.name == "local"
    assert model.reducer.sent_bytes == 0


# Processes that users start


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
from fastreduce import DistributedDataParallel as DDP

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5)), compression="int8",
                bucket_cap_mb=1e-6)
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 20) * (dist.get_rank() + 1)).sum().backward()
    total = sum(p.grad.double().sum().item() for p in model.parameters())
    print(f"rank {dist.get_rank()} has {total!r}", flush=True)
    if sys.argv[1] == "destroyed":
        dist.destroy_process_group()

main()
"""

FORKS = """
import gc, os, sys, tempfile
os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
import torch
import torch.distributed as dist
from fastreduce import Compression
from fastreduce.reduction.pipeline import warm_up
from fastreduce.transports import LocalTransport
from tests.support.models import Breaking, whole_batch, wrap
torch.set_num_threads(1)

def train(rank, kind, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = wrap("ours", Breaking(), compression="int8", bucket_cap_mb=1e-6)
    sys.modules["keep"] = model  # alive while the interpreter goes down
    for step in range(4):
        model.zero_grad()
        model(whole_batch(rank, step, 3, 4)).sum().backward()
    if kind == "destroyed":
        dist.destroy_process_group()
    elif kind == "armed":
        model(whole_batch(rank, 4, 3, 4))
    elif kind == "exits":
        raise SystemExit(0)
    elif kind in ("backward raises", "backward raised"):
        try:
            model(whole_batch(rank, 4, 3, 4), boom=True, skip=rank == 0).sum().backward()
        except ValueError:
            if kind == "backward raises":
                sys.stderr = open(os.devnull, "w")
                raise

warm_up(torch.float32, torch.device("cpu"), Compression.parse("int8"), LocalTransport())
gc.collect()
gc.freeze()  # nobody walks the parent's objects when a child ends
bad = []
for kind in ("left", "destroyed", "armed", "exits", "backward raises", "backward raises", "backward raised"):
    path = tempfile.mktemp()
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            train(rank, kind, path)
            sys.exit(0)  # a forked child that goes through the interpreter's whole end
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if codes != [int(kind == "backward raises")] * 2:
        bad.append((kind, codes))
print("bad", bad)
sys.exit(bool(bad))
"""


def test_torchrun_starts_it_and_it_ends_cleanly(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    done = subprocess.run([*command, "left"], capture_output=True, text=True, timeout=90, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d has (\d+\.\d+)", done.stdout)  # two processes on one pipe: lines may run together
    assert len(said) == 2
    assert said[0] == said[1]


def test_processes_exit_cleanly_however_the_script_ends():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=150, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr


def _spawned(rank: int, path: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    seen = train("ours", mlp, rank, compression="fp16", bucket_cap_mb=0.004)
    buffer = io.BytesIO()
    torch.save(seen, buffer)
    results.put((rank, buffer.getvalue()))


def test_mp_spawn_starts_it_and_it_ends_cleanly(tmp_path):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    spawned = mp.spawn(_spawned, (str(tmp_path / "store"), results), nprocs=2, join=False)
    seen = dict(results.get() for _ in range(2))
    deadline = time.monotonic() + 60
    while not spawned.join(timeout=1):  # raises where a process ended badly
        assert time.monotonic() < deadline
    assert [p.exitcode for p in spawned.processes] == [0, 0]
    assert_same_bits(torch.load(io.BytesIO(seen[0])), torch.load(io.BytesIO(seen[1])))


def test_a_group_that_is_destroyed_and_made_again_serves(ranks2: RankPool):
    assert run_ranks(_again, 2) == [[6.0, 6.0]] * 2


def _again(rank: int, world_size: int) -> list[float]:
    seen = []
    group = dist.new_group(backend="gloo")
    for attempt in range(2):
        model = wrap("ours", nn.Linear(4, 4), process_group=group)
        (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
        seen.append(float(model.module.bias.grad[0]))
        del model
        dist.destroy_process_group(group)
        if attempt == 0:
            group = dist.new_group(backend="gloo")
    return seen


def test_a_subgroup_averages_over_its_own_ranks(ranks3: RankPool):
    results = ranks3.run(_subgroup)
    assert results == [8.0, 4.0 * 2, 8.0]


def _subgroup(rank: int, world_size: int) -> float:
    group = dist.new_group([0, 2])
    layer = nn.Linear(4, 4)
    model = wrap("ours", layer, process_group=group) if rank != 1 else layer
    (model(torch.ones(4, 4)) * (rank + 1)).sum().backward()
    return float(layer.bias.grad[0])  # type: ignore[index]
