"""What to install for the CUDA that is here: packages whose names carry its number."""

from __future__ import annotations

import ctypes
import shlex

import torch

NEWEST = 13  # that CuPy and numba-cuda have packages for; newer drivers run it too


def cuda_version() -> int | None:
    """The major version of CUDA that torch was built with, else what the driver runs; None if neither is there."""
    if torch.version.cuda is not None:
        return int(torch.version.cuda.split(".")[0])
    number = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return min(number.value // 1000, NEWEST) or None


def pip_install(package: str, *options: str) -> str:
    """The command for a package such as `cupy-cuda{}x`; where CUDA's version cannot be known, also how to tell it."""
    found = cuda_version()
    command = shlex.join(["pip", "install", *options, package.format(found or NEWEST)])
    return command if found else f"{command}, or {package.format(12)} where nvidia-smi shows CUDA 12"
