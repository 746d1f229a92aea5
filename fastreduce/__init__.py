"""fastreduce averages gradients across the ranks of a data-parallel job with its own kernels."""

from .compression import BF16, FP16, INT8, Compression, NoCompression
from .ddp import DistributedDataParallel
from .errors import (
    BackendUnavailableError,
    FastreduceError,
    MismatchError,
    RanksFailedError,
    ReducerError,
    SettingError,
    TensorError,
    TransportError,
)
from .functional import all_reduce_gradients
from .reducer import GradientReducer

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP16",
    "INT8",
    "BackendUnavailableError",
    "Compression",
    "DistributedDataParallel",
    "FastreduceError",
    "GradientReducer",
    "MismatchError",
    "NoCompression",
    "RanksFailedError",
    "ReducerError",
    "SettingError",
    "TensorError",
    "TransportError",
    "__version__",
    "all_reduce_gradients",
]
