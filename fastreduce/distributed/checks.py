"""What is looked at before a collective starts: op, ranks, tensors, and with FASTREDUCE_DEBUG=1 the other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DeviceError, MismatchError, SettingError, TensorError
from .meetings import meet_in, ranks_of

DEBUG_VARIABLE = "FASTREDUCE_DEBUG"
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def check_op(call: str, op: Any) -> None:
    """Raise SettingError unless `op` is one of ReduceOp's."""
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise SettingError(
            f"{call} on rank {dist.get_rank()}: unknown op {op!r}; allowed: ReduceOp.{', ReduceOp.'.join(OPERATIONS)}"
        )


def check_rank(call: str, name: str, rank: int, group: dist.ProcessGroup) -> None:
    """Raise SettingError unless global rank `rank`, the argument called `name`, is in `group`."""
    ranks = ranks_of(group)
    if rank not in ranks:
        allowed = f"0 to {len(ranks) - 1}" if ranks == list(range(len(ranks))) else ", ".join(map(str, ranks))
        raise SettingError(f"{call} on rank {dist.get_rank()}: {name}={rank} is not in the group; its ranks: {allowed}")


def check_peer(call: str, name: str, rank: int, group: dist.ProcessGroup) -> None:
    """Raise SettingError unless `rank` is another rank of `group`."""
    check_rank(call, name, rank, group)
    if rank == dist.get_rank():
        raise SettingError(f"{call} on rank {rank}: {name}={rank} is this rank itself; it must be another one")


def devices_of(group: dist.ProcessGroup) -> list[str]:
    """Types of the devices whose tensors `group` moves."""
    return sorted({device.type for device in group._device_types})


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Where tensors that `group` moves can be made: the CPU if it moves those, else the current GPU."""
    return torch.device("cpu") if "cpu" in devices_of(group) else torch.device("cuda", torch.cuda.current_device())


def check_tensors(call: str, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Check that `group` can move all tensors.

    Raises:
        TensorError: if one is no dense tensor.
        DeviceError: if one is on a device whose tensors the group's backend does not move, or they are on several.
    """
    rank, allowed, first = dist.get_rank(), devices_of(group), None
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            what = f"a {tensor.layout} tensor" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise TensorError(f"{call} on rank {rank}: tensor {i} is {what}; it must be a dense torch tensor")
        if tensor.device.type not in allowed:
            raise DeviceError(
                f"{call} on rank {rank}: tensor {i} is on {tensor.device}; backend {dist.get_backend_config(group)} "
                f"moves tensors on {' and '.join(allowed)}"
            )
        first = first or tensor.device
        if tensor.device != first:
            raise DeviceError(f"{call} on rank {rank}: tensor 0 is on {first}, tensor {i} on {tensor.device}")


def check_alike(call: str, tensors: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup) -> None:
    """Raise TensorError unless there is a tensor for each rank of `group`, of the shape and dtype of `like`."""
    size, rank = dist.get_world_size(group), dist.get_rank()
    if len(tensors) != size:
        raise TensorError(f"{call} on rank {rank}: {len(tensors)} tensors for a group of {size} ranks")
    for i, tensor in enumerate(tensors):
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise TensorError(
                f"{call} on rank {rank}: tensor {i} of the list is {text_of(tensor)}; needed: {text_of(like)}"
            )


def text_of(tensor: Tensor) -> str:
    """A tensor's shape and dtype."""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}"


def agree(call: str, group: dist.ProcessGroup, description: str) -> None:
    """In debug mode: come together before the call, and hold what all ranks are about to do against each other.

    Raises:
        MismatchError: on every rank alike, naming who is about to do what.
        TransportError: naming the ranks that do not come within the timeout.
    """
    if os.environ.get(DEBUG_VARIABLE, "0") in ("", "0"):
        return
    told = meet_in(group, call, note=f"{call}: {description}")
    by_text: dict[str, list[str]] = {}
    for rank, text in told.items():
        by_text.setdefault(text, []).append(str(rank))
    if len(by_text) > 1:
        each = "; ".join(f"rank {', '.join(ranks)} has {text}" for text, ranks in by_text.items())
        raise MismatchError(f"ranks differ in a collective: {each}")
