"""The state of a training on its way from one rank to the others: over the transport, as plain data and tensors."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checkpoint import snapshot_file
from ..checkpoint.parts import load_into, state_of, unwrapped
from ..ddp import DistributedDataParallel
from ..environment.stacks import OURS
from ..errors import SettingError, TransportError
from ..reduction.buckets import round_up
from ..transports import Transport
from ..transports.messages import checked, of_types
from .storages import pieces, put_in, take_out
from .times import LOOK_SECONDS

T = TypeVar("T")

logger = logging.getLogger(__name__)

WIRE_BYTES = 16 << 20  # that are under way at once


class Model:
    """What a wrapped module has between two steps: its state, and what is in no `state_dict`.

    That is: buffers that are not persistent, which torch's class makes equal, too, and averages in `.grad`, where a
    user accumulates or zeroes them in place.

    Args:
        ddp: the wrapper.
        averages: whether its `.grad` are averages: they are sent then.
    """

    def __init__(self, ddp: DistributedDataParallel, averages: bool) -> None:
        self._ddp, self._averages = ddp, averages

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors."""
        module, state = unwrapped(self._ddp), state_of(self._ddp)
        buffers = {name: buffer for name, buffer in module.named_buffers() if name not in state}
        found = self._ddp.reducer.buckets.gradients
        named = zip(found.names, found.parameters, strict=True)
        grads = {name: p.grad.detach() for name, p in named if p.grad is not None} if self._averages else None
        return {"module": state, "buffers": buffers, "grads": grads}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load it."""
        load_into(self._ddp, state["module"])
        own = dict(unwrapped(self._ddp).named_buffers())
        for name, buffer in state["buffers"].items():
            if name in own and own[name].shape == buffer.shape:  # else it is a cache that grows
                own[name].copy_(buffer)
        if (grads := state["grads"]) is not None:
            found = self._ddp.reducer.buckets.gradients
            for name, parameter in zip(found.names, found.parameters, strict=True):
                grad = grads.get(name)
                parameter.grad = None if grad is None else grad.to(parameter.device)


def digest(ddp: DistributedDataParallel) -> str:
    """Of the bits of all parameters that are averaged."""
    found = hashlib.sha256()
    for parameter in ddp.reducer.buckets.gradients.parameters:
        found.update(parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


def send(
    parts: Mapping[str, Any], step: int, transport: Transport, source: int, taken: Callable[[int], object] | None
) -> None:
    """Send the state of rank `source` to all, and load it where it is asked for; every rank calls it.

    Args:
        parts: what has a state, by name.
        step: how many steps the source has committed.
        transport: among all.
        source: a rank.
        taken: on a rank that has no state yet, and is not the source: called with the source's step when it is loaded.

    Raises:
        TransportError: if a rank is lost, or what comes is no state.
        SettingError: on new ranks, if a part has no such state (ranks have different parts), or the source cannot send
            its own.
    """
    plain, storages, why = _together(
        lambda: _dumped(parts, step) if transport.rank == source else (b"", list[Tensor](), ""), transport
    )
    told = checked(
        transport.exchange([len(plain), sum(map(len, storages)), why]),
        lambda value: of_types(value, int, int, str),
        "size of its state",
    )
    size, in_storages, why = told[source]
    if why:
        why = f"rank {source} cannot send its state, so that nobody can come in: {why:.400}"
        if taken is not None:
            raise SettingError(why)
        logger.warning("%s", why)
        return
    data = torch.frombuffer(bytearray(plain or size), dtype=torch.uint8)
    _broadcast([data], size, transport, source)
    state, into = _together(
        lambda: _opened(data, in_storages, source) if taken is not None else ({}, storages), transport
    )
    _broadcast(into, in_storages, transport, source)
    _together(lambda: taken(_load(state, parts)) if taken is not None else None, transport)


def _together(function: Callable[[], T], transport: Transport) -> T:
    """`function()`, while ranks tell each other that they are there, until it has ended on all of them.

    So it may take longer than a collective. Where a rank is lost meanwhile, a function that loads comes to its end
    first.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def there() -> T:
        # Each thread has a current GPU of its own, at first GPU 0: a part may name none.
        with nullcontext() if device is None else torch.cuda.device(device):
            return function()

    pool = ThreadPoolExecutor(1, thread_name_prefix=f"{OURS}state")
    ended = pool.submit(there)
    try:
        while True:
            wait([ended], LOOK_SECONDS)
            if done := ended.done():
                ended.result()  # where it raises, this rank is lost to the others
            if all(checked(transport.exchange(done), _bool, "word on its state")):
                return ended.result()
    finally:
        pool.shutdown()


def _bool(value: Any) -> bool:
    (found,) = of_types([value], bool)
    return bool(found)


def _opened(data: Tensor, size: int, source: int) -> tuple[dict[str, Any], list[Tensor]]:
    """What rank `source` has sent, and its storages, of `size` bytes in all, which are to be filled."""
    try:
        found, into = put_in(snapshot_file.load(io.BytesIO(data.numpy().data), dict))
        of_types([found["step"], found["parts"]], int, dict)
        if sum(map(len, into)) != size:
            raise ValueError(f"tensors have {sum(map(len, into))} bytes, and {size} were told")
    except Exception as error:
        raise TransportError(f"rank {source} sent no state of a training: {error}") from error
    return found, into


def _load(found: Mapping[str, Any], parts: Mapping[str, Any]) -> int:
    """Load what was sent; returns its step."""
    states = found["parts"]
    if states.keys() != parts.keys():
        raise SettingError(
            f"fastreduce.elastic.join was given the parts {', '.join(parts)}; those who train have {', '.join(states)}"
        )
    for name, part in parts.items():
        load_into(part, states[name])
    return int(found["step"])


def _dumped(parts: Mapping[str, Any], step: int) -> tuple[bytes, list[Tensor], str]:
    """The state as bytes and storages, or why it cannot be sent: who trains goes on, whatever is in a part."""
    try:
        plain, storages = take_out({"step": step, "parts": {name: state_of(part) for name, part in parts.items()}})
        data = snapshot_file.dump(plain)
        snapshot_file.check_plain(io.BytesIO(data))
        for device in {storage.device for storage in storages if storage.is_cuda}:
            torch.cuda.synchronize(device)  # they are read on another thread, whose current stream may be another
    except Exception as error:
        return b"", [], f"{type(error).__name__}: {error}"
    return data, storages, ""


def _broadcast(storages: Sequence[Tensor], size: int, transport: Transport, source: int) -> None:
    """Rank `source`'s bytes, `size` in all, into `storages` of the others, UINT8 `[bytes]`; one may want none of them.

    Each gets a shard of a wire, and passes it on to all.
    """
    ranks = transport.world_size
    chunk = round_up(min(WIRE_BYTES, max(size, 1)), ranks)
    in_turn = pieces(storages, chunk)
    memory, memory_received = torch.zeros(2, chunk, dtype=torch.uint8, device="cpu")
    for start in range(0, size, chunk):
        used = round_up(min(chunk, size - start), ranks)
        wire, received = memory[:used], memory_received[:used].view(ranks, -1)
        own = next(in_turn, [])
        places = wire[: sum(map(len, own))].split([*map(len, own)])
        if transport.rank == source:
            for place, piece in zip(places, own, strict=True):
                place.copy_(piece)
        transport.all_to_all(received, wire).wait()
        wire.view(ranks, -1)[transport.rank] = received[source]
        transport.all_gather(wire).wait()
        if transport.rank != source:
            for place, piece in zip(places, own, strict=True):
                piece.copy_(place)
