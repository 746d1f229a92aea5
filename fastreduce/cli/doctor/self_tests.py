"""What `fastreduce doctor` tries out: kernels beside the reference, and an average over real ranks."""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ... import DistributedDataParallel
from ...distributed.processes import Group, run_ranks
from ...errors import BackendUnavailableError, FastreduceError, RanksFailedError, TransportError
from ...kernels.slots import FP8_FORMAT, INT4_FORMAT, INT8_FORMAT, SlotTable, shard_bytes
from ...ops import backends
from ...reduction.buckets import round_up, table_of
from ...transports import ENVIRONMENT_VARIABLE
from .rows import FAILED, MISSING, Row, one_line

NUMELS = (1, 127, 1000, 4099)
BLOCK, SHARDS = 128, 2
STALL_SECONDS = 60.0
SETTINGS = ("none", "fp16")


def kernel_test(name: str, device: torch.device, chosen: bool = True) -> Row:
    """Whether backend `name` gives the reference's bits: flatten and unflatten, quantize and dequantize.

    One that is not `chosen` and does not run at all fails nothing; other bits always do.
    """
    title = f"{name} on {device.type}"
    start = time.monotonic()
    try:
        different = _different_bits(name, device)
    except Exception as error:  # what a compiler or a driver may raise
        return Row(title, one_line(error), FAILED if chosen else MISSING)
    if different:
        return Row(title, f"not the reference's bits after {' and '.join(different)}", FAILED)
    return Row(title, f"the reference's bits, {time.monotonic() - start:.1f} s")


def _different_bits(name: str, device: torch.device) -> list[str]:
    random = np.random.default_rng(0)
    numbers = random.standard_normal(sum(NUMELS)) * 2.0 ** random.integers(-20, 12, sum(NUMELS))
    tensors = list(torch.from_numpy(numbers).float().split(NUMELS))
    expected = _round_trips(backends.load("reference"), tensors)
    found = _round_trips(backends.load(name), [tensor.to(device) for tensor in tensors])
    return [step for step, bits in found.items() if not torch.equal(bits.cpu(), expected[step])]


def _round_trips(kernels: backends.Backend, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """The bytes after each operation."""
    packed = table_of([tensor.numel() for tensor in tensors], BLOCK)
    total = round_up(packed.total, BLOCK * SHARDS)
    slots = SlotTable(packed.offsets, packed.numels, total)
    device = tensors[0].device
    steps: dict[str, Tensor] = {}
    for dtype in (torch.float16, torch.bfloat16):
        wire, back = torch.empty(total, dtype=dtype, device=device), [torch.empty_like(t) for t in tensors]
        kernels.flatten(tensors, slots, wire, 0.5)
        kernels.unflatten(wire, slots, back, 2.0)
        steps |= {f"flatten to {dtype}": _bytes(wire), f"unflatten from {dtype}": _bytes(torch.cat(back))}
    for form in (INT8_FORMAT, INT4_FORMAT, FP8_FORMAT):
        numel = SHARDS * shard_bytes(total // SHARDS // BLOCK, BLOCK, form)
        wire, back = torch.empty(numel, dtype=torch.uint8, device=device), [torch.empty_like(t) for t in tensors]
        kernels.quantize(tensors, slots, wire, SHARDS, BLOCK, None, None, form=form)
        kernels.dequantize(wire, SHARDS, BLOCK, slots, back, form=form)
        steps |= {f"quantize to {form.name}": wire, f"dequantize from {form.name}": _bytes(torch.cat(back))}
    return steps


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


# Transports


def transport_test(title: str, transport: str, ranks: int, device: str) -> Row:
    """Whether `ranks` processes of this machine get the average of a small model's gradients."""
    start = time.monotonic()
    try:
        names = run_ranks(
            _average, Group(ranks, ranks), device, transport, on_report=lambda _: None, stall_seconds=STALL_SECONDS
        )
    except RanksFailedError as error:
        lines = str(error).splitlines()
        said = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
        return Row(title, said, FAILED, _help(transport, error))
    return Row(title, f"gradients averaged over {names[0]}, {time.monotonic() - start:.1f} s")


def _help(transport: str, failed: RanksFailedError) -> str:
    """What may help; "" where that is what the error says."""
    cause = failed.__cause__
    if transport == "shm":
        is_shm = isinstance(cause, BackendUnavailableError)  # else what the group has over gloo, or the kernels
        return f"docker run --shm-size=256m, or export {ENVIRONMENT_VARIABLE}=gloo" if is_shm else ""
    if isinstance(cause, FastreduceError) and not isinstance(cause, TransportError):
        return ""
    if transport == "nccl":
        return "NCCL_DEBUG=INFO fastreduce doctor"
    connecting = isinstance(cause, RuntimeError) or (cause is None and "they hang" in str(failed))
    return _help_with_gloo() if connecting else ""


def _help_with_gloo() -> str:
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    name = "GLOO_SOCKET_IFNAME"
    return f"{f'unset {name}, or ' if name in os.environ else ''}export {name}=… with one of: {interfaces}"


def _average(rank: int, report: Callable[[Any], None], device: str, transport: str) -> str:
    """Whole numbers, so that the average is exact in every setting; every rank knows what all ranks' gradients are."""
    world_size = torch.distributed.get_world_size()
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)).to(device)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel(), device=device).view_as(parameter) % 3 - i)
    gradients = [_gradients(copy.deepcopy(model), r) for r in range(world_size)]
    expected = [sum(each) / world_size for each in zip(*gradients, strict=True)]
    if device == "cuda":  # torch's own communicator too, which a wrapper of one rank may not need
        torch.distributed.all_reduce(torch.ones(1, device=device))
    for setting in SETTINGS:
        ddp = DistributedDataParallel(copy.deepcopy(model), compression=setting, transport=transport)
        found = _gradients(ddp, rank)
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise ValueError(f"the gradients under {setting} are not the average of the ranks'")
        report(setting)
    return ddp.reducer.transport.name


def _gradients(model: nn.Module, rank: int) -> list[Tensor]:
    device = next(model.parameters()).device
    model(torch.full((1, 8), rank + 1.0, device=device)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
