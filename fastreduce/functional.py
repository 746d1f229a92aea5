"""all_reduce_gradients: the same reduction for people without a module."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .agreement import check_agreement, describe_tensor
from .arrays import as_tensor
from .bucketed import BUCKET_BYTES
from .buckets import build_plan, group_by_size
from .compression import Compression
from .errors import NotInitializedError, SettingError, TensorError
from .gradients import Gradients
from .pipeline import BucketPipeline
from .transports import Transport, make_transport

OPERATIONS = {"mean": None, "sum": 1}  # what the sum is divided by; None means the number of ranks


class _Reduction:
    """Plan and pipelines for one list of shapes, kept between calls."""

    def __init__(self, tensors: list[Tensor], transport: Transport, compression: Compression, op: str) -> None:
        names = _names(tensors)
        specs = Gradients(tensors, names).specs
        groups = group_by_size(specs, range(len(specs)), [BUCKET_BYTES])
        plan = build_plan(specs, groups, alignment=compression.alignment, shards=transport.world_size)
        divisor = OPERATIONS[op]
        self.pipelines = [BucketPipeline(bucket, compression, transport, divisor) for bucket in plan.buckets]


def _names(tensors: list[Tensor]) -> list[str]:
    return [f"tensor {i}" for i in range(len(tensors))]


_transports: weakref.WeakKeyDictionary[Any, dict[str, Transport]] = weakref.WeakKeyDictionary()
_reductions: weakref.WeakKeyDictionary[Transport, dict[Any, _Reduction]] = weakref.WeakKeyDictionary()


def all_reduce_gradients(
    tensors_or_parameters: Iterable[Any],
    compression: Compression | str | None = None,
    group: dist.ProcessGroup | None = None,
    transport: Transport | None = None,
    op: str = "mean",
) -> None:
    """Average gradients over the ranks, in place, between backward and the optimizer's step.

    Parameters, and other leaves that require gradients, are averaged in their `.grad`: None counts as
    zeros, and stays None where every rank has None. Other tensors are averaged themselves. Call it on
    every rank with the same shapes in the same order; a list of shapes that is new is compared between
    ranks. Buffers, and residuals under error feedback, are kept per list of shapes.

    Args:
        tensors_or_parameters: parameters, or dense floating-point or complex tensors; NumPy and CuPy arrays
            too, and whatever has `__dlpack__` or `__cuda_array_interface__`.
        compression: as in `DistributedDataParallel`.
        group: the ranks; None means the default group.
        transport: what moves the data, in place of NCCL (for CUDA tensors), gloo or MPI over `group`.
        op: "mean", or "sum".

    Raises:
        SettingError: if `compression` is no setting, or `op` no operation.
        TensorError: if a tensor or array cannot be averaged in place.
        MismatchError: on every rank, if shapes, dtypes or settings differ between ranks.
        NotInitializedError: if torch.distributed is not initialised and no transport is given.
    """
    tensors = [as_tensor(array) for array in tensors_or_parameters]
    owners = [t if isinstance(t, nn.Parameter) or (t.requires_grad and t.is_leaf) else _as_owner(t) for t in tensors]
    for kind in sorted({owner.device.type for owner in owners}) or ["cpu"]:
        chosen = transport or transport_of(group, "all_reduce_gradients", kind)
        _average([owner for owner in owners if owner.device.type == kind], chosen, compression, op)


def _average(owners: list[Tensor], transport: Transport, compression: Compression | str | None, op: str) -> None:
    reduction = _reduction_for(owners, transport, compression, op)
    gradients = Gradients(owners, _names(owners))
    used = [owner.grad is not None for owner in owners]
    with torch.no_grad():
        for pipeline in reduction.pipelines:
            found = gradients.collect(gradients.members(pipeline.bucket), used)
            pipeline.run(found.sources, found.targets, found.unused)
            torch.autograd.graph.increment_version(found.targets)
            found.settle(pipeline.used_by_any)


def _reduction_for(
    tensors: list[Tensor], transport: Transport, compression: Compression | str | None, op: str
) -> _Reduction:
    known = _reductions.setdefault(transport, {})
    layout = tuple((t.shape, t.dtype, t.device, t.stride()) for t in tensors)
    error = setting = None
    try:
        if op not in OPERATIONS:
            raise SettingError(f"all_reduce_gradients: unknown op {op!r}; allowed: {', '.join(OPERATIONS)}")
        setting = Compression.resolve(compression)
        if (setting, op, layout) in known:
            return known[setting, op, layout]
    except SettingError as found:
        error = found
    names = _names(tensors)
    description = {"compression": str(setting), "op": op}
    description.update((name, describe_tensor(t)) for name, t in zip(names, tensors, strict=True))
    check_agreement(transport, description, error)
    assert setting is not None
    return known.setdefault((setting, op, layout), _Reduction(tensors, transport, setting, op))


def _as_owner(tensor: Tensor) -> Tensor:
    """A leaf whose `.grad` is `tensor`."""
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError("a lazy conjugate or negative cannot be averaged in place: call resolve_conj() first")
    if tensor.requires_grad:
        raise TensorError("a tensor that autograd computed cannot be averaged in place: pass tensor.detach()")
    owner = tensor.detach()
    owner.grad = tensor.detach()
    return owner


def transport_of(group: dist.ProcessGroup | None, call: str, device: str = "cpu") -> Transport:
    """The transport that calls over `group` share for a type of device; `call` asks, and is named in errors.

    Raises:
        NotInitializedError: if there is no group.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise NotInitializedError(call)
    made = _transports.setdefault(group, {})
    if device not in made:
        made[device] = make_transport(group, device)
    return made[device]
