"""all_reduce_gradients: the same reduction for people without a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import check_agreement, describe_tensor
from .bucketed import BUCKET_BYTES
from .buckets import build_plan, group_by_size
from .compression import Compression
from .errors import SettingError, TensorError
from .gradients import Gradients
from .pipeline import BucketPipeline
from .transports import LocalTransport, TorchProcessGroup, Transport


class _Reduction:
    """Plan and pipelines for one list of shapes, kept between calls."""

    def __init__(self, tensors: list[Tensor], transport: Transport, compression: Compression) -> None:
        names = _names(tensors)
        specs = Gradients(tensors, names).specs
        groups = group_by_size(specs, range(len(specs)), [BUCKET_BYTES])
        plan = build_plan(specs, groups, alignment=compression.alignment, shards=transport.world_size)
        self.pipelines = [BucketPipeline(bucket, compression, transport) for bucket in plan.buckets]


def _names(tensors: list[Tensor]) -> list[str]:
    return [f"tensor {i}" for i in range(len(tensors))]


_transports: weakref.WeakKeyDictionary[Any, Transport] = weakref.WeakKeyDictionary()
_reductions: weakref.WeakKeyDictionary[Transport, dict[Any, _Reduction]] = weakref.WeakKeyDictionary()


def all_reduce_gradients(
    tensors_or_parameters: Iterable[Tensor],
    compression: Compression | str | None = None,
    group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
) -> None:
    """Average gradients over the ranks, in place, between backward and the optimizer's step.

    Parameters, and other leaves that require gradients, are averaged in their `.grad`: None counts as
    zeros, and stays None where every rank has None. Other tensors are averaged themselves. Call it on
    every rank with the same shapes in the same order; a list of shapes that is new is compared between
    ranks. Buffers, and residuals under error feedback, are kept per list of shapes.

    Args:
        tensors_or_parameters: parameters, or dense floating-point or complex tensors.
        compression: as in `DistributedDataParallel`.
        group: the ranks; None means the default group.
        transport: what moves the data, in place of gloo over `group`.

    Raises:
        SettingError: if `compression` is no setting.
        TensorError: if a tensor cannot be averaged in place.
        MismatchError: on every rank, if shapes, dtypes or settings differ between ranks.
        ValueError: if torch.distributed is not initialised and no transport is given.
    """
    tensors = list(tensors_or_parameters)
    owners = [t if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf) else _as_owner(t) for t in tensors]
    transport = transport or _transport_of(group)
    reduction = _reduction_for(owners, transport, compression)
    gradients = Gradients(owners, _names(owners))
    used = [owner.grad is not None for owner in owners]
    with torch.no_grad():
        for pipeline in reduction.pipelines:
            found = gradients.collect(gradients.members(pipeline.bucket), used)
            pipeline.run(found.sources, found.targets, found.unused)
            found.settle(pipeline.used_by_any)


def _reduction_for(tensors: list[Tensor], transport: Transport, compression: Compression | str | None) -> _Reduction:
    known = _reductions.setdefault(transport, {})
    layout = tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors)
    error = setting = None
    try:
        setting = Compression.resolve(compression)
        if (setting, layout) in known:
            return known[setting, layout]
    except SettingError as found:
        error = found
    names = _names(tensors)
    description = {name: describe_tensor(t) for name, t in zip(names, tensors, strict=True)}
    check_agreement(transport, {"compression": str(setting), **description}, error)
    assert setting is not None
    return known.setdefault((setting, layout), _Reduction(tensors, transport, setting))


def _as_owner(tensor: Tensor) -> Tensor:
    """A leaf whose `.grad` is `tensor`."""
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError("a lazy conjugate or negative cannot be averaged in place: call resolve_conj() first")
    if tensor.requires_grad:
        raise TensorError("a tensor that autograd computed cannot be averaged in place: pass tensor.detach()")
    owner = tensor.detach()
    owner.grad = tensor.detach()
    return owner


def _transport_of(group: dist.ProcessGroup | None) -> Transport:
    group = group or dist.group.WORLD
    if group is None:
        raise ValueError(
            "Default process group has not been initialized: call torch.distributed.init_process_group first"
        )
    if group not in _transports:
        _transports[group] = LocalTransport() if dist.get_world_size(group) == 1 else TorchProcessGroup(group)
    return _transports[group]
