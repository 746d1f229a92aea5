"""`replicate`: shards averaged between replicas, the slow dimension of HSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fastreduce.fsdp
from fastreduce import FastreduceError, MismatchError, ReducerError, SettingError
from tests.support.installed_torch import shards_bytes
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import Quantized, batch, gradients, mesh_of, network, shard
from tests.support.tolerances import U

Found = list[dict[str, Tensor]]


def _train(rank: int, world_size: int, ours: bool, kind: str) -> Found:
    mesh = mesh_of(2)
    model = shard(Quantized() if kind == "quantized" else network(), mesh=mesh["shard"] if ours else mesh)
    if ours:
        fastreduce.fsdp.replicate(model, mesh["replicate"], "none")
        fastreduce.fsdp.compress(model, "none")
    if kind == "divided":
        model.set_gradient_divide_factor(3.0)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(3):
        optimizer.zero_grad()
        for last in (False, True):
            model.set_requires_all_reduce(last or step != 1)  # in the second step replicas are averaged once
            model(batch(rank, 2 * step + last)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "mean",
        pytest.param("quantized", marks=[shards_bytes, pytest.mark.long]),
        pytest.param("divided", marks=pytest.mark.long),
    ],
)
def test_none_has_the_bits_of_native_hsdp(ranks4: RankPool, kind: str):
    native, ours = (ranks4.run(_train, way, kind) for way in (False, True))
    assert_same_bits(ours, native)


def _compressed(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    mesh, found = mesh_of(2), []
    for setting in ("none", "ndim<2: none; *: int8:error_feedback"):
        model = shard(network(), mesh=mesh["shard"])
        reduction = fastreduce.fsdp.replicate(model, mesh["replicate"].get_group(), setting)
        model(batch(rank)).square().mean().backward()
        found.append(gradients(model))
    return found[0], found[1], reduction.sent_bytes


def test_settings_differ_by_parameter(ranks4: RankPool):
    found = ranks4.run(_compressed)
    numel = sum(parameter.numel() for parameter in network().parameters()) // 2  # of a shard
    for exact, compressed, sent in found:
        assert_same_bits(compressed, found[0][1])
        for name, gradient in exact.items():
            if name.endswith("bias"):
                assert_same_bits(compressed[name], gradient)
            else:
                error = (compressed[name] - gradient).abs().max() / gradient.abs().max()
                assert 0 < error < 2 / 127
        assert numel < sent < 2 * numel  # under none 4: two stages, half of each to the other replica


def _on_hosts(rank: int, world_size: int) -> tuple[Found, dict[str, Any]]:
    mesh = mesh_of(world_size)
    model = shard(network(), mesh=mesh["shard"])
    reduction = fastreduce.fsdp.replicate(model, mesh["replicate"], "int8:error_feedback")
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        found.append(gradients(model))
        optimizer.step()
    kept = {
        f"{kind} {name}": each.to_local() for kind, of in reduction.state_dict().items() for name, each in of.items()
    }
    return found, kept


@pytest.mark.long
def test_replicas_of_which_a_host_has_several_reduce_as_equals(ranks4: RankPool):
    """What is saved is a mean of four in FP32, which each transport sums in its own order."""
    with RankPool(4, hosts="aabb") as on_two:
        several = on_two.run(_on_hosts)
    for (found, kept), (expected, expected_kept) in zip(several, ranks4.run(_on_hosts), strict=True):
        assert_same_bits(found, expected)
        for name, mean in expected_kept.items():
            torch.testing.assert_close(kept[name], mean, rtol=0, atol=8 * U[torch.float32] * float(mean.abs().max()))


def _resumed(rank: int, world_size: int, path: str) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Parameters of a training that went on, and of one that was resumed."""
    mesh, found = mesh_of(2), []
    for resumed in (False, True):
        torch.manual_seed(resumed)
        model = shard(network(), mesh=mesh["shard"])
        reduction = fastreduce.fsdp.compress(model, "int8:error_feedback")
        fastreduce.fsdp.replicate(model, mesh["replicate"], "int4:error_feedback")
        if resumed:
            dcp.load({"model": model.state_dict(), "reduction": reduction}, checkpoint_id=path)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3 * resumed, 6):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            if step == 2:
                dcp.save({"model": model.state_dict(), "reduction": reduction}, checkpoint_id=path)
        found.append([parameter.full_tensor().detach() for parameter in model.parameters()])
    kept = {kind: sorted(names) for kind, names in reduction.state_dict().items()}
    return found[0], found[1], kept


