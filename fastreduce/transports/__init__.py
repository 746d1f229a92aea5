"""What moves wires between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist

from .base import Transport, Work
from .gloo import GlooTransport, TorchProcessGroup
from .local import LocalTransport, local_ranks
from .nccl import NcclTransport

__all__ = [
    "GlooTransport",
    "LocalTransport",
    "NcclTransport",
    "TorchProcessGroup",
    "Transport",
    "Work",
    "local_ranks",
    "make_transport",
    "register_transport",
]

Factory = Callable[[dist.ProcessGroup], Transport]

_factories: weakref.WeakKeyDictionary[dist.ProcessGroup, Factory] = weakref.WeakKeyDictionary()


def register_transport(group: dist.ProcessGroup, factory: Factory) -> None:
    """Let `make_transport` call `factory` for `group`; the default group's serves all groups that have none."""
    _factories[group] = factory


def make_transport(group: dist.ProcessGroup, device: torch.device | str = "cpu") -> Transport:
    """What moves wires on `device` between the ranks of `group`.

    One rank alone needs nobody; else what was registered, NCCL for CUDA, gloo for the CPU.

    Raises:
        BackendUnavailableError: if NCCL is needed and cannot be used.
    """
    if dist.get_world_size(group) == 1:
        return LocalTransport()
    world = dist.group.WORLD
    factory = _factories.get(group) or (world and _factories.get(world))
    return (factory or (NcclTransport if torch.device(device).type == "cuda" else GlooTransport))(group)
