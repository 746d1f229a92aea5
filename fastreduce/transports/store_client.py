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
import uuid
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
MOST_BYTES = 8 << 20  # of a value: torch's store ends the connection of who sends more at once
MOST_KEY_BYTES = 7 << 10  # likewise at 8 KiB, with what a group puts before a key, which nobody here is told
NOTHING = "\0nothing"  # so begins what is no value
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
        self._check_sizes([key], value)
        self.call(lambda store: store.set(key, value))

    def read(self, key: str) -> str | None:
        """What is there, or None."""
        return self.read_each([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """What is at keys that are all there: of each rank's, read by each, in one message where the store can."""

        def read(store: Any) -> list[str]:
            values = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
            return [_text(key, bytes(value)) for key, value in zip(keys, values, strict=True)]

        return self.call(read)

    def read_each(self, keys: Sequence[str]) -> list[str | None]:
        """What is at each key, or None."""
        self._check_sizes(keys)
        found = self.call(lambda store: [_text(key, _look(store, key)) for key in keys])
        return [None if text.startswith(NOTHING) else text for text in found]

    def has(self, key: str) -> bool:
        """Whether something is there."""
        return self.read(key) is not None

    def absent(self, keys: Sequence[str]) -> list[int]:
        """Positions of keys at which nothing is."""

        def look(store: Any) -> list[int]:
            return [] if store.check(keys) else [i for i, key in enumerate(keys) if not store.check([key])]

        return self.call(look)

    def add(self, key: str, amount: int) -> int:
        """Count up; returns the sum."""
        return self.call(lambda store: int(store.add(key, amount)))

    def append(self, key: str, value: str) -> None:
        """Write behind what is there."""
        self._check_sizes([key], value)
        self.call(lambda store: store.append(key, value))

    def set_first(self, key: str, value: str) -> str:
        """Write if nothing is there; returns what is there then."""
        self._check_sizes([key], value)
        return self.call(lambda store: _text(key, store.compare_set(key, "", value))) or value

    def take(self, key: str, value: str) -> bool:
        """Take it away if this value is there; returns whether it was, for one of several that ask at once.

        For `has`, `read` and `set` nothing is there then: torch's store deletes under no condition, so a mark stays.
        """
        mark = f"{NOTHING} {uuid.uuid4().hex}"
        self._check_sizes([key], max(value, mark, key=len))
        return self.call(lambda store: _text(key, store.compare_set(key, value, mark))) == mark

    def delete(self, *keys: str) -> None:
        """Delete what is there."""
        self.call(lambda store: [store.delete_key(key) for key in keys])

    def _check_sizes(self, keys: Sequence[str], value: str = "") -> None:
        for key in keys if self._caller.has_limits else ():
            if (size := len((self._prefix + key).encode())) > MOST_KEY_BYTES:
                raise TransportError(f"a key of {size} bytes, {key!r:.40} …; allowed: up to {MOST_KEY_BYTES}")
            if (size := len(value.encode())) > MOST_BYTES:
                raise TransportError(f"{size} bytes for the store at {key!r:.80}; allowed: up to {MOST_BYTES}")


def _look(store: Any, key: str) -> bytes:
    """What is there, or `NOTHING`: asked in one of torch's own stores, where between two calls it may be deleted."""
    if isinstance(root_of(store), (dist.TCPStore, dist.HashStore, dist.FileStore)):
        return bytes(store.compare_set(key, NOTHING, NOTHING))
    return bytes(store.get(key)) if store.check([key]) else NOTHING.encode()


def _text(key: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise TransportError(
            f"the store has {value[:40]!r} at {key!r}, which is no text: another program writes there"
        ) from error


class _Line:
    """Calls on their way to a daemon thread, which owns a connection and starts with the first call."""

    def __init__(self, store: Any) -> None:
        self.jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None] = queue.SimpleQueue()
        self.silent_since: float | None = None  # a deadline has passed, and nothing has come back since
        self.over = False  # the process ends: nothing is asked any more
        self._store = store
        self._first: dict[str, threading.Thread] = {}  # which thread has come first, for `setdefault` lets one in
        self._connection: Any = None
        self._socket: socket.socket | None = None  # of the connection, where it has one that we have found

    def put(self, answer: Future[T], function: Callable[[Any], T]) -> None:
        """Have the thread call `function(connection)`: at once, where what asks ends as garbage on that thread.

        Garbage is collected wherever objects are made, and signals are handled anywhere, also while a thread starts.
        So what asks meanwhile waits for no start but its own: the thread that begins first answers, others end.
        """
        if self._thread is not None and self._thread.ident == threading.get_ident():
            self._answer(answer, function)
            return
        if self._thread is None:
            _running.add(self)
            threading.Thread(target=self._work, name="fastreduce-store", daemon=True).start()
        self.jobs.put((answer, function))

    @property
    def _thread(self) -> threading.Thread | None:
        return self._first.get("")

    def end(self) -> None:
        """At exit: end the thread, and its connection where it waits for an answer.

        One that came back from C++ while Python goes would abort the process.
        """
        self.over = True
        self.jobs.put(None)
        if self._thread is None or not self._thread.is_alive():
            return
        if self.silent_since is None:
            self._thread.join(EXIT_SECONDS)
        if self._thread.is_alive() and self._socket is not None:
            with suppress(OSError):  # it is closed
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(EXIT_SECONDS)

    def _work(self) -> None:
        here = threading.current_thread()
        if self._first.setdefault("", here) is not here:
            return
        while (job := self.jobs.get()) is not None:
            self._answer(*job)
            self.silent_since = None
            del job
        self._connection = None
        if self._socket is not None:
            self._socket.close()
        _running.discard(self)

    def _answer(self, answer: Future[T], function: Callable[[Any], T]) -> None:
        if answer.set_running_or_notify_cancel():
            try:
                self._connection = self._connection or self._connect()
                self._check_holder()
                answer.set_result(function(self._connection))
            except BaseException as error:
                answer.set_exception(error)

    def _check_holder(self) -> None:
        """Raise where the holder has closed the connection.

        torch raises then, too, but only at the second call, and with a C++ stack on stderr: at the end of a good
        training on a rank that ends a little later than the holder.
        """
        if self._socket is None:
            return
        try:
            over = not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing to read
            over = False
        except OSError:  # reset by peer
            over = True
        if over:
            raise RuntimeError("the connection has been closed by it")

    def _connect(self) -> Any:
        """A connection of our own to the store."""
        before = _sockets()
        try:
            store = self._store.clone()
        except RuntimeError as error:
            if "pure virtual" not in str(error):
                raise
            return self._store  # a store of the user's own class, in Python
        port = getattr(root_of(self._store), "port", None)
        # Where a TCPStore is, one of its own was there before: without any the system did not tell.
        for file in _sockets() - before if before else set[int]():
            # It may be another thread's: closed already, or of a kind whose peers have no port.
            with suppress(OSError), socket.socket(fileno=os.dup(file)) as found:
                if found.family in INTERNET and found.getpeername()[1] == port:
                    self._socket = found.dup()
        return store


class _Caller:
    """Makes calls on a line, which ends once nobody has a client any more."""

    def __init__(self, store: dist.Store) -> None:
        self._line, self._owner = _Line(store), Owner()
        root = root_of(store)
        self.has_limits = isinstance(root, dist.TCPStore) and getattr(root, "libuvBackend", True)
        weakref.finalize(self, self._line.jobs.put, None).atexit = False

    def call(self, function: Callable[[Any], T], client: StoreClient) -> T:
        """`function(connection)`."""
        self._owner.check("The store was called")
        if self._line.over:
            raise TransportError("the store is not asked any more: this process is ending")
        start = time.monotonic()
        silent = self._line.silent_since
        left = client.seconds if silent is None else client.seconds - (start - silent)
        if left <= 0:
            raise TransportError(f"{_holder()}, which holds the store, does not answer")
        answer: Future[T] = Future()
        self._line.put(answer, function)
        try:
            return answer.result(left)
        except TransportError:
            raise
        except (TooLate, TimeoutError) as error:  # two classes before Python 3.11
            if is_of_signal(error):
                answer.cancel()
                raise
            self._line.silent_since = start if silent is None else silent  # first: the thread may end it from now on
            answer.cancel()
            if answer.done() and not answer.cancelled():  # it came meanwhile, and takes this back no more
                self._line.silent_since = None
                if answer.exception() is None:
                    return answer.result()
            raise TransportError(
                f"{_holder()}, which holds the store, does not answer within {client.seconds:g} s"
            ) from error
        except RuntimeError as error:
            if is_of_signal(error):
                raise
            raise TransportError(f"the store is gone, and with it {_holder()}: {error}") from error


def _sockets() -> set[int]:
    """The sockets of this process, by file; none where the system does not tell, as in some sandboxes."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # or this process has too many files open
        return set()
    found = set()
    for name in names:
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


_running: set[_Line] = set()
"""Those whose threads have not ended, though their clients may be gone."""


def root_of(store: Any) -> Any:
    """What is behind all prefixes."""
    return getattr(store, "_underlying_non_prefix_store", store)


each_at_exit(Exit.STORE, _Line.end, _running)
