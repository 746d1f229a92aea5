"""`none` on two ranks has the bits of FSDP's own reduce-scatter, in whatever way a model is sharded and trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import fastreduce.fsdp
from tests.support.installed_torch import shards_bytes
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool
from tests.support.sharded import Quantized, batch, gradients, network, shard

Found = list[dict[str, Tensor]]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _plain(**options: Any) -> Callable[[], Any]:
    return lambda: shard(network(), **options)


def _whole() -> Any:
    """The root alone: one group of all parameters."""
    return fully_shard(network())


def _on_meta() -> Any:
    """Sharded before it has memory, which is given and filled afterwards."""
    with torch.device("meta"):
        return shard(network())


def _checkpointed() -> Any:
    model = network()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Sequential))
    return shard(model)


def _reentrant() -> Any:
    """FSDP reduces within a backward of its own, inside of the model's."""
    model: Any = network()
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    apply_activation_checkpointing(model, wrapper, check_fn=lambda module: module is model[2])
    return shard(model)


def _compiled() -> Any:
    model: Any = network()
    for name, child in list(model.named_children()):
        if any(True for _ in child.parameters()):
            model._modules[name] = torch.compile(child, backend="aot_eager")
    return shard(model)


def _with_options(call: Callable[[Any], object]) -> Callable[[], Any]:
    def made() -> Any:
        model = shard(network())
        call(model)
        return model

    return made


def _shared_weight() -> Any:
    model: Any = network()
    model[2][0].weight = nn.Parameter(torch.randn(51, 50) / 8)
    model.append(nn.Linear(1, 50))
    model.append(nn.Linear(50, 51))
    model[4].weight = model[2][0].weight
    return fully_shard(model)


MODELS: dict[str, Callable[[], Any]] = {
    "plain": _plain(),
    "one group": _whole,
    "not resharded": _plain(reshard_after_forward=False),
    "bf16, summed in fp32": _plain(mp_policy=BF16),
    "bf16": _plain(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    "fp16": _plain(mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)),
    "fp64": lambda: shard(network().double()),
    "offloaded": _plain(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "meta": _on_meta,
    "meta, given memory first": _on_meta,
    "checkpointed": _checkpointed,
    "checkpointed, re-entrant": _reentrant,
    "compiled": _compiled,
    "weights in common": _shared_weight,
    "quantized": lambda: fully_shard(Quantized()),
    "divided by 3": _with_options(lambda model: model.set_gradient_divide_factor(3.0)),
    "summed": _with_options(lambda model: model.set_force_sum_reduction_for_comms(True)),
    "another dimension": lambda: shard(
        nn.Sequential(nn.Linear(30, 8)), shard_placement_fn=lambda p: torch.distributed.tensor.Shard(p.ndim - 1)
    ),
}
LONG = {
    "checkpointed, re-entrant",
    "not resharded",
    "bf16",
    "fp16",
    "fp64",
    "offloaded",
    "summed",
    "one group",
    "compiled",
    "weights in common",
}


def _train(rank: int, world_size: int, name: str, ours: bool) -> Found:
    model = MODELS[name]()
    if name == "meta, given memory first":
        model.to_empty(device="cpu")
    if ours:
        fastreduce.fsdp.compress(model, "none")
    if name == "meta":
        model.to_empty(device="cpu")
    if name.startswith("meta"):
        for i, parameter in enumerate(model.parameters()):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(10 * i + rank))
    dtype = torch.float64 if name == "fp64" else torch.float32
    return list(_steps(model, rank, dtype))


def _steps(model: Any, rank: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Clipped, two of them accumulated, and one in which a module has no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step, ways in enumerate(("", "accumulate", "frozen", "add")):
        first = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
        first.requires_grad_(ways != "frozen")
        if ways == "accumulate":
            model.set_requires_gradient_sync(False)
            model(batch(rank, 10 + step).to(dtype)).square().mean().backward()
            model.set_requires_gradient_sync(True)
        if ways != "add":
            optimizer.zero_grad()
        model(batch(rank, step).to(dtype)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        yield gradients(model)
        optimizer.step()
    yield {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] * (n in LONG) + [shards_bytes] * (n == "quantized")) for n in MODELS],
)
def test_none_has_the_bits_of_fsdp(ranks2: RankPool, name: str):
    torchs, ours = (ranks2.run(_train, name, way) for way in (False, True))
    assert all(steps and steps[0] for steps in torchs)
    assert_same_bits(ours, torchs)
