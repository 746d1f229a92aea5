"""What a rank runs on, for results."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding

from ..environment.cores import usable_cores
from ..ops import backends


def machine(device: str) -> dict[str, Any]:
    """What was measured on."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "kernels": backends.choose(torch.device(device)).name,
    }


def processor() -> str:
    """What Linux calls the processor, or LLVM where Linux has no name for it, as on ARM."""
    lines = list[str]()
    with suppress(OSError):  # a sandbox without
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or str(binding.get_host_cpu_name())
