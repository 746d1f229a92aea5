"""Arrays of any library → torch tensors over the same memory, so that what is written arrives in the array."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import DeviceError, TensorError, brief

_IMMUTABLE = ("jax", "jaxlib", "tensorflow")


def as_tensor(array: Any) -> Tensor:
    """A torch tensor that shares its memory with `array`; a torch tensor comes back as it is.

    NumPy arrays (ml_dtypes' bfloat16 too), whatever has `__dlpack__` (CuPy arrays among them), and
    whatever has `__cuda_array_interface__` only.

    Raises:
        TensorError: if it is none of these, is read-only, or has a dtype or layout that torch does not know.
        DeviceError: if it lies on a GPU, and torch sees none, or on another one than the current one, without DLPack.
    """
    if isinstance(array, Tensor):
        return array
    name = f"{type(array).__module__}.{type(array).__qualname__}"
    if isinstance(array, np.ndarray):
        return _from_numpy(array)
    if name.split(".")[0] in _IMMUTABLE:
        raise TensorError(f"a {name} is immutable and cannot be written in place: pass numpy.array(it)")
    on_gpu = hasattr(array, "__cuda_array_interface__")
    if on_gpu and not torch.cuda.is_available():
        raise DeviceError(
            f"a {name} lies on a CUDA device (it has __cuda_array_interface__), and torch sees only cpu here: "
            "install a CUDA build of torch and a driver, or pass the array's copy on the host"
        )
    try:
        if hasattr(array, "__dlpack__"):  # before the older interface: it also orders the two libraries' streams
            return torch.from_dlpack(array)
        tensor = torch.as_tensor(array, device="cuda") if on_gpu else None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TensorError(f"a {name} cannot be shared with torch: {error}") from error
    if tensor is not None:
        if tensor.numel() and tensor.data_ptr() != array.__cuda_array_interface__["data"][0]:
            raise DeviceError(
                f"a {name} lies on another GPU than the current one, cuda:{torch.cuda.current_device()}, and without "
                "__dlpack__ torch would copy it: call torch.cuda.set_device first"
            )
        return tensor
    raise TensorError(
        f"a {name} is no array; allowed: torch tensors, NumPy arrays, and what has __dlpack__ or "
        "__cuda_array_interface__ (CuPy and others)"
    )


def as_list(arrays: Any) -> list[Any]:
    """What an iterable of arrays gives.

    Raises:
        TensorError: if it is none.
    """
    if isinstance(arrays, nn.Module):  # some give their parts
        raise TensorError(f"a {type(arrays).__name__} is a module; allowed: a list of tensors, as its parameters()")
    try:
        each = iter(arrays)
    except TypeError as error:
        raise TensorError(f"{brief(arrays)} is no list of tensors; allowed: a list, or what else gives them") from error
    return list(each)


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.flags.writeable:
        raise TensorError("a NumPy array is read-only and cannot be written in place: pass a copy")
    try:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise TensorError(
            f"a NumPy array of dtype {array.dtype} and strides {array.strides} cannot be shared with torch: {error}"
        ) from error
