"""Every collective over several dtypes and layouts, what it gives, and what those that return a result compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

import fastreduce.distributed as dist
from fastreduce.distributed import ReduceOp
from tests.support.models import assert_same_bits, whole_batch

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)


def data(rank: int, step: int = 0, dtype: torch.dtype = torch.float32, layout: str = "contiguous") -> Tensor:
    """Whole numbers `[3, 4]`, exact under every operation, in several layouts."""
    tensor = whole_batch(rank, step, 3, 4).to(dtype)
    if layout == "transposed":
        tensor = tensor.t().contiguous().t()
    elif layout == "apart":
        tensor = torch.stack([tensor, torch.full_like(tensor, 99)], -1)[..., 0]
    return tensor


def all_kinds(rank: int, world_size: int, dtype: torch.dtype, layout: str, async_op: bool) -> dict[str, Any]:
    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        work = function(*args, async_op=async_op, **kwargs)
        if not async_op:
            assert work is None
            return
        assert isinstance(work, torch_dist.Work)
        future = work.get_future() if function is not dist.reduce_scatter else None  # torch's has none over gloo
        assert work.wait() and work.wait()
        if future:
            future.wait()
        assert work.is_completed() and work.is_success()

    make = partial(data, dtype=dtype, layout=layout)
    seen: dict[str, Any] = {}
    ops = [ReduceOp.SUM, ReduceOp.AVG]
    if not dtype.is_complex:
        ops += [ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    for op in ops:
        for name, function in (("all_reduce", dist.all_reduce), ("reduce", partial(dist.reduce, dst=1))):
            tensor = make(rank)
            call(function, tensor, op=op)
            seen[f"{name} {op}"] = tensor
        output = make(rank, 9)
        call(dist.reduce_scatter, output, [make(rank, step) for step in range(world_size)], op=op)
        seen[f"reduce_scatter {op}"] = output
    tensor = make(rank)
    call(dist.broadcast, tensor, src=1)
    seen["broadcast"] = tensor
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.all_gather, listed, make(rank))
    seen["all_gather"] = listed
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.gather, make(rank), listed if rank == 1 else None, dst=1)
    seen["gather"] = listed
    tensor = make(rank, 9)
    call(dist.scatter, tensor, [make(rank, step) for step in range(world_size)] if rank == 1 else None, src=1)
    seen["scatter"] = tensor
    listed = [make(rank, 9) for _ in range(world_size)]
    call(dist.all_to_all, listed, [make(rank, step) for step in range(world_size)])
    seen["all_to_all"] = listed
    tensor = make(rank)
    if rank == 0:
        dist.send(tensor, 1, tag=3)
    elif rank == 1:
        assert dist.recv(tensor, 0, tag=3) == 0
    seen["recv"] = tensor
    return seen


def _reduced(op: str, tensors: list[Tensor]) -> Tensor:
    stacked = torch.stack(tensors)
    if op == "PRODUCT":
        return stacked.prod(0)
    if op in ("MIN", "MAX"):
        return stacked.amin(0) if op == "MIN" else stacked.amax(0)
    total = stacked.sum(0)
    if op == "AVG":
        exact = total.is_floating_point() or total.is_complex()
        total = total.div(len(tensors), rounding_mode=None if exact else "trunc")
    return total


def check_all_kinds(rank: int, size: int, seen: dict[str, Any], dtype: torch.dtype, layout: str) -> None:
    """Whether `all_kinds` saw on `rank` what it should."""
    make = partial(data, dtype=dtype, layout=layout)
    for name, found in seen.items():
        kind, _, op = name.partition(" ")
        op = op.removeprefix("RedOpType.")
        untouched = make(rank, 9)
        expected: Any = {
            "all_reduce": lambda op=op: _reduced(op, [make(r) for r in range(size)]),
            "reduce": lambda op=op: _reduced(op, [make(r) for r in range(size)]) if rank == 1 else make(rank),
            "reduce_scatter": lambda op=op: _reduced(op, [make(s, rank) for s in range(size)]),
            "broadcast": lambda: make(1),
            "all_gather": lambda: [make(r) for r in range(size)],
            "gather": lambda u=untouched: [make(s) for s in range(size)] if rank == 1 else [u] * size,
            "scatter": lambda: make(1, rank),
            "all_to_all": lambda: [make(s, rank) for s in range(size)],
            "recv": lambda: make(0) if rank == 1 else make(rank),
        }[kind]()
        contiguous = [t.contiguous() for t in expected] if isinstance(expected, list) else expected.contiguous()
        assert_same_bits(found, contiguous, f"rank {rank}: {name}")


def _equal_parts(inputs: list[Tensor], axis: int) -> list[list[Tensor]]:
    return [list(x.split(x.shape[axis] // len(inputs), axis)) for x in inputs]


def _zeros_but_first(value: Tensor, size: int) -> list[Tensor]:
    return [value] + [torch.zeros_like(value)] * (size - 1)


def _total(xs: list[Tensor]) -> Tensor:
    return reduce(torch.add, xs)


COMPOSED: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "all_reduce_sum": lambda xs: [_total(xs)] * len(xs),
    "all_reduce_max": lambda xs: [torch.stack(xs).amax(0)] * len(xs),
    "all_reduce_min": lambda xs: [torch.stack(xs).amin(0)] * len(xs),
    "all_gather": lambda xs: [torch.cat(xs)] * len(xs),
    "all_gather axis=1": lambda xs: [torch.cat(xs, 1)] * len(xs),
    "reduce_scatter_sum": lambda xs: _equal_parts([_total(xs)] * len(xs), 0)[0],
    "reduce_scatter_sum axis=1": lambda xs: _equal_parts([_total(xs)] * len(xs), 1)[0],
    "reduce_sum": lambda xs: _zeros_but_first(_total(xs), len(xs)),
    "gather": lambda xs: _zeros_but_first(torch.cat(xs), len(xs)),
    "gather axis=1": lambda xs: _zeros_but_first(torch.cat(xs, 1), len(xs)),
    "broadcast": lambda xs: [xs[0]] * len(xs),
    "scatter": lambda xs: _equal_parts(xs, 0)[0],
    "scatter axis=1": lambda xs: _equal_parts(xs, 1)[0],
    "all_to_all": lambda xs: [torch.cat(part) for part in zip(*_equal_parts(xs, 0), strict=True)],
    "all_to_all split_axis=1 concat_axis=0": lambda xs: [
        torch.cat(part) for part in zip(*_equal_parts(xs, 1), strict=True)
    ],
}
FUNCTIONS = sorted({case.split()[0] for case in COMPOSED})
