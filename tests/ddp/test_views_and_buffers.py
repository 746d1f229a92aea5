"""Gradients as views of buckets, memory layouts, buffers and GradScaler, beside torch's class."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import (
    EXACT,
    Grads,
    Normed,
    OddShapes,
    assert_same_bits,
    average_of_whole,
    batch,
    equal_on_all,
    grads_of,
    mlp,
    whole_,
    whole_batch,
    wrap,
)
from tests.support.ranks import OVER_HOSTS, RankPool


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


class _Complex(nn.Module):
    """A complex parameter, which a forward may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.turn = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, turns: bool) -> Tensor:
        return self.plain.sum() + (torch.view_as_real(self.turn).sum() if turns else 0)


def _zeroed_by_hand(rank: int, world_size: int, kind: str) -> list[Grads]:
    """Gradients of steps between which they are detached in place, as `zero_grad` does not, and zeroed."""
    model, found = wrap(kind, _Complex(), find_unused_parameters=True), []
    for _ in range(3):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()
        model(rank == 0).backward()
        found.append(grads_of(model.module))
    return found


def test_complex_gradients_that_only_another_rank_has_can_be_detached_in_place(ranks2: RankPool):
    found, expected = (ranks2.run(_zeroed_by_hand, kind) for kind in ("ours", "torch"))
    assert_same_bits(found, expected)


def test_lazy_gradients_that_are_there_before_move_into_views(alone: None):
    body = _Complex()
    body.plain.grad, body.turn.grad = torch._neg_view(torch.ones(3)), torch.full((3,), 1 + 2j).conj()
    wrap("ours", body, gradient_as_bucket_view=True)
    assert (body.plain.grad == -1).all() and (body.turn.grad == 1 - 2j).all()
    body(turns=True).backward()
    assert (body.plain.grad == 0).all() and (body.turn.grad == 2 - 1j).all()


@pytest.mark.parametrize("change", ["channels_last", pytest.param("contiguous", marks=pytest.mark.long), "data"])
def test_gradients_whose_memory_is_changed_behind_their_backs_are_averaged(ranks2: RankPool, change: str, views: bool):
    found = equal_on_all(ranks2.run(_changed_memory, change, views))
    for step, grads in enumerate(found):
        assert_same_bits(grads, average_of_whole(_ConvOfFour, step, range(2)))


class _ConvOfFour(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 6, 2, padding=1), nn.Conv2d(6, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x[:, :, None, None].expand(3, 4, 2, 2)))


def _changed_memory(rank: int, world_size: int, change: str, views: bool) -> list[Grads]:
    formats = [torch.contiguous_format, torch.channels_last]
    before, after = formats[::-1] if change == "contiguous" else formats
    body = whole_(_ConvOfFour()).to(memory_format=before)  # type: ignore[call-overload]
    model, seen = wrap("ours", body, gradient_as_bucket_view=views, transport="gloo"), []
    for step in range(4):
        model.zero_grad(set_to_none=step != 3)
        (model(whole_batch(rank, step, 3, 4)).sum() * EXACT).backward()
        seen.append({name: grad if grad is None else grad.contiguous() for name, grad in grads_of(body).items()})
        if step == 1 and change == "data":
            for parameter in body.first.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-1, 1)
        elif step == 1:
            model.to(memory_format=after)
    return seen


def test_channels_last_models_equal_torch(ranks2: RankPool, views: bool):
    equal_on_all(ranks2.run(_channels_last, views))


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


class _Marked(Tensor):
    """A subclass that nothing but its type tells from a tensor, as quantization and metadata libraries have them."""


def test_parameters_of_a_subclass_of_tensor_are_averaged_as_in_torch(ranks2: RankPool, views: bool):
    equal_on_all(ranks2.run(_marked, views))


def _marked(rank: int, world_size: int, views: bool) -> list[Grads]:
    seen = {}
    for kind in ("torch", "ours"):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        body[0].weight = nn.Parameter(body[0].weight.detach().as_subclass(_Marked))
        model = wrap(kind, body, gradient_as_bucket_view=views)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen[kind] = []
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 4, 6)).square().mean().backward()
            optimizer.step()
            seen[kind].append({n: g.as_subclass(Tensor) for n, g in grads_of(model.module).items() if g is not None})
    assert len(seen["ours"][0]) == 4
    assert_same_bits(seen["ours"], seen["torch"], f"rank {rank}")
    return seen["ours"]


@OVER_HOSTS
@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_go_the_way_they_go_in_torch(ranks: RankPool, broadcast: bool):
    results = ranks.run(_buffers, broadcast)
    for ours, torchs in results:
        for name, (mine, other) in enumerate(zip(ours, torchs, strict=True)):
            assert_same_bits(mine, other, f"step {name}")
    if broadcast:
        equal_on_all([ours[-1]["seen"] for ours, _ in results])
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


def test_buffers_may_be_taken_out(alone: None):
    """As by `prune.remove`, which takes out its mask."""
    model = wrap("ours", Normed())
    for name in ("norm", "steps"):
        model(torch.ones(2, 20)).sum().backward()
        if name == "norm":
            model.module.norm = nn.Identity()
    del model.module.steps
    model.module.steps = torch.zeros(())
    for _ in range(2):
        model(torch.ones(2, 20)).sum().backward()


def test_grad_scaler_skips_on_all_ranks_when_one_overflows(ranks2: RankPool):
    for setting in ("none", "fp16", "int8:error_feedback"):
        results = ranks2.run(_scaled, setting)
        equal_on_all([(weights, scales) for weights, scales in results])
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
