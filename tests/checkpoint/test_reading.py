"""How rank 0's file comes to all ranks: through links and pipes, and what goes wrong on one rank is an error on all."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastreduce import CheckpointError, load_checkpoint, save_checkpoint
from fastreduce.checkpoint import ranks as on_ranks
from fastreduce.checkpoint import snapshot_file
from tests.support.ranks import RankPool
from tests.support.snapshots import FEEDBACK, Training, save


def _load(rank: int, world_size: int, path: Path) -> Any:
    return load_checkpoint(path, **Training(FEEDBACK, seed=5).parts())["epoch"]


def test_the_one_before_a_links_is_found_by_the_links_name(ranks2: RankPool, tmp_path: Path):
    disk, link = tmp_path / "disk" / "run.pt", tmp_path / "latest.pt"
    link.symlink_to(disk)
    ranks2.run(save, link, FEEDBACK, 2)
    assert ranks2.run(_load, tmp_path / "latest.pt.previous") == [0, 0]
    disk.write_bytes(disk.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=f"latest.pt is truncated.*before it is {re.escape(str(disk))}.previous"):
        load_checkpoint(link, model=nn.Linear(1, 1))


def _load_pipe(rank: int, world_size: int, path: Path, pipe: Path) -> Any:
    if rank == 0:
        os.mkfifo(pipe)
        writer = threading.Thread(target=lambda: shutil.copyfileobj(path.open("rb"), pipe.open("wb")), daemon=True)
        writer.start()
    return _load(rank, world_size, pipe)


def test_a_pipe_can_be_read(ranks2: RankPool, tmp_path: Path):
    ranks2.run(save, tmp_path / "a.pt", "fp16", 3)
    assert ranks2.run(_load_pipe, tmp_path / "a.pt", tmp_path / "pipe") == [2, 2]


class _Stop(Exception):
    pass


def _in_parse(patch: pytest.MonkeyPatch, rank: int) -> None:
    """A signal's handler raises while rank 0 looks at the file."""

    def stop(*_: Any) -> None:
        raise _Stop("mine")

    def look(stream: Any, kind: type) -> Any:
        if kind is dict:  # the file, and not what ranks tell each other
            signal.signal(signal.SIGALRM, stop)
            signal.raise_signal(signal.SIGALRM)
        return load(stream, kind)

    load = snapshot_file.load
    if rank == 0:
        patch.setattr(snapshot_file, "load", look)


def _no_memory(which: int) -> Callable[[pytest.MonkeyPatch, int], None]:
    def none_for(size: int) -> bytes:
        raise MemoryError("no room")

    def take(patch: pytest.MonkeyPatch, rank: int) -> None:
        if rank == which:
            patch.setattr(on_ranks, "bytes", none_for, raising=False)

    return take


def _while_broken(rank: int, world_size: int, path: Path, how: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        BREAK[how](patch, rank)
        try:
            load_checkpoint(path, model=nn.Linear(30, 30))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "loaded"


BREAK = {"a signal": _in_parse, "no memory on rank 0": _no_memory(0), "no memory on rank 1": _no_memory(1)}


@pytest.mark.parametrize("how", BREAK)
def test_what_goes_wrong_on_one_rank_is_told_on_all(ranks2: RankPool, tmp_path: Path, how: str):
    path = tmp_path / "a.pt"
    save_checkpoint(path, model=nn.Linear(30, 30))
    own, other = ranks2.run(_while_broken, path, how)
    if how.endswith("rank 1"):
        own, other = other, own
    text = "_Stop: mine" if how == "a signal" else "MemoryError: no room"
    assert own == text if how == "a signal" else own == other
    assert re.fullmatch(rf"CheckpointError: rank [01], reading {re.escape(str(path))}: {text}", other), other


def test_a_file_that_cannot_be_read_is_no_broken_snapshot(tmp_path: Path):
    with pytest.raises(OSError, match="Input/output error") as caught:
        load_checkpoint("/proc/self/mem", model=nn.Linear(1, 1))
    assert not isinstance(caught.value, CheckpointError)
    torch.save({"model": nn.Linear(1, 1).state_dict()}, tmp_path / "whole.pt")
    (tmp_path / "half.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:700])
    with pytest.raises(CheckpointError, match="truncated"):
        load_checkpoint(tmp_path / "half.pt", model=nn.Linear(1, 1))
