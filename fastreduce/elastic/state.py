"""The state of a training on its way from one rank to the others: over the transport, as plain data and tensors."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint import snapshot_file
from ..checkpoint.parts import load_into, state_of
from ..errors import SettingError, TransportError
from ..transports import Transport
from ..transports.messages import checked, of_types

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 20  # that each rank passes on at once


def send(parts: Mapping[str, Any], step: int, transport: Transport, source: int, new: bool) -> int | None:
    """Send the state of rank `source` to all, and load it where a rank is `new`; every rank calls it.

    Args:
        parts: what has a state, by name.
        step: how many steps the source has committed.
        transport: among all.
        source: a rank.
        new: whether this rank has none yet; it takes that, unless it is the source.

    Returns:
        The source's step, where it was taken.

    Raises:
        TransportError: if a rank is lost, or what comes is no state.
        SettingError: on new ranks, if a part has no such state (ranks have different parts), or the source cannot send
            its own.
    """
    data, why = _dumped(parts, step) if transport.rank == source else (b"", "")
    told = checked(transport.exchange([len(data), why]), lambda value: of_types(value, int, str), "size of its state")
    size, why = told[source]
    if why:
        why = f"rank {source} cannot send its state, so that nobody can come in: {why:.400}"
        if new:
            raise SettingError(why)
        logger.warning("%s", why)
        return None
    data = _broadcast(data, size, transport, source)
    if not new or transport.rank == source:
        return None
    try:
        found = snapshot_file.load(data, dict)
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
    whole = torch.zeros(-(-size // ranks) * ranks, dtype=torch.uint8)
    if data:
        whole[:size] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for wire in whole.split(chunk):
        received = torch.empty_like(wire).view(ranks, -1)
        transport.all_to_all(received, wire).wait()
        wire.view(ranks, -1)[transport.rank] = received[source]
        transport.all_gather(wire).wait()
    return whole[:size].numpy().tobytes()
