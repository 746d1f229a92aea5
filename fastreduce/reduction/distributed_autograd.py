"""Gradients that `torch.distributed.autograd` accumulates in a context of its own, and not in `.grad`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import ReducerError

_RPC = "torch.distributed.rpc.api"  # without which there is no context; most processes need not import it


def _may_be() -> bool:
    """Whether there may be a context."""
    return _RPC in sys.modules and bool(sys.modules[_RPC]._is_current_rpc_agent_set())


def current_context() -> int | None:
    """The context that this thread computes in, if it does."""
    if not _may_be():
        return None
    try:
        context: int = _functions()._current_context()._context_id()
    except RuntimeError:  # it is in none
        return None
    return context


def context_through(forward: int | None) -> int | None:
    """Where the gradients come of the backward that the caller is in, through a forward in that context.

    If it has ended, or the caller is in it, the backward is a plain one: torch.distributed.autograd's is on another
    thread.
    """
    if forward is None or forward == current_context():
        return None
    try:
        _functions()._retrieve_context(forward)
    except RuntimeError:
        return None
    return forward


def _functions() -> Any:
    from torch._C import _distributed_autograd

    return _distributed_autograd


@contextmanager
def gradients_of(
    context: int | None, parameters: Sequence[Tensor], names: Sequence[str], used: Sequence[bool], rank: int
) -> Iterator[None]:
    """Let a context's gradients, if it has any, be in `.grad` meanwhile; what is there at the end goes back into it.

    Args:
        context: see `context_through`.
        parameters: what is averaged.
        names: theirs, for errors.
        used: of each, whether this backward has brought a gradient.
        rank: this one, for errors.

    Raises:
        ReducerError: if gradients have come to some that are `used`, and are in neither place, or, at the end, if one
            has an average and no gradient in the context.
    """
    if not _may_be():
        yield
        return
    theirs = {} if context is None else _functions().get_gradients(context)
    if not any(parameter in theirs for parameter in parameters):
        grads = [parameter.grad for parameter, is_used in zip(parameters, used, strict=True) if is_used]
        if grads and all(grad is None for grad in grads):
            raise ReducerError(
                f"rank {rank}: backward has left no gradient: where torch.distributed.autograd runs it, run the "
                "forward inside of torch.distributed.autograd.context(), too"
            )
        yield
        return
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = theirs.get(parameter)
        yield
        for name, parameter in zip(names, parameters, strict=True):
            average, own = parameter.grad, theirs.get(parameter)
            if own is not None and average is not None:
                own.copy_(average)
            elif average is not None:
                raise ReducerError(
                    f"rank {rank}: parameter {name!r} has an average of other ranks' gradients, and no gradient of "
                    "this rank's in its context of torch.distributed.autograd, where the average belongs: let every "
                    "rank use it"
                )
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
