"""Functions that run on several ranks of this machine: the `launcher` decorator, and `spawn`."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SettingError
from ..processes import Group, run_ranks

Function = Callable[..., Any]
START_METHODS = ("spawn", "forkserver", "fork")


@dataclass(frozen=True)
class _Reference:
    """A function by its name, which is how a decorated one travels: its name means the decorated thing."""

    module: str
    qualname: str

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference:
        """Refer to a function at module level.

        Raises:
            SettingError: for one that a new process could not import.
        """
        if "<" in function.__qualname__:
            raise SettingError(
                f"{function.__qualname__} of {function.__module__} is not at module level: the processes of its ranks "
                "import it by name"
            )
        return cls(function.__module__, function.__qualname__)

    def resolve(self) -> Callable[..., Any]:
        """What the name stands for; where that starts ranks, the function that they run."""
        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        inner: Any = found
        while inner is not None:
            if getattr(inner, "starts_ranks", None) is inner:  # not a copy that functools.wraps made
                return inner.__wrapped__  # type: ignore[no-any-return,union-attr]
            inner = getattr(inner, "__wrapped__", None)
        return found  # type: ignore[no-any-return]


def launcher(
    function: Function | None = None,
    /,
    *,
    n_gpus: int | None = None,
    world_size: int | None = None,
    rank_start: int = 0,
    master_ip: str = "localhost",
    port: int = 0,
    timeout: timedelta = dist.default_pg_timeout,
    start_method: str = "spawn",
) -> Callable[..., Any]:
    """Make a function run on `n_gpus` ranks of this machine, each with the process group up; as `@launcher` too.

    Calling it starts the ranks and returns the list of what they returned, in rank order. When the function has
    returned on one rank, that rank waits for the others, so that none loses a peer early.

    Args:
        function: at module level, because each rank imports it by name.
        n_gpus: ranks on this machine; default: its GPUs, or all of `world_size` where it has none.
        world_size: ranks on all machines; default: `n_gpus`.
        rank_start: the first rank on this machine.
        master_ip: the machine of rank 0.
        port: where its ranks meet; 0 takes a free one.
        timeout: of the process group.
        start_method: "spawn", "forkserver" or "fork".

    Raises:
        SettingError: if the options contradict each other or say too little, if the port is in use, or at a fork
            after CUDA was initialised.
        RanksFailedError: if a rank failed: its rank and traceback, and its exception as the cause.
    """
    if function is None:
        return functools.partial(
            launcher,
            n_gpus=n_gpus,
            world_size=world_size,
            rank_start=rank_start,
            master_ip=master_ip,
            port=port,
            timeout=timeout,
            start_method=start_method,
        )

    @functools.wraps(function)
    def start(*args: Any, **kwargs: Any) -> list[Any]:
        here = _ranks_here(n_gpus, world_size)
        group = _check(Group(here, world_size or here, rank_start, master_ip, port, timeout))
        _check_start_method(start_method)
        return run_ranks(_call, group, _Reference.to(function), args, kwargs, start_method=start_method)

    start.starts_ranks = start  # type: ignore[attr-defined]
    return start


def spawn(function: Function, args: Sequence[Any] = (), nprocs: int | None = None) -> list[Any]:
    """Run `function(rank, *args)` on `nprocs` ranks of this machine, each with the process group up.

    As `torch.multiprocessing.spawn`, but that the ranks are joined already, and that it returns what they returned,
    in rank order. `nprocs` is the number of GPUs by default. On CPUs the backend is gloo, on GPUs NCCL as well.

    Raises:
        SettingError: if there is no GPU and no `nprocs`.
        RanksFailedError: if a rank failed: its rank and traceback, and its exception as the cause.
    """
    here = _ranks_here(nprocs, None, "nprocs")
    group = Group(here, here)
    return run_ranks(_call_with_rank, group, function, tuple(args))


def _call(function: _Reference, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function.resolve()(*args, **kwargs)


def _call_with_rank(function: Function, args: tuple[Any, ...]) -> Any:
    return function(dist.get_rank(), *args)


def _ranks_here(given: int | None, world_size: int | None, name: str = "n_gpus") -> int:
    ranks = given or torch.cuda.device_count() or world_size
    if given is not None and given < 1:
        raise SettingError(f"{name}={given}: at least 1 rank is needed")
    if not ranks:
        raise SettingError(f"this machine has no GPU: say how many ranks to start, as in {name}=2")
    return ranks


def _check(group: Group) -> Group:
    last, world_size = group.first + group.here - 1, group.world_size
    if not 0 <= group.first <= last < world_size:
        raise SettingError(f"ranks {group.first} to {last} on this machine do not fit into world_size={world_size}")
    if group.first != 0 and group.port == 0:
        raise SettingError(f"rank_start={group.first} needs the port on which rank 0's machine listens")
    if not group.alone and group.port == 0:
        raise SettingError(f"{group.here} of {world_size} ranks run here: the others need a port= to find rank 0")
    return group


def _check_start_method(method: str) -> None:
    if method not in START_METHODS:
        raise SettingError(f"start_method={method!r}: one of {', '.join(START_METHODS)}")
    if method == "fork" and torch.cuda.is_initialized():
        raise SettingError(
            "start_method='fork' after CUDA was initialised in this process: forked ranks could not use it. "
            "Start them before the first use of CUDA, or with start_method='spawn'"
        )
