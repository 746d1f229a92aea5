"""A model's gradients in buckets, what a case of a kernel operation over them is, and how its bits are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastreduce import Compression, ops
from fastreduce.ops import backends
from fastreduce.ops.backends import Backend
from fastreduce.reduction.buckets import Bucket

from .shapes import CAPS, buckets_of

RANKS = 2
WITHOUT = "without statistics"
TO_NEAREST = "rounded to nearest"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
REFERENCE = backends.load("reference")

Way = Callable[[], list[Tensor] | None]
Options = dict[str, Any]  # of an operation, dtypes by their short names


@dataclass
class Gradients:
    """One bucket's gradients, each in memory of its own, and its used-flags."""

    bucket: Bucket
    grads: list[Tensor]
    used: Tensor

    def flat(self, dtype: torch.dtype) -> Tensor:
        """A flat of zeros."""
        return torch.zeros(self.bucket.total, dtype=dtype, device=self.used.device)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The gradients' places in a flat."""
        return [
            flat[slot.offset : slot.offset + slot.numel].view(grad.shape)
            for slot, grad in zip(self.bucket.slots, self.grads, strict=True)
        ]

    def filled_wire(self, dtype: torch.dtype) -> Tensor:
        """The gradients as a wire."""
        wire = self.flat(dtype)
        REFERENCE.flatten([*self.grads, self.used], self.bucket.table, wire, 1.0)
        return wire

    def quantized_wire(self, setting: Compression) -> Tensor:
        """The gradients as a quantized wire."""
        wire, tensors = self.empty_quantized_wire(setting), [*self.grads, self.used]
        table, block = self.bucket.table, setting.block
        REFERENCE.quantize(tensors, table, wire, RANKS, block, None, None, form=setting.format)
        return wire

    def fp16_wire(self) -> Tensor:
        """A wire of FP16 blocks, of zeros."""
        numel = ops.fp16_wire_numel(self.bucket.total, RANKS)
        return torch.zeros(numel, dtype=torch.uint8, device=self.used.device)

    def filled_fp16_wire(self) -> Tensor:
        """The gradients as a wire of FP16 blocks."""
        wire = self.fp16_wire()
        REFERENCE.flatten_fp16([*self.grads, self.used], self.bucket.table, wire, RANKS, 1)
        return wire

    def empty_quantized_wire(self, setting: Compression) -> Tensor:
        """A quantized wire of zeros."""
        numel = ops.wire_numel(self.bucket.total, RANKS, setting.block, setting.format)
        return torch.zeros(numel, dtype=torch.uint8, device=self.used.device)


Model = list[Gradients]


@dataclass
class Case:
    """One operation over all buckets of a model.

    `run` calls a backend's kernels as a step does; `plain` are torch's ways, and `beside` other ways by the kernels of
    that backend. All of them fill `outputs`, but an allocating way returns what it makes instead. `to_nearest` is `run`
    without stochastic rounding, for a run with it.
    """

    run: Callable[[Backend], None]
    outputs: list[Tensor]
    nbytes: int
    plain: dict[str, Way] = field(default_factory=dict)
    beside: dict[str, Callable[[Backend], None]] = field(default_factory=dict)
    to_nearest: Callable[[Backend], None] | None = None

    def ways(self, kernels: Backend) -> dict[str, Way]:
        """The ways to hold a backend against: those by its own kernels, then torch's."""
        return {**{name: partial(way, kernels) for name, way in self.beside.items()}, **self.plain}


def model_of(
    shapes: str,
    alignment: int,
    most: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    caps: Sequence[int] = CAPS,
) -> Model:
    """A model's buckets as two ranks lay them out, with random gradients."""
    shape_of, buckets = buckets_of(shapes, alignment, most, caps)
    torch.manual_seed(0)
    return [
        Gradients(
            bucket,
            [torch.randn(shape_of[slot.parameter], device=device, dtype=dtype) for slot in bucket.slots],
            torch.ones(len(bucket.slots), device=device, dtype=dtype),
        )
        for bucket in buckets
    ]


def elements(model: Model) -> int:
    """Gradient elements of all buckets, without flags and padding."""
    return sum(grad.numel() for each in model for grad in each.grads)


def case_id(case: tuple[str, str, Options]) -> str:
    """What a case is called: operation, model, options."""
    operation, name, options = case
    return "-".join([operation, name, *(f"{key}={value}" for key, value in options.items())])


def alignment_of(operation: str) -> int:
    """Elements to whose multiples the slots of an operation's wire are aligned."""
    return 128 if "quantize" in operation or operation.endswith("_fp16") else 16


def check(case: Case, kernels: Backend) -> None:
    """Hold the kernels' bits against the reference's, and all other ways against those."""
    expected = _results(case, lambda: case.run(REFERENCE))
    for got, want in zip(_results(case, lambda: case.run(kernels)), expected, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), f"{kernels.name} differs from reference"
    for way in case.ways(kernels).values():
        whole = [torch.cat(tensors) for tensors in (_results(case, way), expected)]
        torch.testing.assert_close(*whole, rtol=2**-7, atol=1e-6)


def _results(case: Case, way: Way) -> list[Tensor]:
    for output in case.outputs:
        output.fill_(97)
    returned = way()
    return [tensor.detach().clone().flatten() for tensor in returned or case.outputs]
