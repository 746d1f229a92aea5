"""One snapshot on disk: whole or not there, checked when it is read."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ..environment.signals import is_of_signal
from ..errors import CheckpointError, SettingError, brief

State = dict[str, Any]
PREVIOUS = ".previous"
OURS = "fastreduce"  # the entry for what no part asked for: random states, buckets, the tag of residual files


def check_name(path: object) -> None:
    """Raise if no file can have this name.

    Raises:
        SettingError: saying what was given, also where something stands there that is no file, as a folder or a pipe.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise SettingError(f"path={brief(path)}: allowed: a string or a path, and parts by name, such as model=ddp")
    if not Path(path).name or "\0" in str(path):
        raise SettingError(f"path={str(path)!r} names no file")
    if Path(path).is_dir():
        raise SettingError(f"path={str(path)!r} is a folder, and a file's name is needed")
    if Path(path).exists() and not Path(path).is_file():  # whose place a snapshot would take
        raise SettingError(f"path={str(path)!r} is a device, a pipe or a socket, and a file's name is needed")


def target_of(path: Path) -> Path:
    """Where the file itself is, if `path` is a symbolic link; else `path`."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def previous_of(path: Path) -> Path:
    """Where the snapshot before this one is."""
    return path.with_name(f"{path.name}{PREVIOUS}")


def found_at(path: Path) -> Path:
    """The file of a snapshot to load: the one before a symbolic link's is beside that one's file."""
    if path.name.endswith(PREVIOUS) and not path.exists():
        return previous_of(target_of(path.with_name(path.name.removesuffix(PREVIOUS))))
    return path


def write(value: Any, file: Path) -> None:
    """Write and wait for the disk; an error leaves nothing behind.

    Raises:
        CheckpointError: if `value` could not be read again.
        OSError: if the disk is full, or fails.
    """
    try:
        with file.open("wb") as stream:
            try:
                torch.save(value, stream)
            except RuntimeError as error:
                if isinstance(error.__context__, OSError):  # torch tells of a full disk that a position is unexpected
                    raise error.__context__ from None
                raise
            stream.flush()
            os.fsync(stream.fileno())
        check_plain(file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def check_plain(file: Path | io.BytesIO) -> None:
    """Raise if what was saved could not be read again.

    Raises:
        CheckpointError: naming what it would take.
    """
    refused = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if refused:
        raise CheckpointError(
            f"a value needs {', '.join(sorted(refused))}, which torch.load(weights_only=True) refuses: save plain "
            "numbers, strings and tensors, like float(x) and torch.from_numpy(x)"
        )


def put_in_place(unfinished: Path, path: Path) -> None:
    """Let a written file be the snapshot, and the one before it the previous one."""
    if zipfile.is_zipfile(path):  # a broken one does not take the place of a good one
        linked = path.with_name(f"{path.name}.previous.unfinished")
        linked.unlink(missing_ok=True)
        try:
            os.link(path, linked)
        except OSError:  # a file system without hard links: for a moment there is only the previous one
            os.replace(path, previous_of(path))
        else:
            try:
                os.replace(linked, previous_of(path))
            except BaseException:
                linked.unlink(missing_ok=True)
                raise
    os.replace(unfinished, path)
    _synchronize(path.parent)


def _synchronize(folder: Path) -> None:
    """Wait for the disk to have a folder's names, where its file system and this user can do that."""
    try:
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS, errno.EACCES):
            raise


def tag_of(file: Path) -> str | None:
    """What a snapshot's residual files are found by; None where it has none, or is none of ours."""
    with torch.serialization.skip_data():  # no tensor is read, nor mapped, which not every file system can
        try:
            tag: str | None = torch.load(file, map_location="meta", weights_only=True)[OURS]["tag"]
        except Exception:
            return None
    return tag


def dump(value: Any) -> bytes:
    """`value` as a file would hold it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(stream: BinaryIO, kind: type) -> Any:
    """What `dump` made of a value of `kind`: plain data and tensors; whatever else is in `stream` raises."""
    value = torch.load(stream, map_location="cpu", weights_only=True)
    if not isinstance(value, kind):
        raise TypeError(f"it holds a {type(value).__name__}, not a {kind.__name__}")
    return value


def parse(stream: BinaryIO, file: Path) -> State:
    """What `file` holds, whose bytes come from `stream`.

    Raises:
        CheckpointError: if they are not what was written, or no snapshot.
    """
    try:
        snapshot: State = load(stream, dict)
        if OURS in snapshot:  # torch checks no checksums
            with zipfile.ZipFile(stream) as archive:
                if (record := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the checksum of {record!r} is wrong")
    except Exception as error:
        # A seek to before the beginning, EINVAL, is of a file that was cut short.
        if is_of_signal(error) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        before = previous_of(target_of(file))
        hint = f". The snapshot before it is {before}" if before.exists() else ""
        raise CheckpointError(f"{file} is truncated, corrupt or no snapshot ({error}){hint}") from error
    return snapshot
