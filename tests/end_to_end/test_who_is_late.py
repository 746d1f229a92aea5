"""A rank that others wait for in vain is named in their error, with what it does and where its Python stands."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.commands import free_port, with_environment
from tests.support.fork_server import Forked, run_as_script, server
from tests.support.ranks import with_time

TIMEOUT = 4.0
LIMIT = 160.0  # beyond the timeout, until ranks have come so far, have raised and ended
JOB = "tests.support.late_jobs"
TOLD = {
    "loader": r"Rank 1, \d+\.\d s ago, was between its optimizer's step and its forward \(data loading.*, in step 20\."
    r" Its Python stacks:\nMainThread:\n(.*\n)+.* in load_batch\n",
    "backward": r"Rank 1, \d+\.\d s ago, was in backward, 7 of 12 gradients there, up to '2\.bias', for .*, in step 20"
    r"\. Its Python stacks:\nMainThread:\n(.*\n)+.* in hang_in_backward\n",
    "stopped": r"Rank 1 has not told where it is: its process \d+ is stopped \(SIGSTOP\)\.",
    "killed": r"Rank 1 has not told where it is: its process \d+ has ended\. It said nothing at its end, .* killed",
    "raised": r"Rank 1 has ended, between its optimizer's step .*, in step 20: it raised ValueError: no such file\n"
    r"(.*\n)+.* in load_batch\n",
    # Before the thread that introduces its process has had its turn.
    "soon": r"Rank 1 has ended, .*, in step 0: it raised ValueError: no such file\n",
    "exited": r"Rank 1 has ended.*: its script has come to its end, or called sys\.exit\.",
    "collective": r"Rank 1, \d+\.\d s ago, was between its optimizer's step .*, in step 20\. It was in "
    r"torch\.distributed\.all_reduce \(line \d+ of .*/late_jobs\.py, in load_batch\), while this rank averages ",
    "forward": r"Rank 1, \d+\.\d s ago, was between .*, in step 29\. Up to its last averages it ran 30 forward\(s\) to "
    r"be averaged, this rank 29: a forward had no backward",
    # Both time out at once, and this one may have ended by its own error before it is asked for.
    "other": r"Rank 1(, \d+\.\d s ago, was waiting for other ranks, for .*, in step 1\. Its Python stacks:\n"
    r"MainThread:\n"  # of a deep one its end is cut off
    r"| has ended, waiting for other ranks, for .*, in step 1: TransportError: rank 1 of )",
    "skipped": r"Rank 1, \d+\.\d s ago, was between its optimizer's step and its forward \(.*, in step 29\."
    r" Its Python stacks:\nMainThread:\n(.*\n)+.* in evaluate\n",
    "no_sync": r"Rank 1, \d+\.\d s ago, was between its optimizer's step and its forward \(.*, in step 29\."
    r" Up to its last averages it ran 1 forward\(s\) in no_sync, this rank 0: if they are to be as many, .*\."
    r" Its Python stacks:\nMainThread:\n(.*\n)+.* in evaluate\n",
}

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


def _start(folder: Path, stack: ExitStack, what: str, transport: str, timeout: float) -> list[Forked]:
    folder.mkdir()
    port, ranks = str(free_port()), []
    for rank in range(2):
        where = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = with_environment(GLOO_SOCKET_IFNAME="lo", FASTREDUCE_TRANSPORT=transport, LOCAL_RANK=str(rank), **where)
        env["SNAPSHOT"] = str(folder / "snapshot.pt")
        job = (JOB, [what, str(timeout)], str(folder / f"{rank}.out"))
        ranks.append(server(rank).fork(run_as_script, *job, env=env))
        stack.callback(ranks[-1].kill)
    return ranks


SOME = [("loader", "gloo"), ("stopped", "shm"), ("no_sync", "gloo"), ("raised", "gloo"), ("soon", "shm")]
OTHERS = [
    ("backward", "shm"),
    ("killed", "gloo"),
    ("raised", "shm"),
    ("exited", "gloo"),
    ("collective", "shm"),
    ("other", "gloo"),
    ("skipped", "shm"),
    ("forward", "gloo"),
    ("no_sync", "shm"),
]


@pytest.mark.long
@pytest.mark.parametrize("cases", [SOME, OTHERS], ids=["some", "others"])
def test_the_error_names_who_is_missing_and_where_it_is(tmp_path: Path, cases: list[tuple[str, str]]):
    with_time(lambda seconds: _check(tmp_path / f"{seconds:g} s", cases, seconds), TIMEOUT)


def _check(folder: Path, cases: list[tuple[str, str]], timeout: float) -> None:
    """Several groups of two ranks, side by side: they mostly wait."""
    folder.mkdir()
    with ExitStack() as stack:
        groups = {case: _start(folder / "-".join(case), stack, *case, timeout) for case in cases}
        deadline = time.monotonic() + timeout + LIMIT
        for (what, transport), ranks in groups.items():
            code = ranks[0].poll(max(0.0, deadline - time.monotonic()))
            text = (folder / f"{what}-{transport}" / "0.out").read_text().replace("[rank0]: ", "")
            assert code == 1, f"{what}: {text}"
            assert f"over {transport} failed" in text and "No word from rank 1: it" in text
            assert re.search(r"\nRank 0 was waiting for other ranks in bucket \d of \d, sent \d", text), text
            assert re.search(TOLD[what], text), f"{what}: {text}"


OF_TORCH = {
    "buffers": r"rank 0 of 2: broadcasting the module's buffers .*\nRank 0 was waiting for .* in step 20\.\n"
    + TOLD["loader"],
    "snapshot": r"rank 0 of 2, collecting .*/snapshot\.pt: .*\nRank 0 was between .* in step 20\.\n" + TOLD["killed"],
}


@pytest.mark.long
def test_so_does_the_error_of_a_collective_of_torchs(tmp_path: Path):
    def test(seconds: float) -> None:
        with ExitStack() as stack:
            folder = tmp_path / f"{seconds:g} s"
            folder.mkdir()
            groups = {what: _start(folder / what, stack, what, "gloo", seconds) for what in OF_TORCH}
            for what, ranks in groups.items():
                code = ranks[0].poll(seconds + LIMIT)
                text = (folder / what / "0.out").read_text().replace("[rank0]: ", "")
                assert code == 1 and re.search(OF_TORCH[what], text), f"{what}: {text}"

    with_time(test, TIMEOUT)


@pytest.mark.long
@pytest.mark.parametrize(("what", "call"), [("saved", "save_checkpoint"), ("loaded", "load_checkpoint")])
def test_those_who_wait_for_a_rank_that_saves_or_loads_are_told_at_once(tmp_path: Path, what: str, call: str):
    """One rank has caught what its loader raised, and saves: it waits for the others there, and they for it."""
    with ExitStack() as stack:
        groups = {name: _start(tmp_path / name, stack, what, name, 300.0) for name in ("gloo", "shm")}
        for name, ranks in groups.items():
            code, ended = ranks[0].poll(LIMIT), time.time()
            text, other = ((tmp_path / name / f"{rank}.out").read_text() for rank in range(2))
            assert code == 1, f"{name}: {text}{other}"
            # How the one that calls ends is not asked: it fails in the user's own group, whose threads torch leaves
            # behind, and once in a while that process is ended by a signal, or stays after its traceback.
            calls = re.search(r"calls at (.*)", other)
            assert calls is not None and ended - float(calls[1]) < 40, text  # after 60 s the one that calls gives up
            assert re.search(
                rf"over {name} failed(.*\n)+.*Rank 1, \d+\.\d s ago, was between .*, in step 20\. "
                rf"It was in fastreduce\.{call} \(line \d+ of .*/late_jobs\.py, in main\), while this",
                text.replace("[rank0]: ", ""),
            ), text
