"""clip_grad_norm_: the norm of all gradients, out of what decompression has summed up where it still holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from ..errors import SettingError, listed
from ..reduction.pipeline import BucketPipeline
from ..reduction.residuals.factors import Factor
from ..reduction.residuals.notices import multiplied
from ..reduction.statistics import Statistics

TILE = 2048  # elements that one thread sums up
ORDER_IS_NOTHING = (0, math.inf, -math.inf)

Known = list[tuple[Statistics, dict[int, Tensor]]]  # what is known of which slots' parameters


@torch.no_grad()
def clip_(
    named: Mapping[str, Tensor],
    pipelines: Sequence[BucketPipeline],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Clip the gradients of parameters by their total norm, which is returned; the same bits on every rank.

    1. Of a gradient that is as its reduction left it, the squares are known, tile by tile.
    2. Every other gradient is read, in an order that no number of threads changes.
    3. Both make one norm in FP64, and torch clips by it.

    Raises:
        TypeError: if `max_norm` is no number, as where parameters are given in its place.
        SettingError: if it is negative or NaN, or `norm_type` is NaN.
        RuntimeError: if the norm is not finite and `error_if_nonfinite` is set; nothing has been clipped then.
    """
    try:
        max_norm = float(max_norm)
    except TypeError as error:
        raise TypeError(
            f"max_norm must be a number, got {type(max_norm).__name__}: ddp.clip_grad_norm_(max_norm) clips the "
            "wrapper's own parameters, and takes none"
        ) from error
    norm_type = float(norm_type)
    if not max_norm >= 0:
        raise SettingError(
            f"max_norm={max_norm:g}; allowed: 0 and more, where inf clips nothing: gradients would have another sign, "
            "or be NaN"
        )
    if math.isnan(norm_type):
        raise SettingError("norm_type=nan; allowed: a number, such as 2 or inf")
    grads = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
    if not grads:
        return torch.tensor(0.0, device="cpu")
    parameters = [named[name] for name in grads]
    known = known_slots(pipelines, parameters) if norm_type == 2 else []
    summed = {id(parameter) for _, slots in known for parameter in slots.values()}
    norms = _norms_known([statistics.of_slots(slots)[:, 1] for statistics, slots in known])
    norms += _norms([grads[name] for name in grads if id(named[name]) not in summed], norm_type)
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.cat([each.to(device) for each in norms]), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            f"clipped: {_what_is_not_finite(grads, named, known)}. To disable this error and scale the gradients by "
            "the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    dtype = reduce(torch.promote_types, (grad.dtype.to_real() for grad in grads.values()))
    # Not in 16 bits, where a norm may overflow that no element does.
    wide = total.to(torch.promote_types(dtype, torch.float32))
    with multiplied(grads.values(), lambda: _coefficient(max_norm, wide)):
        clip_grads_with_norm_(parameters, max_norm, wide, foreach)
    return total.to(dtype)


def known_slots(pipelines: Iterable[BucketPipeline], parameters: Iterable[Tensor]) -> Known:
    """The slots whose statistics describe what is in the gradients of `parameters` now."""
    wanted = set(map(id, parameters))
    kept = [pipeline.statistics for pipeline in pipelines if pipeline.statistics is not None]
    return [(statistics, slots) for statistics in kept if (slots := statistics.known(wanted))]


def _coefficient(max_norm: float, total: Tensor) -> Factor:
    """What torch multiplies gradients by."""
    coefficient = (max_norm / (total + 1e-6)).clamp(max=1.0)
    return coefficient.double() if coefficient.is_cuda else float(coefficient)


def _sum(numbers: Tensor) -> Tensor:
    """The sum of a 1-D tensor, in an order that no number of threads changes."""
    while len(numbers) > TILE:
        numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % TILE)).view(-1, TILE).sum(1)
    return numbers.sum()


def _norms_known(squares: Sequence[Tensor]) -> list[Tensor]:
    """Norms in FP64, 1-D, out of buckets' squares; on a GPU, where launches cost the host, one for all of a kind."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for each in squares:
        kinds.setdefault((each.device, each.dtype), []).append(each)
    return [
        _sum(part.double()).sqrt()[None]
        for parts in kinds.values()
        for part in ([torch.cat(parts)] if at_once(parts[0]) else parts)
    ]


def _norms(grads: Sequence[Tensor], order: float) -> list[Tensor]:
    """The norms of gradients in FP64, 1-D; on a GPU, which has no number of threads, all dense ones at once."""
    together = [_elements(grad) for grad in grads if at_once(grad) and not grad.is_sparse and grad.numel()]
    wide = [torch.promote_types(grad.dtype, torch.float32) for grad in together]
    norms = []
    for kind in dict.fromkeys((grad.device, dtype) for grad, dtype in zip(together, wide, strict=True)):
        alike = [grad for grad, dtype in zip(together, wide, strict=True) if (grad.device, dtype) == kind]
        norms.append(torch.stack(torch._foreach_norm(alike, order, dtype=kind[1])).double())
    rest = [grad for grad in grads if not at_once(grad) or grad.is_sparse or not grad.numel()]
    return norms + [_norm(grad, order)[None] for grad in rest]


def at_once(tensor: Tensor) -> bool:
    """Whether an operation on many tensors like this one had better be one: on a GPU."""
    return tensor.is_cuda


def _norm(grad: Tensor, order: float) -> Tensor:
    """The norm of a gradient in FP64, in an order that no number of threads changes."""
    grad = _elements(grad)
    if not len(grad):
        return grad.new_zeros((), dtype=torch.float64)
    dtype = torch.promote_types(grad.dtype, torch.float32)
    if order in ORDER_IS_NOTHING:
        norm: Tensor = torch.linalg.vector_norm(grad, order, dtype=dtype)
        return norm.double()
    whole, rest = grad.split([len(grad) // TILE * TILE, len(grad) % TILE])
    rows = [whole.view(-1, TILE), *([rest.view(1, -1)] if len(rest) else [])]
    norms = torch.cat([torch.linalg.vector_norm(each, order, dim=1, dtype=dtype) for each in rows])
    return _sum(norms.double().pow(order)).pow(1 / order)


def _elements(grad: Tensor) -> Tensor:
    """What a gradient holds, 1-D: the values of a sparse one, the magnitudes of a complex one."""
    values = grad.detach().coalesce().values() if grad.is_sparse else grad.detach()
    return (values.abs() if values.is_complex() else values).reshape(-1)


def _what_is_not_finite(grads: Mapping[str, Tensor], named: Mapping[str, Tensor], known: Known) -> str:
    place = {id(parameter): (statistics, i) for statistics, slots in known for i, parameter in slots.items()}
    found = {}
    for name, grad in grads.items():
        if (at := place.get(id(named[name]))) is not None:
            count = int(at[0].of_slot(at[1])[:, 0].sum())
        else:
            count = int((~_elements(grad).isfinite()).sum())
        if count:
            found[name] = f"{name} ({count}{f', bucket {at[0].bucket.index}' if at else ''})"
    if not found:
        return "every element is finite, but their squares overflow"
    return f"not finite are elements of {listed(found.values())}"
