"""Runs a phase in processes that it can end: what hangs, dies or fails is named, and the rest goes on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .carried_nccl import sharing_environment, version, why_not_shared
from .lines import ENDS, ROOT, USED_UP, Lines, predictions, read, rows
from .phases import Suite, cases_of, tests_of
from .probe import MACHINE
from .pytest_lines import VARIABLE
from .worker_cases import Case, why_too_late

START = 90.0  # seconds that a worker may take to begin with its first case: it imports torch
MORE = 3.0, 20.0  # a case may take this many times its seconds, and so many more
LEAST = 3.0  # seconds before the deadline in which no test begins
GONE = 10.0  # seconds for a process that was killed
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Run:
    """One call of the command: where it writes, and what is in every line."""

    out: Path
    lines: Lines
    rehearsal: bool
    unpacked: Path  # a folder for what need not come home

    def environment(self, phase: str) -> dict[str, str]:
        """Of the processes of a phase."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))  # packages may be carried
        found = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        # Groups look up names: where no name service answers, each waits twenty seconds.
        found.setdefault("GLOO_SOCKET_IFNAME", "lo")
        found.setdefault("RES_OPTIONS", "attempts:0")
        # Tests fill new memory with NaN, in a mode in which torch asks for cuBLAS's workspace to be of a fixed size.
        found.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if "CUDA_HOME" not in found and Path("/usr/local/cuda").exists():
            found["CUDA_HOME"] = "/usr/local/cuda"  # where Numba looks for NVVM
        if self.rehearsal and phase not in ("tests", "ranks"):  # tests choose for themselves
            found |= {"TRITON_INTERPRET": "1"}
        if self.rehearsal and phase in ("probe", "numba"):
            found |= {"NUMBA_ENABLE_CUDASIM": "1"}
        return found


def run_phase(run: Run, phase: str, seconds: float) -> None:
    """A phase's cases, then its tests, in at most `seconds`; whatever happens is in the lines."""
    deadline = time.time() + seconds
    try:
        cases = cases_of(phase, run.rehearsal, run.out)
        if [case.name for case in cases] == [MACHINE] and _knows_the_machine(run):
            cases = []  # the tests have the time that a process takes to begin
        run.lines.write_all(
            [
                {"phase": phase, "case": case.name, "status": "planned", "predictions": predictions(phase, case.name)}
                for case in cases
            ]
        )
        _run_cases(run, phase, cases, deadline)
        for tests in tests_of(phase, run.rehearsal):
            _run_tests(run, phase, tests, deadline - tests.leaves * max(0.0, deadline - time.time()))
    except Exception as error:  # of this program, not of a case: the next phase runs all the same
        run.lines.write(phase, "phase", "failed", why=f"{type(error).__name__}: {error}")
    finally:
        _name_the_rest(run, phase, USED_UP)


def _knows_the_machine(run: Run) -> bool:
    """Whether an earlier phase of this run has told what its rows stand beside."""
    found = rows(read(run.lines.path))
    return any((row.case, row.status, row.run) == (MACHINE, "done", run.lines.common["run"]) for row in found)


def _run_cases(run: Run, phase: str, cases: Sequence[Case], deadline: float) -> None:
    """Cases in order, in one process until one of them ends it or must have a process of its own."""
    left = list(cases)
    while left := [case for case in left if not _skipped(run, phase, case, deadline)]:
        until = next((i for i, case in enumerate(left) if case.alone), len(left)) or 1
        batch = left[:until]
        asked = {
            "phase": phase,
            "cases": [case.name for case in batch],
            "rehearsal": run.rehearsal,
            "out": str(run.out),
            "lines": str(run.lines.path),
            "common": run.lines.common,
            "deadline": deadline,
        }
        with _started(run, [sys.executable, "-m", "bench.gpu.worker", phase], run.environment(phase)) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode())
                process.stdin.close()
            why = _watched(run, phase, process, batch, deadline)
        states = _states(run, phase)
        broken = [case for case in batch if states[case.name] == "begun"]
        if why and all(states[case.name] == "planned" for case in batch):  # it did not come so far as to begin
            broken = batch[:1]
        for case in broken:
            run.lines.write(phase, case.name, "failed", why=why or "its process ended")
        ended = {name for name, state in _states(run, phase).items() if state in ENDS}
        remaining = [case for case in left if case.name not in ended]
        if len(remaining) == len(left):
            return  # no progress: nothing would change that
        left = remaining


