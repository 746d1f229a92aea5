"""Launchers: a rank that is killed starts again by itself, and the others do not end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.commands import FASTREDUCE, ROOT, TORCHRUN, free_port, run, started, with_environment

SECONDS = 150.0
STEPS = 600
SCRIPT = ROOT / "examples" / "elastic_train.py"


def _train(*commands: Sequence[Any], until: str = "") -> str:
    """What commands print to their end, or until they print that; rank 1 is killed in the middle."""
    lines: list[str] = []
    env = with_environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

    def read(process: Any) -> None:
        for line in process.stdout:
            lines.append(line)
            if "step 200: loss" in line:
                pids = [re.match(r"process (\d+) is rank 1 of 2, at step 0", each) for each in lines]
                os.kill(next(int(pid[1]) for pid in pids if pid), signal.SIGKILL)
            if until and re.search(until, line):
                for each in processes:
                    os.kill(each.pid, signal.SIGTERM)  # by which an agent ends its rank

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(started(*command, env=env, together=True)) for command in commands]
        readers = [threading.Thread(target=read, args=(process,)) for process in processes]
        watchdogs = [threading.Timer(SECONDS, process.kill) for process in processes]
        for thread in [*readers, *watchdogs]:
            thread.start()
        codes = [process.wait() for process in processes]
        for thread in readers:
            thread.join()
        for watchdog in watchdogs:
            watchdog.cancel()
    text = "".join(lines)
    assert until or not any(codes), text
    assert re.search(r"rank 0 of 1 from step [2-9]\d\d+ on", text), text
    return text


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_example_goes_on_without_a_rank_and_with_the_one_in_its_place():
    command = [FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 2, "--max-restarts", 1, SCRIPT, "--steps", STEPS]
    text = _train(command)
    assert "rank 1 was ended by SIGKILL; the others go on, and it starts again, 0 restart(s) left" in text
    assert f"step {STEPS}: loss" in text


@pytest.mark.long
def test_a_rank_that_fails_says_why_before_it_starts_again(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('of the user')\n")
    ended = run(FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 2, "--max-restarts", 1, script)
    first, again = ended.stderr.split("rank 1 failed with exit code 1; the others go on, and it ")[1:]
    assert first.startswith("starts again") and "ValueError: of the user" in first
    assert again.startswith("stays away") and "ValueError: of the user" in again


@pytest.mark.long
def test_what_a_rank_has_started_ends_before_it_starts_again(tmp_path: Path):
    script, of_it = tmp_path / "fails.py", tmp_path / "started"
    script.write_text(
        "import os, subprocess, sys\n"
        f"with open({str(of_it)!r}, 'a') as file:\n"
        "    file.write(f\"{subprocess.Popen(['sleep', '1000']).pid}\\n\")\n"
        "sys.exit(1)\n"
    )
    run(FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 1, "--max-restarts", 1, script)
    pids = list(map(int, of_it.read_text().split()))
    assert len(pids) == 2 and not any(_is_there(pid) for pid in pids)


def _is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.long
@pytest.mark.timeout(400)
def test_torchrun_serves_with_an_agent_for_each_rank():
    where = ["--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    train = [SCRIPT, "--steps", 10**9]  # the agent must be there when the rank is back
    back = r"process \d+ is rank 1 of 2, at step [1-9]"
    agents = [[TORCHRUN, *where, "--node-rank", rank, "--max-restarts", 1, *train] for rank in range(2)]
    assert re.search(back, _train(*agents, until=back))


@pytest.mark.long
def test_one_that_comes_again_when_the_others_are_done_is_not_started_for_ever(tmp_path: Path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        "started, done = (pathlib.Path(__file__).with_name(name) for name in ('started', 'done'))\n"
        "if os.environ['RANK'] == '0':\n"
        "    while not started.exists():\n"
        "        time.sleep(0.05)\n"
        "    done.touch()\n"
        "elif started.exists():\n"  # again: it comes when the other one has ended
        "    while not done.exists():\n"
        "        time.sleep(0.05)\n"
        "    time.sleep(2.0)\n"
        "    sys.exit('nobody is there')\n"
        "else:\n"
        "    started.touch()\n"
        "    sys.exit('killed')\n"
    )
    ended = run(FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 2, "--max-restarts", 5, script)
    assert ended.returncode == 0, ended.stderr
    told = re.findall(r"rank 1 failed with exit code 1; (.*)", ended.stderr)
    assert told == [
        "the others go on, and it starts again, 4 restart(s) left",
        "the others have ended well, and it stays away",
    ]
