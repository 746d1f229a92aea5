"""What a script does that is measured: forwards of wrappers, and backwards with the losses at their roots."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP  # its other name is ours in a run

from ..ddp import DistributedDataParallel
from ..ddp.outputs import tensors_of


class Listener(Protocol):
    """Who is told."""

    def forward(self, model: Any) -> None:
        """Before each forward of a wrapper."""

    def output(self, model: Any, tensors: Iterable[Tensor]) -> None:
        """Behind each forward of a wrapper, with what it returns."""

    def before_backward(self) -> None:
        """Before each outermost backward."""

    def after_backward(self, roots: Any, gradients: Any) -> None:
        """After each outermost backward, with the gradients of its roots, if it was given some."""


def listen(listener: Listener) -> None:
    """Tell `listener` from now on; for ever."""
    torch.autograd.backward = _around_backward(torch.autograd.backward, listener)
    torch.amp.GradScaler.scale = _remembering_loss(torch.amp.GradScaler.scale)  # type: ignore[method-assign]
    for kind in (TorchDDP, DistributedDataParallel):
        kind._pre_forward = _before_forward(kind._pre_forward, listener)  # type: ignore[method-assign]
    post_forward = _behind_forward(TorchDDP._post_forward, listener)  # ours calls it
    TorchDDP._post_forward = post_forward  # type: ignore[method-assign]


def loss_of(roots: Any, gradients: Any) -> float:
    """The sum of what `backward` was called on, without a GradScaler's scale; NaN if that is no number.

    Of a root of several elements it is their sum, weighed by the gradient that backward was given for it.
    """
    tensors = [roots] if isinstance(roots, Tensor) else list(roots)
    given = [gradients] * len(tensors) if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    return math.fsum(map(_value_of, tensors, given))


def _value_of(root: Any, gradient: Tensor | None) -> float:
    value = getattr(root, "_fastreduce_loss", root)
    if not isinstance(value, Tensor):
        return math.nan
    if value.numel() == 1:
        return value.detach().item()
    return math.nan if gradient is None else (value.detach() * gradient.detach()).sum().item()


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
        listener.after_backward(tensors, args[0] if args else kwargs.get("grad_tensors"))

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


def _behind_forward(post_forward: Callable[..., Any], listener: Listener) -> Callable[..., Any]:
    @functools.wraps(post_forward)
    def measured(self: Any, output: Any) -> Any:
        output = post_forward(self, output)
        listener.output(self, tensors_of(output))
        return output

    return _disable_dynamo(measured)
