"""Functions that run on several ranks of this machine: the `launcher` decorator, and `spawn`."""

from __future__ import annotations

import atexit
import functools
import importlib
import itertools
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..errors import SettingError, brief
from .processes import Group, run_ranks

Function = Callable[..., Any]
START_METHODS = ("spawn", "forkserver", "fork")
MOST_RANKS = 4096  # of one machine: objects for each of 10^9 fill the memory

_calls = itertools.count(1)  # of this process, each of which starts ranks
_reached = ""  # the call at which this rank's import of the script ended


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

    Ranks that are spawned import the script. Where it calls the function at module level, without
    `if __name__ == "__main__":`, they import it up to that call, and run the function there; that works for the first
    such call of a script.

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
        SettingError: if the options contradict each other or say too little, if the port is in use, at a fork after
            CUDA was initialised, or if ranks would import a function that was written in no file, as in a notebook.
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
        _stop_import(function.__name__)
        here = _ranks_here(n_gpus, world_size)
        group = _check(Group(here, world_size or here, rank_start, master_ip, port, timeout))
        _check_start_method(start_method)
        _check_importable(function, start_method)
        call = next(_calls), _Reference.to(function)
        return run_ranks(_call, group, *call, args, kwargs, start_method=start_method)

    start.starts_ranks = start  # type: ignore[attr-defined]
    return start


def spawn(function: Function, args: Sequence[Any] = (), nprocs: int | None = None) -> list[Any]:
    """Run `function(rank, *args)` on `nprocs` ranks of this machine, each with the process group up.

    As `torch.multiprocessing.spawn`, but that the ranks are joined already, and that it returns what they returned,
    in rank order. `nprocs` is the number of GPUs by default. On CPUs the backend is gloo, on GPUs NCCL as well.

    Raises:
        SettingError: if there is no GPU and no `nprocs`, or for a function that was written in no file.
        RanksFailedError: if a rank failed: its rank and traceback, and its exception as the cause.
    """
    _stop_import("spawn")
    here = _ranks_here(nprocs, None, "nprocs")
    group = Group(here, here)
    _check_importable(function, "spawn")
    return run_ranks(_call_with_rank, group, next(_calls), function, tuple(args))


def _call(number: int, function: _Reference, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check_first(number)
    return function.resolve()(*args, **kwargs)


def _importing() -> bool:
    """Whether this is a new process that multiprocessing has not handed its work yet: it imports the script."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def _stop_import(name: str) -> None:
    """In a new process that imports the script, and comes to the call that has started it: be the rank here and now.

    All that the script did before the call is done, as in the process that made it, and nothing of what comes after.

    Raises:
        SettingError: where this process did not begin as spawned ones do.
    """
    global _reached
    if not _importing():
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not multiprocessing.spawn._main.__code__:
        frame = frame.f_back
    pipe, sentinel = (frame.f_locals.get(variable) for variable in ("from_parent", "parent_sentinel"))
    if pipe is None or sentinel is None or "__mp_main__" not in sys.modules:
        raise _unguarded(name)
    _reached = name
    sys.modules["__main__"] = sys.modules["__mp_main__"]
    _go_on(pipe, sentinel)


def _check_first(number: int) -> None:
    """Raise SettingError if this rank's import of the script ended at an earlier call than that of its work."""
    if _reached and number > 1:
        raise _unguarded(_reached)


def _unguarded(name: str) -> SettingError:
    return SettingError(
        f"{name}() starts ranks, which import the script and come to this call again: put the script's own work under "
        'if __name__ == "__main__":'
    )


def _go_on(pipe: Any, sentinel: int) -> NoReturn:
    """What multiprocessing does in a spawned process when it has imported the script."""
    process = pickle.load(pipe)
    del multiprocessing.current_process()._inheriting  # type: ignore[attr-defined]
    pipe.close()
    code = process._bootstrap(sentinel)
    atexit._run_exitfuncs()
    os._exit(code)  # by SystemExit the script could go on


def _call_with_rank(number: int, function: Function, args: tuple[Any, ...]) -> Any:
    _check_first(number)
    return function(dist.get_rank(), *args)


def _ranks_here(given: int | None, world_size: int | None, name: str = "n_gpus") -> int:
    ranks = given or torch.cuda.device_count() or world_size
    if not (given is None or (isinstance(given, int) and 1 <= given <= MOST_RANKS)):
        raise SettingError(f"{name}={brief(given)}: at least 1 rank is needed, a whole number up to {MOST_RANKS}")
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


def _check_importable(function: Function, method: str) -> None:
    """Raise SettingError for a function of `__main__` where that is no file, and new processes would not have it."""
    main = sys.modules["__main__"]
    in_file = getattr(main, "__file__", None) or getattr(main, "__spec__", None)
    if method != "fork" and not in_file and getattr(function, "__module__", None) == "__main__":
        name = getattr(function, "__name__", repr(function))
        raise SettingError(
            f"{name} was written in a notebook, at a prompt or in python -c: new processes cannot import it from "
            "there. Let them be forks, @launcher(start_method='fork'), or put it into a file and import it"
        )
