"""Collectives in place, into the caller's tensors: torch.distributed's names and arguments, checked before the call.

Ranks in arguments are global, also with `group` (None means the default group). With `async_op=True` each
returns a Work, else None. Tensors may have any strides. All of them raise:

    NotInitializedError   if there is no process group
    SettingError          for an unknown op, or a rank that is not in the group
    TensorError           for a list of the wrong length, or shapes and dtypes that do not fit
    DeviceError           for a tensor on a device whose tensors the backend does not move
    MismatchError         with FASTREDUCE_DEBUG=1: if ranks differ in call, op, shape or dtype, or one raises the above
    TransportError        if a peer is gone, or does not come within the timeout
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import SettingError, TensorError, brief
from .checks import (
    agree,
    agree_on_parts,
    agree_with_receiver,
    agree_with_sender,
    check_alike,
    check_op,
    check_peer,
    check_rank,
    check_tag,
    check_tensors,
    tell_of_errors,
    text_of,
)
from .meetings import group_or_default
from .works import Work, as_transport_error, count_as_written

ReduceOp = dist.ReduceOp
Group = dist.ProcessGroup | None


class _Call:
    """One collective: its checks, and contiguous tensors in the place of those that are not."""

    def __init__(self, name: str, group: Group, *lists: Any, op: Any = None, **ranks: int) -> None:
        self.name, self.group, self.op, self._ranks = name, group_or_default(name, group), op, ranks
        self._last_steps: list[Callable[[], Any]] = []
        self._writes_on: torch.device | None = None
        with self.telling():
            self._check([tensor for each in lists for tensor in self._listed(each)])

    def telling(self) -> AbstractContextManager[None]:
        """Around checks: in debug mode the others are told of their errors. A message has one other, who is not."""
        return nullcontext() if self.name in ("send", "recv") else tell_of_errors(self.name, self.group)

    def _listed(self, tensors: Any) -> list[Tensor]:
        try:
            return [tensors[i] for i in range(len(tensors))]
        except (TypeError, LookupError) as error:
            what = f"{brief(tensors)} is no list of tensors"
            raise TensorError(f"{self.name} on rank {dist.get_rank()}: {what}") from error

    def _check(self, tensors: Sequence[Tensor]) -> None:
        for argument, rank in self._ranks.items():
            check_rank(self.name, argument, rank, self.group)
        if self.op is not None:
            check_op(self.name, self.op)
        check_tensors(self.name, tensors, self.group)
        self._given = " and ".join(dict.fromkeys(str(tensor.dtype) for tensor in tensors))
        linear = self.op in (None, ReduceOp.SUM, ReduceOp.AVG)
        for tensor in tensors:
            if (tensor.is_complex() and not linear) or (tensor.dtype is torch.bool and self.op == ReduceOp.AVG):
                what = f"no {_name(self.op)} of {tensor.dtype} tensors"
                raise TensorError(f"{self.name} on rank {dist.get_rank()}: {what}")

    def agree(self, tensor: Tensor | None, also: str = "") -> None:
        """In debug mode, compare with the other ranks."""
        parts = [text_of(tensor)] if tensor is not None else []
        parts += [f"{argument}={rank}" for argument, rank in self._ranks.items()]
        if self.op is not None:
            parts.append(_name(self.op))
        agree(self.name, self.group, ", ".join([*parts, *([also] if also else [])]))

    def read(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of the same values, real numbers: gloo takes any for dense, in silence."""
        return _real(_contiguous(tensor))

    def write(self, tensor: Tensor) -> Tensor:
        """The same, whose values at the end are `tensor`'s, divided under AVG."""
        flat = _contiguous(tensor)
        self._writes_on = tensor.device
        if self._divides:
            mode = None if flat.is_floating_point() or flat.is_complex() else "trunc"
            size = dist.get_world_size(self.group)
            self._last_steps.append(lambda: flat.div_(size, rounding_mode=mode))
        if not _is_same(flat, tensor):
            self._last_steps.append(lambda: _copy(flat, tensor.detach()))
        else:
            self._last_steps.append(lambda: count_as_written(tensor))
        return _real(flat)

    def fill(self, tensors: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
        """At the end, give each of `tensors` the values of its 1-D part."""

        def copy() -> None:
            for tensor, part in zip(tensors, parts, strict=True):
                if tensor.is_complex():
                    part = torch.view_as_complex(part.view(-1, 2))
                _copy(part.view(tensor.shape), tensor.detach())

        self._last_steps.append(copy)
        self._writes_on = tensors[0].device

    @property
    def _divides(self) -> bool:
        """Whether AVG is a sum and a division here: gloo has no AVG in every torch."""
        return self.op == ReduceOp.AVG and "nccl" not in dist.get_backend_config(self.group)

    @property
    def chosen_op(self) -> Any:
        """What the backend is to do."""
        return ReduceOp.SUM if self._divides else self.op

    def start(self, function: Callable[..., Any], *args: Any, async_op: bool) -> Work | None:
        """Call into torch."""
        with as_transport_error(self.name, self._given):
            inner = function(*args, group=self.group, async_op=True)
        work = Work(self.name, inner, self._last_steps, self._given, self._writes_on)
        if async_op:
            return work
        work.wait()
        return None


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Work | None:
    """Reduce `tensor` over the ranks, in place on each; any shape, the same on every rank."""
    call = _Call("all_reduce", group, [tensor], op=op)
    call.agree(tensor)
    return call.start(dist.all_reduce, call.write(tensor), call.chosen_op, async_op=async_op)


def reduce(
    tensor: Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `tensor` over the ranks into rank `dst`'s; on other ranks it stays as it is."""
    call = _Call("reduce", group, [tensor], op=op, dst=dst)
    call.agree(tensor)
    # gloo leaves partial sums in what it is given: other ranks give a copy.
    flat = call.write(tensor) if dist.get_rank() == dst else call.read(tensor).clone()
    return call.start(dist.reduce, flat, dst, call.chosen_op, async_op=async_op)


def broadcast(tensor: Tensor, src: int = 0, group: Group = None, async_op: bool = False) -> Work | None:
    """Give every rank the values of rank `src`, in `tensor`; any shape, the same on every rank."""
    call = _Call("broadcast", group, [tensor], src=src)
    call.agree(tensor)
    return call.start(dist.broadcast, call.write(tensor), src, async_op=async_op)


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list`, in the group's order, with every rank's `tensor`."""
    call = _Call("all_gather", group, [tensor], tensor_list)
    with call.telling():
        check_alike(call.name, tensor_list, tensor, call.group)
    call.agree(tensor)
    into = [call.write(t) for t in tensor_list]
    return call.start(dist.all_gather, into, call.read(tensor), async_op=async_op)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill rank `dst`'s `gather_list` with every rank's `tensor`; other ranks pass no list."""
    call = _Call("gather", group, [tensor], () if gather_list is None else gather_list, dst=dst)
    with call.telling():
        _check_list(call, "gather_list", gather_list, dst, tensor)
    call.agree(tensor)
    into = None if gather_list is None else [call.write(t) for t in gather_list]
    return call.start(dist.gather, call.read(tensor), into, dst, async_op=async_op)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Fill every rank's `tensor` with its entry of rank `src`'s `scatter_list`; other ranks pass no list."""
    call = _Call("scatter", group, [tensor], () if scatter_list is None else scatter_list, src=src)
    with call.telling():
        _check_list(call, "scatter_list", scatter_list, src, tensor)
    call.agree(tensor)
    out = None if scatter_list is None else [call.read(t) for t in scatter_list]
    return call.start(dist.scatter, call.write(tensor), out, src, async_op=async_op)


def reduce_scatter(
    output: Tensor, input_list: Sequence[Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce `input_list` over the ranks entry by entry, and put this rank's entry into `output`."""
    call = _Call("reduce_scatter", group, [output], input_list, op=op)
    with call.telling():
        check_alike(call.name, input_list, output, call.group)
    call.agree(output)
    out = [call.read(t) for t in input_list]
    return call.start(dist.reduce_scatter, call.write(output), out, call.chosen_op, async_op=async_op)


def all_to_all(
    output_list: Sequence[Tensor], input_list: Sequence[Tensor], group: Group = None, async_op: bool = False
) -> Work | None:
    """Entry i of `input_list` goes to rank i of the group; entry i of `output_list` comes from it. Any shapes."""
    call = _Call("all_to_all", group, output_list, input_list)
    size = dist.get_world_size(call.group)
    with call.telling():
        for name, tensors in (("output_list", output_list), ("input_list", input_list)):
            if len(tensors) != size:
                what = f"{name} has {len(tensors)} tensors for a group of {size} ranks"
                raise TensorError(f"all_to_all on rank {dist.get_rank()}: {what}")
        if len(dtypes := {str(tensor.dtype) for tensor in input_list}) > 1:
            raise TensorError(
                f"all_to_all on rank {dist.get_rank()}: input_list has tensors of {' and '.join(sorted(dtypes))}; they "
                "must be of one dtype"
            )
        for i, tensor in enumerate(output_list):
            if tensor.dtype != (sent := input_list[0].dtype):
                what = f"tensor {i} of output_list is of {tensor.dtype}; needed: {sent}, as in input_list"
                raise TensorError(f"all_to_all on rank {dist.get_rank()}: {what}")
    call.agree(None, f"{input_list[0].dtype}")
    agree_on_parts(call.name, call.group, input_list, output_list)
    # As one tensor each: gloo takes lists only of equal sizes.
    parts = [call.read(t).flatten() for t in input_list]
    sizes = [t.numel() * (2 if t.is_complex() else 1) for t in output_list]
    flat = torch.empty(sum(sizes), dtype=parts[0].dtype, device=parts[0].device)
    call.fill(output_list, flat.split(sizes))
    return call.start(
        dist.all_to_all_single, flat, torch.cat(parts), sizes, [part.numel() for part in parts], async_op=async_op
    )


def send(tensor: Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`, which calls `recv` with a tensor of the same shape and dtype; blocks."""
    call = _Call("send", group, [tensor], dst=dst)
    check_peer(call.name, "dst", dst, call.group)
    check_tag(call.name, tag)
    agree_with_receiver(tensor, dst, tag, call.group)
    with as_transport_error(call.name):
        dist.send(call.read(tensor), dst, call.group, tag)


def recv(tensor: Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Fill `tensor` with what rank `src` sends (None means any rank); blocks. Returns the sender."""
    call = _Call("recv", group, [tensor])
    check_tag(call.name, tag)
    if src is not None:
        check_peer(call.name, "src", src, call.group)
    src = agree_with_sender(tensor, src, tag, call.group)
    flat = _contiguous(tensor)
    with as_transport_error(call.name):
        sender: int = dist.recv(_real(flat), src, call.group, tag)
    if not _is_same(flat, tensor):
        tensor.detach().copy_(flat)
    else:
        count_as_written(tensor)
    return sender


def _check_list(call: _Call, name: str, tensors: Sequence[Tensor] | None, root: int, like: Tensor) -> None:
    rank = dist.get_rank()
    if (tensors is not None) != (rank == root):
        needed = f"a list of {dist.get_world_size(call.group)} tensors" if rank == root else "none"
        raise SettingError(f"{call.name} on rank {rank}: {name} is {tensors!r:.60}; rank {root} passes one: {needed}")
    if tensors is not None:
        check_alike(call.name, tensors, like, call.group)


def _name(op: Any) -> str:
    return str(getattr(op, "op", op)).removeprefix("RedOpType.")


def _copy(flat: Tensor, tensor: Tensor) -> None:
    """On whatever stream: nobody else refers to `flat`, whose memory is another one's."""
    tensor.copy_(flat)
    if flat.is_cuda:
        flat.record_stream(torch.cuda.current_stream(flat.device))


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_same(flat: Tensor, tensor: Tensor) -> bool:
    """Whether what is written into `flat` is in `tensor`."""
    return flat.data_ptr() == tensor.data_ptr()
