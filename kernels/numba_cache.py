"""Numba's disk cache, keyed on all files that a kernel may be made of: by itself it looks at the kernel's own only.

Each compiled signature has a file that is named after all that it depends on. By itself Numba numbers files, and an
index says which is whose: two processes that compile at once, or one that is killed, can leave an index by which a
signature gets the code of another. A file whose bytes are not those that were written is compiled anew: a machine that
went down can leave it empty or full of zeros. A folder that cannot be written, full say, costs compiling each time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIGEST = 32  # bytes in front of an entry: the digest of the rest

logger = logging.getLogger(__name__)


def keyed(jit: Callable[[Any], Any], more: Path | None = None) -> Callable[[Any], Any]:
    """A decorator of Numba's that caches on disk → the same, whose entries hold until a module in here changes.

    Args:
        jit: Numba's.
        more: a folder, all of whose modules count too.
    """

    def declare(function: Any) -> Any:
        dispatcher = jit(function)
        file = dispatcher._cache._cache_file
        stamp = _short(repr((file._version, file._source_stamp, _digest(more))))
        start = file._index_name.removesuffix(".nbi")

        def name_of(key: Any) -> str:
            return f"{start}.{stamp}.{_short(repr(key))}.nbc"

        def save(key: Any, data: Any) -> None:
            entry = file._dump(data)
            with file._open_for_write(file._data_path(name_of(key))) as opened:
                opened.write(hashlib.sha256(entry).digest() + entry)
            for other in Path(file._cache_path).glob(f"{start}.*.nbc"):
                if not other.name.startswith(f"{start}.{stamp}."):
                    other.unlink(missing_ok=True)  # of files as they were

        def load(key: Any) -> Any:
            try:
                found = Path(file._data_path(name_of(key))).read_bytes()
            except OSError:
                found = b""
            entry = found[DIGEST:]
            if hashlib.sha256(entry).digest() != found[:DIGEST]:
                _say_what_takes_long()
                return None
            return pickle.loads(entry)

        save_overload = dispatcher._cache.save_overload

        def save_if_possible(signature: Any, compiled: Any) -> None:
            try:
                save_overload(signature, compiled)
            except OSError as error:
                _tell_once(f"compiled kernels are not kept in {file._cache_path}: {error.strerror or error}")

        file.save, file.load, dispatcher._cache.save_overload = save, load, save_if_possible
        return dispatcher

    return declare


@cache
def _say_what_takes_long() -> None:
    """To who sits at a terminal, once, and not from every rank."""
    # A script may have put something else there, or have closed it.
    with suppress(AttributeError, ValueError, OSError):
        if os.environ.get("RANK", "0") == "0" and sys.stderr.isatty():
            print("fastreduce compiles its kernels for this machine, once: some seconds", file=sys.stderr, flush=True)


@cache
def _tell_once(text: str) -> None:
    logger.warning(text)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _digest(more: Path | None) -> str:
    files = [*sorted(HERE.glob("*.py")), *(sorted(more.glob("*.py")) if more else [])]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
