"""Which communication backends there are, and the reason why one cannot run here."""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist

from ..errors import BackendUnavailableError, SettingError

NAMES = ("nccl", "gloo", "mpi")


def parse(backend: str | None) -> dict[str, str]:
    """`"gloo"`, `"cpu:gloo,cuda:nccl"` → device type (or "" for any) → backend.

    None means NCCL where it can run, else gloo.

    Raises:
        SettingError: if there is no such backend.
    """
    if backend is None:
        return {"": "gloo" if why_no_nccl() else "nccl"}
    found = {}
    for part in str(backend).lower().split(","):
        device, _, name = part.rpartition(":")
        if name not in NAMES:
            raise SettingError(
                f"init_process_group: unknown backend {backend!r}; allowed: {', '.join(NAMES)}, "
                "and by device, as in 'cpu:gloo,cuda:nccl'"
            )
        found[device] = name
    return found


def check_available(names: set[str]) -> None:
    """Check that NCCL is here, if it is asked for; MPI is checked where it starts.

    Raises:
        BackendUnavailableError: with "NCCL library not available", the reason, and what to install.
    """
    reason = why_no_nccl() if "nccl" in names else None
    if reason is not None:
        raise BackendUnavailableError(
            f"NCCL library not available: {reason}. Or use backend='gloo', which needs no GPU"
        )


def why_no_nccl() -> str | None:
    """What is missing for backend "nccl", and what to install; None if nothing is."""
    if not torch.cuda.is_available() and torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch, and fastreduce[cuda12]"
    if not torch.cuda.is_available():
        return "torch sees no GPU: install a driver, or look at CUDA_VISIBLE_DEVICES"
    if not dist.is_nccl_available():
        return "torch is built without NCCL: install a CUDA build of torch"
    extra = f"fastreduce[cuda{(torch.version.cuda or '12').split('.')[0]}]"
    try:
        nccl = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        return f"CuPy cannot be imported ({error}): pip install '{extra}'"
    return None if nccl.available else f"CuPy finds no libnccl: pip install '{extra}'"
