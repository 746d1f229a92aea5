"""Snapshots on file systems that cannot do all that Linux's own can, such as those of networks and clouds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastreduce import CheckpointError, load_checkpoint
from tests.support.ranks import RankPool
from tests.support.snapshots import FEEDBACK, Training, save


def _save_on(rank: int, world_size: int, path: Path, number: int, of_folders: int) -> str:
    """Save where files have no hard links and cannot be mapped, and folders not be synchronised."""
    sync, load, open_file = os.fsync, torch.load, os.open

    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(of_folders, os.strerror(of_folders))
        sync(file)

    def open_readable(file: Any, *args: Any, **kwargs: Any) -> int:
        if of_folders == errno.EACCES and Path(file).is_dir():  # one that may be written to, not read
            raise PermissionError(errno.EACCES, "no reading here")
        return open_file(file, *args, **kwargs)

    def unmapped(*args: Any, mmap: bool = False, **kwargs: Any) -> Any:
        if mmap:
            raise RuntimeError("unable to mmap")
        return load(*args, **kwargs)

    with (
        patch.object(os, "link", side_effect=PermissionError(errno.EPERM, "no links here")),
        patch.object(os, "fsync", fsync),
        patch.object(os, "open", open_readable),
        patch.object(torch, "load", unmapped),
    ):
        try:
            save(rank, world_size, path, FEEDBACK, number)
        except (OSError, CheckpointError) as error:
            return str(error)
    return ""


def _load(rank: int, world_size: int, path: Path) -> Any:
    return load_checkpoint(path, **Training(FEEDBACK, seed=5).parts())["epoch"]


@pytest.mark.parametrize("of_folders", [errno.EINVAL, errno.ENOTSUP, errno.EACCES], ids=os.strerror)
def test_the_snapshot_and_the_one_before_it_are_there(ranks2: RankPool, tmp_path: Path, of_folders: int):
    path = tmp_path / "snapshot.pt"
    assert ranks2.run(_save_on, path, 3, of_folders) == ["", ""]
    assert ranks2.run(_load, path) == [2, 2]
    assert ranks2.run(_load, tmp_path / "snapshot.pt.previous") == [1, 1]
    assert len(list(tmp_path.iterdir())) == 6  # each with the residuals of both ranks


def test_a_disk_that_fails_is_told(ranks2: RankPool, tmp_path: Path):
    for text in ranks2.run(_save_on, tmp_path / "snapshot.pt", 1, errno.EIO):
        assert "Input/output error" in text
