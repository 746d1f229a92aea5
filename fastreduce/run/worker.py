"""One rank under `fastreduce launch` or `run`: runs the script, and leaves word of why it failed.

Started by its path, so that nothing of fastreduce is imported: `python worker.py script|module|program name …`.
An exception goes to a file that the launcher (`cli/launch/`) named, which prints the first one of all ranks; without
our launcher it is printed here.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib.machinery
import inspect
import io
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import time
import traceback
import zipfile
from types import ModuleType, TracebackType
from typing import Any

LAUNCHER = "FASTREDUCE_LAUNCHER"  # the launcher's process id
ONE_GPU = "FASTREDUCE_ONE_GPU"  # each rank sees one device
ALONE = "_FASTREDUCE_ALONE"  # one process, since nobody said how many; it may start ranks of its own
TEARDOWN_SECONDS = 2
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run what the arguments name, as Python itself would."""
    launched, rank = _end_with_launcher(), os.getpid()
    if _wants_one_gpu():
        _see_one_gpu()
    if os.environ.pop(ALONE, ""):
        _leave_the_store()
    kind, name = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    if kind == "program":
        os.execvp(name, sys.argv)
    try:
        _run(kind, name)
    except KeyboardInterrupt as error:  # the launcher passed Ctrl-C on, or this rank alone received it
        sys.last_value = error
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if launched and os.getpid() == rank and end.code not in (None, 0):
            _record("", _exit_code(end.code))
        raise
    except BaseException as error:
        error.__traceback__ = _of_script(error.__traceback__)
        sys.last_value = error  # as the interpreter leaves it: exit handlers tell those who wait for this rank
        told = launched and os.getpid() == rank and _tell_launcher(error)  # a process that the script forked is none
        if not told or _has_excepthook():  # it may tell others
            sys.excepthook(type(error), error, error.__traceback__)
        if told:
            # What hangs in the interpreter's end must not keep the other ranks waiting.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(TEARDOWN_SECONDS)
        sys.exit(1)


def _run(kind: str, name: str) -> None:
    """As `python name` or `python -m name`: with Python's `sys.path[0]`, `sys.argv[0]` and `__file__`."""
    main = sys.modules["__main__"] = ModuleType("__main__")  # which stays, for threads and exit handlers
    vars(main).update(__builtins__=builtins)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    container = kind == "script" and (os.path.isdir(name) or zipfile.is_zipfile(name))
    path = os.path.join(os.getcwd(), name)
    folder = os.getcwd() if kind == "module" else path if container else os.path.dirname(os.path.realpath(path))
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    elif container:
        sys.path.insert(0, folder)
    if kind == "module" or container:
        runpy._run_module_as_main("__main__" if container else name, not container)  # type: ignore[attr-defined]
        return
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader)
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # compiled
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _exit_code(given: object) -> int:
    """What the system makes of it: of -1 and of a number too large 255, of a text 1."""
    if not isinstance(given, int):
        return 1
    return given & 0xFF if abs(given) < 1 << 63 else 255


def _tell_launcher(error: BaseException) -> bool:
    """Whether the launcher has it now: it prints the first one of all ranks."""
    return _record("".join(traceback.format_exception(type(error), error, error.__traceback__)), 1)


def _has_excepthook() -> bool:
    """Whether the script has a `sys.excepthook` of its own, behind those of torch.distributed, which print its rank."""
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook", sys.__excepthook__)
    return hook is not sys.__excepthook__


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this file's frame and those of runpy."""
    ours = (__file__, pkgutil.__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename in ours:
        kept = kept.tb_next
    return kept  # None where the script does not even compile: then the error says where


def _record(text: str, code: int) -> bool:
    """Write what torch's launcher reads, and beside it when this was and how the process ends: whether it is there."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and not text):  # torch's own @record may have been here
        return bool(path)
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    content = {"message": {"message": text, "extraInfo": extra}, "exit_code": code, "nanoseconds": time.time_ns()}
    try:
        with open(f"{path}.part", "w") as file:
            json.dump(content, file)
        os.replace(f"{path}.part", path)
    except OSError:  # its folder is gone, or the disk is full
        return False
    return True


def _see_one_gpu() -> None:
    """The local rank's device becomes device 0, and the local rank 0 with it, since scripts use it as a device."""
    rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank].strip() if visible else str(rank)
    os.environ["LOCAL_RANK"] = "0"


def _wants_one_gpu() -> bool:
    value = os.environ.pop(ONE_GPU, "")
    if value not in ("", "1"):
        sys.exit(f"fastreduce launch: {ONE_GPU}={value}: this is set to 1 by --gpus, and by nobody else: unset it")
    return value == "1"


def _leave_the_store() -> None:
    """Let rank 0 serve the store, here or in what this process starts, at whatever address the script gives it.

    torch's launcher serves one, and has told every process so: they would connect, and nobody would serve.
    """
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    with socket.create_server(("", 0)) as free:
        os.environ["MASTER_PORT"] = str(free.getsockname()[1])


def _end_with_launcher() -> bool:
    """Whether there is a launcher of ours; then this process ends with it."""
    launcher = os.environ.pop(LAUNCHER, "")
    if not launcher:
        return False
    if not launcher.isdecimal():
        sys.exit(f"fastreduce launch: {LAUNCHER}={launcher}: this is set to its process id by the launcher: unset it")
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it ended before the line above
        os._exit(1)
    return True


if __name__ == "__main__":
    main()
