"""Files of snapshots: whole or not there, whatever happens while one is written or read."""

from __future__ import annotations

import copy
import os
import re
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fastreduce import CheckpointError, SettingError, load_checkpoint, save_checkpoint
from fastreduce.checkpoint import snapshot_file
from tests.support.commands import PYTHON, run
from tests.support.memory import bytes_of
from tests.support.models import assert_same_bits
from tests.support.ranks import RankPool, run_ranks
from tests.support.snapshots import FEEDBACK, Training, save


def test_the_previous_snapshot_is_kept_and_no_other_file(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    (tmp_path / "snapshot.pt.0123abcd.unfinished").touch()  # left behind by a crash
    (tmp_path / "snapshot.pt.0123abcd.rank1").touch()
    (tmp_path / "snapshot.pt.best").touch()  # somebody else's
    ranks2.run(save, path, FEEDBACK, 3)
    names = sorted(file.name for file in tmp_path.iterdir())
    tags = {name.split(".")[2] for name in names if ".rank" in name}
    assert len(tags) == 2
    expected = ["snapshot.pt", "snapshot.pt.best", "snapshot.pt.previous"]
    assert names == sorted(expected + [f"snapshot.pt.{tag}.rank{rank}" for tag in tags for rank in (0, 1)])
    assert torch.load(path)["epoch"] == 2
    previous = tmp_path / "snapshot.pt.previous"
    assert torch.load(previous)["epoch"] == 1
    assert [loaded["epoch"] for loaded in ranks2.run(_load, previous, FEEDBACK)] == [1, 1]


def test_a_symbolic_link_stays_one_and_its_file_is_the_snapshot(ranks2: RankPool, tmp_path: Path):
    disk, link = tmp_path / "disk" / "run" / "snapshot.pt", tmp_path / "latest.pt"
    link.symlink_to(disk)
    ranks2.run(save, link, FEEDBACK, 2)  # its folder is made, as any other
    assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "latest.pt"]
    assert link.is_symlink()
    assert torch.load(disk)["epoch"] == 1
    assert torch.load(disk.with_name("snapshot.pt.previous"))["epoch"] == 0
    assert [loaded["epoch"] for loaded in ranks2.run(_load, link, FEEDBACK)] == [1, 1]


def _load(rank: int, world_size: int, path: Path, setting: str) -> Any:
    return load_checkpoint(path, **Training(setting, seed=5).parts())


def _peak_of_loading(rank: int, world_size: int, path: Path) -> float:
    model = nn.Linear(4096, 8192, bias=False, device="meta").to_empty(device="cpu")
    nn.init.ones_(model.weight)
    if not path.exists():
        save_checkpoint(path, model=model)
    before = bytes_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # peaks begin anew
    load_checkpoint(path, model=model)
    return (bytes_of("VmHWM") - before) / path.stat().st_size


@pytest.mark.long
def test_loading_takes_the_memory_of_one_file_on_rank_0_and_of_two_on_the_others(ranks2: RankPool, tmp_path: Path):
    ranks2.run(_peak_of_loading, tmp_path / "snapshot.pt")
    first, other = ranks2.run(_peak_of_loading, tmp_path / "snapshot.pt")
    assert first < 1.8  # with a part of 64 MiB, of 128
    assert other < 2.3


