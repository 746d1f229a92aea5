"""A pytest plugin (`-p bench.gpu.pytest_lines`): each test's end is a line on disk before the next test begins.

What it needs to know comes in the environment, so that xdist's workers know it too; only the main process writes.
"""

from __future__ import annotations

import json
import os
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from .gpu_goals import SHOWN
from .lines import Lines
from .worker_cases import BROKEN, cuda_is_broken

# JSON: lines, common, phase, and of its `Suite` name, ranks and of_goals; until when tests begin.
VARIABLE = "FASTREDUCE_BENCH_GPU_TESTS"


def pytest_configure(config: pytest.Config) -> None:
    asked = json.loads(os.environ[VARIABLE])
    config.pluginmanager.register(_Chooser(asked), "chooser")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Leaver(), "leaver")
    else:
        config.pluginmanager.register(_Recorder(asked), "recorder")


def ranks_of(item: pytest.Item) -> int:
    """How many ranks a test runs on, as its parameters say; 1 if they say nothing, 0 of what no number is left for."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    found = next((parameters[name] for name in ("ranks", "several", "size") if name in parameters), 1)
    return found if isinstance(found, int) else 0  # pytest has a mark of its own for an empty list


def case_of(suite: str, test: str) -> str:
    """What a test of a suite is called among the lines."""
    file, _, name = test.partition("::")
    return f"{suite}: {Path(file).name}::{name}"


class _Chooser:
    """Leaves out tests on other numbers of ranks, or of goals, and what would begin after the deadline."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if not self._takes(item)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if self._takes(item)]

    def _takes(self, item: pytest.Item) -> bool:
        ranks, of_goals = self._asked["ranks"], self._asked["of_goals"]
        case = case_of(self._asked["name"], item.nodeid)
        shows = any(fnmatchcase(case, pattern) for pattern in SHOWN.values())
        return ranks in (None, ranks_of(item)) and of_goals in (None, shows)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if time.time() > self._asked["until"]:
            pytest.skip("nothing of the budget is left")


class _Leaver:
    """Ends a worker of pytest-xdist behind a test that has broken its CUDA context, in which all others would fail.

    Another worker takes its place.
    """

    def __init__(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        failed, self._failed = self._failed, False
        if failed and cuda_is_broken():
            time.sleep(1)  # what was reported is on its way
            os._exit(BROKEN)


class _Recorder:
    def __init__(self, asked: dict[str, Any]) -> None:
        self._lines = Lines(Path(asked["lines"]), asked["common"])
        self._phase, self._name = asked["phase"], asked["name"]
        self._planned = False
        self._ended: set[str] = set()
        self._seconds: dict[str, float] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._plan(ids)

    def _plan(self, tests: list[str]) -> None:
        if not self._planned and tests:
            self._planned = True
            self._lines.write_all(
                [{"phase": self._phase, "case": self._case(test), "status": "planned"} for test in tests]
            )

    def _case(self, test: str) -> str:
        return case_of(self._name, test)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._lines.write(self._phase, self._case(nodeid), "begun")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            why = f"{report.when}: {str(report.longrepr)[-1500:]}"
            self._end(test, "failed", why=why)
        elif report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._end(test, "skipped", why=reason.removeprefix("Skipped: "))
        elif report.when == "teardown":
            self._end(test, "done", result={"seconds": self._seconds[test]})

    def _end(self, test: str, status: str, **more: Any) -> None:
        if test not in self._ended:
            self._ended.add(test)
            self._lines.write(self._phase, self._case(test), status, **more)
