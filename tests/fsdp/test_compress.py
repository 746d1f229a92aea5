"""`compress`: settings by parameter within their bounds, overlap with what FSDP does, and what is refused."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import signal
import types
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fastreduce.fsdp
from fastreduce import BackendUnavailableError, MismatchError, NotInitializedError, SettingError, TransportError
from fastreduce.fsdp import model as model_module
from fastreduce.fsdp import torch_names
from tests.support import tolerances
from tests.support.installed_torch import shards_bytes
from tests.support.models import assert_same_bits
from tests.support.ranks import RankError, RankPool, run_ranks
from tests.support.sharded import batch, gradients, mesh_of, network, shard

SETTINGS = ("none:accumulate=fp32", "fp16", "bf16", "int8", "fp8:error_feedback", "int4:error_feedback", "auto4")


def _backward(model: Any, rank: int, step: int = 0) -> dict[str, Tensor]:
    model.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    return gradients(model)


def _alone(rank: int) -> dict[str, Tensor]:
    """This rank's own gradients."""
    model = network()
    model(batch(rank)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _under(rank: int, world_size: int, settings: Any, transport: str | None) -> list[dict[str, Tensor]]:
    found = []
    for setting in settings:
        model = shard(network())
        fastreduce.fsdp.compress(model, setting, transport=transport)
        found.append(_backward(model, rank))
    return found


def test_each_setting_is_within_its_bound(ranks: RankPool):
    found = ranks.run(_under, SETTINGS, None)
    exact = [_alone(rank) for rank in range(ranks.world_size)]
    for i, setting in enumerate(SETTINGS):
        grads = found[0][i]
        for rank in range(1, ranks.world_size):
            assert_same_bits(found[rank][i], grads)
        for name, grad in grads.items():
            mean = torch.stack([one[name].double() for one in exact]).mean(0)
            used = setting if setting != "auto4" else "fp16" if grad.ndim < 2 or grad.numel() < 4096 else "int4"
            bound = tolerances.error_bound(used, [one[name] for one in exact]).view(grad.shape)
            if "int" in used or "fp8" in used:  # blocks begin with each rank's part: others' largest magnitudes
                bound = bound.max()
            assert ((grad.double() - mean).abs() <= bound).all(), (setting, name)


class Adapted(nn.Module):
    """A frozen base of bytes, where there is one, and trained factors beside it, as QLoRA has them."""

    def __init__(self, dtype: torch.dtype, base: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        if base:
            self.base = nn.Parameter(torch.ones(30, 30, dtype=torch.uint8), requires_grad=False)
        self.down = nn.Parameter(torch.randn(30, 7, generator=generator).to(dtype))
        self.up = nn.Parameter(torch.randn(7, 30, generator=generator).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.up.dtype) @ self.down @ self.up


def _adapted(rank: int, world_size: int, dtype: torch.dtype, base: bool) -> list[Any]:
    found: list[Any] = []
    for setting in ("none", "fp16", "int8"):
        model = fully_shard(Adapted(dtype, base))
        reduction = fastreduce.fsdp.compress(model, setting)
        found += [reduction.sent_bytes, _backward(model, rank)]
        mesh = mesh_of(world_size)
        model = fully_shard(Adapted(dtype, base), mesh=mesh["shard"])
        reduction = fastreduce.fsdp.replicate(model, mesh["replicate"], setting)
        found += [reduction.sent_bytes, _backward(model, rank), reduction.sent_bytes]
    return found


@shards_bytes
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_a_frozen_base_of_another_dtype_changes_nothing(ranks2: RankPool, dtype: torch.dtype):
    assert_same_bits(ranks2.run(_adapted, dtype, True), ranks2.run(_adapted, dtype, False))


def _beside_rotations(rank: int, world_size: int, frozen: bool) -> dict[str, Tensor]:
    model = network()
    if frozen:
        model.rotations = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=False)
    fastreduce.fsdp.compress(fully_shard(model), "int8")
    return _backward(model, rank)


def test_complex_parameters_that_are_frozen_change_nothing(ranks2: RankPool):
    assert_same_bits(ranks2.run(_beside_rotations, True), ranks2.run(_beside_rotations, False))


def test_bits_do_not_depend_on_the_transport(ranks: RankPool):
    shared, sockets = (ranks.run(_under, ("fp16", "int8"), transport) for transport in ("shm", "gloo"))
    assert_same_bits(sockets, shared)


BY_NAME = {"*.bias": "none:accumulate=fp32", "2.*": "bf16", "*": "int8"}


def _by_name(rank: int, world_size: int) -> tuple[list[dict[str, Tensor]], ...]:
    found = []
    for setting in (BY_NAME, "none:accumulate=fp32", "bf16", "int8"):
        model = network()
        for parameter in model.parameters():
            if setting is BY_NAME and parameter.ndim == 2:
                parameter.grad_dtype = None  # since torch 2.15 those of other dtypes follow behind them all
        shard(model)
        fastreduce.fsdp.compress(model, setting)
        found.append([_backward(model, rank, step) for step in range(2)])
    return tuple(found)


def test_each_parameter_has_the_bits_of_its_setting(ranks: RankPool):
    for mixed, plain, bf16, int8 in ranks.run(_by_name):
        for step, grads in enumerate(mixed):
            for name, grad in grads.items():
                alone = plain if name.endswith("bias") else bf16 if name.startswith("2.") else int8
                assert_same_bits(grad, alone[step][name])


def _wrapped(rank: int, world_size: int) -> list[str]:
    model: Any = network()
    apply_activation_checkpointing(model, check_fn=lambda module: module is model[2])
    model._modules["0"] = torch.compile(model[0], backend="eager")
    return list(fastreduce.fsdp.compress(shard(model), "int8:error_feedback").state_dict()["reduce_scatter"])


def test_names_are_those_of_the_model_that_was_wrapped(ranks2: RankPool):
    names = [name for name, _ in network().named_parameters()]
    assert ranks2.run(_wrapped) == [names, names]


def _thawed(rank: int, world_size: int, at: int, ours: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of weights, and of a bias that requires them from a step on."""
    model: Any = shard(nn.Sequential(nn.Linear(30, 9)))
    model[0].bias.requires_grad_(False)
    if ours:
        fastreduce.fsdp.compress(model, "int8:error_feedback")
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found = []
    for step in range(6):
        model[0].bias.requires_grad_(step >= at)
        found.append(_backward(model, rank))
        optimizer.step()
    return [grads["0.weight"] for grads in found], [grads["0.bias"] for grads in found if "0.bias" in grads]


def test_residuals_move_along_when_parameters_require_gradients_later(ranks2: RankPool):
    never, later, exact = (ranks2.run(_thawed, *way) for way in ((6,), (3,), (3, False)))
    for (weights, _), (same, biases), (_, theirs) in zip(never, later, exact, strict=True):
        assert not torch.equal(weights[0], weights[-1]), "what is kept shows"
        assert_same_bits(same, weights)
        for found, expected in zip(biases, theirs, strict=True):
            assert (found - expected).abs().max() < 2 / 127 * expected.abs().max()


def _sent(rank: int, world_size: int) -> list[int]:
    found = []
    for setting in ("none", "fp16", "int8"):
        model = fully_shard(nn.Linear(512, 512))
        found.append(fastreduce.fsdp.compress(model, setting).sent_bytes)
    return found


def test_bytes_of_a_large_layer(ranks2: RankPool):
    for none, fp16, int8 in ranks2.run(_sent):
        assert none == 513 * 512 * 4 / 2
        assert fp16 <= 0.51 * none and int8 <= 0.27 * none


def _sent_in(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> tuple[int, int]:
    """Bytes as told, and of what FSDP gives us to reduce."""
    model: Any = fully_shard(nn.Linear(512, 512), mp_policy=policy)
    reduction = fastreduce.fsdp.compress(model, "none")
    scatter: Any = reduction._scatters[0]
    given, reduce = list[Tensor](), scatter._reduce

    def reduce_and_note(output: Tensor, input_: Tensor, *more: Any) -> None:
        given.append(input_)
        reduce(output, input_, *more)

    scatter._reduce = reduce_and_note
    model(torch.ones(2, 512)).sum().backward()
    return reduction.sent_bytes, given[0].nbytes // 2


@pytest.mark.parametrize(
    "given",
    [
        pytest.param((None, None), marks=pytest.mark.long),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_bytes_under_mixed_precision(ranks2: RankPool, given: tuple[torch.dtype | None, torch.dtype | None]):
    for told, sent in ranks2.run(_sent_in, MixedPrecisionPolicy(*given)):
        assert told == sent


def _ends(rank: int, world_size: int) -> bool:
    model = shard(network())
    reduction = weakref.ref(fastreduce.fsdp.compress(model, "int8:error_feedback"))
    _backward(model, rank)
    before = weakref.ref(model)
    del model
    gc.collect()
    return before() is None and reduction() is None


def test_a_model_that_is_gone_is_held_by_nothing(ranks2: RankPool):
    assert ranks2.run(_ends) == [True, True]


# What is refused, and failures


def _sharded_later(rank: int, world_size: int, replicas: bool) -> str:
    mesh, model = mesh_of(2 if replicas else 1), network()
    fully_shard(model.get_submodule("0"), mesh=mesh["shard"])
    if replicas:
        fastreduce.fsdp.replicate(model, mesh["replicate"], "int8")
    else:
        fastreduce.fsdp.compress(model, "int8")
    fully_shard(model, mesh=mesh["shard"])
    with pytest.raises(SettingError) as caught:
        _backward(model, rank)
    return str(caught.value)


@pytest.mark.parametrize("replicas", [False, True])
def test_what_is_sharded_later_is_told_before_it_trains(ranks2: RankPool, replicas: bool):
    """Replicas of it would not be averaged."""
    for said in ranks2.run(_sharded_later, replicas):
        assert "the root module was sharded after compress or replicate was called" in said
        assert "call them behind the last fully_shard" in said


def _said(kind: type[Exception], model: nn.Module, *given: Any, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        fastreduce.fsdp.compress(model, *given, **options)
    return str(caught.value)


def _refusals(rank: int, world_size: int) -> dict[str, str]:
    mesh = mesh_of(1)
    once = shard(network())
    fastreduce.fsdp.compress(once, "none")
    part = shard(network())
    fastreduce.fsdp.compress(part[2], "none")
    return {
        "hsdp": _said(SettingError, shard(network(), mesh=mesh), "int8"),
        "replicated": _said(SettingError, replicate(network()), "int8"),
        "not sharded": _said(SettingError, network(), "int8"),
        "no module": _said(SettingError, None, "int8"),  # type: ignore[arg-type]
        "swapped": _said(SettingError, "int8", shard(network())),  # type: ignore[arg-type]
        "wire": _said(SettingError, shard(network()), "fp16:accumulate=wire"),
        "warm-up": _said(SettingError, shard(network()), "int8:warm_up=10"),
        "in factors": _said(SettingError, shard(network()), "powersgd:rank=2"),
        "largest": _said(SettingError, shard(network()), "topk", all_gather="bf16"),
        "by chance": _said(SettingError, shard(network()), "bf16:rounding=stochastic"),
        "no key": _said(SettingError, shard(network()), {"3.*": "int8", "*": "fp16"}),
        "complex": _said(SettingError, shard(nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))), "none"),
        "twice": _said(SettingError, once, "none"),
        "a part before": _said(SettingError, part, "int8"),
        "a part again": _said(SettingError, once[2], "int8"),
        "differs": _said(MismatchError, shard(network()), ["int8", "fp16"][rank]),
        "one is wrong": _said((SettingError, MismatchError)[rank], shard(network()), ["int9", "fp16"][rank]),  # type: ignore[arg-type]
    }


def _refused_often(rank: int, world_size: int) -> list[int]:
    """Files that are open behind each call on which ranks do not agree."""
    found = []
    for _ in range(3):
        with pytest.raises(MismatchError):
            fastreduce.fsdp.compress(shard(network()), ["int8", "fp16"][rank], transport="gloo")
        found.append(len(os.listdir("/proc/self/fd")))
    return found


def test_what_is_refused_again_and_again_leaves_no_connections(ranks2: RankPool):
    for first, *others in ranks2.run(_refused_often):
        assert others == [first] * 2


def test_what_replicas_are_averaged_over_is_named(ranks2: RankPool):
    ranks2.run(_over_what)


def _over_what(rank: int, world_size: int) -> None:
    for over, said in ((None, "None"), ("replicate", "'replicate'"), (network(), "Sequential")):
        with pytest.raises(SettingError, match=rf"replicate: over={said}(.|\n)*; allowed: a DeviceMesh"):
            fastreduce.fsdp.replicate(shard(network()), over)  # type: ignore[arg-type]


def test_what_is_refused_and_what_to_write_instead(ranks2: RankPool):
    for rank, said in enumerate(ranks2.run(_refusals)):
        assert "sharded and replicated over the 2-D mesh ('replicate', 'shard')" in said["hsdp"]
        assert "fully_shard(module, mesh=mesh['shard'])" in said["hsdp"]
        assert "fastreduce.fsdp.replicate(model, mesh['replicate'], 'int8:error_feedback')" in said["hsdp"]
        assert "fastreduce.DistributedDataParallel(model, compression=…)" in said["replicated"]
        assert "no module of this Sequential is sharded: call torch.distributed.fsdp.fully_shard" in said["not sharded"]
        assert said["no module"].startswith("fastreduce.fsdp.compress: model=None; allowed: a torch.nn.Module that")
        assert said["swapped"].startswith("fastreduce.fsdp.compress: model='int8'; allowed: a torch.nn.Module that")
        assert "'fp16:accumulate=wire' is summed by the transport's all-reduce" in said["wire"]
        assert "counts no steps, so it takes no warm_up" in said["warm-up"]
        assert "counts no steps, so it takes no rounding=stochastic" in said["by chance"]
        for setting in ("in factors", "largest"):
            assert said[setting].endswith("allowed: none, fp16, bf16, int8, fp8, int4")
        assert "the key '3.*' of the policy, for 'int8', matches no parameter" in said["no key"]
        assert "parameter '0.weight' is torch.complex64, and what is sharded is reduced in" in said["complex"]
        assert "called already for this model; call it once" in said["twice"]
        assert "called already for module '2', with another part of the model" in said["a part before"]
        assert "called already for the root module, with another part of the model" in said["a part again"]
        assert "ranks differ in the parameter '0.weight': rank 0 has int8, shape (50, 30)" in said["differs"]
        assert ("rank 0 could not be set up: SettingError" if rank else "'int9'") in said["one is wrong"]


def test_without_a_process_group():
    with pytest.raises(NotInitializedError, match=r"fastreduce\.fsdp\.compress"):
        fastreduce.fsdp.compress(nn.Linear(1, 1))


def _die(rank: int, world_size: int, path: str) -> None:
    model = shard(network())
    fastreduce.fsdp.compress(model, "int8")
    # Torch's own collectives before it would fail first: nothing is gathered again in backward.
    model.set_reshard_after_forward(False)
    _backward(model, rank)
    loss = model(batch(rank)).square().mean()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        loss.backward()
    except TransportError as error:
        Path(path).write_text(str(error))
        raise


def test_a_rank_that_dies_is_told_with_the_parameters(tmp_path: Path):
    with pytest.raises(RankError, match="SIGKILL"):
        run_ranks(_die, 2, str(tmp_path / "said"))
    said = (tmp_path / "said").read_text()
    assert "rank 0" in said and "FSDP reduces module '2'" in said and "2.0.weight" in said


# Private names of torch


def test_torch_has_what_is_touched():
    assert torch_names.missing_names() == []


def test_a_torch_that_has_changed_is_named():
    real = importlib.import_module

    def changed(name: str) -> Any:
        if name.endswith("_fsdp_common"):
            raise ImportError(name)
        if not name.endswith("_fsdp_param_group"):
            return real(name)
        group = type("FSDPParamGroup", (), {"__init__": lambda self: None, "post_backward": None})
        return types.SimpleNamespace(FSDPParamGroup=group)

    missing = torch_names.missing_names(changed)
    assert "torch.distributed.fsdp._fully_shard._fsdp_common" in missing
    assert "FSDPParamGroup._reduce_scatter_comm" in missing and "FSDPParamGroup.post_backward" not in missing
    with pytest.raises(BackendUnavailableError) as caught:
        torch_names.check_torch(["FSDPParamGroup._all_reduce_hook"], "2.16.0")
    assert "torch 2.16.0 has changed FSDP2, and lacks FSDPParamGroup._all_reduce_hook" in str(caught.value)
    assert "It works with torch 2.9 to 2.15" in str(caught.value)


def _alone_in_group(rank: int, world_size: int) -> None:
    model = fully_shard(network())
    reduction = fastreduce.fsdp.compress(model, "int8")
    assert_same_bits(_backward(model, rank), _alone(rank))
    assert reduction.sent_bytes == 0


def test_one_rank_alone_sends_nothing():
    run_ranks(_alone_in_group, 1)


def _in_a_list(rank: int, world_size: int) -> None:
    modules: list[Any] = [fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 1))]
    reductions = weakref.ref(fastreduce.fsdp.compress(nn.ModuleList(modules), "int8:error_feedback"))
    gc.collect()
    modules[1](modules[0](torch.ones(4, 8))).sum().backward()
    modules.clear()
    gc.collect()
    assert reductions() is None


def test_a_list_of_modules_need_not_live_as_long_as_they(ranks: RankPool):
    """Nor what is returned: they keep what reduces their gradients, and it ends with them."""
    ranks.run(_in_a_list)


def _again(rank: int, world_size: int, replicates: bool) -> tuple[int, int]:
    mesh = mesh_of(world_size)
    model = shard(network(), mesh=mesh["shard"]) if replicates else shard(network())
    reductions = fastreduce.fsdp.ShardedModel(model)
    where, name, fails = (model_module, "ReplicaAverage", 1) if replicates else (reductions, "_gathers", 0)
    for attempt in range(2):
        tries = itertools.count()
        made = getattr(where, name)

        def failing(*args: Any, made: Any = made, tries: Any = tries, first: bool = attempt == 0) -> Any:
            if first and next(tries) == fails:
                raise MemoryError("no memory left")
            return made(*args)

        with patch.object(where, name, failing), pytest.raises(MemoryError) if not attempt else nullcontext():
            if replicates:
                reductions.replicate(mesh["replicate"].get_group(), "int8:error_feedback", None)
            else:
                reductions.compress("int8:error_feedback", "bf16", None)
    _backward(model, rank)
    return len(reductions._follower.all) // len(reductions._groups), len(reductions._transports)


@pytest.mark.parametrize("replicates", [False, True], ids=["compress", "replicate"])
def test_a_call_that_failed_leaves_nothing_and_may_be_made_again(ranks: RankPool, replicates: bool):
    for followed, transports in ranks.run(_again, replicates):
        assert (followed, transports) == (1, 1 if replicates else 2)
