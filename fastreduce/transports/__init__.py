"""What moves wires between ranks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, SettingError
from .base import SlotTransport, Transport, Work
from .gloo import GlooTransport, TorchProcessGroup
from .local import LocalTransport, local_ranks
from .nccl import NcclTransport
from .shm import ShmTransport

__all__ = [
    "GlooTransport",
    "LocalTransport",
    "NcclTransport",
    "ShmTransport",
    "SlotTransport",
    "TorchProcessGroup",
    "Transport",
    "Work",
    "local_ranks",
    "make_transport",
    "register_transport",
]

Factory = Callable[[dist.ProcessGroup], Transport]

ENVIRONMENT_VARIABLE = "FASTREDUCE_TRANSPORT"
TRANSPORTS: dict[str, Factory] = {
    "gloo": GlooTransport,
    "shm": ShmTransport,
    "nccl": NcclTransport,
}
_DEVICES = {"gloo": ("cpu",), "shm": ("cpu",), "nccl": ("cuda",)}  # whose tensors they move

_factories: weakref.WeakKeyDictionary[dist.ProcessGroup, Factory] = weakref.WeakKeyDictionary()


def register_transport(group: dist.ProcessGroup, factory: Factory) -> None:
    """Let `make_transport` call `factory` for `group`; the default group's serves all groups that have none."""
    _factories[group] = factory


def make_transport(
    group: dist.ProcessGroup, device: torch.device | str = "cpu", asked: Transport | str | None = None
) -> Transport:
    """What moves wires on `device` between the ranks of `group`.

    What was asked for; else what FASTREDUCE_TRANSPORT names, unless it moves no tensors on `device`; else what was
    registered, NCCL for CUDA, gloo for the CPU. One rank alone needs nobody.

    Args:
        group: the ranks.
        device: where the tensors are.
        asked: a transport, or the name of one.

    Raises:
        SettingError: if no transport has that name.
        BackendUnavailableError: if the one that was asked for, or NCCL for CUDA, cannot be used.
    """
    if asked is not None and not isinstance(asked, str):
        return asked
    kind = torch.device(device).type
    told = os.environ.get(ENVIRONMENT_VARIABLE) or None
    for name, source in ((asked, f"transport={asked!r}"), (told, f"{ENVIRONMENT_VARIABLE}={told}")):
        if name is not None and name not in TRANSPORTS:
            raise SettingError(f"{source}: allowed: {', '.join(TRANSPORTS)}")
    if asked is not None and kind not in _DEVICES[asked]:
        raise BackendUnavailableError(
            f"transport={asked!r} moves tensors on {' or '.join(_DEVICES[asked])}, and these are on {device}"
        )
    if dist.get_world_size(group) == 1:
        return LocalTransport()
    if asked is not None:
        return TRANSPORTS[asked](group)
    if told is not None and kind in _DEVICES[told]:
        return TRANSPORTS[told](group)
    world = dist.group.WORLD
    factory = _factories.get(group) or (world and _factories.get(world))
    return (factory or (NcclTransport if kind == "cuda" else GlooTransport))(group)
