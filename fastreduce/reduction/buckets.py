"""Parameter shapes → BucketPlan: which gradients travel together, and where each lies. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..kernels.slots import SlotTable


@dataclass(frozen=True)
class ParameterSpec:
    """What a plan needs to know of one parameter; `numel` counts real numbers (two for a complex one).

    `rows` is the size of the dimension that is outermost in memory: what its gradient is cut into as a matrix.
    """

    name: str
    numel: int
    dtype: torch.dtype
    device: torch.device
    rows: int = 1


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket: `parameter` is its index among the specs, the rest in elements.

    `rows` is what its gradient is cut into as a matrix (`ParameterSpec`).
    """

    parameter: int
    name: str
    offset: int
    numel: int
    rows: int = 1


@dataclass(frozen=True)
class Bucket:
    """Parameters of one dtype and device whose gradients travel together.

    The flat is the slots, then one used-flag per slot from `flags_offset`, then padding up to
    `total` elements, which divides into equal shards.
    """

    index: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    flags_offset: int
    total: int

    @cached_property
    def table(self) -> SlotTable:
        """The slots and the flags as a kernel sees them."""
        rows = [(s.offset, s.numel) for s in self.slots] + [(self.flags_offset, len(self.slots))]
        offsets, numels = np.array(rows, dtype=np.int64).T.copy()
        keys = np.array([*(_key(slot.name) for slot in self.slots), 0], dtype=np.int64)
        return SlotTable(offsets, numels, self.total, keys, np.zeros_like(keys))

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients themselves, without flags and padding."""
        return sum(s.numel for s in self.slots) * self.dtype.itemsize

    def __str__(self) -> str:
        first, last = self.slots[0].name, self.slots[-1].name
        names = first if len(self.slots) == 1 else f"{first} … {last}"
        return (
            f"bucket {self.index}: {str(self.dtype).removeprefix('torch.')} on {self.device}, "
            f"{len(self.slots)} slots, {self.nbytes / 2**20:.2f} MiB, {names}"
        )


@dataclass(frozen=True)
class BucketPlan:
    """The frozen assignment of parameters to buckets and offsets; `print` it to read it."""

    buckets: tuple[Bucket, ...]
    shards: int

    def names(self) -> list[list[str]]:
        """Parameter names by bucket: with the specs, all that is needed to build the plan again."""
        return [[slot.name for slot in bucket.slots] for bucket in self.buckets]

    def __str__(self) -> str:
        return "\n".join(str(bucket) for bucket in self.buckets)


def _key(name: str) -> int:
    """What random bits of a parameter follow from: not its place, so that no layout tells in them."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def round_up(value: int, multiple: int) -> int:
    """The next multiple, or the value itself."""
    return -(-value // multiple) * multiple


def table_of(numels: Iterable[int], alignment: int) -> SlotTable:
    """Slots of such sizes one after the other, each at a multiple of `alignment`."""
    offsets, sizes, end = [], list(numels), 0
    for numel in sizes:
        offsets.append(end)
        end = round_up(end + numel, alignment)
    return SlotTable(np.array(offsets, np.int64), np.array(sizes, np.int64), end)


def group_by_size(
    specs: Sequence[ParameterSpec], order: Iterable[int], caps: Sequence[int], settings: Sequence[object] | None = None
) -> list[list[int]]:
    """Parameter indices in `order` → groups of one dtype, device and setting, closed when they reach their cap.

    The rule of torch's `compute_bucket_assignment_by_size`: `caps` are bytes, the first for the first
    bucket of each dtype, device and setting (by parameter), the last for all that follow; a parameter is never split.
    Groups come in the order in which their last parameter becomes ready.
    """
    order = list(order)
    open_groups: dict[object, list[int]] = {}
    closed_of: dict[object, int] = {}
    size_of: dict[object, int] = {}
    done: list[tuple[int, list[int]]] = []
    for position, index in enumerate(order):
        spec = specs[index]
        key = (spec.dtype, spec.device, settings and settings[index])
        open_groups.setdefault(key, []).append(index)
        size_of[key] = size_of.get(key, 0) + spec.numel * spec.dtype.itemsize
        if size_of[key] >= caps[min(closed_of.get(key, 0), len(caps) - 1)]:
            done.append((position, open_groups.pop(key)))
            closed_of[key] = closed_of.get(key, 0) + 1
            size_of[key] = 0
    position_of = {index: position for position, index in enumerate(order)}
    done += [(position_of[group[-1]], group) for group in open_groups.values()]
    return [group for _, group in sorted(done)]


def matrix_rows(tensor: Tensor) -> int:
    """The size of the dimension that is outermost in memory: the first, unless the memory format is another."""
    if tensor.is_contiguous():
        return (tensor.shape or (1,))[0]
    return max(zip(tensor.stride(), tensor.shape, strict=True))[1]


def shortest(caps: Sequence[int]) -> tuple[int, ...]:
    """The same caps without those at the end that the last one's rule makes."""
    return tuple(caps[:1]) if len(set(caps)) == 1 else tuple(caps)


def build_plan(
    specs: Sequence[ParameterSpec],
    groups: Iterable[Sequence[int]],
    *,
    alignment: int | Sequence[int],
    shards: int,
    parts: Sequence[int] | None = None,
) -> BucketPlan:
    """Lay every group out as a bucket.

    Args:
        specs: all parameters.
        groups: parameter indices, one group a bucket, in launch order.
        alignment: elements to whose multiples slots and flags are aligned; or those of each group.
        shards: ranks among which a wire is divided.
        parts: of each group, into how many equal parts its flat must divide; None means as many as there are ranks.
    """
    buckets, groups = [], list(groups)
    alignments = [alignment] * len(groups) if isinstance(alignment, int) else list(alignment)
    parts = [shards] * len(groups) if parts is None else parts
    for index, (group, alignment, count) in enumerate(zip(groups, alignments, parts, strict=True)):
        slots, end = [], 0
        for parameter in group:
            spec = specs[parameter]
            slots.append(Slot(parameter, spec.name, end, spec.numel, spec.rows))
            end = round_up(end + spec.numel, alignment)
        total = round_up(end + len(slots), alignment * count)
        spec = specs[group[0]]
        buckets.append(Bucket(index, spec.dtype, spec.device, tuple(slots), end, total))
    return BucketPlan(tuple(buckets), shards)
