"""What fastreduce raises.

FastreduceError
├── SettingError (ValueError)             a compression or backend that does not exist, or an option out of range
├── BackendUnavailableError (RuntimeError)  a kernel backend that cannot run here
├── TensorError (ValueError)              a tensor that an operation cannot take
├── MismatchError (RuntimeError)          ranks that hold different models or settings
├── ReducerError (RuntimeError)           a backward that the reducer cannot follow
├── RanksFailedError (RuntimeError)       a started rank that raised, died or hung
└── TransportError (RuntimeError)         a collective that failed or timed out
"""

from __future__ import annotations


class FastreduceError(Exception):
    """Every error that fastreduce raises itself."""


class SettingError(FastreduceError, ValueError):
    """A compression or backend that does not exist, or an option out of range."""


class BackendUnavailableError(FastreduceError, RuntimeError):
    """A kernel backend that cannot run here, with the reason."""


class TensorError(FastreduceError, ValueError):
    """A tensor whose dtype, device, size or layout an operation cannot take."""


class MismatchError(FastreduceError, RuntimeError):
    """Ranks that hold different models or settings; raised on every rank."""


class ReducerError(FastreduceError, RuntimeError):
    """A backward that the reducer cannot follow."""


class RanksFailedError(FastreduceError, RuntimeError):
    """A started rank that raised, died or hung, with its rank and traceback."""


class TransportError(FastreduceError, RuntimeError):
    """A collective that failed or timed out, with rank, operation and bucket."""
