"""MPI: real mpirun. One start runs all checks of mpi_jobs.py; jobs that fail on purpose have their own."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastreduce.transports.mpi import communicator
from fastreduce.transports.mpi.library import GATE
from tests.support.commands import PYTHON, ROOT, run
from tests.support.mpirun import HAS_MPI4PY, MPIRUN, SECONDS, environment, mpirun, needs_mpirun

CHECKS = re.findall(
    r"^    (\w+),$", ROOT.joinpath("tests/support/mpi_jobs.py").read_text().split("\nCHECKS:")[1], re.MULTILINE
)

pytestmark = pytest.mark.timeout(SECONDS + 30)


def run_job(folder: Path, world_size: int, job: str, transport: str = "mpi") -> tuple[int, str]:
    program = (sys.executable, "-m", "tests.support.mpi_jobs", job, ".", transport)
    return mpirun(folder, "--oversubscribe", "-n", str(world_size), *program)


# What works


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)], ids=["2 ranks", "3 ranks"])
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each rank, what each check raised."""
    folder = tmp_path_factory.mktemp("checks")
    code, output = run_job(folder, request.param, "checks")
    assert code == 0, output
    return [json.loads(folder.joinpath(f"{rank}.json").read_text()) for rank in range(request.param)]


@needs_mpirun
@pytest.mark.parametrize("check", CHECKS)
def test_on_ranks(checked: list[dict[str, str]], check: str):
    assert list(checked[0]) == CHECKS
    failures = [found[check] for found in checked if found[check]]
    assert not failures, "\n".join(failures)


# How a job ends


@needs_mpirun
@pytest.mark.parametrize("job", ["raises", pytest.param("raises_in_a_thread", marks=pytest.mark.long)])
def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path, job: str):
    output = _ended(tmp_path, job)
    assert "rank 1 of 2 ends the job by an exception" in output
    assert "Traceback (most recent call last)" in output and "ValueError: boom" in output


# The one that exits is in MPI's Finalize by then, which waits for the other.
@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("mpi", "rank 1 has ended, or takes no part any more"),
        ("shm", "over shm failed. No word from rank 1: it has exited, takes no part"),
    ],
)
def test_a_rank_that_exits_early_is_not_waited_for(tmp_path: Path, transport: str, says: str):
    assert says in _ended(tmp_path, "exits", transport)


@needs_mpirun
@pytest.mark.long
@pytest.mark.parametrize("transport", ["mpi", "shm"])
def test_mpis_end_is_not_waited_for_where_a_rank_is_stopped(tmp_path: Path, transport: str):
    """Finalize waits for all ranks, without a limit."""
    output = _ended(tmp_path, "stops_and_the_other_goes_on", transport)
    assert "rank 0 ends the job: a collective failed, and MPI's Finalize waits for a rank" in output


@needs_mpirun
@pytest.mark.long
def test_a_rank_that_saves_for_long_is_not_ended_where_a_collective_has_failed(tmp_path: Path):
    code, output = run_job(tmp_path, 2, "saves_behind_a_failure", "shm")
    assert code == 0, output
    assert [json.loads(tmp_path.joinpath(f"{rank}.json").read_text()) for rank in (0, 1)] == [False, True]


@needs_mpirun
@pytest.mark.long
def test_training_behind_mpis_end_is_an_error(tmp_path: Path):
    code, output = run_job(tmp_path, 2, "finalizes_early")
    assert code == 0, output
    for rank in (0, 1):
        assert "over MPI failed: MPI.Finalize() has been called" in json.loads((tmp_path / f"{rank}.json").read_text())


@needs_mpirun
@pytest.mark.long
def test_a_rank_that_does_not_join_is_named(tmp_path: Path):
    output = _ended(tmp_path, "stays_away")
    assert "rank 0 of 2: init_process_group over MPI failed: rank 1 did not come within 4 s" in output


def _ended(folder: Path, job: str, transport: str = "mpi") -> str:
    """What a job of two ranks has written that ends with an error, long before the default timeout, and leaves none."""
    code, output = run_job(folder, 2, job, transport)
    assert code != 0
    assert time.time() - float(folder.joinpath("event").read_text()) < 60
    assert not _alive(folder)
    return output


