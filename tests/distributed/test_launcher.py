"""`launcher` and `spawn`: functions on several ranks of this machine."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from fastreduce import RanksFailedError, SettingError
from fastreduce import distributed as frdist
from tests.support.commands import PYTHON, ROOT, Done, command_line, finish, free_port, run, started, with_environment

launcher, spawn = frdist.launcher, frdist.spawn

pytestmark = pytest.mark.usefixtures("preloaded")


def _twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return [function(*args), function(*args)]

    return wrapper


def _sums_and_bytes(x: float, *, size: int) -> tuple[float, bytes, torch.Tensor]:
    """Large values, tensors, keyword arguments; destroying the group is allowed."""
    total = torch.tensor(x + dist.get_rank())
    dist.all_reduce(total)
    rank = dist.get_rank()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == (str(rank), "2", str(rank))
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()
    return total.item(), bytes([rank]) * size, torch.full((1000,), rank)


METHODS = pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.long)])


@pytest.mark.long
@METHODS
def test_values_come_back_in_rank_order_and_large_ones_do_not_block(method: str):
    first, second = launcher(_sums_and_bytes, n_gpus=2, start_method=method)(2.0, size=20_000_000)
    assert first[0] == second[0] == 5.0
    assert first[1] == bytes(20_000_000) and second[1] == b"\1" * 20_000_000
    assert torch.equal(second[2], torch.full((1000,), 1))


def _groups_anew() -> list[float]:
    """Sums over ranks in the group that is there, in one of ours behind it, and in one of torch's behind that."""
    sums = []

    def add() -> None:
        one = torch.ones(1)
        dist.all_reduce(one)
        sums.append(one.item())

    frdist.init_process_group("gloo", init_method="tcp://127.0.0.1:29500")  # taken as it is, wherever it has met
    add()
    for init, destroy in (
        (frdist.init_process_group, dist.destroy_process_group),
        (dist.init_process_group, frdist.destroy_process_group),
    ):
        frdist.destroy_process_group()
        assert not dist.is_initialized()
        init("gloo")
        add()
        destroy()
    return sums


@pytest.mark.long
def test_ranks_destroy_their_group_and_make_another():
    assert launcher(_groups_anew, n_gpus=2, start_method="forkserver")() == [[2.0] * 3] * 2


def _children() -> set[psutil.Process]:
    processes = psutil.Process().children(recursive=True)
    return {p for p in processes if "resource_tracker" not in command_line(p)}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process that the test started is there when it ends; pools of other tests may be."""
    before = _children()
    yield
    assert _children() <= before


@_twice
@launcher(n_gpus=1, start_method="forkserver")
@_twice
def _decorated(x: int) -> tuple[int, str]:
    return x, __name__


def _one_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("boom on one")
    dist.barrier()


def _one_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def _value_that_cannot_travel() -> Any:
    return lambda: None


def test_decorators_on_both_sides_of_launcher_apply_where_they_stand():
    value = (3, __name__)
    assert _decorated(3) == [[[value, value]], [[value, value]]]


@METHODS
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_raises_ends_the_others_and_is_raised_here(method: str):
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match=r"(?s)rank 1 failed:\n.*in _one_raises.*boom on one") as error:
        launcher(_one_raises, n_gpus=2, start_method=method)()
    assert str(error.value).count("Traceback") == 1
    assert isinstance(error.value.__cause__, ValueError) and error.value.__cause__.args == ("boom on one",)
    assert time.monotonic() - start < 300


@METHODS
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_dies_is_named_and_the_others_end(method: str):
    with pytest.raises(RanksFailedError, match=r"^rank 1 was ended by SIGKILL$"):
        launcher(_one_dies, n_gpus=2, start_method=method)()


def test_a_value_that_cannot_be_pickled_is_an_error_of_that_rank():
    with pytest.raises(RanksFailedError, match=r"rank 0 failed:\n[^~]*pickle"):
        launcher(_value_that_cannot_travel, n_gpus=1, start_method="forkserver")()


def _rank_and_sum(rank: int, x: float) -> tuple[int, float]:
    total = torch.tensor(x * (rank + 1))
    dist.all_reduce(total)
    return rank, total.item()


@pytest.mark.long
def test_spawn_gives_rank_group_and_values():
    assert spawn(_rank_and_sum, (2.0,), nprocs=2) == [(0, 6.0), (1, 6.0)]


def _late_peer(seconds: float) -> list[str]:
    """Rank 0 is done at once; rank 1 looks at it for a while."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 0:
        return []
    peer, seen = psutil.Process(pids[0]), set()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seen.add(peer.status() if peer.is_running() else "gone")
        time.sleep(0.005)
    return sorted(seen)


