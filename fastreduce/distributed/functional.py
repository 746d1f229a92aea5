"""Collectives that return their result, with gradients through them.

The gradient of a rank's input is that of the sum of all ranks' losses, as if one process computed them all;
backward runs on every rank. The backward of each is another one of them. `group` is the ranks, None the
default group. What is raised is listed in `collectives`; in debug mode ranks must also agree on whether
gradients are needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..errors import SettingError, TensorError
from ..transports.ranks import group_device
from . import collectives
from .checks import agree, check_axis, check_rank, tell_of_errors
from .collectives import Group, ReduceOp
from .headers import NUMEL, Header
from .meetings import group_or_default, ranks_of
from .point_to_point import remote_recv, remote_send

__all__ = [
    "all_gather",
    "all_reduce_max",
    "all_reduce_min",
    "all_reduce_sum",
    "all_to_all",
    "broadcast",
    "gather",
    "reduce_scatter_sum",
    "reduce_sum",
    "remote_recv",
    "remote_send",
    "scatter",
]


def all_reduce_sum(inp: Tensor, group: Group = None) -> Tensor:
    """The sum over the ranks, on each; the same shape everywhere."""
    return _apply(_AllReduceSum, "all_reduce_sum", inp, group)


def all_reduce_max(inp: Tensor, group: Group = None) -> Tensor:
    """The largest over the ranks, element by element; equal ones share the gradient, as in `torch.amax`."""
    return _apply(_AllReduceExtreme, "all_reduce_max", inp, group, ReduceOp.MAX)


def all_reduce_min(inp: Tensor, group: Group = None) -> Tensor:
    """The smallest over the ranks, element by element; equal ones share the gradient, as in `torch.amin`."""
    return _apply(_AllReduceExtreme, "all_reduce_min", inp, group, ReduceOp.MIN)


def all_gather(inp: Tensor, group: Group = None, axis: int = 0) -> Tensor:
    """Every rank's `inp`, concatenated along `axis` in the group's order, on each; the same shape everywhere."""
    return _apply(_AllGather, "all_gather", inp, group, axis)


def reduce_scatter_sum(inp: Tensor, group: Group = None, axis: int = 0) -> Tensor:
    """This rank's part, of as many equal ones along `axis` as there are ranks, of the sum over the ranks."""
    return _apply(_ReduceScatterSum, "reduce_scatter_sum", inp, group, axis)


def all_to_all(inp: Tensor, group: Group = None, split_axis: int = 0, concat_axis: int = 0) -> Tensor:
    """Part i of `inp` along `split_axis` goes to rank i; what comes is concatenated along `concat_axis`."""
    return _apply(_AllToAll, "all_to_all", inp, group, split_axis, concat_axis)


def reduce_sum(inp: Tensor, group: Group = None, *, dst: int | None = None) -> Tensor:
    """The sum over the ranks on rank `dst` (None means the group's first); zeros on the others."""
    return _apply(_ReduceSum, "reduce_sum", inp, group, _root("reduce_sum", "dst", dst, group))


def gather(inp: Tensor, group: Group = None, axis: int = 0, *, dst: int | None = None) -> Tensor:
    """Every rank's `inp`, concatenated along `axis`, on rank `dst` (None: the group's first); zeros on the others."""
    return _apply(_Gather, "gather", inp, group, axis, _root("gather", "dst", dst, group))


def broadcast(inp: Tensor | None, group: Group = None, *, src: int | None = None) -> Tensor:
    """What rank `src` (None means the group's first) passes, on each; others may pass None; their gradient is zero."""
    return _from_root("broadcast", _Broadcast, inp, group, src, 0)


def scatter(inp: Tensor | None, group: Group = None, axis: int = 0, *, src: int | None = None) -> Tensor:
    """This rank's part along `axis` of what rank `src` (None: the group's first) passes; others may pass None."""
    return _from_root("scatter", _Scatter, inp, group, src, axis)


def _apply(function: type[Function], name: str, inp: Tensor, group: Group, *args: Any) -> Tensor:
    group = group_or_default(name, group)
    with tell_of_errors(name, group):
        _check_input(name, inp)
    if torch.is_grad_enabled():
        agree(name, group, "requires grad" if inp.requires_grad else "requires no grad")
    result: Tensor = function.apply(inp, group, *args)
    return result


def _check_input(name: str, inp: Any) -> None:
    if not isinstance(inp, Tensor):
        raise TensorError(f"{name} on rank {dist.get_rank()}: the input is a {type(inp).__name__}, not a torch tensor")


def _root(call: str, name: str, rank: int | None, group: Group) -> int:
    group = group_or_default(call, group)
    rank = ranks_of(group)[0] if rank is None else rank
    with tell_of_errors(call, group):
        check_rank(call, name, rank, group)
    return rank


