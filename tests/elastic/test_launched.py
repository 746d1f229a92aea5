"""`fastreduce launch --elastic`: a rank that is killed starts again by itself, and the others do not end."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest

from tests.support.commands import FASTREDUCE, ROOT, run, started, with_environment

SECONDS = 150.0
STEPS = 600


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_example_goes_on_without_a_rank_and_with_the_one_in_its_place():
    script = ROOT / "examples" / "elastic_train.py"
    command = [FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 2, "--max-restarts", 1, script, "--steps", STEPS]
    lines: list[str] = []
    with started(*command, env=with_environment(OMP_NUM_THREADS="1"), together=True) as process:
        assert process.stdout is not None
        watchdog = threading.Timer(SECONDS, process.kill)
        watchdog.start()
        for line in process.stdout:
            lines.append(line)
            if "step 200: loss" in line:
                pids = [re.match(r"process (\d+) is rank 1 of 2, at step 0", each) for each in lines]
                os.kill(next(int(pid[1]) for pid in pids if pid), signal.SIGKILL)
        watchdog.cancel()
        assert process.wait() == 0, "".join(lines)
    text = "".join(lines)
    assert "rank 1 was ended by SIGKILL; the others go on, and it starts again, 0 restart(s) left" in text
    assert re.search(r"rank 0 of 1 from step 2\d\d on", text), text
    assert f"step {STEPS}: loss" in text


@pytest.mark.long
def test_a_rank_that_fails_says_why_before_it_starts_again(tmp_path: Path):
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    raise ValueError('of the user')\n")
    ended = run(FASTREDUCE, "launch", "--elastic", "--nproc-per-node", 2, "--max-restarts", 1, script)
    first, again = ended.stderr.split("rank 1 failed with exit code 1; the others go on, and it ")[1:]
    assert first.startswith("starts again") and "ValueError: of the user" in first
    assert again.startswith("stays away") and "ValueError: of the user" in again