def _load_what_shrinks(rank: int, world_size: int, path: Path) -> str:
    model = nn.Linear(8, 8)

    def parse_and_shrink(stream: Any, file: Path) -> Any:
        found = parse(stream, file)
        if rank == 0:
            os.truncate(file, file.stat().st_size // 2)
        return found

    parse, snapshot_file.parse = snapshot_file.parse, parse_and_shrink
    try:
        load_checkpoint(path, model=model)
    except CheckpointError as error:
        return str(error)
    finally:
        snapshot_file.parse = parse
    return "loaded"


def test_a_file_that_is_overwritten_while_it_is_read_is_an_error_on_every_rank(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(save, path, "fp16", 1)
    for text in ranks2.run(_load_what_shrinks, path):
        assert f"{path} is truncated, corrupt or no snapshot" in text


def _damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "empty":
        data.clear()
    elif how == "half":
        del data[len(data) // 2 :]
    elif how == "last byte":
        del data[-1]
    elif how == "one bit":
        data[data.rfind(torch.load(path)["model"]["0.weight"].numpy().tobytes()) + 5] ^= 4
    else:
        data[:] = b"no snapshot" * 100
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how", ["half", "one bit", *(pytest.param(how, marks=pytest.mark.long) for how in ("empty", "last byte", "other"))]
)
def test_a_damaged_file_is_an_error_on_every_rank_and_the_previous_one_is_there(
    ranks2: RankPool, how: str, tmp_path: Path
):
    path = tmp_path / "snapshot.pt"
    ranks2.run(save, path, "fp16", 2)
    _damaged(path, how)
    for name, text, changed in ranks2.run(_fail_to_load, path, "fp16"):
        assert (name, changed) == ("CheckpointError", False)
        assert f"{path} is truncated, corrupt or no snapshot" in text
        assert text.endswith(f"The snapshot before it is {path}.previous")
    good = path.with_name("snapshot.pt.previous")
    assert [loaded["epoch"] for loaded in ranks2.run(_load, good, "fp16")] == [0, 0]


def _fail_to_load(rank: int, world_size: int, path: Path, setting: str, **parts: Any) -> tuple[str, str, bool]:
    training = Training(setting, seed=5)
    before = copy.deepcopy([part.state_dict() for part in training.parts().values()])
    name, text = "nothing", ""
    try:
        load_checkpoint(path, **training.parts(), **parts)
    except Exception as error:
        name, text = type(error).__name__, str(error)
    try:
        assert_same_bits([part.state_dict() for part in training.parts().values()], before)
    except AssertionError:
        return name, text, True
    return name, text, False


def test_a_broken_file_does_not_take_the_place_of_the_previous_one(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(save, path, "fp16", 2)
    _damaged(path, "half")
    ranks2.run(save, path, "fp16", 1)
    assert torch.load(tmp_path / "snapshot.pt.previous")["epoch"] == 0
    assert torch.load(path)["epoch"] == 0


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_residual_file_that_is_not_whole_is_an_error_on_every_rank(ranks2: RankPool, how: str, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(save, path)
    (file,) = tmp_path.glob("*.rank1")
    file.unlink() if how == "missing" else _damaged(file, "other")
    for name, text, changed in ranks2.run(_fail_to_load, path, FEEDBACK):
        assert (name, changed) == ("CheckpointError", False)
        assert text.startswith("rank 1, reading residuals") and file.name in text


def test_a_save_that_fails_leaves_what_was_there(ranks2: RankPool, tmp_path: Path):
    path = tmp_path / "snapshot.pt"
    ranks2.run(save, path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    bad = {
        "a NumPy number": (np.float64(0.5), ["numpy", "float(x)"]),
        "an object": (Path("x"), ["pathlib"]),
        "what cannot be pickled": (None, ["lambda"]),
    }
    for case, (value, words) in bad.items():
        for name, text in ranks2.run(_fail_to_save, path, value):
            assert name == "CheckpointError" and text.startswith("rank 0, writing"), f"{case}: {text}"
            assert all(word in text for word in words), text
        assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    ranks2.run(save, path)
    assert len(list(tmp_path.glob("*.rank*"))) == 4


def _fail_to_save(rank: int, world_size: int, path: Path, value: Any) -> tuple[str, str]:
    training = Training(FEEDBACK)
    training.steps(1)
    try:
        save_checkpoint(path, **training.parts(), extra=(lambda: 1) if value is None else value)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_a_rank_that_cannot_write_is_an_error_on_all(ranks2: RankPool, tmp_path: Path):
    for name, text in ranks2.run(_fail_to_save_on_one, tmp_path):
        assert name == "CheckpointError" and text.startswith("rank 1, writing residuals"), text
    assert not list(tmp_path.glob("good/snapshot.pt"))


def _fail_to_save_on_one(rank: int, world_size: int, folder: Path) -> tuple[str, str]:
    training = Training(FEEDBACK)
    training.steps(1)
    if rank == 1:
        folder.joinpath("bad").write_text("a file where a folder should be")
    try:
        save_checkpoint(folder / ("bad" if rank else "good") / "snapshot.pt", **training.parts())
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


KILLED = """
import os, signal, sys, torch
from fastreduce import load_checkpoint, save_checkpoint

path, net, found = sys.argv[1], torch.nn.Linear(2, 2), []
save_checkpoint(path, net=net, epoch=0)

def killing_at(point, function):
    def guarded(*args, **kwargs):
        global calls
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        calls += 1
        return function(*args, **kwargs)
    return guarded

for point in range(100):
    child = os.fork()
    if child == 0:
        calls = 0
        for name in ("open", "fsync", "unlink", "link", "replace"):
            setattr(os, name, killing_at(point, getattr(os, name)))
        save_checkpoint(path, net=net, epoch=point + 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    found.append(load_checkpoint(path, net=net)["epoch"])
    if status == 0:
        break
print(*found)
"""


def test_a_kill_at_any_point_of_a_save_leaves_a_whole_snapshot(tmp_path: Path):
    done = run(PYTHON, "-c", KILLED, tmp_path / "snapshot.pt")
    assert done.returncode == 0, done.stderr
    epochs = [int(epoch) for epoch in done.stdout.split()]
    assert len(epochs) > 5 and epochs == sorted(epochs)
    assert epochs[0] == 0 and epochs[-1] == len(epochs), "the last save was not killed"
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"snapshot.pt", "snapshot.pt.previous"}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no such file": ({}, "FileNotFoundError", "elsewhere"),
    "no path": ({}, "CheckpointError", "rank 0, reading "),
    "no such part": ({"ema": nn.Linear(1, 1)}, "CheckpointError", "no part 'ema'; it has 'model', 'optimizer'"),
    "a number": ({"epoch": 3}, "SettingError", "epoch=3 cannot load a state"),
}


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_a_rank_that_calls_it_alone_is_told_that_all_have_to(call: Callable[..., Any], tmp_path: Path):
    alone, _ = run_ranks(_call_alone, 2, call, tmp_path / "snapshot.pt")
    assert alone[0] == "TransportError"
    assert re.match(r"rank 0 of 2, (collecting|reading) .*/snapshot\.pt: .*not by rank 0 alone$", alone[1], re.DOTALL)


def _call_alone(rank: int, world_size: int, call: Callable[..., Any], path: Path) -> tuple[str, str]:
    if rank == 0:
        torch.save({"model": nn.Linear(2, 2).state_dict()}, path)
        dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=1))
        try:
            call(path, model=nn.Linear(2, 2))
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_bad_input_is_an_error_on_every_rank(ranks2: RankPool, tmp_path: Path):
    ranks2.run(save, tmp_path / "snapshot.pt")
    for case, (parts, error, message) in BAD.items():
        path = tmp_path / {"no such file": "elsewhere", "no path": "a\0b"}.get(case, "snapshot.pt")
        for name, text, changed in ranks2.run(_fail_to_load_parts, path, parts):
            assert (name, changed) == (error, False), case
            assert message in text


def _fail_to_load_parts(rank: int, world_size: int, path: Path, parts: Any) -> tuple[str, str, bool]:
    return _fail_to_load(rank, world_size, path, FEEDBACK, **parts)


def _fail_to_load_on_one(rank: int, world_size: int, path: Path) -> tuple[str, str, bool]:
    return _fail_to_load(rank, world_size, path, FEEDBACK, **({"ema": nn.Linear(1, 1)} if rank else {}))


def test_a_part_that_one_rank_alone_loads_and_is_not_there_is_an_error_on_all(ranks2: RankPool, tmp_path: Path):
    ranks2.run(save, tmp_path / "snapshot.pt")
    for name, text, changed in ranks2.run(_fail_to_load_on_one, tmp_path / "snapshot.pt"):
        assert (name, changed) == ("CheckpointError", False)
        assert text.startswith("rank 1, reading") and "no part 'ema'; it has 'model', 'optimizer'" in text


def _save_and_load_sharded(rank: int, world_size: int, path: Path) -> list[str]:
    model: Any = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    said = []
    for parts in ({"model": model}, {"epoch": 1, "optimizer": optimizer}):
        with pytest.raises(CheckpointError) as caught:
            save_checkpoint(path, **parts)
        said.append(str(caught.value))
    if rank == 0:
        torch.save({"model": model.state_dict()}, path.with_name("old.pt"))
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path.with_name("old.pt"), model=model)
    return [*said, str(caught.value)]


