"""Small values and whole functions shared between ranks: the key-value client, group_barrier, synchronized."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..errors import TransportError
from ..transports.meeting import wait_until
from ..transports.ranks import timeout_of
from ..transports.store_client import StoreClient
from . import values
from .meetings import group_or_default, store_of
from .process_groups import barrier
from .queries import is_initialized

P = ParamSpec("P")
R = TypeVar("R")


class Client:
    """Values by key on the rendezvous store, the same for all ranks; for small things, not for steps."""

    def __init__(self, store: StoreClient, seconds: float) -> None:
        self._store, self._seconds = store, seconds

    def user_set(self, key: str, val: Any) -> None:
        """Store a value; it replaces an earlier one.

        It travels as data that cannot execute: None, bools, numbers, strings, bytes, torch tensors, NumPy arrays and
        numbers, and lists, tuples, sets and dicts of these. In a TCPStore, as launchers and addresses give, it may have
        8 MiB as text, which 6 MiB of bytes or of a tensor's elements become, and the key some 7 KiB.

        Raises:
            TypeError: for another value.
            TransportError: if one of them is longer, or the store does not answer within the timeout of the process
                group.
        """
        self._store.set(key, values.encode(val))

    def user_get(self, key: str) -> Any:
        """The value of `key`; waits until a rank has set it.

        Raises:
            TransportError: if none has, within the timeout of the process group, or if it is no value of `user_set`.
        """
        return self._wait("user_get", key)

    def user_pop(self, key: str) -> Any:
        """The value of `key`, which is gone afterwards; waits until a rank has set it. Of several ranks one gets it.

        Raises:
            TransportError: if none has, within the timeout of the process group.
        """
        return self._wait("user_pop", key, take=True)

    def _wait(self, call: str, key: str, take: bool = False) -> Any:
        found: list[Any] = []

        def look(store: StoreClient) -> bool:
            text = store.read(key)
            if text is None:
                return False
            found[:] = [values.decode(text)]
            return not take or store.take(key, text)  # else another rank was first

        who = f"{call} on rank {dist.get_rank()}"
        try:
            if not wait_until(self._store, look, self._seconds):
                raise TransportError(f"no rank has set {key!r} within {self._seconds:g} s")
            return found[0]
        except TransportError as error:
            raise TransportError(f"{who}: {error}") from error
        except ValueError as error:
            raise TransportError(f"{who}: at {key!r} is no value that a rank has set by user_set: {error}") from error


_clients: weakref.WeakKeyDictionary[dist.ProcessGroup, Client] = weakref.WeakKeyDictionary()


def get_client() -> Client:
    """The key-value client of the default process group.

    Raises:
        NotInitializedError: if there is none.
    """
    group = group_or_default("get_client", None)
    if group not in _clients:
        _clients[group] = Client(store_of(group).at("client"), timeout_of(group).total_seconds())
    return _clients[group]


def group_barrier(group: dist.ProcessGroup | None = None) -> None:
    """`barrier` of the ranks of `group`."""
    barrier(group)


def synchronized(function: Callable[P, R]) -> Callable[P, R]:
    """Let all ranks that call `function` meet at a barrier after it; without a process group, just call it."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        value = function(*args, **kwargs)
        if is_initialized():
            barrier()
        return value

    return wrapper
