"""remote_send and remote_recv: a tensor travels from rank to rank, and its gradient back.

1. `remote_send` sends a header (shape, dtype, whether gradients come back) and the data, and returns a zero
   that stands for the message: backward through it waits for the gradient.
2. `remote_recv` returns the tensor; backward through it sends the gradient.

Messages between two ranks are numbered, so gradients may come back in any order (over NCCL: in the order in which
they are waited for). Sending does not block, but at most one message a direction and kind is under way to each
rank: the next one waits until it is received.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..errors import TensorError
from .checks import check_peer, device_of
from .headers import NUMEL, Header
from .meetings import group_of
from .works import as_transport_error

_HEADER, _DATA, _GRADIENT = range(3)
_TAGS = 3  # tags of one message
_EXIT_SECONDS = 10.0


class _Wire:
    """What this rank has sent to and received from each rank of one group."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        # Works with the tensors that they send, by destination and kind.
        self.under_way: dict[tuple[int, int], list[tuple[Any, Tensor]]] = {}

    def post(self, call: str, tensor: Tensor, to: int, number: int, kind: int, group: dist.ProcessGroup) -> None:
        """Begin to send; the one before of this kind is received first."""
        self.deliver(call, to, kind)
        if tensor.numel():
            data = _bytes_of(tensor.detach().to(device_of(group)).resolve_conj().resolve_neg().contiguous())
            with as_transport_error(call):
                work = dist.isend(data, to, group, tag=number * _TAGS + kind)
            self.under_way[to, kind] = [(work, data)]

    def deliver(self, call: str, to: int, kind: int, timeout: timedelta = timedelta(0)) -> None:
        """Wait until what is under way is received."""
        for work, _ in self.under_way.pop((to, kind), []):
            with as_transport_error(f"{call} (what was sent to rank {to} before it is not received)"):
                work.wait(timeout)


_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, _Wire] = weakref.WeakKeyDictionary()


def remote_send(inp: Tensor, dest_rank: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Send a tensor of any shape to another rank, which calls `remote_recv`.

    Args:
        inp: what to send; where it requires grad, both ranks run backward.
        dest_rank: a global rank.
        group: the ranks; None means the default group.

    Returns:
        A zero. Call backward on it, or on a sum with it: the gradient of `inp` comes from the other rank then.

    Raises:
        NotInitializedError, SettingError, DeviceError: as collectives; to itself is a SettingError too.
        TensorError: for more than 13 dimensions, or a dtype that cannot be told.
        TransportError: if the other rank is gone, or does not receive within the timeout.
    """
    group = group_of("remote_send", group)
    check_peer("remote_send", "dest_rank", dest_rank, group)
    if not isinstance(inp, Tensor) or inp.layout is not torch.strided:
        raise TensorError(
            f"remote_send on rank {dist.get_rank()}: the input must be a dense torch tensor, not {inp!r:.60}"
        )
    token: Tensor = _Send.apply(inp, dest_rank, group)  # type: ignore[no-untyped-call]
    return token


def remote_recv(
    src_rank: int, device: torch.device | str | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Receive the next tensor that rank `src_rank` sends to this one; shape and dtype come with it.

    It requires grad if the sent one does (and gradients are enabled on both sides); backward sends its gradient.

    Args:
        src_rank: a global rank.
        device: where the result is to be; None means where the group's backend moves tensors.
        group: the ranks; None means the default group.

    Raises:
        NotInitializedError, SettingError: as collectives; from itself is a SettingError too.
        TransportError: if the other rank is gone, or does not send within the timeout.
    """
    group = group_of("remote_recv", group)
    check_peer("remote_recv", "src_rank", src_rank, group)
    wire = _wires.setdefault(group, _Wire())
    number = wire.received[src_rank]
    encoded = torch.zeros(NUMEL, dtype=torch.int64, device=device_of(group))
    _receive("remote_recv", encoded, src_rank, number, _HEADER, group)
    wire.received[src_rank] += 1
    header = Header.decode(encoded)
    trigger = torch.zeros((), requires_grad=header.requires_grad)
    result: Tensor = _Receive.apply(trigger, header, src_rank, number, group)  # type: ignore[no-untyped-call]
    return result if device is None else result.to(device)


def drain(group: dist.ProcessGroup | None = None) -> None:
    """Wait until everything sent in `group` (None means all) is received.

    Raises:
        TransportError: if it is not, within the timeout.
    """
    for wire in list(_wires.values()) if group is None else [_wires.get(group, _Wire())]:
        for to, kind in list(wire.under_way):
            wire.deliver("destroy_process_group", to, kind)


@atexit.register
def _deliver_at_exit() -> None:
    """A process that ends takes what it has not sent with it; but nobody waits long for a peer that is gone."""
    for wire in list(_wires.values()):
        for to, kind in list(wire.under_way):
            with contextlib.suppress(RuntimeError, ValueError):
                wire.deliver("exit", to, kind, timedelta(seconds=_EXIT_SECONDS))


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, to: int, group: dist.ProcessGroup) -> Tensor:
        wire = _wires.setdefault(group, _Wire())
        ctx.group, ctx.to, ctx.number, ctx.device = group, to, wire.sent[to], inp.device
        ctx.header = Header.of(f"remote_send on rank {dist.get_rank()}", inp)._replace(
            requires_grad=ctx.needs_input_grad[0]
        )
        wire.post("remote_send", ctx.header.encode(device_of(group)), to, ctx.number, _HEADER, group)
        wire.post("remote_send", inp, to, ctx.number, _DATA, group)
        wire.sent[to] += 1
        return inp.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        grad = ctx.header.empty(device_of(ctx.group))
        _receive("the backward of remote_send", grad, ctx.to, ctx.number, _GRADIENT, ctx.group)
        return grad.to(ctx.device), None, None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, header: Header, src: int, number: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.src, ctx.number = group, src, number
        result = header.empty(device_of(group))
        _receive("remote_recv", result, src, number, _DATA, group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        wire = _wires.setdefault(ctx.group, _Wire())
        wire.post("the backward of remote_recv", grad, ctx.src, ctx.number, _GRADIENT, ctx.group)
        return None, None, None, None, None


def _receive(call: str, into: Tensor, src: int, number: int, kind: int, group: dist.ProcessGroup) -> None:
    if into.numel():
        with as_transport_error(call):
            dist.recv(_bytes_of(into), src, group, tag=number * _TAGS + kind)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