def test_what_is_sharded_is_refused(ranks2: RankPool, tmp_path: Path):
    """Rank 0 would write its own part of each parameter, and all ranks would load that."""
    for saved, moments, loaded in ranks2.run(_save_and_load_sharded, tmp_path / "snapshot.pt"):
        assert "model['weight'] is sharded, (Shard(dim=0),) of (4, 4)" in saved
        assert "torch.distributed.checkpoint" in saved
        assert "optimizer['state'][0]['momentum_buffer'] is sharded" in moments
        assert f"{tmp_path / 'old.pt'}: model['weight'] is sharded" in loaded
    assert [file.name for file in tmp_path.iterdir()] == ["old.pt"]


def test_the_name_of_our_own_entry_is_taken(tmp_path: Path):
    with pytest.raises(SettingError, match="fastreduce"):
        save_checkpoint(tmp_path / "snapshot.pt", fastreduce=1)


def _save_as_given(rank: int, world_size: int, folder: Path, bad: Any, bad_parts: Any, on: int) -> str:
    """What a save says where rank `on`, or all of them (-1), was given something else than `a.pt`."""
    training = Training(FEEDBACK)
    training.steps(1)
    is_bad = on in (rank, -1)
    parts: Any = training.parts() | (bad_parts if is_bad else {})
    try:
        save_checkpoint(bad if is_bad else folder / "a.pt", **parts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


PATHS = {
    "": "path='' names no file",
    "a\0b": "path='a\\x00b' names no file",
    "/": "path='/' names no file",
    None: "path=None: allowed: a string or a path, and parts by name, such as model=ddp",
    b"x": "path=b'x': allowed: a string or a path, and parts by name, such as model=ddp",
}


@pytest.mark.parametrize("on", [pytest.param(-1, marks=pytest.mark.long), 1])
def test_a_path_that_names_no_file_is_an_error_on_every_rank(ranks2: RankPool, on: int, tmp_path: Path):
    """A rank that alone has one raised before or amid the exchanges, in which the others waited for it."""
    for path, text in PATHS.items():
        for rank, saved in enumerate(ranks2.run(_save_as_given, tmp_path, path, {}, on)):
            here = f"SettingError: {text}"
            assert (
                saved == here if on in (rank, -1) else re.match(rf"CheckpointError: rank 1, .*{re.escape(here)}", saved)
            )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("on", [-1, 1])
def test_a_folder_is_no_snapshot_and_nothing_is_left_beside_it(ranks2: RankPool, on: int, tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    here = f"SettingError: path='{folder}' is a folder, and a file's name is needed"
    for rank, saved in enumerate(ranks2.run(_save_as_given, tmp_path, folder, {}, on)):
        assert saved == here if on in (rank, -1) else re.match(rf"CheckpointError: rank 1, .*{re.escape(here)}", saved)
    assert list(tmp_path.iterdir()) == [folder]


def test_a_snapshot_does_not_take_the_place_of_what_is_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as here:
        here.bind("here")  # as /dev/null, of which a whole machine would be bereft
        with pytest.raises(SettingError, match=r"'here' is a device, a pipe or a socket, and a file's name is needed"):
            save_checkpoint("here", epoch=1)
    assert Path("here").is_socket() and list(tmp_path.iterdir()) == [tmp_path / "here"]


def test_a_snapshot_that_cannot_take_its_name_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_replace(*_: Any) -> None:
        raise PermissionError("no")

    monkeypatch.setattr("os.replace", no_replace)
    with pytest.raises(CheckpointError, match=r"rank 0, writing .*PermissionError: no"):
        save_checkpoint(tmp_path / "a.pt", epoch=1)
    assert not list(tmp_path.iterdir())


def test_a_snapshot_whose_predecessor_cannot_move_aside_leaves_no_file(tmp_path: Path):
    path, taken = tmp_path / "a.pt", tmp_path / "a.pt.previous"
    save_checkpoint(path, epoch=1)
    taken.mkdir()
    with pytest.raises(CheckpointError, match=r"IsADirectoryError: .*a\.pt\.previous'"):
        save_checkpoint(path, epoch=2)
    assert sorted(tmp_path.iterdir()) == [path, taken] and torch.load(path)["epoch"] == 1


class _Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("mine")


class _Stop(Exception):
    """What a handler raises, so that a script may end where it catches it."""


class _Signalled:
    def state_dict(self) -> dict[str, Any]:
        signal.raise_signal(signal.SIGALRM)
        return {}


def _stopped(rank: int, world_size: int, path: Path) -> str:
    def stop(*_: Any) -> None:
        raise _Stop("mine")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        save_checkpoint(path, part=_Signalled() if rank else {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.signal(signal.SIGALRM, before)
    return "nothing"


def test_what_a_signals_handler_raises_amid_a_save_comes_out_as_it_is(ranks2: RankPool, tmp_path: Path):
    told, own = ranks2.run(_stopped, tmp_path / "a.pt")
    assert own == "_Stop: mine"
    assert re.fullmatch(r"CheckpointError: rank 1, collecting .*a\.pt: _Stop: mine", told), told


def test_what_one_rank_alone_was_given_is_an_error_on_all(ranks2: RankPool, tmp_path: Path):
    """The others waited in the call, or went on into the next forward."""
    ranks2.run(save, tmp_path / "a.pt")
    cases: list[tuple[Any, Any, str]] = [
        (None, {}, "SettingError: path=None: allowed"),
        (tmp_path / "a.pt", {"epoch": 3}, "SettingError: epoch=3 cannot load"),
        (tmp_path / "a.pt", {"model": nn.Linear}, "SettingError: model=<class"),
        (tmp_path / "a.pt", {"scaler": _Refusing()}, "KeyError: 'mine'"),
    ]
    for bad, parts, text in cases:
        told, own = ranks2.run(_load_as_given, tmp_path / "a.pt", bad, parts)
        assert own.startswith(text)
        assert re.match(rf"CheckpointError: rank 1, (reading|loading) .*a\.pt: {re.escape(text)}", told), told


def _load_as_given(rank: int, world_size: int, path: Path, bad: Any, bad_parts: Any) -> str:
    training = Training(FEEDBACK)
    parts: Any = training.parts() | (bad_parts if rank else {})
    try:
        load_checkpoint(bad if rank else path, **parts)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_reserved_name_on_one_rank_is_an_error_on_all(ranks2: RankPool, tmp_path: Path):
    first, second = ranks2.run(_save_as_given, tmp_path, tmp_path / "a.pt", {"fastreduce": 1}, 1)
    assert second == "SettingError: a part of a snapshot cannot be called 'fastreduce'"
    assert re.match(r"CheckpointError: rank 1, collecting .*cannot be called 'fastreduce'", first)
