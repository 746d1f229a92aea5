"""What is left to do when a process ends, in one order, whichever module was loaded first.

`run/replacement.py`, which imports nothing of ours, is the only other place with a handler at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import multiprocessing.util
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial, wraps
from typing import Any, Protocol


class Kept(Protocol):
    """A set, list or dict, weak or not."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def clear(self) -> None:
        """Have nothing any more."""


class Exit(Enum):
    """The steps, from first to last: what uses something else ends before it."""

    TELL = "peers learn that this rank starts nothing more, so that none waits for it meanwhile (MPI, shared memory)"
    DELIVER = "what `remote_send` has under way is received, while the user's group still stands"
    REDUCERS = "streams end, and give back the connections that they work on"
    NCCL = "communicators end behind what is enqueued, and watchdogs with them; they tell how far they came"
    GLOO = "connections are dropped, in use or not: a thread of gloo that outlives Python aborts the process"
    STORE = "the threads that ask stores end: all of the above may ask"
    TRACES = "traces are completed, and merged by the rank that is last; counters are written once more"
    FILES = "folders that were made for this process are deleted"
    SIGNALS = "those that print stacks are ignored from now on: when Python has gone they would end the process"
    MPI = "MPI is finalised, which waits for all ranks and ends the process where one may be gone: nothing comes after"


_ended = 0  # which process has, by number
_ends: dict[Exit, list[tuple[Callable[[], object], Kept | None]]] = {step: [] for step in Exit}


def at_exit(step: Exit, end: Callable[[], object], of: Kept | None = None) -> None:
    """Call `end` when the process ends, in its step: where atexit's handlers run, and in a forked process too.

    Args:
        step: when.
        end: what is called.
        of: what it ends. Where nothing is in it, `end` is not called; a fork of the process begins with nothing.
    """
    _ends[step].append((end, of))


def each_at_exit(step: Exit, end: Callable[[Any], object], of: Kept) -> None:
    """Call `end` with each of them, likewise."""

    @wraps(end)
    def end_each() -> None:
        for each in list(of):
            _end(partial(end, each))

    at_exit(step, end_each, of)


@atexit.register
def _end_all() -> None:
    global _ended
    if _ended == os.getpid():  # by multiprocessing's finalizers, before atexit's turn
        return
    _ended = os.getpid()
    for step in Exit:
        for end, of in _ends[step]:
            with contextlib.suppress(KeyboardInterrupt):  # once more: what this step has waited for is not waited for
                if of is None or len(of):
                    _end(end)


def _end(end: Callable[[], object]) -> None:
    """Errors are shown, and the others have their turn: as atexit does."""
    try:
        end()
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc()


def _after_fork() -> None:
    """A fork has neither the threads of what its parent made nor its place among the ranks: it ends nothing of it.

    Nor when Python lets go of everything, since C++ would wait for those threads, or end the process: it never does.
    """
    for step in Exit:
        for _, of in _ends[step]:
            if of is not None:
                kept = list(of.items()) if hasattr(of, "items") else list(of)
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
                of.clear()


os.register_at_fork(after_in_child=_after_fork)


def _end_child() -> None:
    """As the interpreter itself does: threads that go on are waited for before what they work on ends."""
    threading._shutdown()  # type: ignore[attr-defined]
    _end_all()


def _end_with_multiprocessing() -> None:
    """What `multiprocessing` starts ends by `os._exit` behind its finalizers, unless it was spawned."""
    multiprocessing.util.Finalize(None, _end_child, exitpriority=0)


multiprocessing.util.register_after_fork(Exit, lambda _: _end_with_multiprocessing())
if multiprocessing.parent_process() is not None:  # this one is such a child, of a parent that had not imported this
    _end_with_multiprocessing()
