"""What is left to do when a process ends, in one order, whichever module was loaded first.

`run/replacement.py`, which imports nothing of ours, is the only other place with a handler at exit.
"""

from __future__ import annotations

import atexit
import traceback
from collections.abc import Callable
from enum import Enum


class Exit(Enum):
    """The steps, from first to last: what uses something else ends before it."""

    TELL = "peers learn by the store that this rank starts nothing more, so that none waits for it meanwhile (MPI)"
    DELIVER = "what `remote_send` has under way is received, while the user's group still stands"
    REDUCERS = "streams end, and give back the connections that they work on"
    NCCL = "communicators end behind what is enqueued, and watchdogs with them; they tell how far they came"
    GLOO = "connections that nobody uses are dropped: a thread of gloo that outlives Python aborts the process"
    STORE = "the threads that ask stores end: all of the above may ask"
    TRACES = "traces are completed, and merged by the rank that is last; counters are written once more"
    FILES = "folders that were made for this process are deleted"
    SIGNALS = "those that print stacks are ignored from now on: when Python has gone they would end the process"
    MPI = "MPI is finalised, which waits for all ranks and ends the process where one may be gone: nothing comes after"


_ends: dict[Exit, list[Callable[[], object]]] = {step: [] for step in Exit}


def at_exit(step: Exit, end: Callable[[], object]) -> None:
    """Call `end` when the process ends, in its step: where atexit's handlers run, and in a forked process too."""
    _ends[step].append(end)


@atexit.register
def _end_all() -> None:
    for step in Exit:
        for end in _ends[step]:
            try:
                end()
            except BaseException:  # shown, and the others have their turn: as atexit does
                traceback.print_exc()
