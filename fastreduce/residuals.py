"""What error feedback keeps between steps: taken out of pipelines by parameter name, and put back."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import BucketPlan, ParameterSpec
from .errors import SettingError
from .pipeline import BucketPipeline

logger = logging.getLogger(__name__)


def collect(pipelines: Sequence[BucketPipeline]) -> dict[str, Tensor]:
    """Copies of the first-stage residuals (FP32, 1-D, in memory order) by parameter name."""
    return {
        slot.name: residual[slot.offset : slot.offset + slot.numel].clone()
        for pipeline in pipelines
        if pipeline.feedback is not None
        for residual in [pipeline.feedback.residual]
        for slot in pipeline.bucket.slots
    }


def restore(kept: Mapping[str, Tensor], pipelines: Sequence[BucketPipeline]) -> None:
    """Write residuals by parameter name into pipelines; a name without one keeps what it has."""
    for pipeline in pipelines:
        if pipeline.feedback is None:
            continue
        residual = pipeline.feedback.residual
        for slot in pipeline.bucket.slots:
            if slot.name in kept:
                residual[slot.offset : slot.offset + slot.numel] = kept[slot.name]


def rescale(pipelines: Sequence[BucketPipeline], factor: float) -> None:
    """Multiply every residual by `factor`."""
    for pipeline in pipelines:
        if pipeline.feedback is not None:  # both rows: which one counts only the device knows
            pipeline.feedback.residuals.mul_(factor)
            pipeline.feedback.shard_residuals.mul_(factor)


def save(plan: BucketPlan, pipelines: Sequence[BucketPipeline], rank: int, compression: str) -> dict[str, Any]:
    """One rank's state: plain tensors, strings and numbers, so `torch.load(weights_only=True)` reads it."""
    return {
        "rank": rank,
        "world_size": plan.shards,
        "compression": compression,
        "buckets": plan.names(),
        "residuals": collect(pipelines),
        "shard_residuals": [p.feedback.shard_residual.clone() for p in pipelines if p.feedback is not None],
    }


def pick(states: Sequence[Mapping[str, Any]], rank: int, world_size: int, compression: str) -> Mapping[str, Any]:
    """The state that `rank` of `world_size` is to load.

    That is its own where one was saved at this world size. Else `states` must be those of all old
    ranks: their mean is loaded, and second-stage residuals, which belong to shards, are dropped.

    Raises:
        SettingError: if the states are of another compression, or ranks are missing.
    """
    for state in states:
        if state["compression"] != compression:
            raise SettingError(f"the state was saved under {state['compression']!r}; this reducer uses {compression!r}")
    for state in states:
        if state["world_size"] == world_size and state["rank"] == rank:
            return state
    have = sorted(state["rank"] for state in states)
    old_size = states[0]["world_size"] if states else 0
    if not states or old_size == world_size or have != list(range(old_size)):
        raise SettingError(
            f"rank {rank} of {world_size} needs its own state, or those of all ranks of another world size; "
            f"given: ranks {have} of {old_size}"
        )
    logger.info(
        "residuals of %d ranks loaded on %d: each rank gets their mean, second-stage residuals are dropped",
        old_size,
        world_size,
    )
    names = states[0]["residuals"]
    mean = {name: torch.stack([state["residuals"][name] for state in states]).mean(0) for name in names}
    return {**states[0], "world_size": world_size, "residuals": mean, "shard_residuals": []}


def check_parameters(state: Mapping[str, Any], specs: Sequence[ParameterSpec]) -> None:
    """Hold a state's parameters against the reducer's.

    Raises:
        SettingError: naming the first parameter that only one of them has, or that differs in size.
    """
    saved = {name for bucket in state["buckets"] for name in bucket}
    for name in sorted(saved.symmetric_difference(spec.name for spec in specs)):
        raise SettingError(f"parameter {name!r} is only in {'the state' if name in saved else 'this reducer'}")
    for spec in specs:
        residual = state["residuals"].get(spec.name)
        if residual is not None and residual.numel() != spec.numel:
            raise SettingError(
                f"parameter {spec.name!r} has {residual.numel()} elements in the state, {spec.numel} in this reducer"
            )
