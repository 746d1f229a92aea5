"""Runs torch's own DDP tests, each on fresh ranks, with torch's class and with ours."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .known_differences import KNOWN_DIFFERENCES, WITHOUT_BASELINE

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0  # the server imports torch's tests
TIMEOUT = 180.0  # of one test; torch.compile can take a minute


@dataclass
class Result:
    """What became of one test with one class: `passed`, `skipped` or `failed`."""

    test: str
    which: str
    outcome: str
    message: str
    seconds: float


class Server:
    """A process of `tests.conformance.rank_server`, which forks the ranks of each test."""

    def __init__(self, world_size: int = 2, sources: Path | None = None) -> None:
        self.world_size, self.has_lists = world_size, sources is None and world_size == 2
        ours = ("FASTREDUCE_", "TORCH_DISTRIBUTED_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        environment.update(BACKEND="gloo", WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        if sources is not None:
            environment["CONFORMANCE_SOURCES"] = str(sources)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.conformance.rank_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            self.tests: list[str] = self._read(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def run(self, test: str, which: str, timeout: float = TIMEOUT) -> Result:
        """One test with `torch`'s class or with `fastreduce`'s."""
        assert self._process.stdin is not None
        print(json.dumps({"test": test, "which": which, "timeout": timeout}), file=self._process.stdin, flush=True)
        return Result(**self._read(timeout + 60))

    def _read(self, timeout: float) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError(f"the server of the conformance tests {'ended' if ready else 'did not answer'}")
        return json.loads(line)

    def close(self) -> None:
        """End the server and its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Verdict:
    """What a test's results with both classes mean; `good` is false where something is to be done."""

    test: str
    text: str
    good: bool
    results: list[Result]


def judge(server: Server, test: str, timeout: float = TIMEOUT) -> Verdict:
    """Run one test with torch's class, then with ours."""
    theirs = server.run(test, "torch", timeout)
    if theirs.outcome != "passed":
        return Verdict(test, "no baseline", not server.has_lists, [theirs])
    ours = server.run(test, "fastreduce", timeout)
    if ours.outcome == "skipped":
        return Verdict(test, "refused", True, [theirs, ours])
    known = test in KNOWN_DIFFERENCES
    if ours.outcome == "passed":
        return Verdict(test, "STALE" if known else "same", not known, [theirs, ours])
    return Verdict(test, "known difference" if known else "DIFFERENT", known, [theirs, ours])


def judge_all(server: Server, tests: list[str], timeout: float) -> Iterator[Verdict]:
    """Verdicts one by one, with progress on stdout."""
    for number, test in enumerate(tests, 1):
        verdict = judge(server, test, timeout)
        seconds = " ".join(f"{result.seconds:6.1f}" for result in verdict.results)
        print(f"{number:3d}/{len(tests)}  {verdict.text:16s}  {seconds:13s}  {test}", flush=True)
        yield verdict


def is_chosen(test: str, parts: list[str]) -> bool:
    """Whether to run a test, given what the user asked for: names, parts of names, or nothing."""
    if test in WITHOUT_BASELINE:
        return test in parts
    return not parts or any(part in test for part in parts)


def _explain(verdict: Verdict, in_full: bool) -> str:
    if verdict.text == "STALE":
        return "it passes now: remove it from known_differences.py"
    reason = KNOWN_DIFFERENCES.get(verdict.test, "")
    return reason if reason and not in_full else f"{reason}\n{verdict.results[-1].message}".strip()


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 if a verdict is not good."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("tests", nargs="*", help="names, or parts of names; all if there are none")
    parser.add_argument("--world-size", type=int, default=2)
    help_ = "FSDP2's tests in place of DDP's: test/distributed/_composable/fsdp of a checkout of torch"
    parser.add_argument("--sharded", type=Path, metavar="FOLDER", help=help_)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one test with one class")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    with Server(options.world_size, options.sharded) as server:
        chosen = [test for test in server.tests if is_chosen(test, options.tests)]
        verdicts = list(judge_all(server, chosen, options.timeout))
    for verdict in verdicts:
        if verdict.text != "same":
            print(f"\n===== {verdict.test}: {verdict.text}\n{_explain(verdict, bool(options.tests))}")
    counts = Counter(verdict.text for verdict in verdicts)
    print(f"\n{len(verdicts)} tests in {time.monotonic() - start:.0f} s: ", end="")
    print(", ".join(f"{count} {text}" for text, count in counts.most_common()))
    return 0 if all(verdict.good for verdict in verdicts) else 1
