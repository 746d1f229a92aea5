"""One rank under `fastreduce launch`: runs the script, and leaves word of why it failed.

Started by its path, so that nothing of fastreduce is imported: `python worker.py script|module|program name …`.
An exception goes to a file that the launcher named (`launch.py`), which prints the first one of all ranks.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

LAUNCHER = "FASTREDUCE_LAUNCHER"  # the launcher's process id
ONE_GPU = "FASTREDUCE_ONE_GPU"  # each rank sees one device
TEARDOWN_SECONDS = 2
PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run what the arguments name, as Python itself would."""
    _end_with_launcher()
    if os.environ.pop(ONE_GPU, ""):
        _see_one_gpu()
    kind, name = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    if kind == "program":
        os.execvp(name, sys.argv)
    path = os.path.abspath(name)
    sys.path[0] = os.getcwd() if kind == "module" else os.path.dirname(path)
    try:
        if kind == "module":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(path, run_name="__main__")
    except KeyboardInterrupt:  # the launcher passed Ctrl-C on
        sys.exit(128 + signal.SIGINT)
    except SystemExit as end:
        if end.code not in (None, 0):
            _record("", end.code if isinstance(end.code, int) else 1)
        raise
    except BaseException as error:
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    error.__traceback__ = _of_script(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    _record(text, 1)
    # What hangs in the interpreter's end must not keep the other ranks waiting.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(TEARDOWN_SECONDS)
    sys.exit(1)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without this file's frame and those of runpy."""
    ours = (__file__, runpy.__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
    kept = trace
    while kept is not None and kept.tb_frame.f_code.co_filename in ours:
        kept = kept.tb_next
    return kept  # None where the script does not even compile: then the error says where


def _record(text: str, code: int) -> None:
    """Write what torch's launcher reads, and beside it when this was and how the process ends."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and not text):  # torch's own @record may have been here
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    content = {"message": {"message": text, "extraInfo": extra}, "exit_code": code, "nanoseconds": time.time_ns()}
    with open(f"{path}.part", "w") as file:
        json.dump(content, file)
    os.replace(f"{path}.part", path)


def _see_one_gpu() -> None:
    """The local rank's device becomes device 0, and the local rank 0 with it, since scripts use it as a device."""
    rank = int(os.environ["LOCAL_RANK"])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[rank].strip() if visible else str(rank)
    os.environ["LOCAL_RANK"] = "0"


def _end_with_launcher() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.pop(LAUNCHER)):  # it ended before the line above
        os._exit(1)


if __name__ == "__main__":
    main()
