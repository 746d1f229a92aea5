"""Where neither the package nor the home folder can be written: compiled kernels go to a folder of this user's own."""

from __future__ import annotations

import errno
import os
import pty
import select
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numba
import pytest

from fastreduce import BackendUnavailableError
from fastreduce.environment import caches
from fastreduce.kernels.numba_cache import keyed
from tests.support.commands import PYTHON, ROOT, Done, run
from tests.support.fork_server import run_command, server

# Root may write everywhere, unless it gives up the capabilities of root.
AS_A_USER = [] if os.geteuid() else ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
HOMELESS = "/proc/nowhere"  # nobody can make it
MINE = f"fastreduce-{os.geteuid()}"

WRAP = """
import logging, os, torch, numba, fastreduce
import fastreduce.distributed as dist
print(fastreduce.__file__)
dist.init_process_group("gloo", world_size=1, rank=0)
ddp = fastreduce.DistributedDataParallel(torch.nn.Linear(2, 2), compression="fp16")
ddp(torch.ones(1, 2)).sum().backward()
assert numba.config.CACHE_DIR == ""
print("trained", float(ddp.module.weight.grad[0, 0]))
"""
LOAD_GPU_KERNELS = """
import os
from fastreduce.ops import backends
from fastreduce.transports.nccl.library import _find_nccl
for name in ("numba_cuda", "triton"):
    backends.load(name)
assert not isinstance(_find_nccl(), str), _find_nccl()
print(os.environ["TRITON_CACHE_DIR"], os.environ["CUPY_CACHE_DIR"])
"""

