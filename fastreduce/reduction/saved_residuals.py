"""What error feedback keeps between steps: taken out of pipelines by parameter name, and put back."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression import Compression
from ..errors import SettingError
from .buckets import BucketPlan, ParameterSpec, round_up
from .pipeline import BucketPipeline
from .residuals.bucket_residuals import SlotResiduals

logger = logging.getLogger(__name__)


def collect(pipelines: Sequence[BucketPipeline]) -> dict[str, SlotResiduals]:
    """What error feedback keeps, by parameter name, removed from pipelines that nobody will use."""
    return {
        slot.name: pipeline.take(i)
        for pipeline in pipelines
        if pipeline.kept is not None
        for i, slot in enumerate(pipeline.bucket.slots)
    }


def collect_alike(pipelines: Sequence[BucketPipeline]) -> dict[str, SlotResiduals]:
    """The same, so that no place of a shard or a column tells in it; every rank calls it."""
    for pipeline in pipelines:
        pipeline.wires.spread()
    kept = collect(pipelines)
    for pipeline in pipelines:
        slots = pipeline.bucket.slots
        parts = {i: kept[slot.name] for i, slot in enumerate(slots) if slot.name in kept}
        kept |= {slots[i].name: part for i, part in pipeline.wires.of_rank(parts).items()}
    return kept


def restore(kept: Mapping[str, SlotResiduals], pipelines: Sequence[BucketPipeline]) -> None:
    """Put it into other pipelines; a name without any keeps what it has.

    One without error feedback adds it to its next gradients. In two levels the ranks of a node bring together what each
    has: every rank calls it then.
    """
    for pipeline in pipelines:
        parts = {i: kept[slot.name] for i, slot in enumerate(pipeline.bucket.slots) if slot.name in kept}
        for i, part in pipeline.wires.of_node(parts).items():
            pipeline.put(i, part)


def save(
    plan: BucketPlan,
    pipelines: Sequence[BucketPipeline],
    rank: int,
    world_size: int,
    compression: str,
    folded: bool = False,
) -> dict[str, Any]:
    """One rank's state: plain tensors, strings and numbers, so `torch.load(weights_only=True)` reads it.

    Gradients are not part of it: averages that have not been applied count as thrown away. `folded`: with second-stage
    residuals as part of the first stage, for buckets that will be divided otherwise.
    """
    residuals, units, factors = {}, {}, dict[str, Tensor]()
    shard_residuals = [torch.zeros(0, dtype=torch.float32, device="cpu") for _ in pipelines]
    for pipeline in pipelines:
        if (feedback := pipeline.kept) is not None:
            residual, shard, known = feedback.settled()
            if not folded and pipeline.feedback is not None:
                shard_residuals[pipeline.bucket.index] = shard.clone()  # a view of FP32 rows: a file would hold both
                shard = torch.zeros_like(shard)
            for i, (slot, unit) in enumerate(zip(pipeline.bucket.slots, known, strict=True)):
                residuals[slot.name] = feedback.folded(i, residual, shard)
                if not math.isnan(unit):
                    units[slot.name] = unit
        factors |= pipeline.wires.factors()
    return {
        "rank": rank,
        "world_size": world_size,
        "compression": compression,
        "buckets": plan.names(),
        "nodes": [pipeline.wires.nodes for pipeline in pipelines],
        "shards": [pipeline.wires.shard for pipeline in pipelines],
        "residuals": residuals,
        "units": units,
        "factors": factors,
        "shard_residuals": shard_residuals if any(p.feedback for p in pipelines) and not folded else [],
    }


def kept_in(state: Mapping[str, Any]) -> dict[str, SlotResiduals]:
    """The first-stage residuals of a state that `save` made; one of an older version has no units and no factors."""
    units, factors = state.get("units", {}), state.get("factors", {})
    return {
        name: SlotResiduals(value, None, units.get(name, math.nan), factors.get(name))
        for name, value in state["residuals"].items()
    }


def pick(states: Sequence[Mapping[str, Any]], rank: int, world_size: int, compression: str) -> Mapping[str, Any]:
    """The state that `rank` of `world_size` is to load.

    That is its own where one was saved at this world size. Else `states` must be those of all old
    ranks: their mean is loaded, with the second-stage residuals, which belong to shards, in it.

    Raises:
        SettingError: if the states are of another compression, or ranks are missing.
    """
    for state in states:
        if _law_of(state["compression"]) != _law_of(compression):
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
    logger.info("residuals of %d ranks loaded on %d: each rank gets their mean", old_size, world_size)
    states = sorted(states, key=lambda state: int(state["rank"]))
    # Where error feedback is over, not all ranks may have something left of it.
    like = {name: value for state in reversed(states) for name, value in state["residuals"].items()}
    mean = {
        name: torch.stack([state["residuals"].get(name, torch.zeros_like(value)) for state in states]).mean(0)
        for name, value in like.items()
    }
    units = {name: unit for state in reversed(states) for name, unit in state.get("units", {}).items()}
    for name, residual in of_shards(states, alignments(states[0])).items():
        mean[name] += residual
    return {**states[0], "world_size": world_size, "residuals": mean, "units": units, "shard_residuals": []}


def _law_of(compression: str) -> str:
    """A setting but for what residuals are kept in: a state has them in FP32, whatever that was."""
    return re.sub(r"(error_feedback)=\w+", r"\1", compression)


def alignments(state: Mapping[str, Any]) -> list[int]:
    """Those of the slots in each bucket of a state."""
    settings = state.get("settings", {})
    specs = [settings.get(names[0], state["compression"]) for names in state["buckets"]]
    return [Compression.parse(spec).alignment for spec in specs]


def of_shards(states: Sequence[Mapping[str, Any]], alignment: Sequence[int]) -> dict[str, Tensor]:
    """The second-stage residuals of all ranks, by parameter name; `alignment` of each bucket."""
    found = {}
    for index, shards in enumerate(zip(*(state["shard_residuals"] for state in states), strict=True)):
        places = [_shard_of(state, index) for state in states]
        flat = torch.cat([shard for _, shard in sorted(zip(places, shards, strict=True), key=lambda pair: pair[0])])
        if len(flat):
            found.update(_by_name(flat, states[0], index, alignment[index]))
    return found


def _shard_of(state: Mapping[str, Any], index: int) -> int:
    """Which shard of a bucket the state's rank had; -1 for none, which comes first and is empty."""
    return int(state["shards"][index] if "shards" in state else state["rank"])


