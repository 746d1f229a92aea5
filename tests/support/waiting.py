"""A host that may not wait for its device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

WAITING = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where the host would wait for what a device computes."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("this would make the host wait for the device")

    kept = {name: getattr(Tensor, name) for name in WAITING}
    try:
        for name in WAITING:
            setattr(Tensor, name, refuse)
        yield
    finally:
        for name, method in kept.items():
            setattr(Tensor, name, method)