pytestmark = pytest.mark.skipif(
    bool(AS_A_USER) and shutil.which("setpriv") is None, reason="root without setpriv (util-linux) writes everywhere"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package where nothing may be written."""
    path = tmp_path_factory.mktemp("installed")
    shutil.copytree(ROOT / "fastreduce", path / "fastreduce", ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path, *(found for found in path.rglob("*") if found.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield path
    for folder in folders:
        folder.chmod(0o755)


def _run(code: str, installed: Path, temporary: Path) -> Done:
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    env = {**kept, "PYTHONPATH": str(installed), "HOME": HOMELESS, "TMPDIR": str(temporary)}
    return run(*AS_A_USER, sys.executable, "-c", code, env=env, cwd=temporary)


def _told(done: Done) -> list[str]:
    return [line for line in done.stderr.splitlines() if "compiled kernels are kept in" in line]


@pytest.mark.long
def test_a_package_that_cannot_be_written_wraps_and_trains_without_a_home(installed: Path, tmp_path: Path):
    done = _run(WRAP, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(installed) in done.stdout and "trained 1.0" in done.stdout
    assert [line.partition(": ")[0] for line in _told(done)] == [f"compiled kernels are kept in {tmp_path / MINE}"]
    folder = tmp_path / MINE
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    compiled = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    assert compiled
    done = _run(WRAP, installed, tmp_path)
    assert done.returncode == 0 and "trained 1.0" in done.stdout, done.stderr
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == compiled, "compiled again"


@pytest.mark.long
def test_gpu_kernels_and_cupy_get_a_folder_too(installed: Path, tmp_path: Path):
    pytest.importorskip("cupy")
    pytest.importorskip("numba_cuda")
    pytest.importorskip("triton")
    done = _run(LOAD_GPU_KERNELS, installed, tmp_path)
    assert done.returncode == 0, done.stderr
    triton, cupy = map(Path, done.stdout.split())
    assert {triton.relative_to(tmp_path).parts[0], cupy.relative_to(tmp_path).parts[0]} == {MINE}
    assert len(_told(done)) == 1


def _others(path: Path) -> None:
    """A folder that somebody else has put there, or a stand-in where nobody can be somebody else."""
    path.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        path.chmod(0o777)


@pytest.mark.parametrize("kind", ["somebody else's", "open to all", "a link", "a file"])
def test_a_folder_that_is_not_this_users_alone_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str):
    theirs = tmp_path / MINE
    if kind == "somebody else's":
        _others(theirs)
    elif kind == "open to all":
        theirs.mkdir()
        theirs.chmod(0o777)
    elif kind == "a link":
        tmp_path.joinpath("elsewhere").mkdir(mode=0o700)
        theirs.symlink_to("elsewhere")
    else:
        theirs.touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = caches.private_folder.__wrapped__()
    assert found != theirs and found.parent == tmp_path
    assert stat.S_IMODE(found.stat().st_mode) == 0o700 and found.stat().st_uid == os.geteuid()


def test_where_nothing_can_be_written_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(BackendUnavailableError, match=r"No usable temporary directory.*Set TMPDIR or NUMBA_CACHE_DIR"):
        caches.private_folder.__wrapped__()


def test_a_home_that_can_be_written_and_a_variable_that_is_set_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_HOME", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    caches.ensure("TRITON_CACHE_DIR")
    assert "TRITON_CACHE_DIR" not in os.environ
    monkeypatch.setenv("HOME", HOMELESS)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    caches.ensure("TRITON_CACHE_DIR")
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/user"


FLATTEN = """
import numpy as np, torch
from fastreduce.ops import backends
from fastreduce.kernels.slots import SlotTable
wire = torch.zeros(1, dtype=torch.bfloat16)
table = SlotTable(np.array([0]), np.array([1]), 1)
backends.load("numba_cpu").flatten([torch.tensor([1.0078124])], table, wire, 1.0)
print(float(wire))
"""


@pytest.mark.long
def test_a_kernel_is_compiled_anew_when_a_file_that_it_shares_has_changed(tmp_path: Path):
    package = tmp_path / "fastreduce"
    shutil.copytree(ROOT / "fastreduce", package, ignore=shutil.ignore_patterns("__pycache__"))

    def flattened() -> float:
        done = run(sys.executable, "-c", FLATTEN, env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
        return float(done.stdout.split()[-1])

    assert flattened() == 1.0078125, "rounded to nearest"
    assert list(package.glob("kernels/__pycache__/*_flatten*.nbc"))
    shared = package / "kernels/numba_cpu_elements.py"
    text = shared.read_text()
    assert text.count("_constant(bits, 0x7FFF)") == 1
    shared.write_text(text.replace("_constant(bits, 0x7FFF)", "_constant(bits, 0)"))
    assert flattened() == 1.0, "cut off"


def test_what_is_compiled_at_once_is_not_mixed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two processes look for what there is, find nothing, and save another signature each."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    first, second = (keyed(numba.njit(cache=True))(_twice)._cache._cache_file for _ in range(2))
    looked = threading.Barrier(2)

    def look(load_index: Any) -> Any:
        found = load_index()
        looked.wait(100)
        return found

    for file in (first, second):  # of Numba's own
        file._load_index = partial(look, file._load_index)
    saving = [threading.Thread(target=file.save, args=(key, key)) for file, key in ((first, "a"), (second, "b"))]
    for thread in saving:
        thread.start()
    for thread in saving:
        thread.join()
    third = keyed(numba.njit(cache=True))(_twice)._cache._cache_file
    assert [third.load(key) for key in "abc"] == ["a", "b", None]
    (tmp_path / "module.py").write_text("made_of = 1")
    of_more = keyed(numba.njit(cache=True), tmp_path)(_twice)._cache._cache_file
    assert of_more.load("a") is None, "it is made of other modules"
    of_more.save("a", "anew")
    assert (of_more.load("a"), third.load("a")) == ("anew", None)


def _twice(value: float) -> float:
    return 2 * value


@pytest.mark.parametrize("broken", ["empty", "cut off", "zeros", "zeros inside"])
def test_a_file_that_a_machine_has_left_broken_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert keyed(numba.njit(cache=True))(_twice)(2.0) == 4.0
    (file,) = tmp_path.rglob("*.nbc")
    whole = file.read_bytes()
    half = len(whole) // 2
    zeros = bytes(len(whole))
    file.write_bytes(
        {"empty": b"", "cut off": whole[:half], "zeros": zeros, "zeros inside": whole[:half] + zeros[half:]}[broken]
    )
    again = keyed(numba.njit(cache=True))(_twice)
    assert again(2.0) == 4.0 and sum(again.stats.cache_hits.values()) == 0
    third = keyed(numba.njit(cache=True))(_twice)
    assert third(2.0) == 4.0 and sum(third.stats.cache_hits.values()) == 1, "it is whole again"


def test_a_folder_that_is_full_costs_compiling_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    kernels = [keyed(numba.njit(cache=True))(_twice) for _ in range(2)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "a file of its own")

    for kernel in kernels:
        monkeypatch.setattr(kernel._cache._cache_file, "_open_for_write", full)
        assert kernel(2.0) == 4.0
    (told,) = caplog.messages
    assert told.startswith(f"compiled kernels are not kept in {tmp_path}") and told.endswith("No space left on device")


TWICE = """
import sys, numba
from fastreduce.kernels.numba_cache import keyed
for _ in range(2):
    @keyed(numba.njit(cache=True))
    def twice(number):
        return number * 2
    print(twice(len(sys.argv) + _ / 2))
"""


@pytest.mark.parametrize(  # the second time nothing is compiled
    ("rank", "told"), [("0", [1, 0]), pytest.param("1", [0, 0], marks=pytest.mark.long)]
)
def test_who_sits_at_a_terminal_is_told_once_what_takes_long(tmp_path: Path, rank: str, told: list[int]):
    script = tmp_path / "twice.py"
    script.write_text(TWICE)
    env = {**os.environ, "RANK": rank, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    for expected in told:
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            with (tmp_path / "printed").open("wb") as printed:
                output = printed.fileno(), theirs
                process = server().fork(run_command, PYTHON, [str(script)], None, env=env, output=output)
            os.close(theirs)
            code = process.wait(120)
            seen = b""
            while select.select([ours], [], [], 0)[0]:
                try:
                    seen += terminal.read(4096)
                except OSError:  # Linux says so of a terminal that nobody writes to any more
                    break
        assert (tmp_path / "printed").read_bytes().split() == [b"2.0", b"3.0"] and code == 0
        assert seen.count(b"compiles its kernels for this machine") == expected, seen
        assert seen.count(b"\n") == expected, seen
