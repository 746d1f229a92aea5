"""What ranks tell each other through the store of a group, beside its collectives."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from ..errors import TransportError
from .connections import timeout_of

LOOK_SECONDS = 0.5  # of waiting, after which a rank looks whether it waits in vain


class StoreNotes:
    """A connection of our own to the store of `group`, under a prefix. A thread that waits keeps others waiting."""

    def __init__(self, group: dist.ProcessGroup, prefix: str) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.seconds = timeout_of(group).total_seconds()
        # A connection of its own: another thread may wait on the group's.
        store: Any = _get_process_group_store(group)
        self._store: Any = dist.PrefixStore(f"fastreduce/{prefix}", store.clone())
        self._round = 0

    def exchange(self, value: Any, look: Callable[[], None] = lambda: None) -> list[Any]:
        """Every rank's picklable value, in rank order; `look`, called now and then, may raise.

        The last one to come tells all, the last one to read clears up: a later group may have the same name in the
        same store. A rank that raises has left; all ranks may then try again.

        Raises:
            TransportError: naming the ranks that do not come within the group's timeout.
        """
        here = f"round {self._round}"
        try:
            self._store.set(f"{here}/{self.rank}", pickle.dumps(value))
            if self._store.add(f"{here}/count", 1) == self.size:
                self._store.set(f"{here}/complete", "")
            try:
                self._wait(here, look)
            except TransportError:
                self._store.add(f"{here}/count", -1)
                raise
            values = [pickle.loads(self._store.get(f"{here}/{rank}")) for rank in range(self.size)]
            if self._store.add(f"{here}/read", 1) == self.size:
                for key in (*range(self.size), "count", "complete", "read"):
                    self._store.delete_key(f"{here}/{key}")
        except TransportError:
            raise
        except RuntimeError as error:
            raise TransportError(f"The store of the process group is gone: {error}.") from error
        self._round += 1
        return values

    def _wait(self, here: str, look: Callable[[], None]) -> None:
        """Ask again and again: the store's own wait writes warnings when it is to end now and then."""
        start = last_look = time.monotonic()
        pause = 0.0005
        while not self._store.check([f"{here}/complete"]):
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
            now = time.monotonic()
            if now - last_look > LOOK_SECONDS:
                last_look = now
                look()
            if now - start > self.seconds:
                missing = [str(rank) for rank in range(self.size) if not self._store.check([f"{here}/{rank}"])]
                raise TransportError(
                    f"No word from rank {', '.join(missing) or 'unknown'}: it has exited, takes no part, or did not "
                    "come within the timeout."
                )

    def tell(self, key: str, value: object) -> None:
        """Leave a note, unless the store is gone."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, str(value))

    def append(self, key: str, value: str) -> None:
        """Add to a note, unless the store is gone."""
        with contextlib.suppress(RuntimeError):
            self._store.append(key, value)

    def read(self, key: str) -> str:
        """A note, or "" where there is none or the store is gone."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([key]):
                return str(self._store.get(key).decode())
        return ""
