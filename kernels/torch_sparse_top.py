"""Top-k's own kernels in plain torch: what GPUs run, and the reference of `numba_cpu_sparse_top.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from .slots import PlacesError, spare


def take_largest(values: Tensor, taken: Tensor, places: Tensor) -> None:
    """The elements of `values`, FP32 `[numel]`, of the largest magnitude → `taken` `[count]`, which become 0 there.

    `places` `[count]`, INT32, ascending, says where they were. NaN is larger than infinity, and of equal magnitudes
    those in front are taken. What is not finite and is left becomes 0, too.
    """
    numel = values.numel()
    behind = torch.arange(numel - 1, -1, -1, device=values.device)  # so that no two keys are equal
    keys = values.abs().view(torch.int32).long().mul_(1 << 32).add_(behind)
    largest = keys.topk(taken.numel(), sorted=False).values
    found = (numel - 1 - (largest & 0xFFFFFFFF)).sort().values
    places.copy_(found)
    torch.index_select(values, 0, found, out=taken)
    values.index_fill_(0, found, 0.0)
    values.nan_to_num_(0.0, 0.0, 0.0)


def average_taken(
    messages: Tensor, first: int, places: int, count: int, scale: float, into: Tensor, finite: Tensor | None = None
) -> None:
    """What ranks have taken of one gradient → their sum in rank order, scaled once, in all of `into`, 1-D.

    `messages` is FP32 `[ranks, numbers]`: of each, `count` numbers from `first` on are values, and from `places` on the
    bits of as many INT32. `finite` becomes 0 if an average is not, in the dtype of `into`.

    Raises:
        PlacesError: if places do not ascend within `into`; not on a GPU.
    """
    numel, room = into.numel(), spare(len(messages))
    where = messages.view(torch.int32)[:, places : places + count].long()
    if not messages.is_cuda:
        _check(where, numel)
    total = torch.zeros(numel, dtype=torch.float32, device=into.device)
    small = torch.zeros_like(total)
    for values, at in zip(messages[:, first : first + count], where, strict=True):
        total.index_copy_(0, at, total[at] + values)
        small.index_copy_(0, at, small[at] + values / room)
    average = torch.where(total.isfinite(), total * scale, small * (scale * room))
    into.copy_(average)
    if finite is not None:
        finite.mul_(into.isfinite().all())


def _check(where: Tensor, numel: int) -> None:
    for rank, at in enumerate(where):
        bounds = torch.cat([at.new_tensor([-1]), at, at.new_tensor([numel])])
        if not (bounds.diff() > 0).all():
            raise PlacesError(rank, numel)
