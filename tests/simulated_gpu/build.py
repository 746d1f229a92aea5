"""Compiles the simulated device, once for each version of its source and of torch."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "device.h", "order.h", "process_groups.h")
MODULE = "simulated_device"
SECONDS = 300.0


def why_not() -> str | None:
    """The reason why there is no simulated device here; None if there can be one."""
    if torch.cuda.is_available() or torch.version.cuda:
        return "torch has CUDA: a GPU shows more, and the simulated one would be a second device of the same kind"
    if not shutil.which("g++"):
        return "no g++ to compile the simulated device with"
    return None


def build() -> Path:
    """The extension module, compiled or found; those who compile at once do not disturb each other.

    Raises:
        RuntimeError: with what the compiler says.
    """
    command = _command()
    source = b"".join(HERE.joinpath(name).read_bytes() for name in SOURCES)
    key = hashlib.sha256(source + repr((torch.__version__, sys.version, command)).encode()).hexdigest()[:16]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "fastreduce-simulated-gpu" / key / f"{MODULE}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder, path.name)
            done = subprocess.run([*command, "-o", made], capture_output=True, text=True, timeout=SECONDS)
            if done.returncode:
                raise RuntimeError(f"g++ cannot compile the simulated device:\n{done.stderr[-4000:]}")
            made.rename(path)
    return path


def _command() -> list[str]:
    torchs = Path(torch.__file__).parent
    include, libraries = torchs / "include", torchs / "lib"
    return [
        "g++",
        *("-O0", "-g0", "-w", "-shared", "-fPIC", "-std=c++20"),
        *(f"-DTORCH_EXTENSION_NAME={MODULE}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])),
        str(HERE / "device.cpp"),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}"),
        *("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"),
    ]
