"""What a script does that is measured: forwards of wrappers, and backwards with the losses at their roots."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP  # its other name is ours in a run

from ..ddp import DistributedDataParallel


class Listener(Protocol):
    """Who is told."""

    def forward(self, model: Any) -> None:
        """Before each forward of a wrapper."""

    def before_backward(self) -> None:
        """Before each outermost backward."""

    def after_backward(self, roots: Any) -> None:
        """After each outermost backward."""


def listen(listener: Listener) -> None:
    """Tell `listener` from now on; for ever."""
    torch.autograd.backward = _around_backward(torch.autograd.backward, listener)
    torch.amp.GradScaler.scale = _remembering_loss(torch.amp.GradScaler.scale)  # type: ignore[method-assign]
    for kind in (TorchDDP, DistributedDataParallel):
        kind._pre_forward = _before_forward(kind._pre_forward, listener)  # type: ignore[method-assign]


def loss_of(roots: Any) -> float:
    """The sum of what `backward` was called on, without a GradScaler's scale; NaN if that is no number."""
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    values = [getattr(root, "_fastreduce_loss", root) for root in tensors]
    if not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return math.nan
    return math.fsum(value.detach().item() for value in values)


def _around_backward(backward: Callable[..., None], listener: Listener) -> Callable[..., None]:
    inside = False

    @functools.wraps(backward)
    def measured(tensors: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if inside:  # of a checkpoint
            backward(tensors, *args, **kwargs)
            return
        listener.before_backward()
        inside = True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            inside = False
        listener.after_backward(tensors)

    return measured


def _remembering_loss(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def measured(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        for loss, each in [(outputs, scaled)] if isinstance(outputs, Tensor) else zip(outputs, scaled, strict=True):
            if each is not loss:
                each._fastreduce_loss = loss.detach()
        return scaled

    return measured


def _before_forward(pre_forward: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    @functools.wraps(pre_forward)
    def measured(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        listener.forward(self)
        return pre_forward(self, *inputs, **kwargs)

    return _disable_dynamo(measured)
