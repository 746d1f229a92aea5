"""Which gradients are still as their reduction left them, so that its statistics (kernels/README.md) describe them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .pipeline import BucketPipeline

Known = list[tuple[BucketPipeline, dict[int, Tensor]]]  # each pipeline's slots, by position, and their parameters


def note_reduced(pipeline: BucketPipeline, parameters: Sequence[Tensor], left: Iterable[int]) -> None:
    """Remember which gradients a reduction that has just been stored has left, if it made statistics of them.

    Not those at the positions `left`, which no rank used, nor what was cast. The choice is the same on every rank.
    """
    if pipeline.has_statistics:
        pipeline.reduced = {
            position: (parameter, weakref.ref(grad), grad._version)
            for position, parameter in enumerate(parameters)
            if (grad := parameter.grad) is not None and grad.dtype.to_real() is pipeline.bucket.dtype
        }
        for position in left:
            pipeline.reduced.pop(position, None)


def known_slots(pipelines: Iterable[BucketPipeline], parameters: Iterable[Tensor]) -> Known:
    """The slots whose statistics describe what is in the gradients of `parameters` now."""
    wanted = set(map(id, parameters))
    known = []
    for pipeline in pipelines:
        slots = {
            position: parameter
            for position, (parameter, noted, version) in pipeline.reduced.items()
            if (grad := parameter.grad) is not None
            and grad is noted()
            and grad._version == version
            and id(parameter) in wanted
        }
        if slots:
            known.append((pipeline, slots))
    return known


def rows_of_slots(pipeline: BucketPipeline, slots: Mapping[int, Tensor]) -> Tensor:
    """The statistics of some slots, tile by tile."""
    count = len(pipeline.bucket.slots)
    if len(slots) == count:
        return pipeline.statistics_of(0, count)
    return torch.cat([pipeline.statistics_of(position, position + 1) for position in sorted(slots)])
