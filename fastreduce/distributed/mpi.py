"""Process groups in a job that mpirun started."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist

from ..environment.engines import LOCAL_RANKS, find_place
from ..errors import SettingError, TransportError, headline
from ..transports import messages, register_transport
from ..transports.deadlines import GRACE_SECONDS, in_background
from ..transports.hosts import this_host
from ..transports.mpi import MpiTransport
from ..transports.mpi.library import end_within, load_mpi
from ..transports.mpi.polling import poll
from .rendezvous import LOOPBACK, serve

T = TypeVar("T")

PRINTING_SECONDS = 1.0  # for mpirun to pass on what a rank printed last: an abort throws the rest away (seen)
_TAG, _BYTES = 29713, 1024  # of the messages by which ranks meet

_under_way: list[Any] = []  # messages, which hold their memory; kept where a rank did not come, which may be late
_stores: list[dist.TCPStore] = []  # kept until exit: a rank that is late still asks why another has left


def init_mpi(timeout: timedelta = dist.default_pg_timeout) -> dist.ProcessGroup:
    """Make the default process group of a job that mpirun started.

    1. Initialise MPI, unless it is. An exception that nobody catches ends the whole job from now on.
    2. Rank 0 opens a store, on loopback if all ranks are on its host, and tells the others by MPI.
    3. Make a gloo group with it, with ranks as in COMM_WORLD; wrappers reduce over it by MPI.

    Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are not set.

    Args:
        timeout: for this call and for every collective; where one has failed, for the other ranks' end, too.

    Raises:
        BackendUnavailableError: if mpi4py or an MPI library is missing, or MPI runs without threads.
        SettingError: if RANK and WORLD_SIZE, or else srun, say another rank than MPI.
        TransportError: if ranks do not come within the timeout; on rank 0 it names them.
        ValueError: if there is a default group already.
    """
    if dist.is_initialized():
        raise ValueError("trying to initialize the default process group twice: call destroy_process_group first")
    world = load_mpi().COMM_WORLD
    rank, size = world.rank, world.size
    end_within(timeout.total_seconds())
    _end_job_on_exceptions()
    _check_place(rank, size)
    host, port, local_rank, here = _rendezvous(world, timeout.total_seconds())
    _under_way.clear()
    local = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), local_rank)
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": here}.items():
        os.environ.setdefault(name, str(value))
    if here == size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = _stores[-1] if rank == 0 else _connect(host, port, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    register_transport(group, MpiTransport)
    return group


def _check_place(rank: int, size: int) -> None:
    """Raise SettingError where MPI and a launcher disagree: processes would train alone, or with others than meant."""
    told = (os.environ.get("RANK"), os.environ.get("WORLD_SIZE"))
    place = find_place()
    if None not in told:
        same, who = told == (str(rank), str(size)), f"RANK={told[0]} and WORLD_SIZE={told[1]} say another"
    else:
        same, who = place is None or (place.rank, place.world_size) == (rank, size), str(place)
    if not same:
        raise SettingError(
            f"init_process_group over MPI: MPI says rank {rank} of {size}, and {who}. Start the script with mpirun, or "
            "with srun --mpi=TYPE for a TYPE that this MPI knows; ranks of torchrun cannot talk over MPI. If RANK and "
            "WORLD_SIZE are left over, unset them"
        )


def _connect(host: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        store: dist.Store = in_background(
            lambda: dist.TCPStore(host, port, is_master=False, timeout=timeout), timeout.total_seconds() + GRACE_SECONDS
        )
    except TimeoutError as error:
        raise TransportError(
            f"init_process_group over MPI failed: rank 0's process, which holds the store at {host}:{port}, does not "
            f"answer within {timeout}"
        ) from error
    except RuntimeError as error:
        raise TransportError(
            f"init_process_group over MPI failed: no connection to rank 0's process, which holds the store at "
            f"{host}:{port}: {headline(error)}. MASTER_ADDR, on its host, gives another address"
        ) from error
    return store


def _rendezvous(world: Any, seconds: float) -> tuple[str, int, int, int]:
    """Host and port of rank 0's store, this rank's number on its host, and how many are there."""
    here = this_host()  # machines may all be called localhost
    if world.rank != 0:
        sent = _send(world, here, 0)
        (answer,) = _receive(world, [0], seconds + 5, _place)  # rank 0 knows better who is missing
        sent.Wait()
        return answer
    hosts = [here, *_receive(world, list(range(1, world.size)), seconds, _name)]
    one_host = len(set(hosts)) == 1
    address = LOOPBACK if one_host else os.environ.get("MASTER_ADDR", socket.gethostname())
    _stores.append(serve(0, here_only=one_host))
    port = _stores[-1].port
    answers = [(address, port, hosts[:r].count(host), hosts.count(host)) for r, host in enumerate(hosts)]
    told = [_send(world, answer, r) for r, answer in enumerate(answers) if r != 0]
    if not poll(lambda: all(request.Test() for request in told), seconds):
        raise TransportError(
            f"rank 0 of {world.size}: init_process_group over MPI failed: ranks did not take the address of the store "
            f"within {seconds:g} s"
        )
    return answers[0]


def _send(world: Any, value: Any, rank: int) -> Any:
    """Begin to send; not by mpi4py's `isend`, whose other end unpickles."""
    data = messages.encode(value)
    if len(data) > _BYTES:
        raise TransportError(f"{value!r} is too long for a message between hosts: {len(data)} bytes of {_BYTES}")
    _under_way.append(world.Isend(bytearray(data.ljust(_BYTES)), rank, _TAG))
    return _under_way[-1]


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the name of a host was expected, not {value!r:.80}")
    return value


def _place(value: Any) -> tuple[str, int, int, int]:
    host, port, local_rank, here = messages.of_types(value, str, int, int, int)
    return host, port, local_rank, here


def _receive(world: Any, sources: list[int], seconds: float, check: Callable[[Any], T]) -> list[T]:
    """One value from each source."""
    into = {source: bytearray(_BYTES) for source in sources}
    waiting = {source: world.Irecv(into[source], source, _TAG) for source in sources}
    _under_way.extend(waiting.values())
    found: dict[int, T] = {}

    def done() -> bool:
        for source in list(waiting):
            if waiting[source].Test():
                found[source] = messages.decode(bytes(into[source]).rstrip(), source, check)
                del waiting[source]
        return not waiting

    if not poll(done, seconds):
        raise TransportError(
            f"rank {world.rank} of {world.size}: init_process_group over MPI failed: "
            f"rank {', '.join(map(str, waiting))} did not come within {seconds:g} s"
        )
    return [found[source] for source in sources]


@cache
def _end_job_on_exceptions() -> None:
    """Let an exception that nobody catches, on whatever thread, end the job: the other ranks wait for this one."""
    world, of_main_thread, of_threads = load_mpi().COMM_WORLD, sys.excepthook, threading.excepthook
    who = f"rank {world.rank} of {world.size} ends the job by an exception"

    def end(show: Any, *error: Any) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):  # torch's hook would print once this one has returned
            print(f"{who}:", file=sys.stderr)
            show(*error)
            sys.stderr.flush()
        sys.stdout.flush()
        time.sleep(PRINTING_SECONDS)
        world.Abort(1)

    def on_main_thread(*error: Any) -> None:
        end(of_main_thread, *error)

    def on_thread(error: threading.ExceptHookArgs) -> None:
        if error.exc_type is not SystemExit:
            end(of_threads, error)

    sys.excepthook, threading.excepthook = on_main_thread, on_thread
