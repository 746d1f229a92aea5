"""Who averages buckets, and what each bucket takes for it: our kernels and a transport, or a user's hook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..compression import Compression
from ..transports import Transport
from .buckets import BucketPlan, build_plan
from .gradients import Gradients
from .pipeline import BucketPipeline
from .shared_buffers import SharedBuffers
from .streams import Stream, make_stream, one_by_one
from .wires.node_level import parts_of


class Averaging(Protocol):
    """Who averages buckets: our kernels and a transport, or a user's hook."""

    def make_pipelines(
        self, gradients: Gradients, groups: Iterable[Sequence[int]], transport: Transport, as_views: bool
    ) -> tuple[BucketPlan, list[BucketPipeline]]:
        """The buckets of `groups`, and each one's way through compress, reduce and decompress."""

    def make_stream(self, device: torch.device, transport: Transport) -> Stream:
        """What the buckets on a device are reduced on."""


class CompressedAveraging:
    """Buckets that our kernels compress, sum and scale.

    Args:
        settings: of each parameter.
        steps: by device, from which random bits follow.
        divisor: what sums are divided by; None means the number of ranks.
        memory: for wires on CPUs, where all buckets are reduced one after the other, with those of others that have it.
    """

    def __init__(
        self,
        settings: Sequence[Compression],
        steps: Mapping[torch.device, Tensor],
        divisor: int | None = None,
        memory: SharedBuffers | None = None,
    ) -> None:
        self._settings, self._steps, self._divisor, self._memory = settings, steps, divisor, memory

    def make_pipelines(
        self, gradients: Gradients, groups: Iterable[Sequence[int]], transport: Transport, as_views: bool
    ) -> tuple[BucketPlan, list[BucketPipeline]]:
        """Buckets of `groups`, each of one setting."""
        plan = self.plan_of(gradients, groups, transport)
        return plan, self.pipelines_of(plan, transport, as_views)

    def plan_of(self, gradients: Gradients, groups: Iterable[Sequence[int]], transport: Transport) -> BucketPlan:
        """The buckets of `groups`, aligned and divided as the setting of each asks for."""
        groups = list(groups)
        chosen = [self._settings[group[0]] for group in groups]
        alignment = [setting.alignment for setting in chosen]
        parts = [parts_of(transport, setting) for setting in chosen]
        return build_plan(gradients.specs, groups, alignment=alignment, shards=transport.world_size, parts=parts)

    def pipelines_of(self, plan: BucketPlan, transport: Transport, as_views: bool) -> list[BucketPipeline]:
        """Buckets that take turns share the memory of the largest one's wire, unless `.grad` are views of it."""
        own, made = SharedBuffers(), {}
        count, devices = len(plan.buckets), {bucket.device for bucket in plan.buckets}
        verdicts = {device: torch.ones(count, dtype=torch.uint8, device=device) for device in devices}
        for bucket in sorted(plan.buckets, key=lambda bucket: bucket.total * bucket.dtype.itemsize, reverse=True):
            compression = self._settings[bucket.slots[0].parameter]
            holds_views = as_views and compression.wire_dtype(bucket.dtype) is bucket.dtype
            shared = self._memory if bucket.device.type == "cpu" else None  # a GPU's may be in a graph of the user's
            in_turn = shared is not None or (one_by_one(bucket.device, transport) and not holds_views)
            made[bucket.index] = BucketPipeline(
                bucket,
                compression,
                transport,
                self._divisor,
                shared=(shared or own) if in_turn else None,
                verdicts=verdicts[bucket.device],
                step=self._steps[bucket.device],
                staging=shared or own,
            )
        return [made[bucket.index] for bucket in plan.buckets]

    def make_stream(self, device: torch.device, transport: Transport) -> Stream:
        """A thread, or a CUDA stream."""
        return make_stream(device, transport)
