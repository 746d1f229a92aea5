"""The state of a training on its way from one rank to the others: over the transport, as plain data and tensors."""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from ..checkpoint import snapshot_file
from ..checkpoint.parts import load_into, state_of, unwrapped
from ..ddp import DistributedDataParallel
from ..environment.stacks import OURS
from ..errors import SettingError, TransportError
from ..reduction.buckets import round_up
from ..transports import Transport
from ..transports.messages import checked, of_types
from .times import LOOK_SECONDS

T = TypeVar("T")

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 20  # that each rank passes on at once


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
    data, why = _together(lambda: _dumped(parts, step) if transport.rank == source else (b"", ""), transport)
    told = checked(transport.exchange([len(data), why]), lambda value: of_types(value, int, str), "size of its state")
    size, why = told[source]
    if why:
        why = f"rank {source} cannot send its state, so that nobody can come in: {why:.400}"
        if taken is not None:
            raise SettingError(why)
        logger.warning("%s", why)
        return
    data = _broadcast(data, size, transport, source)
    _together(lambda: taken(_load(data, parts, source)) if taken is not None else None, transport)


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


def _load(data: bytes, parts: Mapping[str, Any], source: int) -> int:
    """Load what rank `source` has sent; returns its step."""
    try:
        found = snapshot_file.load(io.BytesIO(data), dict)
        step, states = of_types([found["step"], found["parts"]], int, dict)
    except Exception as error:
        raise TransportError(f"rank {source} sent no state of a training: {error}") from error
    if states.keys() != parts.keys():
        raise SettingError(
            f"fastreduce.elastic.join was given the parts {', '.join(parts)}; those who train have {', '.join(states)}"
        )
    for name, part in parts.items():
        load_into(part, states[name])
    return int(step)


def _dumped(parts: Mapping[str, Any], step: int) -> tuple[bytes, str]:
    """The state as bytes, or why it cannot be sent: who trains goes on, whatever is in a part."""
    try:
        data = snapshot_file.dump({"step": step, "parts": {name: state_of(part) for name, part in parts.items()}})
        snapshot_file.check_plain(io.BytesIO(data))
    except Exception as error:
        return b"", f"{type(error).__name__}: {error}"
    return data, ""


def _broadcast(data: bytes, size: int, transport: Transport, source: int) -> bytes:
    """Rank `source`'s bytes, so many, on every rank: each gets a shard of them, and passes it on to all."""
    ranks = transport.world_size
    chunk = SHARD_BYTES * ranks
    whole = torch.zeros(round_up(size, ranks), dtype=torch.uint8, device="cpu")
    if data:
        whole[:size] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for wire in whole.split(chunk):
        received = torch.empty_like(wire).view(ranks, -1)
        transport.all_to_all(received, wire).wait()
        wire.view(ranks, -1)[transport.rank] = received[source]
        transport.all_gather(wire).wait()
    return whole[:size].numpy().tobytes()
