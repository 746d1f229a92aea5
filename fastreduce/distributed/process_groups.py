"""The default process group and others: making, asking, meeting, destroying."""

from __future__ import annotations

import contextlib
import operator
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from ..environment.variables import check_environment
from ..errors import MismatchError, SettingError, TransportError, brief
from ..transports.hosts import this_host
from ..transports.meeting import LONGEST, AbsentError, meet, new_place, notes
from ..transports.ranks import timeout_of
from ..transports.store_client import SOON_SECONDS, StoreClient
from . import backends, point_to_point
from .checks import DEBUG_VARIABLE, agree, debugging, tell_of_errors
from .meetings import check_group, failed_meeting, group_or_default, meet_in
from .queries import (
    LOCAL_RANK_VARIABLES,
    Made,
    count_on_host,
    get_backend,
    get_local_device,
    made_here,
    remember,
)
from .rendezvous import count_initialisation, find_address, find_numbers, open_store

_new_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    store: dist.Store | None = None,
    *,
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Join the other ranks; afterwards torch.distributed is initialised too, with the same group.

    A group that exists already, made here or by torch.distributed, is taken as it is.

    Args:
        backend: "nccl", "gloo" or "mpi", or by device ("cpu:gloo,cuda:nccl"); None means nccl where it can
            run, else gloo.
        init_method: env:// (MASTER_ADDR and MASTER_PORT, the default), tcp://host:port, or
            file:///path/of/a/new/file. Without an address, a fixed port of localhost.
        timeout: how long collectives and meetings wait for other ranks; None means torch's default.
        world_size: the number of ranks; None means WORLD_SIZE, or what mpirun or srun says.
        rank: this rank; None means RANK, or what mpirun or srun says.
        store: in place of `init_method`: what torch.distributed would take.
        pg_options: as in torch.
        device_id: as in torch.

    Raises:
        SettingError: for an unknown backend or init_method, numbers that are missing or out of range, a group that
            exists with other arguments, or an environment variable of ours that holds what it may not.
        BackendUnavailableError: if the backend cannot run here; nothing is initialised then.
        MismatchError: on every rank, if one asks for another backend or world size, or has FASTREDUCE_DEBUG=1 and
            another has not; it names both.
        TransportError: if the port is in use, or not all ranks come within the timeout (it names them).
    """
    if not _is_timeout(timeout):
        raise SettingError(f"init_process_group: timeout={timeout!r} is no datetime.timedelta of more than 0")
    world_size, rank = (None if number == -1 else number for number in (world_size, rank))
    check_environment(rank)
    if dist.is_initialized():
        _check_same(backend, init_method, timeout, world_size, rank)
        return
    names = backends.parse(backend)
    backends.check_available(set(names.values()))
    timeout = timeout or dist.default_pg_timeout
    if "mpi" in names.values():
        from .mpi import init_mpi  # most people need none of it

        remember(Made(init_mpi(timeout), "mpi", "mpi://"))
        try:
            _check_same(None, None, None, world_size, rank)
        except SettingError:
            destroy_process_group()
            raise
        return
    size, rank = find_numbers(init_method, world_size, rank, store)
    chosen = names[""] if "" in names else ",".join(f"{device}:{name}" for device, name in names.items())
    address = "store://" if store is not None else find_address(init_method, size)
    found = store or open_store(address, rank, size, timeout)
    if store is None:
        job = f"backend {chosen}, world size {size}" + (f", {DEBUG_VARIABLE}=1" if debugging() else "")
        found = _join(found, address, job, rank, size, timeout)
    try:
        if "nccl" in chosen:
            _choose_device(device_id, told=store is None or any(name in os.environ for name in LOCAL_RANK_VARIABLES))
        dist.init_process_group(
            chosen, store=found, rank=rank, world_size=size, timeout=timeout, pg_options=pg_options, device_id=device_id
        )
    finally:  # all have come together: where the backend does not start, another call meets anew
        count_initialisation(address)
    remember(Made(group_or_default("init_process_group", None), chosen, address))


def _join(opened: dist.Store, address: str, job: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Come together on the store, before the backend connects: who is missing or different can be named here.

    A rank with another job than the first to come ends the meeting with what differs, for those too that come later.
    Returns the store as these processes alone use it.
    """
    call = f"init_process_group on rank {rank} at {address}"
    mine, seconds = f"rank {rank} has {job}", timeout.total_seconds()
    store = StoreClient(opened, seconds)
    try:
        place = new_place(store, rank, size, seconds)
        store = store.at(place)
        first = store.set_first("job", mine)
    except AbsentError as error:
        raise failed_meeting(f"init_process_group at {address}", size, error, seconds, rank) from error
    except TransportError as error:
        raise TransportError(f"{call}: {error}") from error
    if first.partition(" has ")[2] != job:
        store.set("join/complete", f"{first}; {mine}")
        raise _mismatch(call, address, rank, f"{first}; {mine}")
    others = 0
    try:
        others = store.add(f"joined as {rank}", 1) - 1
        if others:
            raise TransportError(
                f"{call}: another process has joined as rank {rank}. Ranks must differ, and jobs need addresses of "
                "their own (MASTER_PORT; for file://, a new file)"
            )
        meet(store.at("join"), rank, range(size), seconds, this_host())
        (different,) = store.read_all(["join/complete"])
        hosts = notes(store.at("join"), range(size)) if not different else []
    except BaseException as error:  # an interrupt, too: this call may be made again
        with contextlib.suppress(TransportError):
            store.at("", SOON_SECONDS).add(f"joined as {rank}", -1)
        if others or not isinstance(error, TransportError):
            raise
        raise failed_meeting(f"init_process_group at {address}", size, error, seconds, rank) from error
    if different:
        raise _mismatch(call, address, rank, different)
    count_on_host(hosts, rank)
    return dist.PrefixStore(place, opened) if place else opened


