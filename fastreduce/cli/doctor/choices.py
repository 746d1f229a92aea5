"""Which kernels and transport serve a device here, and why not the others, for `fastreduce doctor`."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ... import FastreduceError
from ...ops import backends
from ...transports import ENVIRONMENT_VARIABLE, SPARE, TRANSPORTS, transport_asked_for
from ...transports.mpi.library import INSTALL_MPI4PY
from ...transports.nccl.library import why_no_nccl
from ...transports.shm import why_no_shm
from ...transports.shm.segments import GEOMETRY
from .rows import FAILED, MISSING, OK, Row

CHOSEN = "chosen"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def kernel_rows(device: torch.device) -> list[Row]:
    """The kernel backend that is chosen for `device`, then each other one, why not or how to ask for it."""
    blind = device == CUDA and not torch.cuda.is_available()
    rows = [Row(CHOSEN, "none: torch sees no GPU", MISSING) if blind else _chosen_kernels(device)]
    for name in backends.NAMES:
        reason = backends.why_not(name, device)
        if reason is not None:
            rows.append(Row(name, reason, MISSING))
        elif name != rows[0].value:
            asked = f"{backends.ENVIRONMENT_VARIABLE}={name}"
            rows.append(Row(name, "could run on a GPU", MISSING) if blind else Row(name, f"can run: {asked}"))
    return rows


def _chosen_kernels(device: torch.device) -> Row:
    try:
        return Row(CHOSEN, backends.choose(device).name)
    except FastreduceError as error:
        asked = os.environ.get(backends.ENVIRONMENT_VARIABLE)
        # Who asks for GPU kernels on a machine with a GPU wants none on its CPU.
        meant = device == CPU and torch.cuda.is_available() and asked in ("triton", "numba_cuda")
        help_ = f"unset {backends.ENVIRONMENT_VARIABLE}" if asked else ""
        return Row(CHOSEN, f"none: {error}", MISSING if meant else FAILED, help_)


def transport_rows(device: torch.device) -> list[Row]:
    """The transport that is chosen for `device`, then each other one, why not or how to ask for it."""
    if device == CPU:
        mpi = Row("mpi", 'between hosts by init_process_group("mpi") under mpirun; within one by transport="mpi"')
        if find_spec("mpi4py") is None:
            mpi = Row("mpi", "mpi4py is not installed", MISSING, INSTALL_MPI4PY)
        two_ranks = 2 * GEOMETRY.nbytes
        no_shm, spares_none = why_no_shm(two_ranks), why_no_shm(SPARE * two_ranks)
        shm = Row("shm", "can run, for ranks of one host") if no_shm is None else Row("shm", no_shm, MISSING)
        asked = os.environ.get(ENVIRONMENT_VARIABLE, "")
        by_itself = "shm within a host, gloo between hosts" if spares_none is None else "gloo"
        chosen = Row(CHOSEN, asked if "cpu" in TRANSPORTS.get(asked, ()) else by_itself)
        if asked == "shm" and no_shm is not None:
            chosen = Row(CHOSEN, f"none: {no_shm}", FAILED, f"unset {ENVIRONMENT_VARIABLE}")
        try:
            transport_asked_for()
        except FastreduceError as error:
            chosen = Row(CHOSEN, f"none: {error}", FAILED)
        levels = Row("two_level", "can run, where one of several hosts has several ranks")
        return [chosen, mpi, shm, levels, Row("nccl", "moves CUDA tensors only", MISSING)]
    nccl = why_no_nccl()
    if nccl is None:
        return [Row(CHOSEN, "nccl"), Row("gloo", "moves CPU tensors", MISSING)]
    return [Row(CHOSEN, f"none: {nccl}", FAILED if torch.cuda.is_available() else MISSING)]


def works(rows: list[Row]) -> bool:
    """Whether something is chosen."""
    return rows[0].state == OK
