"""What is looked at before a collective starts: op, ranks, tensors, and with FASTREDUCE_DEBUG=1 the other ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..environment.variables import switch
from ..errors import DeviceError, FastreduceError, MismatchError, SettingError, TensorError
from ..transports.messages import decode, of_types
from ..transports.ranks import group_device_types
from .meetings import exchange_notes, find_sender, meet_in, ranks_of

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
        raise SettingError(
            f"{call} on rank {dist.get_rank()}: {name}={rank!r} is not in the group; its ranks: {allowed}"
        )


def check_peer(call: str, name: str, rank: int, group: dist.ProcessGroup) -> None:
    """Raise SettingError unless `rank` is another rank of `group`."""
    check_rank(call, name, rank, group)
    if rank == dist.get_rank():
        raise SettingError(f"{call} on rank {rank}: {name}={rank} is this rank itself; it must be another one")


def check_tag(call: str, tag: Any) -> None:
    """Raise SettingError unless `tag` is one of a message."""
    if not isinstance(tag, int) or not 0 <= tag < 1 << 31:
        raise SettingError(f"{call} on rank {dist.get_rank()}: tag={tag!r}; allowed: 0 to {(1 << 31) - 1}")


def check_axis(call: str, axis: Any, tensor: Tensor) -> None:
    """Raise TensorError unless `axis` is one of `tensor`'s."""
    if not isinstance(axis, int) or not -tensor.dim() <= axis < tensor.dim():
        allowed = f"{-tensor.dim()} to {tensor.dim() - 1}" if tensor.dim() else "none"
        what = f"axis {axis!r} of a tensor of shape {tuple(tensor.shape)}; allowed: {allowed}"
        raise TensorError(f"{call} on rank {dist.get_rank()}: {what}")


def check_tensors(call: str, tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Check that `group` can move all tensors.

    Raises:
        TensorError: if one is no dense tensor.
        DeviceError: if one is on a device whose tensors the group's backend does not move, or they are on several.
    """
    rank, allowed, first = dist.get_rank(), group_device_types(group), None
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


def debugging() -> bool:
    """Whether ranks are held against each other before each call."""
    return switch(DEBUG_VARIABLE)


def agree(call: str, group: dist.ProcessGroup, description: str) -> None:
    """In debug mode: come together before the call, and hold what all ranks are about to do against each other.

    Raises:
        MismatchError: on every rank alike, naming who is about to do what.
        TransportError: naming the ranks that do not come within the timeout.
    """
    if not debugging():
        return
    told = meet_in(group, call, note=f"{call}: {description}")
    by_text: dict[str, list[str]] = {}
    for rank, text in told.items():
        by_text.setdefault(text, []).append(str(rank))
    if len(by_text) > 1:
        each = "; ".join(f"rank {', '.join(ranks)} has {text}" for text, ranks in by_text.items())
        raise MismatchError(f"ranks differ in a collective: {each}")


@contextmanager
def tell_of_errors(call: str, group: dist.ProcessGroup) -> Iterator[None]:
    """In debug mode: let the others, who wait in `agree`, know of an error in what this rank was given for `call`."""
    try:
        yield
    except FastreduceError as error:
        with suppress(FastreduceError):  # theirs
            agree(call, group, f"{type(error).__name__}: {error}")
        raise


def agree_on_parts(call: str, group: dist.ProcessGroup, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
    """In debug mode: hold what each rank sends to each against what that one takes from it. Raises as `agree`."""
    if not debugging():
        return
    note = json.dumps([[text_of(t) for t in sent], [text_of(t) for t in taken]])
    ranks = ranks_of(group)

    def texts(value: Any) -> list[list[str]]:
        for part in of_types(value, list, list):
            of_types(part, *[str] * len(ranks))
        return value  # type: ignore[no-any-return]

    told = {rank: decode(text, rank, texts) for rank, text in meet_in(group, call, note=note).items()}
    differences = [
        f"rank {a} sends rank {b} {told[a][0][j]}, rank {b} takes {told[b][1][i]}"
        for i, a in enumerate(ranks)
        for j, b in enumerate(ranks)
        if told[a][0][j] != told[b][1][i]
    ]
    if differences:
        raise MismatchError(f"ranks differ in a collective: {call}: {'; '.join(differences)}")


def agree_with_receiver(tensor: Tensor, destination: int, tag: int, group: dist.ProcessGroup) -> None:
    """In debug mode, in `send`: hold the tensor against the receiver's.

    Raises:
        MismatchError: on both ranks.
        TransportError: if the other one does not come within the timeout.
    """
    if debugging():
        told = exchange_notes(group, "send", dist.get_rank(), destination, tag, text_of(tensor))
        _check_message(text_of(tensor), told, dist.get_rank(), destination, tag)


def agree_with_sender(tensor: Tensor, source: int | None, tag: int, group: dist.ProcessGroup) -> int | None:
    """In debug mode, in `recv`: hold the tensor against the sender's, and return the sender. Raises as above."""
    if not debugging():
        return source
    source = find_sender(group, tag) if source is None else source
    told = exchange_notes(group, "recv", source, dist.get_rank(), tag, text_of(tensor))
    _check_message(told, text_of(tensor), source, dist.get_rank(), tag)
    return source


def _check_message(sent: str, taken: str, source: int, destination: int, tag: int) -> None:
    if sent != taken:
        raise MismatchError(
            f"ranks differ in a message with tag {tag}: rank {source} sends {sent}, rank {destination} takes {taken}"
        )
