"""The environment variables of ours: what there is, in one table, and what is wrong with those that are set.

The reference page and `fastreduce doctor` list what stands here.
"""

from __future__ import annotations

import difflib
import logging
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch.distributed as dist

from ..errors import SettingError

logger = logging.getLogger(__name__)

PREFIX = "FASTREDUCE_"
ON, OFF = ("1", "true"), ("", "0", "false")


@dataclass(frozen=True)
class Variable:
    """What a variable may hold, and what that does."""

    values: str
    meaning: str


VARIABLES = {
    "FASTREDUCE_COMPRESSION": Variable(
        "a spec string, of a setting or a policy; unset: none",
        "the compression of wrappers and calls that are given none",
    ),
    "FASTREDUCE_COUNTERS": Variable(
        "a folder, which is made; unset: none",
        "where each rank appends its counters every ten seconds, as JSON lines and for Prometheus",
    ),
    "FASTREDUCE_DEBUG": Variable(
        "1 or true, 0 or false; unset: 0", "1 compares calls, shapes and dtypes between ranks before each collective"
    ),
    "FASTREDUCE_DUMP_SIGNAL": Variable(
        "USR1, USR2, none; unset: USR1",
        "the signal that makes a rank print its flight record and its Python stacks",
    ),
    "FASTREDUCE_HOST": Variable(
        "any name; unset: found by kernel, /dev/shm and network namespace",
        "which ranks count as those of one host: those with the same name",
    ),
    "FASTREDUCE_KERNELS": Variable(
        "triton, numba_cuda, numba_cpu, reference; unset: by device",
        "the kernel backend, in place of the one chosen by device",
    ),
    "FASTREDUCE_NODE_SECONDS": Variable(
        "seconds, more than 0; unset: 15", "how long fastreduce launch waits for a word from another node's launcher"
    ),
    "FASTREDUCE_SEED": Variable(
        "a whole number below 2^32; unset: nothing is seeded",
        "what fastreduce run seeds Python, NumPy and torch with, before the script",
    ),
    "FASTREDUCE_TRACE": Variable(
        "a folder, which is made; unset: none",
        "where every step of every rank is written, as JSON for Perfetto",
    ),
    "FASTREDUCE_TRANSPORT": Variable(
        "gloo, shm, mpi, nccl, two_level; unset: by device, launcher and hosts",
        "what moves gradients, where no transport= says otherwise",
    ),
}
# What `fastreduce launch` tells its ranks, which take it out of their environment before the script runs.
INTERNAL = {"FASTREDUCE_LAUNCHER", "FASTREDUCE_ONE_GPU"}


def switch(name: str) -> bool:
    """Whether a variable is switched on.

    Raises:
        SettingError: if it holds anything but 1, true, 0, false or nothing.
    """
    value = os.environ.get(name, "")
    if value.lower() not in ON + OFF:
        raise SettingError(f"{name}={value}: allowed: 1 or true, 0 or false")
    return value.lower() in ON


def folder_asked_for(name: str) -> Path | None:
    """The folder that a variable names, which is made; None where it is not set.

    Raises:
        SettingError: if nothing can be written there.
    """
    value = os.environ.get(name, "")
    return writable_folder(value, f"{name}={value}") if value else None


def writable_folder(name: str, asked: str) -> Path:
    """A folder, which is made.

    Args:
        name: of the folder.
        asked: how a user has asked for it, as an error says.

    Raises:
        SettingError: if nothing can be written there.
    """
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"{asked}: {error}") from error
    if not os.access(path, os.W_OK):
        raise SettingError(f"{asked}: this folder cannot be written")
    return path


def check_environment(rank: int | None = None) -> None:
    """Look at our variables before anything starts: where a group is made, and where a setting is resolved.

    One that we do not know is one line of the log on rank 0, once a process.

    Args:
        rank: of this process; None means that of the default group, or what the launcher says.

    Raises:
        SettingError: if FASTREDUCE_DEBUG is no switch. Others are read, and refused, where they are used.
    """
    switch("FASTREDUCE_DEBUG")
    if (this_rank() if rank is None else rank) == 0:
        _tell_unknown()


def unknown() -> dict[str, str]:
    """Names that begin as ours do and are none → the one of ours that was meant, or ""."""
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in {*VARIABLES, *INTERNAL})
    ours = {name.removeprefix(PREFIX): name for name in VARIABLES}
    close = {name: difflib.get_close_matches(name.removeprefix(PREFIX), ours, 1) for name in names}
    return {name: ours[found[0]] if found else "" for name, found in close.items()}


@cache
def _tell_unknown() -> None:
    for name, meant in unknown().items():
        instead = f"did you mean {meant}?" if meant else f"there are {', '.join(VARIABLES)}"
        logger.warning("%s is set, and fastreduce knows no such variable: %s", name, instead)


def this_rank() -> int:
    """The rank in the default group, or what the launcher says; 0 where nobody does.

    In an elastic job each process is a default group by itself, and the launcher tells them apart.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.get_rank()
    given = (os.environ.get(name, "") for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))
    return next((int(text) for text in given if text.isdecimal()), 0)