def _alive(folder: Path) -> list[int]:
    """Ranks that still run, a moment after mpirun has ended."""
    pids = [int(path.read_text()) for path in folder.glob("*.pid")]
    assert pids
    deadline = time.monotonic() + 60
    while (alive := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# What people type


@needs_mpirun
@pytest.mark.long
def test_the_example_runs_with_a_host_file_and_a_file_for_each_ranks_output(tmp_path: Path):
    """Four ranks as in the tutorial's command, beside the loop of Allreduces in the same program."""
    tmp_path.joinpath("hosts.txt").write_text("localhost slots=4\n")
    options = ("-n", "4", "--hostfile", "hosts.txt", "--output-filename", "log_output", "--bind-to", "none")
    code, output = mpirun(tmp_path, *options, sys.executable, str(ROOT / "examples/mpi_train.py"))
    logs = [path for path in sorted(tmp_path.glob("log_output*/**/*")) if path.is_file()]
    written = [path.read_text() for path in logs]
    assert code == 0, "\n".join([output, *written])
    losses = [float(loss) for loss in re.findall(r"epoch \d: loss (\d+\.\d+)", "".join(written))]
    assert len(losses) == 5 and losses[-1] < 0.5 * losses[0], losses
    assert len([text for text in written if re.search(r"rank [0-3] of 4", text)]) == 4


# Where MPI is missing


MISSING = """
import sys
import torch.distributed as dist
import fastreduce
from fastreduce.distributed.mpi import init_mpi

try:
    init_mpi()
except fastreduce.BackendUnavailableError as error:
    print(error)
assert not dist.is_initialized()
dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
assert dist.is_initialized()
"""
BUILT_HERE = """
import sys
import types

class Broken:
    def find_spec(self, name, path, target=None):
        if name == "mpi4py.MPI":
            raise ImportError("libmpi.so.40: cannot open shared object file")

sys.meta_path.insert(0, Broken())
sys.modules["mpi4py"] = types.ModuleType("mpi4py")
sys.modules["mpi4py"].__path__ = []
"""
PROBLEMS = {  # what goes before the script, and a part of what the error says
    "no mpi4py": ("import sys; sys.modules['mpi4py'] = None\n", "pip install mpi4py"),
    "no libmpi": ("import os; os.environ['MPI4PY_LIBMPI'] = '/nowhere/libmpi.so'\n", "apt-get install openmpi-bin"),
    "no libmpi that it was built with": (BUILT_HERE, "apt-get install openmpi-bin"),
    "no threads": ("import mpi4py; mpi4py.rc.thread_level = 'single'\n", "THREAD_SERIALIZED or THREAD_MULTIPLE"),
}


@pytest.mark.parametrize(
    "problem", ["no libmpi", *(pytest.param(each, marks=pytest.mark.long) for each in PROBLEMS if each != "no libmpi")]
)
def test_where_mpi_cannot_be_used_the_error_says_what_helps_and_gloo_works_afterwards(tmp_path: Path, problem: str):
    if problem in ("no libmpi", "no threads") and (not HAS_MPI4PY or MPIRUN is None):
        pytest.skip("no mpirun, or no mpi4py")
    before, help_ = PROBLEMS[problem]
    python = [MPIRUN, "-n", "1", sys.executable] if problem == "no threads" else [PYTHON]
    command = [*python, "-c", before + MISSING, f"file://{tmp_path}/store"]
    done = run(*command, env=environment())
    assert done.returncode == 0, done.stderr
    assert help_ in done.stdout
    assert ("MPI library not available" in done.stdout) == (problem != "no threads")


# On GPUs


def test_a_tensor_that_is_padded_is_written_before_mpi_reads_it(monkeypatch: pytest.MonkeyPatch):
    """MPI knows no streams: what a kernel of ours is still to write, it would send as it is."""
    written: list[Tensor] = []
    given: list[Tensor] = []

    def ready(tensor: Tensor) -> Tensor:
        written.append(tensor)
        return tensor

    monkeypatch.setattr(communicator, "ready", ready)
    mpi = SimpleNamespace(IN_PLACE=None, Is_finalized=lambda: False)
    monkeypatch.setattr(communicator, "load_mpi", lambda: mpi)  # which would begin MPI in this process

    class Request:
        def Test(self) -> bool:
            return True

    class Second:
        def Iallgather(self, *_: object) -> Request:
            return Request()

    class First(Second):
        def Ialltoall(self, send: Tensor, into: Tensor) -> Request:
            given.append(send)
            assert any(send.data_ptr() == each.data_ptr() for each in written)
            into.copy_(send)
            return Request()

    connection: Any = object.__new__(communicator.MpiConnection)
    vars(connection).update(rank=0, size=2, failed=False, _me="rank 0", _started=0, _told_to_wait=False, _seconds=60.0)
    vars(connection).update(_under_way={}, _spare={}, _first=First(), _second=Second(), _shards=lambda wire: wire)
    tensor, called = torch.tensor([1.0, 2.0, 3.0]), []
    connection.all_reduce(tensor, lambda: called.append(1)).wait()
    assert given[0].numel() == 4 and called == [1]
    assert tensor.tolist() == [4.0, 2.0, 3.0], "the sum of both shards, in the place of this rank's"


def test_datatypes_are_made_where_no_other_thread_calls_mpi(monkeypatch: pytest.MonkeyPatch):
    """Which large wires need: MPI was asked for threads that take turns."""
    mpi = SimpleNamespace(IN_PLACE=None, Is_finalized=lambda: False)
    monkeypatch.setattr(communicator, "load_mpi", lambda: mpi)
    locked: list[bool] = []

    class Both:
        def Ialltoall(self, *_: object) -> Any:
            return SimpleNamespace(Test=lambda: True)

        Iallgather = Ialltoall

    connection: Any = object.__new__(communicator.MpiConnection)
    vars(connection).update(rank=0, size=2, failed=False, _me="rank 0", _started=0, _told_to_wait=False, _seconds=60.0)
    vars(connection).update(_under_way={}, _spare={}, _first=Both(), _second=Both())
    connection._shards = lambda wire: locked.append(GATE._lock.locked())
    for work in (
        connection.all_to_all(torch.zeros(2), torch.zeros(2)),
        connection.all_gather(torch.zeros(2)),
        connection.all_reduce(torch.zeros(2)),
    ):
        work.wait()
    assert locked == [True] * 6


JOINS = """
import os, sys
from datetime import timedelta
from fastreduce import distributed
distributed.init_process_group("mpi", timeout=timedelta(seconds=int(sys.argv[1])))
os.write(1, f"{os.environ['RANK']} of {os.environ['LOCAL_WORLD_SIZE']} here\\n".encode())
distributed.barrier()
distributed.destroy_process_group()
"""


def _join_on_two_hosts(folder: Path, address: str, *seconds: int) -> tuple[int, str]:
    """Two ranks whose hosts have one name, as machines that are all called localhost, and a timeout each."""
    folder.joinpath("joins.py").write_text(JOINS)
    told = f"MASTER_ADDR={address}", "GLOO_SOCKET_IFNAME=lo"
    first, second = (
        ["-n", "1", "env", f"FASTREDUCE_HOST={host}", *told, sys.executable, "joins.py", str(timeout)]
        for host, timeout in zip("ab", seconds, strict=True)
    )
    return mpirun(folder, "--oversubscribe", *first, ":", *second)


@pytest.mark.long
@needs_mpirun
def test_hosts_of_one_name_are_told_apart(tmp_path: Path):
    code, output = _join_on_two_hosts(tmp_path, "localhost", 60, 60)
    assert code == 0, output
    assert sorted(re.findall(r"\d of \d here", output)) == ["0 of 1 here", "1 of 1 here"]


@pytest.mark.long
@needs_mpirun
def test_an_address_that_nobody_knows_is_told(tmp_path: Path):
    start = time.monotonic()
    code, output = _join_on_two_hosts(tmp_path, "no-such-host.invalid", 100, 5)
    assert code != 0 and time.monotonic() - start < 60
    assert "TransportError: init_process_group over MPI failed: " in output
    assert "rank 0's process, which holds the store at no-such-host.invalid:" in output
