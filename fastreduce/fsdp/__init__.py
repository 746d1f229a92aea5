"""Compressed, deterministic gradient reduction for models that `torch.distributed.fsdp.fully_shard` has sharded."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import SettingError, brief, no_group
from ..policy import AnySetting, Policy
from .model import ShardedModel

__all__ = ["ShardedModel", "compress", "replicate"]

_ATTRIBUTE = "_fastreduce_fsdp"  # of the model, which holds what holds it: both end together


def compress(
    model: nn.Module,
    compression: AnySetting | Policy = None,
    *,
    all_gather: AnySetting | Policy = None,
    transport: str | None = None,
) -> ShardedModel:
    """Let gradients be reduced by our kernels from now on, in place of every reduce-scatter of a sharded model.

    Call it on every rank after the last `fully_shard`, before or after parameters have been materialised, and before
    training. All else is FSDP's: its order, its streams, its mixed precision, its divide factor.

    Args:
        model: the root, with sharded modules in it.
        compression: as in `DistributedDataParallel`: a spec string, a setting, or a policy of parameters' names; None
            means FASTREDUCE_COMPRESSION. Without `warm_up`, `rounding=stochastic`, `powersgd` and `topk`, and without
            `accumulate=wire`: the sum is our kernel's.
        all_gather: a setting or a policy for parameters too, such as `"bf16"` or `"int8"`: forward and backward compute
            with what it makes of them, the same on every rank, and the sharded parameters stay as they are for the
            optimizer. Without `error_feedback`, besides. None: they are gathered by torch, as they are.
        transport: the name of what moves the data: `"gloo"`, `"shm"`, `"nccl"` or `"two_level"`; None as in
            `DistributedDataParallel`.

    Returns:
        What tells the bytes that are sent, and what error feedback keeps: give it to `torch.distributed.checkpoint`.

    Raises:
        SettingError: if `compression` or `all_gather` is no setting that can be used, or the model is not sharded, or
            is replicated, or this was called already for one of its modules.
        MismatchError: on every rank, if models or settings differ between ranks.
        BackendUnavailableError: if kernels or transport cannot run here.
    """
    found = _of(model, "compress")
    found.compress(compression, all_gather, transport)
    return found


def replicate(
    model: nn.Module,
    over: DeviceMesh | dist.ProcessGroup,
    compression: AnySetting | Policy = None,
    *,
    transport: str | None = None,
) -> ShardedModel:
    """Let the shards of a sharded model be averaged over its replicas too: HSDP, of which this is the slow dimension.

    Shard over one dimension of a mesh, and average over the other. Residuals are of shards alone. Replicas begin with
    the same parameters, which are compared in the first backward.

    Args:
        model: the root, with modules in it that are sharded over a mesh of one dimension.
        over: the other dimension, `mesh["replicate"]`, or its process group.
        compression: as in `DistributedDataParallel`, without `warm_up`, `rounding=stochastic`, `powersgd` and `topk`.
        transport: the name of what moves the data: `"gloo"`, `"shm"`, `"nccl"` or `"two_level"`; None as in
            `DistributedDataParallel`.

    Returns:
        What tells the bytes that are sent, and what error feedback keeps: give it to `torch.distributed.checkpoint`.

    Raises:
        SettingError: if `compression` is no setting that can be used, `over` has several dimensions, the model is not
            sharded, or is replicated by torch, or has all-reduce hooks already.
        MismatchError: on every rank, if models or settings differ between ranks.
        BackendUnavailableError: if kernels or transport cannot run here.
    """
    if isinstance(over, DeviceMesh):
        if over.ndim != 1:
            names = over.mesh_dim_names or ()
            raise SettingError(
                f"fastreduce.fsdp.replicate: a mesh of {over.ndim} dimensions {names}; allowed: one, such as "
                f"mesh[{(*names, 'replicate')[0]!r}]"
            )
        over = over.get_group()
    if not isinstance(over, dist.ProcessGroup):
        raise SettingError(
            f"fastreduce.fsdp.replicate: over={brief(over)}; allowed: a DeviceMesh of one dimension, such as "
            "mesh['replicate'], or a ProcessGroup that this rank is in"
        )
    found = _of(model, "replicate")
    found.replicate(over, compression, transport)
    return found


def _of(model: nn.Module, call: str) -> ShardedModel:
    if not dist.is_initialized():
        raise no_group(f"fastreduce.fsdp.{call}")
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"fastreduce.fsdp.{call}: model={brief(model)}; allowed: a torch.nn.Module that fully_shard has sharded"
        )
    found = getattr(model, _ATTRIBUTE, None) or ShardedModel(model)
    assert isinstance(found, ShardedModel)
    setattr(model, _ATTRIBUTE, found)
    return found
