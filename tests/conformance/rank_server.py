"""A server that has torch's tests imported once, and forks fresh ranks for each test it is asked to run.

Reads a line of JSON a test from stdin, answers with one on stdout; ends at end of file.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3.0  # for the other ranks to report too, once one has failed
FAILED = 3  # exit code of a rank that says why


def _shim() -> Any:
    """What has the tests: of DDP, or of FSDP2, which come from a folder."""
    name = "sharded_shim" if "CONFORMANCE_SOURCES" in os.environ else "shim"
    return importlib.import_module(f"tests.conformance.{name}")


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    shim = _shim()

    shim.warm_up()
    print(json.dumps(shim.names()), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(**request)), file=answers)


def run(test: str, which: str, timeout: float) -> dict[str, Any]:
    """Outcome (`passed`, `skipped`, `failed`), message and duration of one test on fresh ranks."""
    world_size = int(os.environ["WORLD_SIZE"])
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        folder = Path(name)
        for child in ("barrier", "test_dir", "init_dir"):
            (folder / child).mkdir()
        pids = {_fork(rank, test, which, folder, timeout): rank for rank in range(world_size)}
        codes = _wait(pids, start + timeout + 5)
        reports = {rank: _report(folder, rank, codes[rank]) for rank in range(world_size)}
    seconds = round(time.monotonic() - start, 2)
    outcomes = [outcome for outcome, _ in reports.values()]
    outcome = next((o for o in ("failed", "skipped") if o in outcomes), "passed")
    message = "\n".join(f"[rank {rank}] {text}" for rank, (o, text) in reports.items() if o != "passed")
    return {"test": test, "which": which, "outcome": outcome, "message": message, "seconds": seconds}


def _fork(rank: int, test: str, which: str, folder: Path, timeout: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.dump_traceback_later(timeout, exit=True, file=2)
        code = _be_rank(rank, test, which, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _be_rank(rank: int, test: str, which: str, folder: Path) -> int:
    shim = _shim()

    os.environ["TEMP_DIR"] = str(folder)
    try:
        shim.install(which)
        shim.call(test, rank, str(folder / "rendezvous"))
        outcome, message = "passed", ""
    except unittest.SkipTest as skip:
        outcome, message = "skipped", str(skip)
    except SystemExit as end:
        known = {skip.exit_code: skip.message for skip in shim.tests.TEST_SKIPS.values()}
        outcome = "skipped" if end.code in known else "failed"
        message = known.get(end.code, f"exit({end.code})")  # type: ignore[arg-type]
    except BaseException:
        outcome, message = "failed", traceback.format_exc()
    (folder / f"{rank}.json").write_text(json.dumps([outcome, message]))
    return FAILED if outcome == "failed" else 0


def _wait(pids: dict[int, int], deadline: float) -> dict[int, int]:
    """Exit codes by rank; a rank that runs past the deadline, or past another's failure, is killed."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid, rank in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    if codes[rank] != 0:
                        deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return codes


def _report(folder: Path, rank: int, code: int) -> tuple[str, str]:
    result, log = folder / f"{rank}.json", folder / f"{rank}.log"
    if result.exists() and code in (0, FAILED):
        outcome, message = json.loads(result.read_text())
        return outcome, message
    tail = log.read_text(errors="replace")[-6000:] if log.exists() else ""
    return "failed", f"ended with code {code}\n{tail}"


if __name__ == "__main__":
    serve()
