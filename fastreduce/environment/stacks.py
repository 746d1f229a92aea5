"""The Python stacks of this process, on request and at a signal."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ..errors import SettingError
from .exits import Exit, at_exit
from .frames import outwards, walking_frames

logger = logging.getLogger(__name__)

VARIABLE = "FASTREDUCE_DUMP_SIGNAL"
SIGNALS = ("USR1", "USR2")
NO_SIGNAL = "NONE"
OURS = "fastreduce-"  # what the names of our own threads begin with

_writing: dict[str, int] = {}  # by signal, where its handler writes; never closed
_printing: set[str] = set()  # signals at which a thread of this process prints


def python_stacks(frames: int = 100, threads: int = 100, ours: bool = True) -> str:
    """Where this process's threads are, the main thread first, the innermost call last.

    Args:
        frames: the most that are told of a thread.
        threads: the most that are told of.
        ours: whether those of fastreduce are among them.
    """
    known = {thread.ident: thread for thread in threading.enumerate()}
    main, here = threading.main_thread().ident, threading.get_ident()
    parts = []
    with walking_frames():
        for ident, frame in sorted(sys._current_frames().items(), key=lambda item: (item[0] != main, item[0])):
            thread = known.get(ident)
            name = thread.name if thread is not None else f"thread {ident}, which Python did not start"
            if ident != here and (ours or not name.startswith(OURS)):
                parts.append("".join([f"{name}:\n", *traceback.format_stack(frame, frames)]))
    return "".join(parts[:threads])


COLLECTIVES = {
    "torch/distributed/distributed_c10d.py": "torch.distributed",
    "fastreduce/checkpoint/__init__.py": "fastreduce",
    **{f"fastreduce/distributed/{name}.py": "fastreduce.distributed" for name in ("collectives", "process_groups")},
}
"""Where functions are that wait for other ranks → how they are called."""


FOLDERS = (Path(__file__).parents[1], sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
OTHERS = tuple(f"{folder}{os.sep}" for folder in FOLDERS)  # what names of files begin with that are not the user's
PACKAGES = ("site-packages", "dist-packages")  # what is in those of others
BACKWARD = f"torch{os.sep}autograd{os.sep}"  # what is in those of torch's that run one


def users_line(thread: int | None = None) -> str:
    """Where a thread is in the user's own code, as "line 12 of train.py, in main"; "" where it is in none.

    Args:
        thread: its `threading.get_native_id()`; None means the main thread, as do threads that run no code of a user's.
    """
    main = threading.main_thread()
    known = [each for each in threading.enumerate() if each.native_id == thread]
    with walking_frames():
        for ident in (each.ident for each in (*known, main)):
            for frame in outwards(sys._current_frames().get(ident or 0)):
                if _is_users(frame):
                    return f"line {frame.f_lineno} of {frame.f_code.co_filename}, in {frame.f_code.co_name}"
    return ""


def only_one_trains() -> bool:
    """Whether no more than one thread of this process is in the user's own code, or in a backward."""
    with walking_frames():
        at_work = [
            any(_is_users(f) or BACKWARD in f.f_code.co_filename for f in outwards(innermost))
            for innermost in sys._current_frames().values()
        ]
    return sum(at_work) <= 1


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    in_main = frame.f_globals.get("__name__") == "__main__"  # as a notebook's code, which has no file
    others = name.startswith(OTHERS) or any(part in name for part in PACKAGES)
    return not others and (in_main or not name.startswith("<"))


def collective_under_way() -> str:
    """The collective in which the main thread is, and where that was called; "" where it is in none."""
    with walking_frames():
        frames = traceback.extract_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    for place, frame in enumerate(frames):
        module = next((name for where, name in COLLECTIVES.items() if where in frame.filename), None)
        if module is not None and not frame.name.startswith(("_", "wrapper")):
            callers = [each for each in frames[:place] if each.name != "wrapper"]
            at = f" (line {callers[-1].lineno} of {callers[-1].filename}, in {callers[-1].name})" if callers else ""
            return f"{module}.{frame.name}{at}"
    return ""


def signal_asked_for() -> str:
    """What FASTREDUCE_DUMP_SIGNAL says, in capitals and without SIG, or USR1.

    Raises:
        SettingError: if that is no such signal, and not none.
    """
    asked = os.environ.get(VARIABLE, "")
    name = (asked or SIGNALS[0]).upper().removeprefix("SIG")
    if name not in (*SIGNALS, NO_SIGNAL):
        raise SettingError(f"{VARIABLE}={asked}: allowed: {', '.join(SIGNALS)}, {NO_SIGNAL.lower()}")
    return name


def dump_at_signal(tell: Callable[[], str]) -> None:
    """Print `tell()` and all stacks to stderr at a signal: USR1, or the one that FASTREDUCE_DUMP_SIGNAL names.

    A thread prints, so that it works while the main thread waits in C++. A handler that is there stays, whoever put it
    there, by `signal` or by `faulthandler`; one that is put there later takes the place of this.

    Raises:
        SettingError: if the variable names no such signal.
    """
    name = signal_asked_for()
    if name == NO_SIGNAL or name in _printing:
        return
    if name not in _writing:
        number = signal.Signals[f"SIG{name}"]
        if _is_taken(number):
            if os.environ.get(VARIABLE):
                logger.warning("%s: this process has a handler for SIG%s already, which stays", VARIABLE, name)
            return
        _writing[name] = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        # To which `unregister` returns: there is no moment in which the signal would end the process.
        ctypes.CDLL(None).signal(number, ctypes.c_void_p(signal.SIG_IGN))
        faulthandler.register(number, file=_writing[name], all_threads=False, chain=False)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # the handler runs wherever the signal comes, and must not wait there
    os.dup2(writing, _writing[name], inheritable=False)
    os.close(writing)
    _printing.add(name)
    threading.Thread(target=_print, args=(reading, tell), name=f"{OURS}signal", daemon=True).start()


def _ignore_signals() -> None:
    for name in _writing:
        faulthandler.unregister(signal.Signals[f"SIG{name}"])


at_exit(Exit.SIGNALS, _ignore_signals)


def _after_fork() -> None:
    """A fork has the handler, and no thread that prints until it asks for one: what comes means nothing until then."""
    _printing.clear()
    if _writing:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for writing in _writing.values():
            os.dup2(nowhere, writing, inheritable=False)
        os.close(nowhere)


os.register_at_fork(after_in_child=_after_fork)


def _is_taken(number: int) -> bool:
    """Whether somebody catches or ignores a signal, in C too, of which Python's `signal` does not know."""
    action = (ctypes.c_void_p * 32)()  # more than a `struct sigaction`, which begins with the handler
    ctypes.CDLL(None).sigaction(number, None, action)
    return action[0] is not None  # SIG_DFL is a null pointer


def _print(reading: int, tell: Callable[[], str]) -> None:
    while os.read(reading, 1 << 16):
        os.set_blocking(reading, False)
        try:
            while threading.Event().wait(0.05) or os.read(reading, 1 << 16):  # the rest of what the handler writes
                pass
        except BlockingIOError:
            pass
        os.set_blocking(reading, True)
        try:
            text = tell()
        except Exception:  # the stacks come all the same
            text = traceback.format_exc()
        print(f"{text}\n{python_stacks()}", file=sys.stderr, flush=True)
