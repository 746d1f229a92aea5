"""Where ranks find each other: an address → a key-value store."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import torch.distributed as dist

from ..environment.engines import translate
from ..errors import SettingError, TransportError, headline
from ..transports.deadlines import GRACE_SECONDS, in_background
from ..transports.store_client import held_by_agent

FIXED_PORT = 29413
"""On localhost, where nobody gives an address."""
LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # of ranks that connect at once
OWN_TIMEOUT, TIMEOUT = timedelta(seconds=10), timedelta(seconds=300)  # of a connection to itself; torch's own

# A store stays open until the process ends: a rank that initialises again may be earlier than one that
# still destroys. What each initialisation writes has a prefix of its own.
_stores: dict[str, dist.Store] = {}
_generations: Counter[str] = Counter()


def find_address(init_method: str | None, world_size: int) -> str:
    """Where to meet: `tcp://host:port`, `file:///path`, or `local://` for one rank that needs nobody.

    Raises:
        SettingError: if `init_method` is not env://, tcp://host:port or file:///path.
    """
    if init_method in (None, "env://"):
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if host is not None and ":" in host and not host.startswith("["):  # IPv6
            host = f"[{host}]"
        if host is None and port is None and world_size == 1:
            return "local://"
        return _tcp(f"tcp://{host or 'localhost'}:{port or FIXED_PORT}")
    assert init_method is not None
    url = urlsplit(init_method)
    if url.scheme == "tcp":
        return _tcp(f"tcp://{url.netloc}")
    if url.scheme == "file" and url.path and not url.netloc:
        return f"file://{url.path}"
    raise SettingError(
        f"init_process_group: init_method={init_method!r}; allowed: env://, tcp://host:port, file:///path/of/a/new/file"
    )


def _tcp(address: str) -> str:
    try:
        url = urlsplit(address)
        if url.hostname and url.port is not None:
            return address
    except ValueError:  # a port that is no number, or too large
        pass
    raise SettingError(
        f"init_process_group: {address} is no tcp://host:port (MASTER_ADDR and MASTER_PORT, if not given)"
    )


def find_numbers(
    init_method: str | None, world_size: int | None, rank: int | None, store: dist.Store | None
) -> tuple[int, int]:
    """World size and rank: as given, as in `tcp://host:port?rank=0&world_size=2`, or as in the environment.

    Where mpirun or srun started this process, the environment is completed before it is read.

    Raises:
        SettingError: if one is missing, no number or out of range.
    """
    query = parse_qs(urlsplit(init_method or "").query)
    in_url = {name: values[0] for name, values in query.items()}
    given = {"world_size": world_size, "rank": rank}
    asked = {name for name, number in given.items() if number is None and name not in in_url}
    if "world_size" in asked or (asked and world_size != 1):
        translate(address=store is None and init_method in (None, "env://"))
    size = _number("world_size", world_size, in_url, "WORLD_SIZE")
    found = 0 if size == 1 and rank is None and "RANK" not in os.environ else _number("rank", rank, in_url, "RANK")
    if size < 1 or not 0 <= found < size:
        raise SettingError(f"init_process_group: rank {found} of world_size {size}; a rank is 0 to world_size - 1")
    return size, found


def _number(name: str, given: int | None, in_url: Mapping[str, str], variable: str) -> int:
    if given is not None:
        return int(given)
    text = in_url.get(name, os.environ.get(variable))
    if text is None:
        raise SettingError(
            f"init_process_group: {name} is not given and {variable} not set: pass rank= and world_size=, "
            f"or start the script with torchrun or fastreduce launch{_forgotten_launcher()}"
        )
    try:
        return int(text)
    except ValueError:
        raise SettingError(f"init_process_group: {name}={text!r} is no number ({variable}, if not given)") from None


def _forgotten_launcher() -> str:
    """What is said where an engine has prepared for a launcher that was not called."""
    if "PET_NNODES" in os.environ:
        return ", to which PET_NNODES and the other PET_ variables are addressed"
    if "SLURM_JOB_ID" in os.environ:
        return ", or in a Slurm job with srun"
    return ""


def is_loopback(host: str) -> bool:
    """Whether only this host reaches it, as far as its name tells."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def open_store(address: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store at `address`, behind a prefix that no earlier initialisation of this process has used.

    Rank 0 serves it, unless torchrun's agent does. On a loopback address it listens there only.

    Raises:
        TransportError: if the port is in use, or rank 0 does not serve it within the timeout.
    """
    if address not in _stores:
        _stores[address] = _open(address, rank, world_size, timeout)
    store = _stores[address]
    store.set_timeout(timeout)
    return dist.PrefixStore(f"fastreduce/{_generations[address]}", store)


def count_initialisation(address: str) -> None:
    """Let the next initialisation there begin with a clean store."""
    _generations[address] += 1


def serve(port: int, here_only: bool) -> dist.TCPStore:
    """A store that this process holds, at every address of this machine, or on loopback alone; port 0 is a free one.

    Its own connection is over loopback: for a name that does not resolve torch asks for minutes, deaf to Ctrl-C.

    Raises:
        OSError: if the port is in use, or this machine has no loopback.
    """
    if not here_only and socket.has_dualstack_ipv6():  # others may have an address of either kind
        listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
    else:
        listener = socket.create_server((LOOPBACK if here_only else "", port), backlog=BACKLOG)
    port, fd = listener.getsockname()[1], listener.detach()
    try:
        store = dist.TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd, timeout=OWN_TIMEOUT
        )
    except RuntimeError as error:
        raise OSError(errno.ENETUNREACH, f"no connection to {LOOPBACK}:{port}: {headline(error)}") from error
    store.set_timeout(TIMEOUT)
    return store


def _open(address: str, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    url = urlsplit(address)
    if url.scheme == "local":
        return dist.HashStore()
    if url.scheme == "file":
        try:
            return dist.FileStore(url.path, world_size)
        except RuntimeError as error:
            raise TransportError(f"init_process_group on rank {rank}: {address}: {error}") from error
    host, port = url.hostname, url.port
    assert host is not None and port is not None
    serves = rank == 0 and not held_by_agent()
    listening = _listen(host, port) if serves and is_loopback(host) else None

    def connect() -> dist.Store:
        return dist.TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # torch's own initialisation in this process may serve the same port
            master_listen_fd=listening,
        )

    try:
        store: dist.Store = in_background(connect, timeout.total_seconds() + GRACE_SECONDS)
        return store
    except TimeoutError as error:
        if not _somebody_listens(host, port):  # torch's client asks again for longer than it was told to
            raise TransportError(
                f"init_process_group on rank {rank}: nobody serves {address} within {timeout}; rank 0 should"
            ) from error
        raise TransportError(
            f"init_process_group on rank {rank}: what listens at {address} does not answer as a store within "
            f"{timeout}: it is another program, or rank 0's process is stopped"
        ) from error
    except RuntimeError as error:
        if serves:
            raise TransportError(
                f"init_process_group on rank 0: cannot listen at {address}, another program may use the port. "
                f"Give another one (MASTER_PORT, or init_method='tcp://host:port'): {error}"
            ) from error
        raise TransportError(
            f"init_process_group on rank {rank}: nobody serves {address} within {timeout}; rank 0 should: {error}"
        ) from error


def _somebody_listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1.0).close()
    except OSError:
        return False
    return True


def _listen(host: str, port: int) -> int | None:
    """A socket that listens on a loopback address only, or None where the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening.detach()
    except OSError:
        listening.close()
        return None