def _skipped(run: Run, phase: str, case: Case, deadline: float) -> bool:
    """Whether a case was left out because it would not end in time; then it is named."""
    if why := why_too_late(case, deadline):
        run.lines.write(phase, case.name, "skipped", why=why)
    return bool(why)


def _watched(run: Run, phase: str, process: Any, batch: Sequence[Case], deadline: float) -> str:
    """Wait for a worker; says why it was ended or ended itself, or nothing."""
    by_name = {case.name: case for case in batch}
    current, since, started = "", time.monotonic(), False
    while process.poll() is None:
        time.sleep(0.2)
        states = _states(run, phase)
        begun = next((name for name, state in states.items() if state == "begun" and name in by_name), "")
        started = started or any(states[name] != "planned" for name in by_name)
        if begun != current:
            current, since = begun, time.monotonic()
        limit = MORE[0] * by_name[current].seconds + MORE[1] if current else START
        if time.time() >= deadline:
            return f"ended in the middle: {USED_UP}"
        if time.monotonic() - since > limit and (current or not started):
            return f"ended after {limit:.0f} s, which is more than it may take"
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"its process was ended by {signal.Signals(-process.returncode).name}"
    return f"its process ended with exit code {process.returncode}: see the log"


def _run_tests(run: Run, phase: str, tests: Suite, deadline: float) -> None:
    """A run of pytest, of whose tests each has a line."""
    environment = run.environment(phase)
    if tests.shares:
        environment |= sharing_environment(run.unpacked)
        if reason := why_not_shared(version(environment)):  # said before any rank starts
            run.lines.write(phase, tests.name, "skipped", why=reason)
            return
    if time.time() >= deadline:
        run.lines.write(phase, tests.name, "skipped", why="nothing of the budget is left")
        return
    asked = {
        "lines": str(run.lines.path),
        "common": run.lines.common,
        "phase": phase,
        "name": tests.name,
        "ranks": tests.ranks,
        "of_goals": tests.of_goals,
        "until": deadline - LEAST,
    }
    environment[VARIABLE] = json.dumps(asked)
    command = [sys.executable, "-m", "pytest", *tests.arguments, "-q", "-p", "bench.gpu.pytest_lines"]
    command += ["-p", "no:cacheprovider"]
    if tests.spread and _has_xdist():
        command += ["-n", str(max(1, min(12, (os.cpu_count() or 1) - 2))), "--dist", "worksteal"]
    before = len(_states(run, phase))
    with _started(run, command, environment) as process:
        assert process.stdin is not None
        process.stdin.close()
        while process.poll() is None and time.time() < deadline:
            time.sleep(0.1)
        ended = process.poll()
    if ended is not None and (ended not in (0, 1) or len(_states(run, phase)) == before):
        run.lines.write(phase, tests.name, "failed", why=f"pytest ended with exit code {ended}: see the log")
    _name_the_rest(run, phase, USED_UP if ended is None else "its process ended")


def _has_xdist() -> bool:
    from importlib.util import find_spec

    return find_spec("xdist") is not None


def _states(run: Run, phase: str) -> dict[str, str]:
    """How far each case of a phase has come in this run."""
    found: dict[str, str] = {}
    for line in read(run.lines.path):
        mine = line["phase"] == phase and line.get("run") == run.lines.common["run"]
        if mine and found.get(line["case"]) not in ENDS:
            found[line["case"]] = line["status"]
    return found


def _name_the_rest(run: Run, phase: str, why: str) -> None:
    """What has no end by now will have none."""
    for case, state in _states(run, phase).items():
        if state not in ENDS:
            status, when = ("failed", "in the middle: ") if state == "begun" else ("skipped", "")
            run.lines.write(phase, case, status, why=when + why)


@contextmanager
def _started(run: Run, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, whose output goes to the log; nothing of its group is left afterwards."""
    with (run.out / "log.txt").open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_in_a_group_that_dies_with_its_parent(),
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a process whose GPU hangs
                process.wait(GONE)


def _in_a_group_that_dies_with_its_parent() -> Callable[[], None]:
    """Not a session of its own: what is left of those may go on after the command was ended."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        os.setpgid(0, 0)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)

    return prepare
