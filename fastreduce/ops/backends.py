"""Which kernel backend serves a device, and the reason why not the others."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, wraps
from importlib.metadata import version

import torch

from ..environment.caches import ensure
from ..environment.numba_imports import import_compiled, pythons_print, why_not_compiled
from ..environment.packages import pip_install
from ..errors import BackendUnavailableError, SettingError, TensorError
from ..kernels.device_tables import AlignmentError
from ..kernels.slots import Pieces

ENVIRONMENT_VARIABLE = "FASTREDUCE_KERNELS"


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels: the functions of kernels/README.md."""

    name: str
    flatten: Callable[..., None]
    unflatten: Callable[..., None]
    quantize: Callable[..., None]
    dequantize: Callable[..., None]
    reduce_shards: Callable[..., None]
    reduce_quantized: Callable[..., None]
    flatten_fp16: Callable[..., None]
    unflatten_fp16: Callable[..., None]
    reduce_fp16: Callable[..., None]
    share_exponents: Callable[..., None]
    multiply: Callable[..., None]
    orthonormal: Callable[..., None]
    take_largest: Callable[..., None]
    average_taken: Callable[..., None]
    pieces: Callable[..., Pieces] | None = None  # where a two-shot can go piece by piece


_OPERATIONS = tuple(field.name for field in fields(Backend) if field.name != "name")


def _why_not_reference(_device: torch.device) -> str | None:
    return None


def _why_not_numba_cpu(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"numba_cpu works on CPU tensors, not on {device}"
    if reason := why_not_compiled():
        return f"{reason}; or set FASTREDUCE_KERNELS=reference"
    return None


def _why_not_triton(device: torch.device) -> str | None:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported ({error}): pip install triton"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "triton works on CPU tensors only in its interpreter: set TRITON_INTERPRET=1 (slow, for tests)"
    return None


@pythons_print()
def _why_not_numba_cuda(device: torch.device) -> str | None:
    try:
        importlib.import_module("numba_cuda")  # without it `numba.cuda` is an older one, part of numba
        cuda = importlib.import_module("numba.cuda")
    except ImportError as error:
        return f"numba-cuda cannot be imported ({error}): {pip_install('numba-cuda[cu{}]')}"
    simulated = bool(cuda.config.ENABLE_CUDASIM)
    if device.type == "cpu" and not simulated:
        return (
            "numba_cuda works on CPU tensors only in Numba's simulator: set NUMBA_ENABLE_CUDASIM=1 before the process "
            "starts (slow, for tests)"
        )
    if not simulated:
        try:
            importlib.import_module("numba.cuda.cudadrv.nvvm").NVVM()
        except Exception as error:  # numba-cuda's own, or cuda-pathfinder's
            reason = str(error).strip().split("\n")[0]
            return (
                f"numba-cuda finds no NVVM to compile with ({reason}): set CUDA_HOME to CUDA's folder, such as "
                f"/usr/local/cuda, before the process starts, or: {pip_install('numba-cuda[cu{}]')}"
            )
        try:
            importlib.import_module("numba.cuda.cudaimpl")  # which the first kernel would import
        except AttributeError as error:
            return (
                f"numba-cuda {version('numba-cuda')} does not fit NumPy {version('numpy')} ({error}): pip install "
                "'numpy<2.5', or a later numba-cuda"
            )
    if device.type != "cpu" and simulated:
        return f"Numba's simulator is on, which works on CPU tensors, not on {device}: unset NUMBA_ENABLE_CUDASIM"
    return None


@dataclass(frozen=True)
class _Declaration:
    """A backend before it is imported: its modules, what keeps it from a device, and whether it is for devices."""

    modules: tuple[str, ...]
    why_not: Callable[[torch.device], str | None]
    for_devices: bool = False


_DECLARED = {
    "reference": _Declaration(("reference", "torch_low_rank", "torch_sparse_top"), _why_not_reference),
    "numba_cpu": _Declaration(
        (
            "numba_cpu_cast",
            "numba_cpu_fp16",
            "numba_cpu_int8",
            "numba_cpu_low_rank",
            "numba_cpu_pieces",
            "numba_cpu_sparse_top",
        ),
        _why_not_numba_cpu,
    ),
    "triton": _Declaration(
        ("triton_cast", "triton_fp16", "triton_int8", "torch_low_rank", "torch_sparse_top"),
        _why_not_triton,
        for_devices=True,
    ),
    "numba_cuda": _Declaration(
        ("numba_cuda_cast", "numba_cuda_fp16", "numba_cuda_int8", "torch_low_rank", "torch_sparse_top"),
        _why_not_numba_cuda,
        for_devices=True,
    ),
}
NAMES = tuple(_DECLARED)


def _declared(name: str) -> _Declaration:
    if name not in _DECLARED:
        raise SettingError(f"unknown kernel backend {name!r}; allowed: {', '.join(NAMES)}")
    return _DECLARED[name]


def why_not(name: str, device: torch.device) -> str | None:
    """The reason why backend `name` cannot serve `device` here, or None if it can.

    Raises:
        SettingError: if there is no such backend.
    """
    return _declared(name).why_not(device)


@cache
def load(name: str) -> Backend:
    """The backend called `name`; its modules are imported on first use.

    Raises:
        SettingError: if there is no such backend.
        BackendUnavailableError: if a module of it cannot be imported, or there is no folder for what it compiles.
    """
    declared = _declared(name)
    if name == "triton":
        ensure("TRITON_CACHE_DIR")
    try:
        modules = import_compiled([f"..kernels.{module}" for module in declared.modules], __package__)
    except ImportError as error:
        raise BackendUnavailableError(f"kernel backend {name!r} cannot be imported: {error}") from error
    found = {
        op: made
        for module in modules
        for op, made in vars(module).items()
        if op in _OPERATIONS and made.__module__ == module.__name__  # some import a `multiply` of a kernel's numbers
    }
    if declared.for_devices:
        found = {op: _translated(operation) for op, operation in found.items()}
    return Backend(name, **found)


def _translated(operation: Callable[..., None]) -> Callable[..., None]:
    """The operation, with the kernels' own error as one of ours."""

    @wraps(operation)
    def call(*args: object, **options: object) -> None:
        try:
            operation(*args, **options)
        except AlignmentError as error:
            raise TensorError(str(error)) from error

    return call


def kernels_asked_for() -> str | None:
    """The backend that FASTREDUCE_KERNELS names, where it is set.

    Raises:
        SettingError: if there is no such backend.
    """
    asked = os.environ.get(ENVIRONMENT_VARIABLE) or None
    try:
        if asked is not None:
            _declared(asked)
    except SettingError as error:
        raise SettingError(f"{ENVIRONMENT_VARIABLE}={asked}: {error}") from None
    return asked


def name_for(device: torch.device) -> str:
    """The name of the backend that `choose` takes, or refuses."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or ("numba_cpu" if device.type == "cpu" else "triton")


def choose(device: torch.device) -> Backend:
    """The backend for tensors on `device`: FASTREDUCE_KERNELS if set, else numba_cpu or triton by device.

    Raises:
        SettingError: if FASTREDUCE_KERNELS names no backend.
        BackendUnavailableError: if the backend cannot serve `device`; nothing else is tried.
    """
    asked, name = kernels_asked_for(), name_for(device)
    reason = why_not(name, device)
    if reason is not None:
        source = f" ({ENVIRONMENT_VARIABLE}={asked})" if asked else ""
        raise BackendUnavailableError(f"kernel backend {name!r}{source} cannot run here: {reason}")
    return load(name)
