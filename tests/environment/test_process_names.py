"""What the kernel tells of a process whose name is cut within a letter."""

from __future__ import annotations

from tests.support.commands import PYTHON, run

NAMED = """
import ctypes, signal
from fastreduce.environment import fates, stacks

ctypes.CDLL(None).prctl(15, b"gr\\xc3")  # PR_SET_NAME
host, pid, born = fates.introduction()
print(fates.fate(host, pid, born) == "", stacks._is_taken(signal.SIGUSR2))
"""


def test_a_name_that_is_no_text_stops_nobody():
    done = run(PYTHON, "-c", NAMED)
    assert done.stdout == "True False\n", done.stderr
