"""The commands that other tests start: one that does not end in time tells where it was."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import FASTREDUCE, INSTALLED, PYTHON, finish, started

WAITS = """
import threading, time
def wait_elsewhere(): time.sleep(600)
def wait_here():
    print("begun", flush=True)
    time.sleep(600)
threading.Thread(target=wait_elsewhere, daemon=True).start()
wait_here()
"""


def _told_at_the_end(*command: object, processes: int = 1) -> str:
    """Of a command all of whose processes that run `WAITS` have begun, how a test fails that waits for its end."""
    with started(*command) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(processes)] == ["begun\n"] * processes
        with pytest.raises(pytest.fail.Exception, match=r"still running after 0.1 s\nload \d") as failure:
            finish(process, 0.1)
    return str(failure.value)


@pytest.mark.parametrize("python", [PYTHON, sys.executable])
def test_a_command_that_does_not_end_in_time_tells_where_its_threads_are_and_how_busy_it_was(python: str):
    told = _told_at_the_end(python, "-c", WAITS)
    assert "in wait_here" in told and "in wait_elsewhere" in told
    assert re.search(r"^\d+\.\d s of processors: \d+ .*python", told, re.MULTILINE)


@pytest.mark.parametrize("command", [FASTREDUCE, pytest.param(INSTALLED, marks=pytest.mark.long)])
def test_a_launcher_and_its_ranks_do(command: object, tmp_path: Path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    told = _told_at_the_end(command, "launch", "--nproc-per-node", 2, script, processes=2)
    assert told.count("in wait_here") == told.count("in wait_elsewhere") == 2
    assert "in _invoke_run" in told  # of torch's launcher
