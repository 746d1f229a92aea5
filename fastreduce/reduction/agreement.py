"""Do all ranks hold the same model and settings? One exchange before anything is built on it."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from .. import ops
from ..errors import MismatchError, TransportError
from ..transports import SlotTransport, Transport
from ..transports.messages import checked, of_types

Description = Mapping[str, str]


def describe_tensor(tensor: Tensor) -> str:
    """What ranks must agree on: shape, dtype, and the layout, since tensors travel in memory order."""
    if is_lazy(tensor):
        return "uninitialized"
    layout = f", strides {tensor.stride()}" if not tensor.is_contiguous() and ops.is_dense(tensor) else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}{layout}"


def check_agreement(transport: Transport, description: Description, error: Exception | None = None) -> None:
    """Hold every rank's description (name → text, in order) against that of most ranks, or of rank 0 if all differ.

    Where ranks share memory they are to have the same kernels, too: some send gradients piece by piece, others wires.
    A rank that already knows that it cannot go on passes its error, so that no other rank waits for it.

    Raises:
        Exception: this rank's own `error`.
        MismatchError: on every rank alike, naming the first difference, or another rank's error.
    """
    if isinstance(transport, SlotTransport):
        kernels = f"the kernels that work in shared memory ({ops.ENVIRONMENT_VARIABLE})"
        description = {**description, kernels: ops.name_for(torch.device("cpu"))}
    digest = hashlib.sha256(repr(list(description.items())).encode()).hexdigest()
    try:
        told = transport.exchange([digest, None if error is None else f"{type(error).__name__}: {error}"])
    except TransportError as failed:
        if error is not None:  # other ranks may not have come here, of which this one is the cause
            raise error from failed
        raise
    if error is not None:
        raise error
    told = checked(told, lambda value: of_types(value, str, (str, type(None))), "digest of its settings")
    for rank, (_, text) in enumerate(told):
        if text is not None:
            raise MismatchError(f"rank {rank} could not be set up: {text}")
    digests = [digest for digest, _ in told]
    if len(set(digests)) == 1:
        return
    usual = digests.index(statistics.mode(digests))
    everybody = checked(transport.exchange(dict(description)), _description, "description of its settings")
    for rank, other in enumerate(everybody):
        difference = _first_difference(everybody[usual], other)
        if difference is not None:
            name, first, second = difference
            raise MismatchError(
                f"ranks differ in {name}: rank {usual} has {first}, rank {rank} has {second}. "
                "Build the same model with the same settings on every rank"
            )


def _description(value: Any) -> Description:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError(f"texts by name were expected, not {value!r:.80}")
    return value


def _first_difference(a: Description, b: Description) -> tuple[str, str, str] | None:
    for name in [*a, *(name for name in b if name not in a)]:
        first, second = a.get(name, "nothing"), b.get(name, "nothing")
        if first != second:
            return name, first, second
    for (name, _), (other, _) in zip(a.items(), b.items(), strict=True):
        if name != other:
            return "the order of parameters", name, other
    return None
