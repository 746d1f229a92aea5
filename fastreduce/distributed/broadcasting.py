"""bcast_list_: one rank's values for a list of tensors or arrays, packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..errors import SettingError, TensorError
from ..reduction.agreement import check_agreement, describe_tensor
from ..reduction.arrays import as_list, as_tensor
from ..reduction.bucketed import BUCKET_BYTES
from ..reduction.buckets import ParameterSpec, group_by_size, table_of
from ..reduction.one_call import transport_of
from ..transports.ranks import group_device, group_device_types
from . import collectives
from .checks import check_rank
from .meetings import group_or_default, ranks_of
from .works import count_as_written


def bcast_list_(tensors: Iterable[Any], group: dist.ProcessGroup | None = None, src: int | None = None) -> None:
    """Give every rank one rank's values, in place: parameters, buffers, arrays, of any dtypes.

    Floating-point ones travel packed by the flatten kernel, the others as bytes. The list is compared between
    ranks first.

    Args:
        tensors: torch tensors, NumPy or CuPy arrays, and whatever has `__dlpack__` or `__cuda_array_interface__`.
        group: the ranks; None means the default group.
        src: the global rank whose values they get; None means the group's first.

    Raises:
        NotInitializedError: if there is no process group.
        SettingError: if `src` is not in the group.
        TensorError: if something cannot be written in place.
        MismatchError: on every rank, if the lists differ in length, shape or dtype, or on other ranks' errors.
        TransportError: if a peer is gone, or does not come within the timeout.
    """
    group = group_or_default("bcast_list_", group)
    src = ranks_of(group)[0] if src is None else src
    found: list[Tensor] = []
    error: SettingError | TensorError | None = None
    try:
        check_rank("bcast_list_", "src", src, group)
        found = [_writable(array) for array in as_list(tensors)]
    except (SettingError, TensorError) as wrong:
        error = wrong
    description = {"src": str(src), **{f"tensor {i}": describe_tensor(t) for i, t in enumerate(found)}}
    check_agreement(transport_of(group, "bcast_list_"), description, error)
    with torch.no_grad():
        dense = [t if ops.is_dense(t) else t.contiguous() for t in found]
        specs = [ParameterSpec(f"tensor {i}", t.numel(), t.dtype, t.device) for i, t in enumerate(dense)]
        for indices in group_by_size(specs, range(len(specs)), [BUCKET_BYTES]):
            _broadcast([dense[i] for i in indices], group, src)
        for tensor, stand_in in zip(found, dense, strict=True):
            if stand_in is not tensor:
                tensor.copy_(stand_in)


def _writable(array: Any) -> Tensor:
    tensor = as_tensor(array).detach()
    if tensor.layout is not torch.strided:
        raise TensorError(f"bcast_list_: a {tensor.layout} tensor; only dense ones are broadcast")
    if tensor.is_conj() or tensor.is_neg():
        raise TensorError("bcast_list_: a lazy conjugate or negative cannot be written: call resolve_conj() first")
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _broadcast(tensors: Sequence[Tensor], group: dist.ProcessGroup, src: int) -> None:
    """Broadcast dense tensors of one dtype and device as one wire."""
    like = tensors[0]
    packed = like.dtype in ops.FLOATS  # the kernel computes: other dtypes are moved as they are
    if packed:
        table = table_of([t.numel() for t in tensors], 1)
        wire = torch.empty(table.total, dtype=like.dtype, device=like.device)
        ops.choose(like.device).flatten(tensors, table, wire, 1.0)
    else:
        wire = torch.cat([_memory(t) for t in tensors])
    moved = wire if like.device.type in group_device_types(group) else wire.to(group_device(group))
    collectives.broadcast(moved, src, group)
    if moved is not wire:
        wire.copy_(moved)
    if packed:
        ops.choose(like.device).unflatten(wire, table, tensors, 1.0)
        count_as_written(*tensors)
        return
    for tensor, part in zip(tensors, wire.split([t.nbytes for t in tensors]), strict=True):
        _memory(tensor).copy_(part)


def _memory(tensor: Tensor) -> Tensor:
    """A dense tensor's bytes, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
