"""The files of a trace: one of each rank, and all merged."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MERGED = "trace.json"
END = "\n]}\n"


def merge(folder: Path) -> Path:
    """All ranks' files of a folder's last run, whole or not, as one file, whose path is returned.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if a file is no trace.
    """
    heads = {
        path: _head(path)
        for path in folder.glob("rank*.json")
        if re.fullmatch(r"rank\d+(\.\d+)?\.json", path.name) and path.stat().st_size  # else of one that was killed
    }
    if not heads:
        raise FileNotFoundError(f"{folder} holds no rank0.json of a trace")
    newest = heads[max(heads, key=lambda path: path.stat().st_mtime)]
    run = newest["fastreduce"]["run"]
    chosen = sorted(path for path, head in heads.items() if head["fastreduce"]["run"] == run)
    merged, part = folder / MERGED, folder / f".{MERGED}.{uuid.uuid4().hex}"  # several ranks may do so at once
    separator = ""
    try:
        with part.open("w", encoding="utf-8") as out:
            about = {"run": run, "files": [path.name for path in chosen]}
            out.write(json.dumps({**newest, "fastreduce": about})[:-1] + ', "traceEvents": [\n')
            for path in chosen:
                for event in _events(path):
                    out.write(f"{separator}{event}")
                    separator = ",\n"
            out.write(END)
        part.replace(merged)
    finally:
        part.unlink(missing_ok=True)
    return merged


def _head(path: Path) -> dict[str, Any]:
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        head: dict[str, Any] = json.loads(line.rstrip() + "]}")
        del head["traceEvents"]
        head["fastreduce"]["run"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of fastreduce: {line[:80]!r}") from error
    return head


def _events(path: Path) -> Iterator[str]:
    """The events of a file, each a line; what a process that was killed has left of the last one is dropped."""
    with path.open(encoding="utf-8", errors="replace") as file:
        next(file)
        last = ""
        for line in file:
            if last:
                yield last
            last = line.strip().removesuffix(",")
    if last not in ("", END.strip()):
        try:
            json.loads(last)
        except ValueError:
            return
        yield last


def is_complete(path: Path) -> bool:
    """Whether a rank has closed its file."""
    try:
        with path.open("rb") as file:
            file.seek(-len(END), os.SEEK_END)
            return file.read() == END.encode()
    except OSError:
        return False