def _by_name(flat: Tensor, state: Mapping[str, Any], index: int, alignment: int) -> dict[str, Tensor]:
    found, start = {}, 0
    for name in state["buckets"][index]:
        numel = state["residuals"][name].numel()
        found[name] = flat[start : start + numel]
        start += round_up(numel, alignment)
    return found


def fold_moved(state: Mapping[str, Any], pipelines: Sequence[BucketPipeline]) -> Mapping[str, Any]:
    """A state of this rank, with second-stage residuals as part of the first where shards have changed hands.

    That is, where it was saved in two levels and this is one, the other way round, or nodes have other ranks.
    """
    shards, residuals = list(state["shard_residuals"]), dict(state["residuals"])
    alignment, nodes = alignments(state), state.get("nodes", [""] * len(shards))
    for index, shard in enumerate(shards):
        if len(shard) and nodes[index] != pipelines[index].wires.nodes:
            flat = shard.new_zeros((_shard_of(state, index) + 1) * len(shard))
            flat[-len(shard) :] = shard
            size = sum(round_up(residuals[name].numel(), alignment[index]) for name in state["buckets"][index])
            flat = torch.nn.functional.pad(flat, (0, max(0, size - len(flat))))
            for name, part in _by_name(flat, state, index, alignment[index]).items():
                residuals[name] = residuals[name] + part * state["world_size"]
            shards[index] = shard.new_zeros(0)
    return {**state, "residuals": residuals, "shard_residuals": shards}


def check_names(saved: Iterable[str], names: Iterable[str]) -> None:
    """Hold the names of a state's parameters against the reducer's.

    Raises:
        SettingError: naming the first that only one of them has.
    """
    saved = set(saved)
    for name in sorted(saved.symmetric_difference(names)):
        raise SettingError(f"parameter {name!r} is only in {'the state' if name in saved else 'this reducer'}")


def check_parameters(state: Mapping[str, Any], specs: Sequence[ParameterSpec]) -> None:
    """Hold a state's parameters against the reducer's.

    Raises:
        SettingError: naming the first parameter that only one of them has, or that differs in size.
    """
    check_names((name for bucket in state["buckets"] for name in bucket), (spec.name for spec in specs))
    for spec in specs:
        residual = state["residuals"].get(spec.name)
        if residual is not None and residual.numel() != spec.numel:
            raise SettingError(
                f"parameter {spec.name!r} has {residual.numel()} elements in the state, {spec.numel} in this reducer"
            )
