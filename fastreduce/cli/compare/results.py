"""results.json: what is the same for every comparison in it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from ... import __version__
from ...ops import backends


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


def processor() -> str:
    """What Linux calls the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Write JSON, with null for NaN and infinity, which it has no words for."""
    path.write_text(json.dumps(_finite(dict(results)), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
