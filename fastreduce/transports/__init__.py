"""What moves wires between ranks."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, FastreduceError, SettingError
from .base import LateGatherTransport, PieceTransport, SlotTransport, Transport, Work
from .choices import agree, known_hosts
from .gloo import GlooTransport, TorchProcessGroup
from .hosts import nodes_of
from .local import LocalTransport, local_ranks
from .mpi import MpiTransport
from .nccl import NcclTransport
from .ranks import own_name
from .shm import ShmTransport
from .two_level import Connected, Level, Nodes, TwoLevelTransport, two_levels, why_no_two_levels

__all__ = [
    "Connected",
    "GlooTransport",
    "LateGatherTransport",
    "Level",
    "LocalTransport",
    "MpiTransport",
    "NcclTransport",
    "Nodes",
    "PieceTransport",
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
# What can be asked for by name, and whose tensors it moves.
TRANSPORTS = {"gloo": ("cpu",), "shm": ("cpu",), "mpi": ("cpu", "cuda"), "nccl": ("cuda",), "two_level": ("cpu",)}
_OF_ONE_LEVEL: dict[str, Factory] = {
    "gloo": GlooTransport,
    "shm": ShmTransport,
    "mpi": MpiTransport,
    "nccl": NcclTransport,
}

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
    error: Exception | None = None,
) -> Transport:
    """What moves wires on `device` between the ranks of `group`.

    What was asked for; else what FASTREDUCE_TRANSPORT names, unless it moves no tensors on `device`; else for CUDA what
    was registered, or NCCL. For the CPU shared memory where all ranks run on one host, and what was registered, or
    gloo, between hosts: where several run on one of them, that carries but what leaves a host, in two levels. What was
    registered, and cannot leave some ranks out, serves alone. One rank alone needs nobody.

    Args:
        group: the ranks, which all call it.
        device: where the tensors are.
        asked: a transport, on every rank then, or the name of one.
        alone: no other rank calls it: for the CPU what was chosen last, or gloo.
        error: why this rank cannot go on, of which the others are told; it is raised.

    Raises:
        SettingError: if no transport has that name, or `asked` is something else.
        BackendUnavailableError: if the one that was asked for, or NCCL for CUDA, cannot be used.
        MismatchError: on every rank, if ranks ask for different ones; on the others, if one raises the above here.
        TransportError: if ranks do not come within the timeout.
    """
    if error is None and isinstance(asked, Transport) and (alone or dist.get_world_size(group) == 1):
        return asked
    name, how = "", ""
    try:
        name, how = _asked_for(group, asked, torch.device(device))
    except FastreduceError as found:
        error = error or found
    alone = alone or dist.get_world_size(group) == 1
    if error is not None and alone:
        raise error
    if dist.get_world_size(group) == 1:
        return LocalTransport()
    hosts = known_hosts(group) if alone else agree(group, name, how, error)
    if isinstance(asked, Transport):
        return asked
    if name in _OF_ONE_LEVEL:
        return _OF_ONE_LEVEL[name](group)
    sockets = _registered(group) or GlooTransport
    if name:
        return _levels(group, sockets, hosts, how)
    if torch.device(device).type != "cpu" or not _takes_some(sockets):
        return sockets(group)
    if alone or hosts is None:
        return _last_choice.get(group, sockets)(group)
    return _choose(group, sockets, nodes_of(hosts))


def transport_asked_for() -> str | None:
    """The transport that FASTREDUCE_TRANSPORT names, where it is set.

    Raises:
        SettingError: if there is no such transport.
    """
    told = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if told is not None and told not in TRANSPORTS:
        raise SettingError(f"{ENVIRONMENT_VARIABLE}={told}: allowed: {', '.join(TRANSPORTS)}")
    return told


def _asked_for(group: dist.ProcessGroup, asked: Transport | str | None, device: torch.device) -> tuple[str, str]:
    """The name of what this rank asks for, and how it does; no name where hosts decide."""
    if isinstance(asked, Transport):
        return f"{asked.name} of the user's", f"transport={type(asked).__name__}(...)"
    if asked is not None and not isinstance(asked, str):
        raise SettingError(f"transport={asked!r}: allowed: {', '.join(TRANSPORTS)}, or a Transport")
    if asked is not None and asked not in TRANSPORTS:
        raise SettingError(f"transport={asked!r}: allowed: {', '.join(TRANSPORTS)}")
    told = transport_asked_for()
    by_argument, by_variable = f"transport={asked!r}", f"{ENVIRONMENT_VARIABLE}={told}"
    if asked is not None and device.type not in TRANSPORTS[asked]:
        raise BackendUnavailableError(
            f"{by_argument} moves tensors on {' or '.join(TRANSPORTS[asked])}, and these are on {device}"
        )
    if "mpi" in (asked, None if asked else told) and _registered(group) is not MpiTransport:
        raise BackendUnavailableError(
            f"{by_argument if asked else by_variable}: MPI moves gradients in a job that "
            'fastreduce.distributed.init_process_group("mpi") has begun'
        )
    if asked is not None:
        return asked, by_argument
    if told is not None and device.type in TRANSPORTS[told]:
        return told, by_variable
    if device.type == "cuda" and _registered(group) is None:
        return "nccl", "nccl, for CUDA tensors,"
    return "", "nothing asked for"


def _registered(group: dist.ProcessGroup) -> Factory | None:
    world = dist.group.WORLD
    return _factories.get(group) or (_factories.get(world) if world is not None else None)


def _takes_some(sockets: Factory) -> bool:
    return bool(getattr(sockets, "of_some", False))


def _levels(group: dist.ProcessGroup, sockets: Factory, hosts: Sequence[str] | None, how: str) -> Transport:
    """Two levels, which were asked for."""
    nodes = nodes_of(hosts or ())
    reason = why_no_two_levels(nodes)
    if hosts is None:
        reason = "ranks have not told their hosts yet, and no other one is asked now: wrap a module on every rank first"
    elif not _takes_some(sockets):
        reason = "what is registered for these ranks reduces among all of them only"
    if reason is not None:
        raise BackendUnavailableError(f"{own_name(group)}: {how}: {reason}")
    return two_levels(group, nodes, sockets, spare=1)


def _choose(group: dist.ProcessGroup, sockets: Factory, nodes: list[list[int]]) -> Transport:
    """`sockets`, two levels of it and shared memory, or shared memory in its place; on all ranks the same."""
    factory, chosen = sockets, None
    if len(nodes) == 1 and sockets in (GlooTransport, MpiTransport):
        shm = ShmTransport(group, SPARE)
        try:
            shm.connect()
            chosen, factory = shm, ShmTransport
        except BackendUnavailableError as error:  # on every rank
            logger.info("gradients go over %s: %s", getattr(sockets, "name", sockets), error)
    elif why_no_two_levels(nodes) is None:
        factory = partial(two_levels, nodes=nodes, make=sockets, spare=SPARE)
    _last_choice[group] = factory
    return chosen or factory(group)
