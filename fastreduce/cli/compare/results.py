"""results.json: what is the same for every comparison in it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding

from ... import __version__
from ...ops import backends

FORMAT = 1  # of results.json: a larger number where `fastreduce report` must read it in another way


def describe(device: str) -> dict[str, Any]:
    """With what, on what and when it was measured."""
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(device),
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


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": backends.choose(torch.device(device)).name,
    }


def over(transport: str) -> str:
    """What moves gradients under our settings, in words; torch's class has its process group."""
    return f"ours over {transport}" if transport else "over torch's group"


def processor() -> str:
    """What Linux calls the processor, or LLVM where Linux has no name for it, as on ARM."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or str(binding.get_host_cpu_name())


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, with null for NaN and infinity, which it has no words for."""
    path.write_text(json.dumps(finite(dict(results)), indent=1) + "\n")


def finite(value: Any) -> Any:
    """The same with None for NaN and infinity."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
