"""Numba's disk cache, keyed on all files that a kernel may be made of: by itself it looks at the kernel's own only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def keyed(jit: Callable[[Any], Any], family: str) -> Callable[[Any], Any]:
    """A decorator of Numba's that caches on disk → the same, whose entries hold until a file `family`_*.py changes."""

    def declare(function: Any) -> Any:
        dispatcher = jit(function)
        file = dispatcher._cache._cache_file
        file._source_stamp = (file._source_stamp, _digest(family))
        return dispatcher

    return declare


@cache
def _digest(family: str) -> str:
    files = sorted(Path(__file__).parent.glob(f"{family}_*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
