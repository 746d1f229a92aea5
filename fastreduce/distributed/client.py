"""Small values and whole functions shared between ranks: the key-value client, group_barrier, synchronized."""

from __future__ import annotations

import functools
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from ..errors import TransportError
from ..transports.connections import timeout_of
from .meetings import group_of, store_of
from .process_groups import barrier
from .queries import is_initialized

P = ParamSpec("P")
R = TypeVar("R")


class Client:
    """Values by key on the rendezvous store, the same for all ranks; for small things, not for steps."""

    def __init__(self, store: Any, timeout: timedelta) -> None:
        # A connection of its own: a get that waits must not stop collectives that look something up.
        self._store: Any = dist.PrefixStore("client", store.clone())
        self._timeout = timeout

    def user_set(self, key: str, val: Any) -> None:
        """Store a value that can be pickled; it replaces an earlier one."""
        self._store.set(key, pickle.dumps(val))

    def user_get(self, key: str) -> Any:
        """The value of `key`; waits until a rank has set it.

        Raises:
            TransportError: if none has, within the timeout of the process group.
        """
        try:
            self._store.wait([key], self._timeout)
            return pickle.loads(self._store.get(key))
        except RuntimeError as error:
            raise TransportError(
                f"user_get on rank {dist.get_rank()}: no rank has set {key!r} within {self._timeout}: {error}"
            ) from error

    def user_pop(self, key: str) -> Any:
        """The value of `key`, which is gone afterwards; waits until a rank has set it.

        Raises:
            TransportError: if none has, within the timeout of the process group.
        """
        value = self.user_get(key)
        self._store.delete_key(key)
        return value


_clients: weakref.WeakKeyDictionary[dist.ProcessGroup, Client] = weakref.WeakKeyDictionary()


def get_client() -> Client:
    """The key-value client of the default process group.

    Raises:
        NotInitializedError: if there is none.
    """
    group = group_of("get_client", None)
    if group not in _clients:
        _clients[group] = Client(store_of(group), timeout_of(group))
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
