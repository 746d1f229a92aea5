"""Every collective of a transport over several sizes and dtypes, and what it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastreduce.transports import Transport
from tests.support.models import assert_same_bits

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _whole(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, exact in every dtype and in every order of summation."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, (numel,), generator=generator).to(dtype)


def collect(transport: Transport) -> list[Any]:
    """The results of every collective, for several sizes and dtypes."""
    rank, size = transport.rank, transport.world_size
    seen: list[Any] = [transport.name, rank, size]
    for numel in (0, 1, 7, 1000, 300_000):
        for dtype in DTYPES:
            summed = _whole(rank, numel, dtype)
            transport.all_reduce(summed).wait()
            seen.append(summed)
        for dtype in (*DTYPES, torch.uint8):
            wire = _whole(rank, numel * size, dtype)
            received = torch.full_like(wire, 77).view(size, -1)
            kept = wire.clone()
            transport.all_to_all(received, wire).wait()
            assert_same_bits(wire, kept, "all_to_all only reads the wire")
            transport.all_gather(wire).wait()
            seen += [received, wire]
    seen.append(transport.exchange({"rank": rank, "text": "x" * (10 * rank), "nothing": None}))
    return seen


def expected(rank: int, size: int) -> list[Any]:
    seen: list[Any] = []
    for numel in (0, 1, 7, 1000, 300_000):
        for dtype in DTYPES:
            seen.append(sum(_whole(r, numel, dtype) for r in range(size)))
        for dtype in (*DTYPES, torch.uint8):
            wires = [_whole(r, numel * size, dtype).view(size, -1) for r in range(size)]
            seen.append(torch.stack([wire[rank] for wire in wires]))
            seen.append(torch.stack([wires[r][r] for r in range(size)]).flatten())
    seen.append([{"rank": r, "text": "x" * (10 * r), "nothing": None} for r in range(size)])
    return seen
