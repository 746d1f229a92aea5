"""Numba's disk cache, keyed on all files that a kernel may be made of: by itself it looks at the kernel's own only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def keyed(jit: Callable[[Any], Any], pattern: str, more: Path | None = None) -> Callable[[Any], Any]:
    """A decorator of Numba's that caches on disk → the same, whose entries hold until such a file in here changes.

    Args:
        jit: Numba's.
        pattern: of names, as `Path.glob` takes it.
        more: a folder, all of whose modules count too.
    """

    def declare(function: Any) -> Any:
        dispatcher = jit(function)
        file = dispatcher._cache._cache_file
        file._source_stamp = (file._source_stamp, _digest(pattern, more))
        return dispatcher

    return declare


@cache
def _digest(pattern: str, more: Path | None) -> str:
    files = [*sorted(HERE.glob(pattern)), *(sorted(more.glob("*.py")) if more else [])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
