"""A rank's segment of shared memory, from its making to its end, and the map of what lies in it.

A segment is a file of /dev/shm that only its user may open, with a name for no longer than the other ranks take to map
it. Its maker locks it, and the system takes the lock back when that process ends, however it ends: so others see that.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
import weakref
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...environment.numba_imports import why_not_compiled

FOLDER = Path("/dev/shm")
PREFIX = "fastreduce-"
NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}  # of futex(2)

# Where words lie in the header, each on two lines of its own: processors fetch lines in pairs.
MAGIC, SENT, SUMMED, TAKEN, BEAT, FAILED, ASLEEP, TAGS = 0, 128, 256, 384, 512, 640, 768, 1024
TAG_BYTES = 64  # of what the piece in a cell belongs to: kind, bytes, dtype
DATA = 4096
VERSION = 1
_HEADER = struct.Struct("=8s5q")  # name, version, rank, ranks, cells, bytes of a cell


class Geometry(NamedTuple):
    """The sizes of a ring; ranks of one version have the same."""

    cells: int
    cell_bytes: int

    @property
    def nbytes(self) -> int:
        """Of a segment."""
        return DATA + self.cells * self.cell_bytes


GEOMETRY = Geometry(cells=8, cell_bytes=256 << 10)


class CannotShareError(Exception):
    """Why ranks cannot share memory here."""


def why_no_shm(nbytes: int = 0) -> str | None:
    """The reason why this process can share no memory with others, or None. Others may have reasons of their own.

    Args:
        nbytes: what must be free.
    """
    if os.uname().machine not in NUMBERS:
        return f"on {os.uname().machine} the number of futex(2) is not known; it is on {', '.join(NUMBERS)}"
    if reason := why_not_compiled():
        return reason
    if not os.access(FOLDER, os.W_OK | os.X_OK):
        return f"there is no {FOLDER} that this user may write to"
    free = os.statvfs(FOLDER)
    if free.f_bavail * free.f_frsize < nbytes:
        return f"{nbytes} bytes in {FOLDER}: {_no_room()}"
    return None


def file_of(place: str, rank: int) -> Path:
    """Where the segment of a rank has its name for a while."""
    return FOLDER / f"{PREFIX}{place}-{rank}"


class Segment:
    """Memory of one rank, mapped here.

    Attributes:
        address: where it begins.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self._file = file
        self.address = _map(file, nbytes)
        self.end = weakref.finalize(self, _end, self.address, nbytes, file)
        self.end.atexit = False  # the process ends it, and threads may still use it

    @classmethod
    def make(cls, path: Path, rank: int, ranks: int, geometry: Geometry) -> Segment:
        """Make this rank's, under a name that nobody has, and lock it; the caller takes the name away.

        Raises:
            CannotShareError: if there is no room for it, or no such folder.
        """
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with _reasons(f"{geometry.nbytes} bytes in {path.parent}"):
            file = os.open(path, flags, 0o600)
            try:
                os.posix_fallocate(file, 0, geometry.nbytes)  # else a full folder is SIGBUS, later
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                segment = cls(file, geometry.nbytes)
            except BaseException:
                os.close(file)
                raise
        header = _HEADER.pack(b"fastred\0", VERSION, rank, ranks, *geometry)
        ctypes.memmove(segment.address + MAGIC, header, len(header))
        return segment

    @classmethod
    def open(cls, path: Path, rank: int, ranks: int, geometry: Geometry) -> Segment:
        """Map that of another rank.

        Raises:
            CannotShareError: if it cannot be seen from here, or is not what was to come.
        """
        with _reasons(f"the segment of rank {rank}, {path}"):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != geometry.nbytes:
                    raise CannotShareError(
                        f"{path} is no segment of rank {rank}: it has {found.st_size} bytes of user {found.st_uid}"
                    )
                segment = cls(file, geometry.nbytes)
            except BaseException:
                os.close(file)
                raise
        name, *told = _HEADER.unpack(ctypes.string_at(segment.address + MAGIC, _HEADER.size))
        if name != b"fastred\0" or told != [VERSION, rank, ranks, *geometry]:
            raise CannotShareError(f"rank {rank} runs another version of fastreduce")
        return segment

    def let_go(self) -> None:
        """Of this rank's own: look as one whose process has ended, as it is about to."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)

    def owner_is_gone(self) -> bool:
        """Whether the process that made it has ended, or is about to and starts nothing more."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def word(self, at: int) -> int:
        """A word of the header, as it is now."""
        return ctypes.c_int64.from_address(self.address + at).value

    def set_word(self, at: int, value: int) -> None:
        """Write a word of the header."""
        ctypes.c_int64.from_address(self.address + at).value = value


@contextlib.contextmanager
def _reasons(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotShareError(f"{what}: {_why(error)}") from error


def _why(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return _no_room()
    if error.errno == errno.ENOENT and FOLDER.is_dir():
        return f"not seen from here: it has a {FOLDER} of its own, as containers do (docker run --ipc=host shares one)"
    return os.strerror(error.errno or 0)


def _no_room() -> str:
    free = os.statvfs(FOLDER)
    if free.f_files and not free.f_favail:
        return "no room: it holds as many files as it may"
    return f"no room: {free.f_bavail * free.f_frsize} bytes are free (docker run --shm-size=256m gives more)"


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _map(file: int, nbytes: int) -> int:
    """By hand: Python's mmap keeps a second descriptor, and closing one gives the lock back."""
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _end(address: int, nbytes: int, file: int) -> None:
    _libc().munmap(address, nbytes)
    os.close(file)
