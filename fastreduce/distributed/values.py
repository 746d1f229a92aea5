"""Values as text that cannot execute: JSON, in which what JSON has not is a dict with the one key "kind of value"."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

KIND = "kind of value"
MOST_LEVELS = 100
ALLOWED = (
    "None, bools, numbers, strings, bytes, torch tensors, NumPy arrays and numbers, and lists, tuples, sets and dicts "
    "of these"
)


def encode(value: Any) -> str:
    """The text of a value.

    Raises:
        TypeError: if it is none of `ALLOWED`, nested deeper than `MOST_LEVELS`, or a number of too many digits.
    """
    try:
        return json.dumps(_plain(value, MOST_LEVELS))
    except ValueError as error:
        raise TypeError(f"a {type(value).__name__} cannot be given to other ranks by user_set: {error}") from error


def decode(text: str) -> Any:
    """The value of a text.

    Raises:
        ValueError: if the text is of no value, with what is wrong.
    """
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        raise ValueError(f"{text[:40]!r} ({type(error).__name__}: {error})") from error


def _plain(value: Any, levels: int) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if not levels:
        raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels, or in itself")
    below = levels - 1
    if type(value) is list:
        return [_plain(part, below) for part in value]
    if type(value) in (tuple, set, frozenset):
        return {KIND: type(value).__name__, "parts": [_plain(part, below) for part in value]}
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict", "defaultdict"):
        if KIND not in value and all(type(key) is str for key in value):
            return {key: _plain(part, below) for key, part in value.items()}
        return {KIND: "dict", "parts": [[_plain(key, below), _plain(part, below)] for key, part in value.items()]}
    if isinstance(value, Tensor) and value.layout is torch.strided:
        dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return _array("tensor", str(dense.dtype).removeprefix("torch."), dense.shape, data)
    if isinstance(value, np.generic) and value.dtype.kind in "biufcSU":
        return _array("number", value.dtype.str, (), value.tobytes())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU" and value.itemsize:
        return _array("array", value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {KIND: "complex", "parts": [value.real, value.imag]}
    raise TypeError(f"a {type(value).__name__} cannot be given to other ranks by user_set; allowed: {ALLOWED}")


def _array(kind: str, dtype: str, shape: tuple[int, ...], data: bytes) -> dict[str, Any]:
    return {KIND: kind, "dtype": dtype, "shape": list(shape), "data": base64.b64encode(data).decode()}


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    kind = plain.get(KIND)
    if kind is None:
        return {key: _value(part) for key, part in plain.items()}
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_value(plain["parts"]))
    if kind == "dict":
        return {_value(key): _value(part) for key, part in plain["parts"]}
    if kind == "complex":
        return complex(*plain["parts"])
    data = base64.b64decode(plain["data"], validate=True)
    if kind == "bytes":
        return data
    shape = tuple(plain["shape"])
    if kind == "tensor":
        dtype = getattr(torch, plain["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype {plain['dtype']!r}")
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    if kind not in ("array", "number") or np.dtype(plain["dtype"]).kind not in "biufcSU":
        raise ValueError(f"no kind of value is called {kind!r} with dtype {plain.get('dtype')!r}")
    if kind == "number" and np.dtype(plain["dtype"]).itemsize == 0:
        return np.dtype(plain["dtype"]).type()
    array = np.frombuffer(bytearray(data), dtype=np.dtype(plain["dtype"])).reshape(shape)
    return array if kind == "array" else array[()]
