"""The tensors of a forward's output, wherever in it they are."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel.distributed import _find_tensors

MOST_OBJECTS = 1000  # in which tensors are looked for: what they hold may be anything
NOT_LOOKED_INTO = (nn.Module, type, ModuleType, FunctionType)


def tensors_of(output: Any) -> Iterator[Tensor]:
    """Those that torch finds, then those in objects that it does not look into, each once.

    Nothing is looked for before the first is asked for.
    """
    if isinstance(output, Tensor):
        yield output
        return
    told = set[int]()
    for tensor in _find_tensors(output):
        if id(tensor) not in told:
            told.add(id(tensor))
            yield tensor
    left, seen = deque([output]), set[int]()
    while left and len(seen) < MOST_OBJECTS:
        each = left.popleft()
        kind = type(each)  # what a proxy says of its class may be an error
        if issubclass(kind, Tensor):
            if id(each) not in told:
                told.add(id(each))
                yield each
        elif id(each) not in seen and not issubclass(kind, NOT_LOOKED_INTO):
            seen.add(id(each))
            left += filter(gc.is_tracked, gc.get_referents(each))  # no numbers and no text: they hold nothing
