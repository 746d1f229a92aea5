"""Files of lines of JSON. Whatever is killed leaves all that was written before."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any


def append(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Add a line for each object, all in one write, and on disk when it returns."""
    text = "".join(json.dumps(each, default=str) + "\n" for each in objects)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"  # who wrote it was killed in the middle
        os.write(file, (("\n" if torn else "") + text).encode())
        os.fsync(file)
    finally:
        os.close(file)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, none if it is not there; torn lines are left out."""
    if not path.exists():
        return
    for text in path.read_text(errors="replace").splitlines():
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found
