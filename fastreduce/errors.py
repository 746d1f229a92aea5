"""What fastreduce raises.

FastreduceError
├── SettingError (ValueError)             a compression or backend that does not exist, or an option out of range
├── BackendUnavailableError (RuntimeError)  kernels, a transport or a library such as MPI that cannot run here
├── NotInitializedError (RuntimeError, ValueError)  a call that needs a process group, before there is one
├── TensorError (ValueError)              a tensor that an operation cannot take
│   └── DeviceError (RuntimeError)        because of the device it is on
├── MismatchError (RuntimeError)          ranks that hold different models, settings or tensors
├── ReducerError (RuntimeError)           a backward that the reducer cannot follow
├── RanksFailedError (RuntimeError)       a started rank that raised, died or hung
├── TransportError (RuntimeError)         a collective that failed or timed out
└── CheckpointError (RuntimeError)        a snapshot that could not be written, or is not whole
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable


class FastreduceError(Exception):
    """Every error that fastreduce raises itself."""


class SettingError(FastreduceError, ValueError):
    """A compression or backend that does not exist, or an option out of range."""


class BackendUnavailableError(FastreduceError, RuntimeError):
    """A kernel backend, or a library such as MPI, that cannot run here, with the reason and what helps."""


class NotInitializedError(FastreduceError, RuntimeError, ValueError):
    """A call that needs a process group, before there is one; torch raises the one kind, Genesis the other."""


class TensorError(FastreduceError, ValueError):
    """A tensor whose dtype, device, size or layout an operation cannot take."""


class DeviceError(TensorError, RuntimeError):
    """A tensor on a device that an operation cannot take, or tensors on several; names both devices."""


class MismatchError(FastreduceError, RuntimeError):
    """Ranks that hold different models, settings or tensors; raised on every rank."""


class ReducerError(FastreduceError, RuntimeError):
    """A backward that the reducer cannot follow."""


class RanksFailedError(FastreduceError, RuntimeError):
    """A started rank that raised, died or hung, with its rank and traceback."""


class TransportError(FastreduceError, RuntimeError):
    """A collective that failed or timed out, with rank, operation and bucket.

    Attributes:
        missing: the ranks that did not come, as far as that is known.
        at: when it was made, in seconds of this process's monotonic clock.
    """

    def __init__(self, message: str = "", missing: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.at = time.monotonic()


class CheckpointError(FastreduceError, RuntimeError):
    """A snapshot that could not be written, or is not whole; raised on every rank."""


def no_group(call: str, instead: str = "") -> NotInitializedError:
    """The error of a call before there is a process group, where one would do, or `instead`."""
    return NotInitializedError(
        f"{call}: the default process group has not been initialized: call "
        "fastreduce.distributed.init_process_group (or torch.distributed.init_process_group) first"
        + (f", or {instead}" if instead else "")
    )


def brief(value: object) -> str:
    """`repr(value)`, the middle left out where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no more than 4300 digits
        return f"a {type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else f"{text[:40]} … {text[-20:]}"


def headline(error: BaseException) -> str:
    """The first line of an error's text, or its kind, where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def listed(names: Collection[object], most: int = 8) -> str:
    """Names in a sentence, of many the first ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, itertools.islice(names, most))) + more
