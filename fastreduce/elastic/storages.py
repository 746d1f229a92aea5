"""A state in two parts: plain data, and the memory of its tensors, which is moved without another copy of all of it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def take_out(value: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """Plain data, for `put_in`, in which tensors have no memory, and their storages, UINT8 `[bytes]`, each once.

    Tensors that are more than a view of a storage, as sparse ones, stay as they are.
    """
    places, storages = list[tuple[Tensor, int, int]](), dict[tuple[int, int], tuple[int, Tensor]]()

    def empty(tensor: Tensor) -> Tensor:
        if not _is_view_of_storage(tensor):
            return tensor
        storage = tensor.untyped_storage()
        as_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        place = storage.data_ptr(), storage.nbytes()  # a shorter one may begin where it does: of a slice of an array
        number, _ = storages.setdefault(place, (len(storages), as_bytes))
        found = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        places.append((found, number, int(tensor.storage_offset())))
        return found

    value, found = _with_tensors(value, empty), [storage for _, storage in storages.values()]
    return {"value": value, "places": places, "sizes": [storage.numel() for storage in found]}, found


def put_in(plain: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """The value that `take_out` was given, on the CPU, and its storages, UINT8 `[bytes]`, which are to be filled."""
    storages = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in plain["sizes"]]
    made = {
        id(empty): torch.empty(0, dtype=empty.dtype, device="cpu").set_(
            storages[number].untyped_storage(), offset, empty.size(), empty.stride()
        )
        for empty, number, offset in plain["places"]
    }
    return _with_tensors(plain["value"], lambda tensor: made.get(id(tensor), tensor)), storages


def pieces(storages: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """All bytes of `storages` in lists of views, `size` bytes in each but the last."""
    found, room = list[Tensor](), size
    for storage in storages:
        while storage.numel():
            found.append(storage[:room])
            storage, room = storage[room:], room - found[-1].numel()
            if not room:
                yield found
                found, room = [], size
    yield found


def _with_tensors(value: Any, changed: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None) -> Any:
    """`value` with other tensors in its dicts, lists and tuples, which are copied; what is there twice, once."""
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    found = value
    if isinstance(value, Tensor):
        found = changed(value)
    elif type(value) in (dict, OrderedDict):
        found = copies[id(value)] = copy.copy(value)  # with attributes: of a module's state versions of its layers
        for key, each in value.items():
            found[key] = _with_tensors(each, changed, copies)
    elif type(value) is list:
        found = copies[id(value)] = []  # now, since it may be in itself
        found.extend(_with_tensors(each, changed, copies) for each in value)
    elif type(value) is tuple:
        found = tuple(_with_tensors(each, changed, copies) for each in value)
    copies[id(value)] = found
    return found


def _is_view_of_storage(tensor: Tensor) -> bool:
    """Whether dtype, sizes, strides and a storage say all of it."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")
    more = tensor.requires_grad or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    return plain and not (more or vars(tensor))