def test_no_rank_leaves_before_the_others():
    first, second = launcher(_late_peer, n_gpus=2, start_method="forkserver")(1.0)
    assert first == [] and second and not {"gone", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} & set(second)


@pytest.mark.long
@pytest.mark.parametrize("master", ["localhost", "::1"])
def test_two_machines_share_a_port(master: str, tmp_path: Path):
    """Two launchers of one rank each, as two machines would."""
    if master == "::1":
        try:
            socket.create_server((master, 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this machine has no address ::1")
    code = textwrap.dedent(
        f"""
        import sys, torch, torch.distributed as dist
        from fastreduce.distributed import launcher
        @launcher(n_gpus=1, world_size=2, rank_start=int(sys.argv[1]), port={free_port()},
                  master_ip={master!r})
        def f():
            total = torch.tensor(dist.get_rank() + 1.0)
            dist.all_reduce(total)
            return dist.get_rank(), total.item()
        if __name__ == "__main__":
            print(f())
        """
    )
    script = tmp_path / "machine.py"
    script.write_text(code)
    with contextlib.ExitStack() as stack:
        machines = [stack.enter_context(started(sys.executable, script, r, together=True)) for r in (0, 1)]
        outputs = [finish(machine, 200).stdout for machine in machines]
    assert outputs == ["[(0, 3.0)]\n", "[(1, 3.0)]\n"]


UNGUARDED = """
import atexit, os, sys
import fastreduce.distributed as dist

class Box:
    def __init__(self, value): self.value = value

scale = 2
atexit.register(lambda: open(f"ended.{{os.getpid()}}", "w").close())
print("before\\n", end="", flush=True)

{function}

for box in {call}: print("value", box.value)
scale = 3
print("after", {call_again})
"""
DECORATED = """
@dist.launcher(n_gpus=2, start_method={method!r})
def work(box):
    return Box([box.value * scale, dist.get_rank(), sys.argv[1]])
"""
PLAIN = """
def work(rank, box):
    return Box([box.value * scale, rank, sys.argv[1]])
"""
NOT_AGAIN = 'come to this call again: put the script\'s own work under if __name__ == "__main__":'


def _run_unguarded(folder: Path, function: str, call: str, call_again: str = "0", module: bool = False) -> Done:
    path = folder / "tutorial.py"
    path.write_text(UNGUARDED.format(function=function, call=call, call_again=call_again))
    command = ["-m", "tutorial"] if module else [path]
    python = PYTHON if "start_method='fork'" in function else sys.executable  # forks import nothing
    return run(python, *command, "argument", cwd=folder, env=with_environment(PYTHONPATH=f"{folder}:{ROOT}"))


@pytest.mark.parametrize(
    ("function", "call", "module"),
    [
        pytest.param(DECORATED.format(method="spawn"), "work(Box(7))", False, marks=pytest.mark.long),
        pytest.param(DECORATED.format(method="spawn"), "work(Box(7))", True, marks=pytest.mark.long),
        pytest.param(DECORATED.format(method="forkserver"), "work(Box(7))", False, marks=pytest.mark.long),
        (DECORATED.format(method="fork"), "work(Box(7))", False),
        pytest.param(PLAIN, "dist.spawn(work, (Box(7),), nprocs=2)", False, marks=pytest.mark.long),
    ],
    ids=["script", "module", "forkserver", "fork", "spawn()"],
)
def test_a_script_without_a_guard_runs_up_to_its_call_on_every_rank(
    tmp_path: Path, function: str, call: str, module: bool
):
    done = _run_unguarded(tmp_path, function, call, module=module)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert set(lines[:-3]) == {"before"}
    assert lines[-3:] == ["value [14, 0, 'argument']", "value [14, 1, 'argument']", "after 0"]
    forked = "method='fork'" in function  # multiprocessing's forks end without what the script has registered
    assert len(list(tmp_path.glob("ended.*"))) == (1 if forked else 3)


@pytest.mark.long
def test_a_second_call_without_a_guard_says_what_to_write(tmp_path: Path):
    call = "work(Box(7))"
    one = DECORATED.format(method="spawn").replace("n_gpus=2", "n_gpus=1")
    done = _run_unguarded(tmp_path, one, call, call)
    assert done.returncode == 1 and "value [14, 0, 'argument']" in done.stdout and "after" not in done.stdout
    assert f"work() starts ranks, which import the script and {NOT_AGAIN}" in done.stderr


def test_a_process_that_did_not_begin_as_spawned_ones_do_is_told_what_to_write(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SettingError, match=re.escape(NOT_AGAIN)):
        launcher(_one_raises, n_gpus=2)()
    with pytest.raises(SettingError, match=re.escape(NOT_AGAIN)):
        spawn(_rank_and_sum, (2.0,), nprocs=2)


LEAVES = """
import contextlib, os, psutil, signal, sys, threading
from fastreduce.distributed import spawn

def leave(*_):
    sys.exit(7)

def has_begun():
    with contextlib.suppress(psutil.Error):  # a child that has ended meanwhile
        return any("spawn_main" in word for child in psutil.Process().children() for word in child.cmdline())

def watch():
    while not has_begun():
        pass
    os.kill(os.getpid(), signal.SIGTERM)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    threading.Thread(target=watch).start()
    spawn(print, (bytes(10**7),), nprocs=2)  # which takes longer to write than to notice
"""


@pytest.mark.long
def test_a_handler_that_raises_while_ranks_are_started_leaves_none_half_started(tmp_path: Path):
    path = tmp_path / "leaves.py"
    path.write_text(LEAVES)
    done = run(sys.executable, path)
    assert (done.returncode, done.stderr) == (7, "")


@pytest.mark.long
def test_the_tutorial_in_the_docs(tmp_path: Path):
    text = (ROOT / "docs" / "from-megengine.md").read_text()
    path = tmp_path / "tutorial.py"
    path.write_text(text.partition("```python\n")[2].partition("```")[0])
    done = run(PYTHON, path)
    assert done.stdout == "[6.0, 6.0]\n", done.stderr


@pytest.mark.long
def test_the_example_in_the_docs(tmp_path: Path):
    text = (ROOT / "docs" / "launching.md").read_text()
    path = tmp_path / "functions.py"
    path.write_text(text.partition("```python\n")[2].partition("```")[0])
    done = run(sys.executable, path)
    assert done.stdout == "[2.0, 2.0]\n[1, 4]\n", done.stderr


def test_a_port_in_use_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SettingError, match="in use"):
        launcher(_late_peer, n_gpus=2, port=taken.getsockname()[1])(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the number of GPUs is the default")
def test_without_gpus_the_number_of_ranks_must_be_given():
    with pytest.raises(SettingError, match="no GPU: say how many ranks to start, as in n_gpus=2"):
        launcher(_late_peer)(0)
    with pytest.raises(SettingError, match="nprocs=2"):
        spawn(_rank_and_sum)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_gpus": 0}, "n_gpus=0: at least 1"),
        ({"n_gpus": "2"}, "n_gpus='2': at least 1 rank is needed, a whole number up to 4096"),
        ({"n_gpus": 5000}, "n_gpus=5000: at least 1 rank is needed, a whole number up to 4096"),
        ({"n_gpus": 1, "world_size": 2, "rank_start": 1}, "rank_start=1 needs the port"),
        ({"n_gpus": 1, "world_size": 2}, r"1 of 2 ranks run here: the others need a port="),
        ({"n_gpus": 2, "world_size": 2, "rank_start": 1, "port": 1}, "ranks 1 to 2 .* do not fit into world_size=2"),
        ({"n_gpus": 1, "start_method": "thread"}, "start_method='thread': one of spawn, forkserver, fork"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str):
    with pytest.raises(SettingError, match=message):
        launcher(_late_peer, **options)(0)


def test_a_function_that_ranks_cannot_import():
    with pytest.raises(SettingError, match="not at module level"):
        launcher(lambda: None, n_gpus=1)()


TYPED = """
import torch.distributed as dist
from fastreduce.distributed import launcher, spawn

def rank(*_):
    return dist.get_rank()

spawned, served = (launcher(n_gpus=2, start_method=method)(rank) for method in ("spawn", "forkserver"))
for start in (spawned, served, lambda: spawn(rank, nprocs=2)):
    try:
        start()
    except Exception as error:
        print(type(error).__name__, error)
print(launcher(n_gpus=2, start_method="fork")(rank)())
"""


def test_a_function_that_is_in_no_file_can_be_run_by_forks_only():
    """As one of a notebook's."""
    done = run(PYTHON, "-c", TYPED)
    *told, value = done.stdout.splitlines()
    assert value == "[0, 1]", done.stderr
    assert len(told) == 3
    for line in told:
        assert line.startswith(
            "SettingError rank was written in a notebook, at a prompt or in python -c: new processes"
        )
        assert "@launcher(start_method='fork')" in line


def test_a_fork_after_cuda_was_initialised_is_an_error(monkeypatch: pytest.MonkeyPatch):
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    else:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(SettingError, match=r"fork.* after CUDA was initialised"):
        launcher(_late_peer, n_gpus=1, start_method="fork")(0)
