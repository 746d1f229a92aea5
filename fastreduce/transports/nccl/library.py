"""NCCL through CuPy: loading it, the reason why it cannot run here, and what the transport needs of CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...environment.caches import ensure
from ...environment.packages import pip_install
from ...errors import BackendUnavailableError

logger = logging.getLogger(__name__)

OLDEST = 21000  # as NCCL counts, 2.10: BF16 and averages
SHARING = 23000  # 2.30: several ranks on one GPU
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def load_nccl() -> Any:
    """CuPy's `nccl` module.

    Raises:
        BackendUnavailableError: if CuPy or NCCL is missing or too old, with what to install.
    """
    nccl = _find_nccl()
    if isinstance(nccl, str):
        raise unavailable(nccl)
    return nccl


def unavailable(reason: str) -> BackendUnavailableError:
    """The error of a missing NCCL, for a reason that says what to install."""
    return BackendUnavailableError(f"NCCL library not available: {reason}")


def why_no_nccl() -> str | None:
    """What is missing for backend "nccl", of torch's and of ours, and what to install; None if nothing is."""
    if not torch.cuda.is_available() and torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA: pip install torch from an index of CUDA builds, "
            "then the CuPy and NCCL that fastreduce doctor names"
        )
    if not torch.cuda.is_available():
        return "torch sees no GPU: install a driver, or look at CUDA_VISIBLE_DEVICES"
    if not dist.is_nccl_available():
        return "torch is built without NCCL: install a CUDA build of torch"
    nccl = _find_nccl()
    return nccl if isinstance(nccl, str) else None


def _find_nccl() -> Any:
    """CuPy's module, or the reason why it cannot be used."""
    try:
        ensure("CUPY_CACHE_DIR")
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): {pip_install('cupy-cuda{}x')}"
    if not nccl.available:
        return f"CuPy finds no libnccl: {pip_install('nvidia-nccl-cu{}')}"
    if nccl.get_version() < OLDEST:
        return (
            f"NCCL {version_name(nccl.get_version())} is too old, fastreduce needs {version_name(OLDEST)} or later: "
            f"{pip_install('nvidia-nccl-cu{}', '--upgrade')}"
        )
    return nccl


def version_name(version: int) -> str:
    """23203 → 2.32.3; until 2.8, NCCL counted in thousands."""
    major, rest = divmod(version, 10000 if version >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@dataclass(frozen=True)
class GpuPlace:
    """Where a rank's communicator works; ranks tell each other before they make one."""

    host: str
    gpu: str
    name: str
    may_share: bool

    @classmethod
    def of(cls, device: torch.device, cuda: Cuda, nccl: Any) -> GpuPlace:
        """This rank's, on `device`."""
        may_share = os.environ.get(SHARING_VARIABLE) == "1" and nccl.get_version() >= SHARING
        return cls(socket.gethostname(), cuda.identity(device), str(device), may_share)

    @classmethod
    def told(cls, value: Any) -> GpuPlace:
        """Another rank's, from what it told.

        Raises:
            ValueError: if that is none.
        """
        types = {name: type(part).__name__ for name, part in value.items()} if isinstance(value, dict) else {}
        if types != cls.__annotations__:
            raise ValueError(f"{', '.join(cls.__annotations__)} were expected, not {value!r:.80}")
        return cls(**value)


def check_distinct(rank: int, places: Sequence[GpuPlace], version: int) -> None:
    """Check that ranks have GPUs of their own, unless sharing is allowed on all of them; on every rank alike.

    Raises:
        BackendUnavailableError: naming two ranks on one GPU, and what helps.
    """
    seen: dict[str, int] = {}
    for other, place in enumerate(places):
        first = seen.setdefault(place.gpu, other)
        if first != other and not (place.may_share and places[first].may_share):
            raise BackendUnavailableError(
                f"rank {rank} of {len(places)}: ranks {first} and {other} are on one GPU, {place.name} of {place.host} "
                f"({place.gpu}), and NCCL {version_name(version)} takes one rank a GPU: call "
                f"torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first, and start as many ranks as there are "
                f"GPUs. To test on one GPU, export {SHARING_VARIABLE}=1 (NCCL {version_name(SHARING)} or later)"
            )


class Cuda:
    """The current stream, events, and which GPU a device is."""

    device_type = "cuda"

    def stream(self, device: torch.device) -> Any:
        """The current stream; its `cuda_stream` is the address."""
        return torch.cuda.current_stream(device)

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        return torch.cuda.is_current_stream_capturing()

    def event(self) -> Any:
        """An event without time, with `record(stream)` and `query()`."""
        return torch.cuda.Event()

    def using(self, device: torch.device) -> AbstractContextManager[Any]:
        """Makes `device` the current one."""
        return torch.cuda.device(device)

    def identity(self, device: torch.device) -> str:
        """What this GPU is called in every process."""
        return str(torch.cuda.get_device_properties(device).uuid)

    def enter_watchdog(self, device: torch.device) -> None:
        """Prepare the calling thread: its queries must not break graphs that others capture, nor use another GPU."""
        torch.cuda.set_device(device)
        torch.cuda.mem_get_info(device)  # gives the thread the context that the driver asks for: on GPU 0 it had none
        with contextlib.suppress(OSError, AttributeError):
            mode = ctypes.c_int(_THREAD_LOCAL)
            if refused := ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
                logger.warning(
                    "NCCL's watchdog on %s: the driver refuses its thread a capture mode of its own (error %d of "
                    "cuThreadExchangeStreamCaptureMode): a CUDA graph that is captured while it looks may fail",
                    device,
                    refused,
                )
