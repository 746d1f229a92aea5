"""What this machine has: versions, compilers, NCCL and what it can do, and the speed of a copy."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastreduce.kernels.slots import SlotTable
from fastreduce.ops import backends
from fastreduce.transports.nccl.library import version_name
from tests.support.nccl_cases import OnGpu, run_case, world
from tests.support.ranks import run_ranks

from .carried_nccl import carried, sharing_environment, why_not_shared
from .carried_nccl import version as nccl_version
from .two_clocks import Work, timed
from .worker_cases import Case, NotHere

PACKAGES = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numba", "numba-cuda", "numpy", "nvidia-nccl-cu13",
    "nvidia-nccl-cu12", "pytest", "pytest-xdist", "pytest-timeout", "hypothesis", "cuda-bindings",
)  # fmt: skip
MACHINE = "machine"
NVIDIA_SMI = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,pstate"


def cases(rehearsal: bool) -> list[Case]:
    """What later phases stand on first."""
    device = "cpu" if rehearsal else "cuda"
    return [
        machine_case(device),
        Case("compiler for Triton's launcher", 2, _launcher),
        Case("triton", 10, partial(_kernel, "triton", device)),
        Case("nccl", 10, partial(_nccl, device)),
        Case("copy", 8, partial(_copy, device)),
        Case("profilers", 5, _profilers),
        Case("ranks on one GPU", 35, partial(_ranks_on_one_gpu, device), alone=True),
        Case("numba_cuda", 20, partial(_numba_cuda, device), alone=True),
    ]


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine_case(device: str) -> Case:
    """What stands beside every row of a phase: the GPU and its driver, versions, the load."""
    return Case(MACHINE, 6, partial(_machine, device))


def _machine(device: str) -> dict[str, Any]:
    packages = {package: _installed(package) for package in PACKAGES}
    found: dict[str, Any] = {
        "gpu": None,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {package: which for package, which in packages.items() if which},
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "cuda_home": os.environ.get("CUDA_HOME"),
    }
    if device == "cpu":
        return found
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader,nounits"]
    said = _output(command).split("\n")[0] if shutil.which("nvidia-smi") else ""
    return {
        **found,
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "nvidia_smi": dict(zip(NVIDIA_SMI.split(","), said.split(", "), strict=False)),
    }


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout or done.stderr).strip()


def _launcher() -> dict[str, Any]:
    """Triton compiles a launcher in C for each kernel's signature."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include"), "Python.h")
    missing = [what for what, there in (("gcc", compiler), ("Python.h", header.exists())) if not there]
    if missing:
        raise NotHere(f"missing: {', '.join(missing)}; Triton cannot launch a kernel without")
    return {
        "compiler": compiler,
        "version": _output([str(compiler), "--version"]).split("\n")[0],
        "header": str(header),
    }


def _kernel(name: str, device: str) -> dict[str, Any]:
    """One kernel compiled, run, and held against the reference; twice, since the second call compiles nothing."""
    if reason := backends.why_not(name, torch.device(device)):
        raise NotHere(reason)
    kernels = backends.load(name)
    slots = SlotTable(np.array([0, 1024]), np.array([1000, 77]), 1136)
    tensors = [torch.randn(numel, device=device) for numel in (1000, 77)]
    wires = [torch.full((1136,), 97.0, dtype=torch.float16, device=device) for _ in range(2)]
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        kernels.flatten(tensors, slots, wires[0], 0.5)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    backends.load("reference").flatten(tensors, slots, wires[1], 0.5)
    assert torch.equal(wires[0].view(torch.int16), wires[1].view(torch.int16)), f"{name} differs from the reference"
    return {"first_call_s": seconds[0], "second_call_s": seconds[1]}


def _numba_cuda(device: str) -> dict[str, Any]:
    found = _kernel("numba_cuda", device)
    return {**found, "cuda_home": os.environ.get("CUDA_HOME")}


def _nccl(device: str) -> dict[str, Any]:
    """The versions here, and whether several ranks could share this GPU under one of them: known before any starts."""
    here = nccl_version({})
    found: dict[str, Any] = {"cupy": version_name(here) if here else None}
    if device == "cuda":
        found["torch"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        library = carried(Path(folder))
        if library:
            with_it = nccl_version(sharing_environment(Path(folder)))
            found["carried"] = version_name(with_it) if with_it else f"{library} cannot be loaded"
            here = with_it or here
    return {**found, "ranks_may_share": why_not_shared(here) is None, "why_not": why_not_shared(here)}


def _sum_of_ranks(rank: int, size: int, place: OnGpu) -> float:
    from fastreduce.transports import NcclTransport

    start = time.monotonic()
    transport, wire = NcclTransport(world()), torch.full((1000,), rank + 1.0, device=place.device)
    transport.all_reduce(wire).wait()
    torch.cuda.synchronize()
    assert bool((wire == size * (size + 1) / 2).all()), wire
    transport.close()
    return time.monotonic() - start


def _ranks_on_one_gpu(device: str) -> dict[str, Any]:
    """Two processes, one GPU, one sum; and how long NCCL's start takes there, which timeouts must allow for."""
    if device == "cpu":
        raise NotHere("no CUDA device")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(sharing_environment(Path(folder)))  # this process is for this case only
        if reason := why_not_shared(nccl_version({})):
            raise NotHere(reason)
        seconds = run_ranks(run_case, 2, _sum_of_ranks, OnGpu(), timeout=50)
    return {"start_and_sum_s": seconds}


def _copy(device: str) -> dict[str, Any]:
    """Bytes a second of a copy within the device's memory, read and written: the ceiling of every kernel.

    And how many instructions of a thread the GPU may issue in the time that a copy takes for a byte: four warps' in a
    cycle of each multiprocessor, at its highest clock. A kernel that needs more cannot be as fast as a copy.
    """
    sizes = [1 << 10] if device == "cpu" else [25 << 20, 256 << 20, 4 << 30]
    found = {}
    for nbytes in sizes:
        source = torch.randint(256, (nbytes,), dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
        call: Callable[[], Any] = partial(target.copy_, source)
        times = timed({"copy": Work(call)}, device, 0.2).gpu["copy"]
        found[f"{nbytes >> 20} MiB"] = 2 * nbytes / sorted(times)[len(times) // 2] / 1e9
    if device == "cpu":
        return {"gb_per_s": found}
    properties, clock = torch.cuda.get_device_properties(0), _machine(device)["nvidia_smi"].get("clocks.max.sm", "")
    issued = 4 * 32 * properties.multi_processor_count * _number(clock) * 1e6
    return {"gpu": properties.name, "gb_per_s": found, "instructions_a_byte": issued / list(found.values())[-1] / 1e9}


def _number(text: str) -> float:
    """Of what nvidia-smi says; NaN for "[N/A]" and the like."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _profilers() -> dict[str, Any]:
    """Where they are, and what they say of themselves; nothing is profiled here."""
    tools = ("ncu", "nsys", "compute-sanitizer", "nvcc", "cuobjdump")
    where = {tool: shutil.which(tool) for tool in tools}
    ncu = _output(["ncu", "--version"]).split("\n")[-1] if where["ncu"] else None
    return {"found": {tool: path for tool, path in where.items() if path}, "ncu": ncu, "python": sys.executable}
