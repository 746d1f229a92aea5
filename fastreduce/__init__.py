"""fastreduce averages gradients across the ranks of a data-parallel job with its own kernels."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(f"fastreduce runs on Linux, not on {sys.platform}: it reads /proc, and asks its kernel for more")

from .checkpoint import load_checkpoint, save_checkpoint
from .compression import BF16, FP8, FP16, INT4, INT8, Compression, NoCompression, PowerSGD, TopK
from .data import ShardSampler, shard_range
from .ddp import DistributedDataParallel, Shadow
from .errors import (
    BackendUnavailableError,
    CheckpointError,
    DeviceError,
    FastreduceError,
    MismatchError,
    NotInitializedError,
    RanksFailedError,
    ReducerError,
    SettingError,
    TensorError,
    TransportError,
)
from .policy import Policy
from .reduction.one_call import all_reduce_gradients
from .reduction.reducer import GradientReducer
from .reduction.residuals.notices import note_applied
from .sync_batchnorm import SyncBatchNorm
from .version import __version__

__all__ = [
    "BF16",
    "FP8",
    "FP16",
    "INT4",
    "INT8",
    "BackendUnavailableError",
    "CheckpointError",
    "Compression",
    "DeviceError",
    "DistributedDataParallel",
    "FastreduceError",
    "GradientReducer",
    "MismatchError",
    "NoCompression",
    "NotInitializedError",
    "Policy",
    "PowerSGD",
    "RanksFailedError",
    "ReducerError",
    "SettingError",
    "Shadow",
    "ShardSampler",
    "SyncBatchNorm",
    "TensorError",
    "TopK",
    "TransportError",
    "__version__",
    "all_reduce_gradients",
    "load_checkpoint",
    "note_applied",
    "save_checkpoint",
    "shard_range",
]

_MODULES = ("distributed", "elastic", "fsdp", "hooks")

if not TYPE_CHECKING:  # else no name would be unknown

    def __getattr__(name: str) -> ModuleType:
        """Modules of ours that are loaded when they are asked for, as in `fastreduce.elastic.join`."""
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
