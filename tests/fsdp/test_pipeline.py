"""Sharded stages of a pipeline, which reduce behind their backwards, and not within one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fastreduce.fsdp
from fastreduce.fsdp.torch_fsdp import Group
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import batch, gradients, shard


def _train(rank: int, world_size: int, setting: str | None, steps: int, varied: bool) -> list[dict[str, Tensor]]:
    """Gradients of each step, on two stages of two shards; the same in each, unless `varied`."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    number, shard_rank = (mesh[name].get_local_rank() for name in ("pipeline", "shard"))
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(30, 50), nn.ReLU())
    model: Any = shard([first, nn.Sequential(nn.Linear(50, 51), nn.Linear(51, 5))][number], mesh=mesh["shard"])
    if setting is not None:
        fastreduce.fsdp.compress(model, setting)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pipeline"].get_group())
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), 0.1 if varied else 0.0)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        given = batch(shard_rank, step if varied else 0)
        if number == 0:
            schedule.step(given)
        else:
            schedule.step(target=given[:, :5])
        if varied:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.long
def test_none_has_the_bits_of_fsdp(ranks4: RankPool):
    torchs, ours = (ranks4.run(_train, setting, 4, True) for setting in (None, "none"))
    assert_same_bits(ours, torchs)


@pytest.mark.long
def test_the_mean_of_many_steps_is_exact(ranks4: RankPool):
    exact, without, with_feedback = (
        ranks4.run(_train, setting, 1 if setting is None else 24, False)
        for setting in (None, "int8", "int8:error_feedback")
    )
    for rank in range(4):
        for name, expected in exact[rank][0].items():
            off, left = (
                (torch.stack([step[name].double() for step in found[rank]]).mean(0) - expected).abs().mean()
                for found in (without, with_feedback)
            )
            assert left < off / 5, name


def _behind_its_backward(rank: int, world_size: int, setting: str) -> tuple[list[Tensor], list[Tensor]]:
    """What was applied of steps, one of which is halved and the next added to it, and one thrown away; what is kept."""
    torch.manual_seed(0)
    model: Any = shard(nn.Sequential(nn.Linear(30, 7, bias=False), nn.Linear(7, 5, bias=False)))
    reduction = fastreduce.fsdp.compress(model, setting)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    applied = [torch.zeros(layer.weight.shape, dtype=torch.float64) for layer in model]
    for step in range(5):
        if step != 2:
            optimizer.zero_grad()
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        model(batch(rank)).square().mean().backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        for layer in model[::-1]:
            fully_shard.state(layer)._fsdp_param_group.post_backward()  # type: ignore[attr-defined]
        fully_shard.state(model)._root_post_backward_final_callback()  # type: ignore[attr-defined]
        if step == 1:
            for layer in model:
                layer.weight.grad.mul_(0.5)
        elif step != 3:
            for total, layer in zip(applied, model, strict=True):
                total += layer.weight.grad.full_tensor()
            optimizer.step()
    kept = reduction.state_dict().get(
        "reduce_scatter", {f"{i}.weight": layer.weight * 0 for i, layer in enumerate(model)}
    )
    return applied, [kept[f"{i}.weight"].full_tensor() for i in range(2)]


def test_nothing_is_lost_where_steps_are_added_up_or_thrown_away(ranks2: RankPool):
    all_exact, _ = ranks2.run(_behind_its_backward, "none")[0]
    for of_rank in ranks2.run(_behind_its_backward, "int8:error_feedback"):
        for applied, kept, exact in zip(*of_rank, all_exact, strict=True):
            assert kept.abs().max() > 1e-5
            torch.testing.assert_close(applied + kept, exact, rtol=0, atol=float(1e-6 * exact.abs().max()))


def test_what_a_stage_has_reduced_is_waited_for_by_its_devices_stream(monkeypatch: pytest.MonkeyPatch):
    """The current device may be another one, on whose stream nothing reads gradients of this one."""
    device, event, waits = torch.device("cuda", 1), object(), []
    inner = SimpleNamespace(device=device, _post_reduce_event=event)

    def stream(of: torch.device) -> Any:
        return SimpleNamespace(wait_event=lambda event: waits.append((of, event)))

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(current_stream=stream))
    Group("", [], inner).wait_until_stored()
    assert waits == [(device, event)]