def _mismatch(call: str, address: str, rank: int, different: str) -> MismatchError:
    count_initialisation(address)  # every rank is told, so all of them begin anew
    if rank == 0:  # with whose process the store may end: those that have come look so often
        time.sleep(2 * LONGEST)
    return MismatchError(f"{call}: ranks differ: {different}")


def _choose_device(given: torch.device | int | None, told: bool) -> None:
    """Work on the GPU that was given, or else on this rank's own, unless the script has chosen one.

    Where the local rank may not be `told`, because a store was handed over, torch's current GPU stays.
    """
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        with contextlib.suppress(*[] if told else [SettingError]):
            torch.cuda.set_device(get_local_device() if given is None else given)


def _check_same(
    backend: str | None, init_method: str | None, timeout: timedelta | None, size: int | None, rank: int | None
) -> None:
    group = group_or_default("init_process_group", None)
    asked: dict[str, tuple[Any, Any]] = {
        "world size": (size, dist.get_world_size()),
        "rank": (rank, dist.get_rank()),
        "timeout": (timeout, timeout_of(group)),
    }
    if backend is not None:
        names = backends.parse(backend)
        if not set(names.values()) <= set(backends.parse(get_backend()).values()):
            asked["backend"] = (backend, get_backend())
    made = made_here()
    # Where a store was handed over, nobody knows its address.
    if init_method is not None and made is not None and made.group is group and made.address != "store://":
        asked["address"] = (find_address(init_method, dist.get_world_size()), made.address)
    for name, (wanted, there) in asked.items():
        if wanted is not None and wanted != there:
            raise SettingError(
                f"init_process_group on rank {dist.get_rank()}: asked for {name} {wanted}, but there is a default "
                f"process group already, with {name} {there}. Call destroy_process_group first"
            )


