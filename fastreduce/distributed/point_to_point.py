"""remote_send and remote_recv: a tensor travels from rank to rank, and its gradient back.

1. `remote_send` sends a header (shape, dtype, whether gradients come back) and the data, and returns a zero
   that stands for the message: backward through it waits for the gradient.
2. `remote_recv` returns the tensor; backward through it sends the gradient.

Messages between two ranks are numbered, so gradients may come back in any order (over NCCL: in the order in which
they are waited for). Sending does not block, as long as no more than 64 MiB are under way to a rank; beyond that, what
was sent first must be received first.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..environment.exits import Exit, at_exit
from ..errors import TensorError, TransportError
from ..transports.ranks import group_device
from .checks import check_peer
from .headers import NUMEL, Header
from .meetings import group_or_default
from .works import as_transport_error

_HEADER, _DATA, _GRADIENT = range(3)
_TAGS = 3  # of one message
_NUMBERS = (1 << 31) // _TAGS  # of messages, after which they begin anew: torch's tags have 31 bits
_MOST_BYTES = 64 << 20
_EXIT_SECONDS = 10.0
NO_SECOND = (
    "a gradient of a gradient that remote_recv has sent back: it does not travel between ranks. Use the collectives of "
    "fastreduce.distributed.functional"
)


class _Wire:
    """What this rank has sent to and received from each rank of one group."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        # Works with the bytes that they send, by destination; gloo tells that one is done only if waited for.
        self._under_way: defaultdict[int, deque[tuple[Any, Tensor]]] = defaultdict(deque)

    def post(self, call: str, tensor: Tensor, to: int, tag: int, group: dist.ProcessGroup) -> None:
        """Begin to send."""
        if not tensor.numel():
            return
        data = _bytes_of(tensor.detach().to(group_device(group)).resolve_conj().resolve_neg().contiguous())
        under_way = self._under_way[to]
        while under_way and sum(other.nbytes for _, other in under_way) + data.nbytes > _MOST_BYTES:
            self._deliver_oldest(call, to)
        with as_transport_error(call):
            under_way.append((dist.isend(data, to, group, tag=tag), data))

    def deliver(self, call: str, timeout: timedelta = timedelta(0)) -> None:
        """Wait until all that is under way is received."""
        for to in list(self._under_way):
            while self._under_way[to]:
                self._deliver_oldest(call, to, timeout)

    def _deliver_oldest(self, call: str, to: int, timeout: timedelta = timedelta(0)) -> None:
        work, _ = self._under_way[to].popleft()
        with self.dropped_on_error(), as_transport_error(f"{call} (while rank {to} receives what was sent before)"):
            work.wait(timeout)

    @contextlib.contextmanager
    def dropped_on_error(self) -> Iterator[None]:
        """Wait for nothing more where something has failed: gloo's connections do not survive it."""
        try:
            yield
        except TransportError:
            self._under_way.clear()
            raise


_wires: weakref.WeakKeyDictionary[dist.ProcessGroup, _Wire] = weakref.WeakKeyDictionary()


def remote_send(inp: Tensor, dest_rank: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Send a tensor of any shape to another rank, which calls `remote_recv`.

    Args:
        inp: what to send; where it requires grad, both ranks run backward.
        dest_rank: a global rank.
        group: the ranks; None means the default group.

    Returns:
        A zero. Call backward on it, or on a sum with it: the gradient of `inp` comes from the other rank then.
        Gradients of that gradient do not: a backward through it raises RuntimeError.

    Raises:
        NotInitializedError, SettingError, DeviceError: as collectives; to itself is a SettingError too.
        TensorError: for more than 13 dimensions, or a dtype that cannot be told.
        TransportError: if the other rank is gone, or does not receive within the timeout.
    """
    group = group_or_default("remote_send", group)
    check_peer("remote_send", "dest_rank", dest_rank, group)
    if not isinstance(inp, Tensor) or inp.layout is not torch.strided:
        raise TensorError(
            f"remote_send on rank {dist.get_rank()}: the input must be a dense torch tensor, not {inp!r:.60}"
        )
    header = Header.of(f"remote_send on rank {dist.get_rank()}", inp)
    token: Tensor = _Send.apply(inp, header, dest_rank, group)  # type: ignore[no-untyped-call]
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
    group = group_or_default("remote_recv", group)
    check_peer("remote_recv", "src_rank", src_rank, group)
    wire = _wires.setdefault(group, _Wire())
    number = wire.received[src_rank]
    encoded = torch.zeros(NUMEL, dtype=torch.int64, device=group_device(group))
    _receive("remote_recv", encoded, src_rank, _tag(number, _HEADER), group)
    wire.received[src_rank] += 1
    header = Header.decode(f"remote_recv on rank {dist.get_rank()}", src_rank, encoded)
    trigger = torch.zeros((), requires_grad=header.requires_grad, device="cpu")
    result: Tensor = _Receive.apply(trigger, header, src_rank, number, group)  # type: ignore[no-untyped-call]
    return result if device is None else result.to(device)


def drain(group: dist.ProcessGroup | None = None) -> None:
    """Wait until everything sent in `group` (None means all groups) is received.

    Raises:
        TransportError: if it is not, within the timeout.
    """
    for wire in list(_wires.values()) if group is None else [_wires.get(group, _Wire())]:
        wire.deliver("destroy_process_group")


def _deliver_at_exit() -> None:
    """A process that ends takes what it has not sent with it; but nobody waits long for a peer that is gone."""
    for wire in list(_wires.values()):
        with contextlib.suppress(RuntimeError, ValueError):
            wire.deliver("exit", timedelta(seconds=_EXIT_SECONDS))


at_exit(Exit.DELIVER, _deliver_at_exit, _wires)


class _Send(Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, header: Header, to: int, group: dist.ProcessGroup) -> Tensor:
        wire = _wires.setdefault(group, _Wire())
        number = wire.sent[to]
        ctx.group, ctx.to, ctx.number, ctx.header, ctx.device = group, to, number, header, inp.device
        wire.post("remote_send", header.encode(group_device(group)), to, _tag(number, _HEADER), group)
        # A copy: it is read when the other rank receives, and the tensor may hold something else by then.
        wire.post("remote_send", inp.detach().clone(), to, _tag(number, _DATA), group)
        wire.sent[to] += 1
        return inp.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:
        grad = ctx.header.empty(group_device(ctx.group))
        _receive("the backward of remote_send", grad, ctx.to, _tag(ctx.number, _GRADIENT), ctx.group)
        grad = grad.to(ctx.device)
        if torch.is_grad_enabled():  # under create_graph: of how it came about nothing is known here
            grad = torch._C._functions.DelayedError(NO_SECOND, 1)(grad.requires_grad_())
        return grad, None, None, None


class _Receive(Function):
    @staticmethod
    def forward(ctx: Any, trigger: Tensor, header: Header, src: int, number: int, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.src, ctx.number = group, src, number
        result = header.empty(group_device(group))
        _receive("remote_recv", result, src, _tag(number, _DATA), group)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        wire = _wires.setdefault(ctx.group, _Wire())
        wire.post("the backward of remote_recv", grad, ctx.src, _tag(ctx.number, _GRADIENT), ctx.group)
        return None, None, None, None, None


def _receive(call: str, into: Tensor, src: int, tag: int, group: dist.ProcessGroup) -> None:
    if into.numel():
        with _wires.setdefault(group, _Wire()).dropped_on_error(), as_transport_error(call):
            dist.recv(_bytes_of(into), src, group, tag)


def _tag(number: int, kind: int) -> int:
    return number % _NUMBERS * _TAGS + kind


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
