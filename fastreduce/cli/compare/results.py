"""results.json: what is the same for every comparison in it."""

from __future__ import annotations

import json
import platform
import subprocess
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from ... import __version__

FORMAT = 1  # of results.json: a larger number where `fastreduce report` must read it in another way


def describe(machine: Mapping[str, Any]) -> dict[str, Any]:
    """With what, on what and when it was measured; `machine` is that of a rank (`run.machine`)."""
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine,
    }


def commit() -> str:
    """Git's commit of the working directory, with "+changes" where files differ from it; "" where there is none."""
    try:
        command = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Of what computes."""
    return {
        "fastreduce": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "numba": numba.__version__,
        "python": platform.python_version(),
    }


def over(transport: str) -> str:
    """What moves gradients under our settings, in words; torch's class has its process group."""
    return f"ours over {transport}" if transport else "over torch's group"


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, with null for NaN and infinity, which it has no words for: all of it, or what was there stays."""
    path = path.resolve()  # of a link, what it leads to
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_text(json.dumps(finite(dict(results)), indent=1) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def finite(value: Any) -> Any:
    """The same with None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
