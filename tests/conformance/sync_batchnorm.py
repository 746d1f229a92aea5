"""The kernels of SyncBatchNorm, which torch has for GPUs alone, written with tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


def install(device: torch.device) -> None:
    """Let SyncBatchNorm run on `device` in this process."""
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        setattr(torch, f"batch_norm_{kernel.__name__}", kernel)
    layer: Any = nn.SyncBatchNorm
    forward: Callable[..., Tensor] = layer.forward

    def forward_on_any_device(self: Any, input: Tensor) -> Tensor:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", lambda: device.type):
            return forward(self, input)

    layer.forward = forward_on_any_device


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _but_channels(tensor: Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(input.float(), _but_channels(input), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights, total = counts.view(-1, 1), counts.sum()
    overall = (mean * weights).sum(0) / total
    variance = ((invstd**-2 - eps + (mean - overall) ** 2) * weights).sum(0) / total
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(overall.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return overall, (variance + eps).rsqrt()


def elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    out = (input - _channels(mean, input)) * _channels(invstd, input)
    if weight is not None and bias is not None:
        out = out * _channels(weight, input) + _channels(bias, input)
    return out.to(input.dtype)


def backward_reduce(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *_: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dims = _but_channels(input)
    sum_dy = grad.float().sum(dims)
    sum_dy_xmu = (grad.float() * (input - _channels(mean, input))).sum(dims)
    dtype = grad.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def backward_elemt(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    scale = invstd if weight is None else invstd * weight
    centred = (input - _channels(mean, input)) * _channels(invstd**2 * sum_dy_xmu / total, input)
    return ((grad - _channels(sum_dy / total, input) - centred) * _channels(scale, input)).to(input.dtype)