def test_a_checkpoint_of_both_reductions_resumes_bit_for_bit(ranks4: RankPool, tmp_path: Path):
    names = sorted(name for name, _ in network().named_parameters())
    for went_on, resumed, kept in ranks4.run(_resumed, str(tmp_path)):
        assert_same_bits(resumed, went_on)
        assert kept == {"reduce_scatter": names, "all_reduce": names}


def _of_another_dtype(rank: int, world_size: int, later: bool) -> dict[str, Tensor]:
    mesh = mesh_of(2)
    model = shard(network(), mesh=mesh["shard"])
    if not later:
        model.double()
    fastreduce.fsdp.replicate(model, mesh["replicate"], "int8:error_feedback")
    if later:
        model.double()
    for step in range(2):
        model.zero_grad()
        model(batch(rank, step).double()).square().mean().backward()
    return gradients(model)


def test_a_model_may_become_of_another_dtype_behind_the_call(ranks4: RankPool):
    found = ranks4.run(_of_another_dtype, True)
    assert {grad.dtype for grad in found[0].values()} == {torch.float64}
    assert_same_bits(found, ranks4.run(_of_another_dtype, False))


# What is refused


def _different_parameters(rank: int, world_size: int) -> str:
    mesh = mesh_of(2)
    model: Any = shard(network(seed=0), mesh=mesh["shard"])
    if rank >= 2:
        with torch.no_grad():
            model[0].bias.to_local().add_(1)
    fastreduce.fsdp.replicate(model, mesh["replicate"], "int8")
    with pytest.raises(MismatchError) as caught:
        model(batch(rank)).square().mean().backward()
    return str(caught.value)


def test_replicas_that_begin_with_other_parameters(ranks4: RankPool):
    for said in ranks4.run(_different_parameters):
        assert "ranks differ in the parameter '0.bias'" in said


def _load_what_one_rank_lacks(rank: int, world_size: int) -> str:
    mesh = mesh_of(2)
    model = shard(network(), mesh=mesh["shard"])
    reduction = fastreduce.fsdp.compress(model, "int8:error_feedback")
    fastreduce.fsdp.replicate(model, mesh["replicate"], "int4:error_feedback")
    state = reduction.state_dict()
    if rank == 1:
        del state["reduce_scatter"]["0.weight"]
    with pytest.raises((SettingError, MismatchError)) as caught:
        reduction.load_state_dict(state)
    return str(caught.value)


def test_a_state_that_does_not_fit_is_an_error_on_ranks_that_share_no_group_with_it(ranks4: RankPool):
    for said in ranks4.run(_load_what_one_rank_lacks):
        assert "only this model has residuals of parameter '0.weight' under 'reduce_scatter'" in said