def barrier(
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    device_ids: Sequence[int] | None = None,
    timeout: timedelta | None = None,
) -> dist.Work | None:
    """Return when all ranks of `group` are here; they meet on the rendezvous store.

    Args:
        group: the ranks; None means the default group.
        async_op: the backend's own barrier, which cannot name ranks; returns its Work.
        device_ids: as in torch, for `async_op`.
        timeout: None means the group's, as `async_op` has it.

    Raises:
        NotInitializedError: if there is no default group.
        SettingError: if `timeout` is something else, or not more than 0, or stands beside `async_op`.
        TransportError: naming the ranks that have not come within the timeout, or, at once where the group has gloo,
            those whose processes have ended before they came.
    """
    group = group_or_default("barrier", group)
    _check_timeout("barrier", timeout)
    if async_op:
        if timeout is not None:
            raise SettingError(f"barrier on rank {dist.get_rank()}: timeout= with async_op=True, which has the group's")
        work: dist.Work = dist.barrier(group, async_op=True, device_ids=device_ids)
        return work
    if "nccl" in get_backend(group):
        torch.cuda.synchronize()
    meet_in(group, "barrier", timeout=timeout)
    return None


def _is_timeout(timeout: Any) -> bool:
    return timeout is None or (isinstance(timeout, timedelta) and timeout > timedelta(0))


def _check_timeout(call: str, timeout: Any) -> None:
    if not _is_timeout(timeout):
        raise SettingError(
            f"{call} on rank {dist.get_rank()}: timeout={timeout!r}; allowed: a datetime.timedelta of more than 0, as "
            "timedelta(seconds=3), or None"
        )


def new_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
) -> dist.ProcessGroup:
    """A group of some ranks; all ranks of the default group call it alike, as in torch.

    Args:
        ranks: global ranks; None means all.
        timeout: None means the default group's.
        backend: None means the default group's.
        pg_options: as in torch.

    Raises:
        NotInitializedError: if there is no default group.
        SettingError: if a rank does not exist or is there twice, for an unknown backend, for "mpi" where the default
            group is another's, or if `timeout` is no timedelta of more than 0.
        BackendUnavailableError: if the backend cannot run here.
    """
    default = group_or_default("new_group", None)
    size = dist.get_world_size()
    with tell_of_errors("new_group", default):
        try:
            chosen = list(range(size)) if ranks is None else [operator.index(rank) for rank in ranks]
        except TypeError:
            chosen = []
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(size)):
            raise SettingError(
                f"new_group on rank {dist.get_rank()}: ranks={brief(ranks)}; allowed: different ranks from 0 to "
                f"{size - 1}"
            )
        _check_timeout("new_group", timeout)
        if backend is not None:
            names = set(backends.parse(backend).values())
            backends.check_available(names)
            if "mpi" in names:
                if get_backend() != "mpi":
                    raise SettingError(
                        f"new_group on rank {dist.get_rank()}: backend={backend!r}, but the default group is of "
                        f"{get_backend()}: call init_process_group('mpi') first, and all groups reduce over MPI"
                    )
                backend = None
    agree("new_group", default, f"ranks {sorted(chosen)}, backend {backend}")
    made: dist.ProcessGroup = dist.new_group(chosen, timeout or timeout_of(default), backend, pg_options)
    if dist.get_rank(made) >= 0:
        _new_groups.add(made)
    return made


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Destroy `group`; for None, what was made here: the default group and those of `new_group`.

    A default group that torch.distributed initialised stays. Messages under way are delivered first.
    Afterwards `init_process_group` works again.

    Raises:
        TransportError: if messages of `remote_send` are not received within the timeout.
    """
    if group is not None and group is not dist.group.WORLD:
        check_group("destroy_process_group", group)
        _destroy([group] if dist.get_rank(group) >= 0 else [])
        return
    made = made_here()
    remember(None)
    if made is not None and dist.group.WORLD is made.group:
        try:
            point_to_point.drain()
        finally:
            dist.destroy_process_group()
    elif dist.is_initialized():
        _destroy([other for other in _new_groups if other in _world.pg_map])
    _new_groups.clear()


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    for group in groups:
        _new_groups.discard(group)
        try:
            point_to_point.drain(group)
        finally:
            dist.destroy_process_group(group)
