"""Numba's disk cache, keyed on all files that a kernel may be made of: by itself it looks at the kernel's own only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def keyed(jit: Callable[[Any], Any], pattern: str, folder: Path = Path(__file__).parent) -> Callable[[Any], Any]:
    """A decorator of Numba's that caches on disk → the same, whose entries hold until such a file of `folder` changes.

    Args:
        jit: Numba's.
        pattern: of names, as `Path.glob` takes it.
        folder: that of the kernels, if it is no other.
    """

    def declare(function: Any) -> Any:
        dispatcher = jit(function)
        file = dispatcher._cache._cache_file
        file._source_stamp = (file._source_stamp, _digest(pattern, folder))
        return dispatcher

    return declare


@cache
def _digest(pattern: str, folder: Path) -> str:
    files = sorted(folder.glob(pattern))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
