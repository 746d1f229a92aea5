"""An NCCL under which several ranks can share a GPU, carried along where the one that torch brought cannot."""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from fastreduce.transports.nccl.library import SHARING, SHARING_VARIABLE, version_name

from .lines import ROOT

NAME = "libnccl.so.2"
FOLDER = ROOT / ".nccl"  # which Git ignores: it is for tests on one machine, and never published
_DECIDE = ("LD_PRELOAD", "PYTHONPATH", SHARING_VARIABLE)
_VERSION = "from cupy.cuda import nccl; print(nccl.get_version() if nccl.available else 0)"


def carried(unpacked: Path) -> Path | None:
    """The library, or the packed one's copy in `unpacked`; None if there is neither."""
    if (FOLDER / NAME).exists():
        return FOLDER / NAME
    packed = FOLDER / f"{NAME}.xz"
    if not packed.exists():
        return None
    library = unpacked / NAME
    if not library.exists():
        library.write_bytes(lzma.decompress(packed.read_bytes()))
    return library


def sharing_environment(unpacked: Path) -> dict[str, str]:
    """What processes need in their environment that share a GPU; what is preloaded already stays so."""
    library = carried(unpacked)
    if library is None:
        return {SHARING_VARIABLE: "1"}
    preloaded = ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
    return {SHARING_VARIABLE: "1", "LD_PRELOAD": preloaded}


def version(environment: Mapping[str, str]) -> int:
    """NCCL's version as CuPy finds it in a new process with this environment; 0 if it finds none."""
    return _version(tuple(sorted((name, environment[name]) for name in _DECIDE if name in environment)))


@cache
def _version(environment: tuple[tuple[str, str], ...]) -> int:
    command = [sys.executable, "-c", _VERSION]
    try:
        done = subprocess.run(
            command, env={**os.environ, **dict(environment)}, capture_output=True, text=True, check=False, timeout=120
        )
    except subprocess.TimeoutExpired:
        return 0
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdigit() else 0


def why_not_shared(found: int) -> str | None:
    """Why ranks cannot share a GPU under this version of NCCL, or None if they can."""
    if found == 0:
        return "CuPy finds no NCCL"
    if found < SHARING:
        return (
            f"NCCL {version_name(found)} takes one rank a GPU: carry {version_name(SHARING)} or later as "
            f".nccl/{NAME} or .nccl/{NAME}.xz"
        )
    return None
