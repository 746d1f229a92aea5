"""The one way from here to the store of a group: every call ends in time, whoever holds the store.

torch's own calls wait without a limit for a holder that is stopped or out of reach, and one that waits keeps all other
calls on its connection waiting.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from ..environment.exits import Exit, each_at_exit
from ..environment.forks import Owner
from ..environment.signals import is_of_signal
from ..errors import TransportError

T = TypeVar("T")

SOON_SECONDS = 1.0  # for an answer, where something has failed already
EXIT_SECONDS = 0.5
INTERNET = (socket.AF_INET, socket.AF_INET6)


class StoreClient:
    """Values by key, as text, behind a prefix; one connection and one thread for all clients made with `at`.

    A call that gets no answer within its deadline raises, and so do later ones at once, until an answer comes: those
    with a longer deadline when nothing has come for as long.

    Args:
        store: what to connect to; the connection is our own, where the store can be cloned.
        seconds: the deadline of each call.

    Raises:
        TransportError: by every method, if the store is gone, or there is no answer from its holder; and in a fork.
    """

    def __init__(self, store: dist.Store, seconds: float) -> None:
        self._caller, self._prefix, self.seconds = _Caller(store), "", seconds

    def at(self, prefix: str, seconds: float | None = None) -> StoreClient:
        """The same store behind a longer prefix, or with another deadline."""
        client = StoreClient.__new__(StoreClient)
        client._caller, client.seconds = self._caller, self.seconds if seconds is None else seconds
        client._prefix = f"{self._prefix}{prefix}/" if prefix else self._prefix
        return client

    def call(self, function: Callable[[Any], T]) -> T:
        """`function(store)`, with torch's store behind the prefix, on the thread."""
        prefix = self._prefix[:-1]
        return self._caller.call(lambda store: function(dist.PrefixStore(prefix, store) if prefix else store), self)

    def set(self, key: str, value: str) -> None:
        """Write."""
        self.call(lambda store: store.set(key, value))

    def read(self, key: str) -> str | None:
        """What is there, or None."""
        return self.call(lambda store: _text(key, store.get(key)) if store.check([key]) else None)

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """What is at keys that are all there."""
        return self.call(lambda store: [_text(key, store.get(key)) for key in keys])

    def read_each(self, keys: Sequence[str]) -> list[str | None]:
        """What is at each key, or None."""
        return self.call(lambda store: [_text(key, store.get(key)) if store.check([key]) else None for key in keys])

    def has(self, key: str) -> bool:
        """Whether something is there."""
        return self.call(lambda store: bool(store.check([key])))

    def absent(self, keys: Sequence[str]) -> list[int]:
        """Positions of keys at which nothing is."""
        return self.call(lambda store: [i for i, key in enumerate(keys) if not store.check([key])])

    def add(self, key: str, amount: int) -> int:
        """Count up; returns the sum."""
        return self.call(lambda store: int(store.add(key, amount)))

    def append(self, key: str, value: str) -> None:
        """Write behind what is there."""
        self.call(lambda store: store.append(key, value))

    def set_first(self, key: str, value: str) -> str:
        """Write if nothing is there; returns what is there then."""
        return self.call(lambda store: _text(key, store.compare_set(key, "", value))) or value

    def delete(self, *keys: str) -> None:
        """Delete what is there."""
        self.call(lambda store: [store.delete_key(key) for key in keys])


def _text(key: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise TransportError(
            f"the store has {value[:40]!r} at {key!r}, which is no text: another program writes there"
        ) from error


class _Line:
    """Calls on their way to the thread."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self.silent_since: float | None = None  # a deadline has passed, and nothing has come back since
        self.socket: socket.socket | None = None  # of the connection, where it has one that we have found


class _Caller:
    """Makes calls on a daemon thread, which starts with the first one and owns a connection."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._line, self._start, self._owner = store, _Line(), threading.Lock(), Owner()
        self.thread: threading.Thread | None = None
        self._end = weakref.finalize(self, self._line.jobs.put, None)
        self._end.atexit = False
        _alive.add(self)

    def call(self, function: Callable[[Any], T], client: StoreClient) -> T:
        """`function(connection)`."""
        self._owner.check("The store was called")
        start = time.monotonic()
        silent = self._line.silent_since
        left = client.seconds if silent is None else client.seconds - (start - silent)
        if left <= 0:
            raise TransportError(f"{_holder()}, which holds the store, does not answer")
        with self._start:
            if self.thread is None:
                work = (self._line, self._store)
                self.thread = threading.Thread(target=_work, args=work, name="fastreduce-store", daemon=True)
                self.thread.start()
        answer: Future[T] = Future()
        self._line.jobs.put((answer, function))
        try:
            return answer.result(left)
        except TransportError:
            raise
        except TooLate as error:
            answer.cancel()
            if is_of_signal(error):
                raise
            self._line.silent_since = start if silent is None else silent
            raise TransportError(
                f"{_holder()}, which holds the store, does not answer within {client.seconds:g} s"
            ) from error
        except RuntimeError as error:
            if is_of_signal(error):
                raise
            raise TransportError(f"the store is gone, and with it {_holder()}: {error}") from error

    def end(self) -> None:
        """At exit: end the thread, and its connection where it waits for an answer.

        One that came back from C++ while Python goes would abort the process.
        """
        if self._end() is not None or self.thread is None:
            return
        if self._line.silent_since is None:
            self.thread.join(EXIT_SECONDS)
        if self.thread.is_alive() and self._line.socket is not None:
            with suppress(OSError):  # it is closed
                self._line.socket.shutdown(socket.SHUT_RDWR)
            self.thread.join(EXIT_SECONDS)


def _work(line: _Line, original: Any) -> None:
    store: Any = None
    while (job := line.jobs.get()) is not None:
        answer, function = job
        if answer.set_running_or_notify_cancel():
            try:
                store = store or _connect(original, line)
                answer.set_result(function(store))
            except BaseException as error:
                answer.set_exception(error)
        line.silent_since = None
        del job, answer, function
    if line.socket is not None:
        line.socket.close()


def _connect(original: Any, line: _Line) -> Any:
    """A connection of our own to a store."""
    before = _sockets()
    try:
        store = original.clone()
    except RuntimeError as error:
        if "pure virtual" not in str(error):
            raise
        return original  # a store of the user's own class, in Python
    port = getattr(root_of(original), "port", None)
    for file in _sockets() - before:
        # It may be another thread's: closed already, or of a kind whose peers have no port.
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as found:
            if found.family in INTERNET and found.getpeername()[1] == port:
                line.socket = found.dup()
    return store


def _sockets() -> set[int]:
    """The sockets of this process, by file."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was that of the folder
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def held_by_agent() -> bool:
    """Whether a launcher holds the store that the environment names, which outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _holder() -> str:
    if held_by_agent():
        return f"the launcher on {os.environ.get('MASTER_ADDR', 'the first node')}"
    return "rank 0's process (or the launcher that started the ranks)"


_alive: weakref.WeakSet[_Caller] = weakref.WeakSet()


def root_of(store: Any) -> Any:
    """What is behind all prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)


each_at_exit(Exit.STORE, _Caller.end, _alive)
