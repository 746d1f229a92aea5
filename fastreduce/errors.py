"""What fastreduce raises.

FastreduceError
├── SettingError (ValueError)             a compression or backend that does not exist, or an option out of range
├── BackendUnavailableError (RuntimeError)  kernels, or a library such as MPI, that cannot run here
├── TensorError (ValueError)              a tensor that an operation cannot take
├── MismatchError (RuntimeError)          ranks that hold different models or settings
├── ReducerError (RuntimeError)           a backward that the reducer cannot follow
├── TransportError (RuntimeError)         a collective that failed or timed out
└── CheckpointError (RuntimeError)        a snapshot that could not be written, or is not whole
"""

from __future__ import annotations


class FastreduceError(Exception):
    """Every error that fastreduce raises itself."""


class SettingError(FastreduceError, ValueError):
    """A compression or backend that does not exist, or an option out of range."""


class BackendUnavailableError(FastreduceError, RuntimeError):
    """A kernel backend, or a library such as MPI, that cannot run here, with the reason and what helps."""


class TensorError(FastreduceError, ValueError):
    """A tensor whose dtype, device, size or layout an operation cannot take."""


class MismatchError(FastreduceError, RuntimeError):
    """Ranks that hold different models or settings; raised on every rank."""


class ReducerError(FastreduceError, RuntimeError):
    """A backward that the reducer cannot follow."""


class TransportError(FastreduceError, RuntimeError):
    """A collective that failed or timed out, with rank, operation and bucket."""


class CheckpointError(FastreduceError, RuntimeError):
    """A snapshot that could not be written, or is not whole; raised on every rank."""