def _from_root(
    name: str, function: type[Function], inp: Tensor | None, group: Group, src: int | None, axis: int
) -> Tensor:
    """A header goes ahead, so that the other ranks know shape and dtype, and whether gradients will come back."""
    group = group_or_default(name, group)
    src = _root(name, "src", src, group)
    device = group_device(group)
    header = torch.zeros(NUMEL, dtype=torch.int64, device=device)
    if dist.get_rank() == src:
        with tell_of_errors(name, group):
            if inp is None:
                raise SettingError(f"{name} on rank {src}: the input is None on the rank that it comes from")
            _check_input(name, inp)
            header = Header.of(f"{name} on rank {src}", inp).encode(device)
    collectives.broadcast(header, src, group)
    told = Header.decode(f"{name} on rank {dist.get_rank()}", src, header)
    if dist.get_rank() != src and told.requires_grad:
        if inp is None or not inp.requires_grad:
            inp = torch.zeros((), device=device, requires_grad=True)  # for autograd to follow
    elif dist.get_rank() != src:
        inp = torch.zeros((), device=device)
    assert inp is not None
    result: Tensor = function.apply(inp, group, axis, src, told)
    return result


def _check_axis(name: str, axis: Any, inp: Tensor, group: dist.ProcessGroup) -> None:
    with tell_of_errors(name, group):
        check_axis(name, axis, inp)


def _parts(name: str, tensor: Tensor, group: dist.ProcessGroup, axis: int) -> list[Tensor]:
    """Equal parts of `tensor` along `axis`, one for each rank."""
    size = dist.get_world_size(group)
    with tell_of_errors(name, group):
        check_axis(name, axis, tensor)
        if tensor.shape[axis] % size:
            raise TensorError(
                f"{name} on rank {dist.get_rank()}: shape {tuple(tensor.shape)} does not divide along axis {axis} "
                f"into {size} equal parts"
            )
    return [part.contiguous() for part in tensor.split([tensor.shape[axis] // size] * size, axis)]


class _AllReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = inp.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_sum(grad, ctx.group), None


class _AllReduceExtreme(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, op: Any) -> Tensor:
        ctx.group = group
        out = inp.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(out, op, group)
        ctx.save_for_backward(inp == out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        mine = ctx.saved_tensors[0].to(grad.dtype)
        total, winners = all_reduce_sum(torch.stack([grad, mine]), ctx.group)
        return mine * total / winners, None, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, axis: int) -> Tensor:
        _check_axis("all_gather", axis, inp, group)
        ctx.group, ctx.axis = group, axis
        parts = [torch.empty_like(inp) for _ in range(dist.get_world_size(group))]
        collectives.all_gather(parts, inp, group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_sum(grad, ctx.group, ctx.axis), None, None


class _ReduceScatterSum(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, axis: int) -> Tensor:
        ctx.group, ctx.axis = group, axis
        parts = _parts("reduce_scatter_sum", inp, group, axis)
        out = torch.empty_like(parts[0])
        collectives.reduce_scatter(out, parts, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.group, ctx.axis), None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, split_axis: int, concat_axis: int) -> Tensor:
        ctx.group, ctx.axes = group, (concat_axis, split_axis)
        _check_axis("all_to_all", concat_axis, inp, group)
        parts = _parts("all_to_all", inp, group, split_axis)
        came = [torch.empty_like(parts[0]) for _ in parts]
        collectives.all_to_all(came, parts, group)
        return torch.cat(came, concat_axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, *ctx.axes), None, None, None


class _ReduceSum(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, dst: int) -> Tensor:
        ctx.group, ctx.dst = group, dst
        out = inp.clone(memory_format=torch.contiguous_format)
        collectives.reduce(out, dst, group=group)
        return out if dist.get_rank() == dst else out.zero_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return broadcast(grad, ctx.group, src=ctx.dst), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, axis: int, dst: int) -> Tensor:
        _check_axis("gather", axis, inp, group)
        ctx.group, ctx.axis, ctx.dst = group, axis, dst
        parts = [torch.zeros_like(inp) for _ in range(dist.get_world_size(group))]
        collectives.gather(inp, parts if dist.get_rank() == dst else None, dst, group)
        return torch.cat(parts, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return scatter(grad, ctx.group, ctx.axis, src=ctx.dst), None, None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, axis: int, src: int, header: Header) -> Tensor:
        ctx.group, ctx.src, ctx.shape = group, src, inp.shape
        out = inp.clone(memory_format=torch.contiguous_format) if dist.get_rank() == src else header.empty(inp.device)
        collectives.broadcast(out, src, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        return _of_input(reduce_sum(grad, ctx.group, dst=ctx.src), ctx), None, None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, group: dist.ProcessGroup, axis: int, src: int, header: Header) -> Tensor:
        ctx.group, ctx.axis, ctx.src, ctx.shape = group, axis, src, inp.shape
        here = dist.get_rank() == src
        parts = _parts("scatter", inp if here else header.empty(torch.device("meta")), group, axis)
        out = torch.empty_like(parts[0], device=inp.device)
        collectives.scatter(out, parts if here else None, src, group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        return _of_input(gather(grad, ctx.group, ctx.axis, dst=ctx.src), ctx), None, None, None, None


def _of_input(total: Tensor, ctx: Any) -> Tensor:
    """The gradient of what a rank has passed: all ranks' `total`, or on ranks other than the source zeros.

    These hang on `total`, so that a gradient of the gradient comes through the collective on every rank.
    """
    return total if dist.get_rank() == ctx.src else total.sum().expand(ctx.shape)
