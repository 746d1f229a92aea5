"""Buckets by themselves, without backward or reducer: their pipelines, and parameters whose gradients they average."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastreduce import Compression
from fastreduce.reduction.buckets import ParameterSpec, build_plan
from fastreduce.reduction.pipeline import BucketPipeline
from fastreduce.reduction.residuals.error_feedback import agree_that_finite
from fastreduce.transports import Transport
from tests.support.thread_ranks import in_threads

CPU = torch.device("cpu")
Shapes = Sequence[tuple[int, ...]]


class Buckets:
    """The parameters of `shapes` in one bucket, or in one for each of `groups`, under a setting with error feedback."""

    def __init__(
        self,
        transport: Transport,
        setting: Compression,
        shapes: Shapes,
        groups: Sequence[Sequence[int]] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        specs = [
            ParameterSpec(f"p{i}", math.prod(shape), dtype, CPU, shape[0] if len(shape) > 1 else 1)
            for i, shape in enumerate(shapes)
        ]
        plan = build_plan(
            specs, groups or [range(len(shapes))], alignment=setting.alignment, shards=transport.world_size
        )
        self.pipelines = [BucketPipeline(bucket, setting, transport) for bucket in plan.buckets]
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]

    def step(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """The averages of the ranks' gradients."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad.clone()
        for pipeline in self.pipelines:
            members = [self.parameters[slot.parameter] for slot in pipeline.bucket.slots]
            averaged: Any = [parameter.grad for parameter in members]
            with torch.no_grad():
                pipeline.run(averaged, averaged)
            pipeline.follow(members, [], watched=False)
        agree_that_finite([pipeline.feedback for pipeline in self.pipelines if pipeline.feedback is not None])
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]

    @property
    def kept(self) -> list[Tensor]:
        """What this rank keeps of each parameter's gradient."""
        found: dict[int, Tensor] = {}
        for pipeline in self.pipelines:
            assert pipeline.feedback is not None
            residual = pipeline.feedback.residual.clone()
            for slot in pipeline.bucket.slots:
                shape = self.parameters[slot.parameter].shape
                found[slot.parameter] = residual[slot.offset :][: slot.numel].view(shape)
        return [found[i] for i in range(len(self.parameters))]


def trained(
    ranks: int | Sequence[Transport],
    setting: Compression,
    shapes: Shapes,
    steps: int,
    grads: Callable[[int, int], list[Tensor]],
    **options: Any,
) -> list[Any]:
    """By rank, the averages of each step, what is kept after it, and the pipelines; gradients are of rank and step."""

    def train(rank: int, transport: Transport) -> Any:
        buckets = Buckets(transport, setting, shapes, **options)
        made = [(buckets.step(grads(rank, step)), buckets.kept) for step in range(steps)]
        return *zip(*made, strict=True), buckets.pipelines

    return in_threads(ranks, train)