class _Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(30, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses_both: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if uses_both else x


def _used_on_one_replica(rank: int, world_size: int) -> str:
    mesh: DeviceMesh = mesh_of(2)
    model: Any = fully_shard(_Either(), mesh=mesh["shard"])
    fastreduce.fsdp.replicate(model, mesh["replicate"], "fp16")
    try:
        model(batch(rank), rank < 2).square().mean().backward()
    except ReducerError as error:
        return str(error)
    return ""


def test_a_parameter_that_one_replica_uses(ranks4: RankPool):
    found = ranks4.run(_used_on_one_replica)
    assert [bool(said) for said in found] == [False, False, True, True]
    assert "parameter 'sometimes.weight' has a gradient on another replica" in found[2]


def _partial_sums(rank: int, world_size: int, used: list[bool], unused_too: bool) -> dict[str, Tensor] | str:
    """Gradients of two backwards, averaged in the second; in each, whether the second layer is used."""
    mesh: DeviceMesh = mesh_of(2)
    torch.manual_seed(0)
    model: Any = fully_shard(_Either(), mesh=mesh["shard"])
    fastreduce.fsdp.replicate(model, mesh["replicate"], "none")
    model.set_reduce_scatter_unused_params(unused_too)
    try:
        for step, uses_both in enumerate(used):
            model.set_requires_all_reduce(step == 1)
            model(batch(rank, step), uses_both).square().mean().backward()
    except ReducerError as error:
        return str(error)
    return gradients(model)


def test_what_is_added_up_goes_to_its_parameter(ranks4: RankPool):
    """In torch's own HSDP, too, a message of other parameters gets what has been added up of all."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    for used in ([False, True], [True, False]):
        in_all = ranks4.run(_partial_sums, used, True)
        found = ranks4.run(_partial_sums, used, False)
        if used[1]:
            assert_same_bits(found, in_all)
        for said in found if used[0] else ():
            assert isinstance(said, str) and "parameter 'sometimes.weight' has been used while" in said
            assert "Call set_reduce_scatter_unused_params(True) on the model" in said


def _lost(rank: int, world_size: int, resets: bool) -> dict[str, Tensor]:
    mesh: DeviceMesh = mesh_of(2)
    model = shard(network(), mesh=mesh["shard"])
    fastreduce.fsdp.replicate(model, mesh["replicate"], "none")
    if resets:
        model.set_requires_all_reduce(False)
        model(batch(rank, 7)).square().mean().backward()
        model.set_requires_all_reduce(True)
        model.reset_iter_state()
        model.zero_grad()
    model(batch(rank)).square().mean().backward()
    return gradients(model)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch has no reset_iter_state")
def test_what_is_added_up_is_lost_with_its_iteration(ranks4: RankPool):
    lost, alone = (ranks4.run(_lost, resets) for resets in (True, False))
    assert_same_bits(lost, alone)


def _refused(rank: int, world_size: int) -> list[str]:
    mesh, said = mesh_of(2), []
    model = shard(network(), mesh=mesh["shard"])
    with pytest.raises(SettingError) as caught:
        fastreduce.fsdp.replicate(model, mesh, "int8")
    said.append(str(caught.value))
    model[2].set_all_reduce_hook(lambda shard: None)
    with pytest.raises(SettingError) as caught:
        fastreduce.fsdp.replicate(model, mesh["replicate"], "int8")
    return [*said, str(caught.value)]


def test_what_cannot_be_averaged_is_refused(ranks4: RankPool):
    for two_dimensions, hooked in ranks4.run(_refused):
        assert (
            "a mesh of 2 dimensions ('replicate', 'shard'); allowed: one, such as mesh['replicate']" in two_dimensions
        )
        assert "module '2' has an all-reduce hook already (set_all_reduce_hook)" in hooked


def _over_shards(rank: int, world_size: int) -> list[str]:
    """What is said where a group holds ranks that have other parts of the parameters."""
    mesh = mesh_of(2)
    said = []
    for over in (mesh["shard"], dist.group.WORLD):
        with pytest.raises(SettingError) as caught:
            fastreduce.fsdp.replicate(shard(network(), mesh=mesh["shard"]), over, "int8")  # type: ignore[arg-type]
        said.append(str(caught.value))
    return said


def test_ranks_that_hold_other_parts_are_no_replicas(ranks4: RankPool):
    for rank, said in enumerate(ranks4.run(_over_shards)):
        shards = [0, 1] if rank < 2 else [2, 3]
        for each in said:
            assert f"is sharded among ranks {shards}, of which {shards} are in over, too" in each
            assert "such as mesh['replicate']" in each


class _First(nn.Module):
    """Uses its first layer or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, uses_first: bool) -> Tensor:
        x = self.last(x)
        return self.first(x) if uses_first else x


def _on_one_replica(rank: int, world_size: int) -> str:
    """What each replica meets, where one alone uses a layer of the first of two buckets."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(_First(), mesh=mesh["shard"])
    fastreduce.fsdp.replicate(model, mesh["replicate"], {"first*": "int8", "*": "fp16"}, transport="gloo")
    try:
        model(torch.ones(2, 8), rank == 0).sum().backward()
    except FastreduceError as error:
        return type(error).__name__
    return ""


def test_a_layer_that_one_replica_uses_alone_is_an_error_for_which_nobody_waits(ranks2: RankPool):
    assert ranks2.run(_on_one_replica, timeout=30) == ["TransportError", "ReducerError"]
