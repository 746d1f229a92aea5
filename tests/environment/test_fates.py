"""What has become of a process, as the system tells."""

from __future__ import annotations

import errno
import os

import pytest

from fastreduce.environment import fates


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file"), True),
        (ProcessLookupError(errno.ESRCH, "No such process"), True),
        (OSError(errno.EMFILE, "Too many open files"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), False),
    ],
)
def test_a_process_has_ended_only_where_the_system_says_so(
    error: OSError, ended: bool, monkeypatch: pytest.MonkeyPatch
):
    """Not where this process could not ask: a rank would be lost for want of a file."""
    here = fates.introduction()
    assert fates.fate(*here) == "" and fates.runs_here(*here)

    def fails(pid: int) -> list[str]:
        raise error

    monkeypatch.setattr(fates, "_stat", fails)
    assert fates.fate(*here) == (f"its process {os.getpid()} has ended" if ended else "")
    assert fates.has_ended(*here) == ended and not fates.runs_here(*here)


def test_a_process_introduces_itself_where_the_system_tells_nothing(monkeypatch: pytest.MonkeyPatch):
    """Then nobody knows what has become of it."""

    def fails(pid: int) -> list[str]:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    monkeypatch.setattr(fates, "_stat", fails)
    here = fates.introduction()
    assert fates.fate(*here) == "" and not fates.has_ended(*here) and not fates.runs_here(*here)
