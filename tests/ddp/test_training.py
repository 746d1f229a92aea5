"""DistributedDataParallel on real ranks, beside torch's class with the same seed, data and processes.

On two ranks `none` must give torch's bits. On three it does so too where whole numbers keep every sum exact
(tests/support/models.py), and is within the order of summation otherwise.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import nn

import fastreduce
from tests.support import tolerances
from tests.support.each_setting import EACH_SETTING
from tests.support.models import (
    TWO_SHOT,
    Grads,
    MixedDtypes,
    OddShapes,
    assert_same_bits,
    batch,
    equal_on_all,
    grads_of,
    in_memory_order,
    local_grads,
    mlp,
    train,
    wrap,
)
from tests.support.ranks import RankPool

MODELS = {"mlp": mlp, "mixed dtypes": MixedDtypes, "odd shapes": OddShapes}
WIDE = {"wide": lambda: mlp(300, 4)}  # more than the first bucket's 1 MiB
CAPS = {"one bucket": 25.0, "several": 0.004, "one parameter each": 1e-6}


# Plain training


def _train_both(rank: int, world_size: int, model: str, options: dict[str, Any]) -> list[Grads]:
    make = {**MODELS, **WIDE}[model]
    ours = train("ours", make, rank, **options)
    assert_same_bits(ours, train("torch", make, rank, **options), f"rank {rank}, {model}")
    return ours


# By turns with gradients of their own and with views.
BY_TURNS = [
    pytest.param(
        model,
        caps,
        views,
        id=f"{'views' if views else 'own'}-{model}-{caps}",
        marks=[pytest.mark.long] * (views == i % 2),
    )
    for i, (model, caps) in enumerate(itertools.product(MODELS, CAPS))
    for views in (False, True)
]


@pytest.mark.parametrize(("model", "caps", "views"), BY_TURNS)
def test_gradients_and_parameters_equal_those_of_torch_bit_for_bit_over_steps(
    ranks2: RankPool, model: str, caps: str, views: bool
):
    options = {"steps": 5, "bucket_cap_mb": CAPS[caps], "gradient_as_bucket_view": views}
    equal_on_all(ranks2.run(_train_both, model, options))


@pytest.mark.parametrize(
    ("views", "set_to_none"),
    [
        pytest.param(False, True, id="own-True"),
        pytest.param(False, False, id="own-False", marks=pytest.mark.long),
        pytest.param(True, True, id="views-True", marks=pytest.mark.long),
        pytest.param(True, False, id="views-False"),
    ],
)
def test_zero_grad_in_place_and_to_none_equal_torch(ranks2: RankPool, views: bool, set_to_none: bool):
    options = {"bucket_cap_mb": 0.004, "gradient_as_bucket_view": views, "set_to_none": set_to_none}
    for model in MODELS:
        equal_on_all(ranks2.run(_train_both, model, options))


def test_torchs_default_caps_equal_torch(ranks2: RankPool):
    equal_on_all(ranks2.run(_train_both, "wide", {"width": 300, "steps": 3}))


def _train(rank: int, world_size: int, kind: str, model: str, options: dict[str, Any]) -> list[Grads]:
    return train(kind, MODELS[model], rank, **options)


@pytest.mark.parametrize(
    ("model", "views"),
    [
        pytest.param(
            model, views, id=f"{'views' if views else 'own'}-{model}", marks=[pytest.mark.long] * (views == i % 2)
        )
        for i, model in enumerate(MODELS)
        for views in (False, True)
    ],
)
def test_three_ranks_agree_with_torch_within_the_order_of_summation(ranks3: RankPool, model: str, views: bool):
    options = {"steps": 3, "lr": 0.0, "bucket_cap_mb": 0.004, "gradient_as_bucket_view": views}
    ours = equal_on_all(ranks3.run(_train, "ours", model, options))
    torchs = equal_on_all(ranks3.run(_train, "torch", model, options))
    for step, of_ranks in enumerate(local_grads(MODELS[model], 0, 3, 3)):
        for name in of_ranks[0]:
            grads = [g[name] for g in of_ranks]
            far = (in_memory_order(ours[step][name]) - in_memory_order(torchs[step][name])).abs()
            assert (far <= tolerances.order_of_summation(grads)).all(), f"step {step}, {name}"  # type: ignore[arg-type]


# Compression


@pytest.mark.parametrize("setting", EACH_SETTING)
def test_averages_are_within_the_formats_bound_and_the_same_on_all_ranks(ranks: RankPool, setting: str):
    for model, make in MODELS.items():
        options = {"steps": 3, "lr": 0.0, "bucket_cap_mb": 0.004, "compression": setting}
        found = equal_on_all(ranks.run(_train, "ours", model, options))
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


@pytest.mark.parametrize("setting", EACH_SETTING)
def test_replicas_stay_bitwise_equal_through_training(ranks3: RankPool, setting: str):
    options = {"steps": 6, "bucket_cap_mb": 0.004, "compression": setting, "gradient_as_bucket_view": True}
    equal_on_all(ranks3.run(_train, "ours", "mlp", options))


@pytest.mark.parametrize(
    "setting",
    [pytest.param(s, marks=[pytest.mark.long] * (s not in ("fp16", "int8:error_feedback"))) for s in TWO_SHOT],
)
def test_two_shot_results_depend_neither_on_bucket_size_nor_on_views_nor_on_the_run(ranks3: RankPool, setting: str):
    expected: Any = None
    for caps, views in ((25.0, False), (25.0, False), (0.004, True), (1e-6, False)):
        options = {"compression": setting, "bucket_cap_mb": caps, "gradient_as_bucket_view": views}
        found = ranks3.run(_train, "ours", "mlp", options)[0]
        expected = expected or found
        assert_same_bits(found, expected, f"{setting} at {caps} MiB")


@pytest.mark.parametrize("setting", EACH_SETTING)
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


@pytest.mark.parametrize("setting", ["none", pytest.param("fp16", marks=pytest.mark.long), "int8:error_feedback"])
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


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "topk:ratio=0.2,min_numel=1", "int8:error_feedback"])
def test_the_default_dtype_changes_no_bit_of_fp32_gradients(ranks2: RankPool, spec: str):
    for expected, *others in ranks2.run(_under_default_dtypes, spec):
        for dtype, found in zip((torch.float64, torch.bfloat16), others, strict=True):
            assert_same_bits(found, expected, f"{dtype}")


def _under_default_dtypes(rank: int, world_size: int, spec: str) -> list[Any]:
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    return [_under_default_dtype(rank, world_size, dtype, spec) for dtype in dtypes]


def _under_default_dtype(rank: int, world_size: int, dtype: torch.dtype, spec: str) -> list[Any]:
    """Gradients and states of trainings with a state that is loaded and a setting that is changed."""
    torch.set_default_dtype(dtype)
    try:
        found = []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24, dtype=torch.float32), nn.Linear(24, 24, dtype=torch.float32))
        inputs = torch.arange(48, dtype=torch.float32).view(2, 24).sin() + rank
        for new in (spec, "int8:block=16,error_feedback", spec):
            ddp = fastreduce.DistributedDataParallel(model, compression=spec)
            if found:
                ddp.reducer.load_state_dict(found[-1])
            for step in range(4):
                if step == 2:
                    ddp.set_compression(new)
                ddp.zero_grad()
                ddp(inputs * (step + 1)).square().sum().backward()
                found.append(grads_of(ddp))
            found.append(ddp.reducer.state_dict())
        return found
    finally:
        torch.set_default_dtype(torch.float32)


# World size 1


@pytest.mark.parametrize("setting", EACH_SETTING)
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
