"""Questions about process groups: who, how many, over which backend, on which device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..environment.engines import LOCAL_RANKS
from ..errors import SettingError
from .meetings import check_group, known_group

LOCAL_RANK_VARIABLES = ("LOCAL_RANK", *LOCAL_RANKS, "SLURM_LOCALID")


@dataclass
class Made:
    """A default group that `init_process_group` made."""

    group: dist.ProcessGroup
    backend: str
    address: str


_made: Made | None = None
_counted: int | None = None  # this rank's number among those of its host


def made_here() -> Made | None:
    """The default group, if `init_process_group` made it and it has not been destroyed since."""
    return _made


def remember(made: Made | None) -> None:
    """Keep what `init_process_group` has made; None once it is destroyed."""
    global _made, _counted
    _made = made
    if made is None:
        _counted = None


def count_on_host(hosts: Sequence[str], rank: int) -> None:
    """Let the local rank be this rank's number among those with the same host; `hosts` has one for each rank."""
    global _counted
    _counted = hosts[:rank].count(hosts[rank])


def is_initialized() -> bool:
    """Whether there is a default process group, made here or by torch.distributed."""
    return dist.is_initialized()


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank, within `group` (None means the default group); -1 if it is not in it.

    Raises:
        NotInitializedError: if there is no default group.
    """
    known_group("get_rank", None)
    check_group("get_rank", group)
    return dist.get_rank(group)


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in `group` (None means the default group); -1 if this rank is not in it.

    Raises:
        NotInitializedError: if there is no default group.
    """
    known_group("get_world_size", None)
    check_group("get_world_size", group)
    return dist.get_world_size(group)


def get_backend(group: dist.ProcessGroup | None = None) -> str:
    """The backend's name: nccl, gloo or mpi, or by device (cpu:gloo,cuda:nccl).

    Raises:
        NotInitializedError: if there is no default group.
        SettingError: if this rank is not in `group`.
    """
    group = known_group("get_backend", group)
    if _made is not None and (_made.group is group or _made.backend == "mpi"):  # its groups reduce over MPI, too
        return _made.backend
    by_device = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    names = set(by_device.values())
    return names.pop() if len(names) == 1 else ",".join(f"{device}:{name}" for device, name in by_device.items())


def get_local_rank() -> int:
    """This rank's number on its host: LOCAL_RANK, else as counted by `init_process_group`, else as mpirun or srun says.

    Raises:
        SettingError: if it cannot be known, or is no number there.
    """
    if "LOCAL_RANK" not in os.environ and _counted is not None:
        return _counted
    for variable in LOCAL_RANK_VARIABLES:
        if variable in os.environ:
            try:
                return int(os.environ[variable])
            except ValueError:
                raise SettingError(f"get_local_rank: {variable}={os.environ[variable]!r}; allowed: a number") from None
    if dist.is_initialized() and dist.get_world_size() == 1:
        return 0
    raise SettingError("get_local_rank: LOCAL_RANK is not set: start with torchrun or fastreduce launch, or set it")


def get_local_device() -> torch.device:
    """This rank's GPU: the local rank, wrapped around the visible ones; the CPU where there is none.

    A launcher that shows each rank one GPU and one that shows all of them both work.
    """
    count = torch.cuda.device_count()
    return torch.device("cuda", get_local_rank() % count) if count else torch.device("cpu")


def is_main_process() -> bool:
    """Whether this is rank 0, or not distributed at all."""
    return not dist.is_initialized() or dist.get_rank() == 0
