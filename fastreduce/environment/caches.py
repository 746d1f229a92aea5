"""Where Numba, Triton and CuPy keep what they compile, on machines where neither package nor home can be written."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError
from .exits import Exit, at_exit
from .variables import this_rank

logger = logging.getLogger(__name__)

# Variable → the folder that the library makes without it, wherever its own variables put that.
_IN_HOME = {
    "TRITON_CACHE_DIR": ("TRITON_HOME", ".triton/cache"),
    "CUPY_CACHE_DIR": ("HOME", ".cupy/kernel_cache"),
}


def ensure(variable: str) -> None:
    """Where TRITON_CACHE_DIR or CUPY_CACHE_DIR is not set, and the library's own folder cannot be made, set it to ours.

    Without a folder Triton cannot compile, and CuPy cannot be imported.

    Raises:
        BackendUnavailableError: if no folder at all can be written.
    """
    home, folder = _IN_HOME[variable]
    base = os.environ.get(home) or os.path.expanduser("~")
    if variable not in os.environ and (base == "~" or not _can_write(Path(base, folder))):
        os.environ[variable] = str(private_folder() / folder.lstrip("."))


@contextmanager
def numba_caching() -> Iterator[None]:
    """While kernels are declared: let Numba, which has found no folder for them, take one of ours.

    Raises:
        BackendUnavailableError: if no folder at all can be written.
    """
    found: list[Any] = [sys.modules.get(name) for name in ("numba.core.config", "numba.cuda.core.config")]
    configs = [(config, config.CACHE_DIR) for config in found if config is not None]
    for config, _ in configs:
        config.CACHE_DIR = str(private_folder() / "numba")
    try:
        yield
    finally:  # where others cache is their affair
        for config, before in configs:
            config.CACHE_DIR = before


@cache
def private_folder() -> Path:
    """`fastreduce-UID` among the temporary files, where it belongs to this user alone, else a new one until exit.

    What lies there is loaded as code, so nobody else may have put it there.

    Raises:
        BackendUnavailableError: if no folder for temporary files can be written.
    """
    try:
        path = Path(tempfile.gettempdir(), f"fastreduce-{os.geteuid()}")
        if not _is_private(path):
            path = Path(tempfile.mkdtemp(prefix="fastreduce-"))
            at_exit(Exit.FILES, partial(shutil.rmtree, path, ignore_errors=True), [path])
    except OSError as error:
        raise BackendUnavailableError(
            f"compiled kernels cannot be kept: {error}. Set TMPDIR or NUMBA_CACHE_DIR to a folder that can be written"
        ) from error
    if this_rank() == 0:
        logger.warning("compiled kernels are kept in %s: neither the package nor the home folder can be written", path)
    return path


def _is_private(path: Path) -> bool:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()  # of a link itself, which is no folder
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    return ours and _can_write(path)


def _can_write(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError:
        return False
    return True
