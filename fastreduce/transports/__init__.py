"""What moves wires between ranks."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, SettingError
from .base import SlotTransport, Transport, Work
from .gloo import GlooTransport, TorchProcessGroup
from .hosts import hosts_of, nodes_of
from .local import LocalTransport, local_ranks
from .nccl import NcclTransport
from .shm import ShmTransport
from .two_level import Connected, Level, Nodes, TwoLevelTransport, two_levels

__all__ = [
    "Connected",
    "GlooTransport",
    "Level",
    "LocalTransport",
    "NcclTransport",
    "Nodes",
    "ShmTransport",
    "SlotTransport",
    "TorchProcessGroup",
    "Transport",
    "TwoLevelTransport",
    "Work",
    "local_ranks",
    "make_transport",
    "register_transport",
]

logger = logging.getLogger(__name__)

Factory = Callable[[dist.ProcessGroup], Transport]

ENVIRONMENT_VARIABLE = "FASTREDUCE_TRANSPORT"
TRANSPORTS: dict[str, Factory] = {
    "gloo": GlooTransport,
    "shm": ShmTransport,
    "nccl": NcclTransport,
}
_DEVICES = {"gloo": ("cpu",), "shm": ("cpu",), "nccl": ("cuda",)}  # whose tensors they move

SPARE = 4  # times what shared memory takes must be free where nobody asked for it: data loaders want some too

_factories: weakref.WeakKeyDictionary[dist.ProcessGroup, Factory] = weakref.WeakKeyDictionary()
_last_choice: weakref.WeakKeyDictionary[dist.ProcessGroup, Factory] = weakref.WeakKeyDictionary()


def register_transport(group: dist.ProcessGroup, factory: Factory) -> None:
    """Let `make_transport` call `factory` for `group`; the default group's serves all groups that have none."""
    _factories[group] = factory


def make_transport(
    group: dist.ProcessGroup,
    device: torch.device | str = "cpu",
    asked: Transport | str | None = None,
    alone: bool = False,
) -> Transport:
    """What moves wires on `device` between the ranks of `group`.

    What was asked for; else what FASTREDUCE_TRANSPORT names, unless it moves no tensors on `device`; else what was
    registered; else NCCL for CUDA, and for the CPU shared memory where all ranks run on one host, or gloo. Where ranks
    run on several hosts, and several on one of them, gloo, and what was registered if it can, carry but what leaves a
    host: two levels. One rank alone needs nobody.

    Args:
        group: the ranks, which all call it.
        device: where the tensors are.
        asked: a transport, or the name of one.
        alone: no other rank calls it: for the CPU what was chosen last, or gloo.

    Raises:
        SettingError: if no transport has that name.
        BackendUnavailableError: if the one that was asked for, or NCCL for CUDA, cannot be used.
        TransportError: if ranks that tell each other their hosts do not come within the timeout.
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
    registered = _factories.get(group) or (_factories.get(world) if world is not None else None)
    if registered is None and kind == "cuda":
        return NcclTransport(group)
    sockets = registered or GlooTransport
    if alone:
        return _last_choice.get(group, sockets)(group)
    return _choose(group, sockets) if getattr(sockets, "of_some", False) else sockets(group)


def _choose(group: dist.ProcessGroup, sockets: Factory) -> Transport:
    """`sockets`, two levels of it and shared memory, or shared memory in gloo's place; on all ranks the same."""
    nodes, factory = nodes_of(hosts_of(group)), sockets
    chosen = None
    if len(nodes) == 1 and sockets is GlooTransport:
        shm = ShmTransport(group, SPARE)
        try:
            shm.connect()
            chosen, factory = shm, ShmTransport
        except BackendUnavailableError as error:  # on every rank
            logger.info("gradients go over gloo: %s", error)
    elif 1 < len(nodes) < dist.get_world_size(group):
        factory = partial(two_levels, nodes=nodes, make=sockets, spare=SPARE)
    _last_choice[group] = factory
    return chosen or factory(group)
