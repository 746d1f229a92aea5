"""What error feedback keeps of sharded gradients, as DTensors that lie as the parameters do."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..reduction.buckets import Slot
from ..reduction.residuals.error_feedback import ErrorFeedback
from ..transports import Transport
from .torch_fsdp import Member


class Kept(ABC):
    """The residuals of some parameters. What counts is their mean over the ranks: that is saved, by shards.

    Args:
        feedback: whose.
        slots: where each parameter lies.
        members: the parameters.
        transport: the ranks that have residuals of them.
        scale: what the mean over ranks of a gradient is multiplied by until it is stored.

    Attributes:
        members: the parameters.
    """

    kind: str

    def __init__(
        self,
        feedback: ErrorFeedback,
        slots: Sequence[Slot],
        members: Sequence[Member],
        transport: Transport,
        scale: float,
    ) -> None:
        self._feedback, self._slots, self.members, self._transport = feedback, slots, members, transport
        self._scale = scale

    @property
    def is_settled(self) -> bool:
        """Whether what became of all averages is known."""
        return self._feedback.is_settled

    @torch.no_grad()
    def save(self, go_on: bool, replicas: Transport | None) -> dict[str, Tensor]:
        """By name, in units of what is applied: a DTensor as the parameter is; every rank calls it.

        Args:
            go_on: whether every rank has the mean in place of its own from now on. Then what follows has the bits of a
                training that loads it.
            replicas: the ranks that have the same shards.
        """
        mean = self._mean().mul_(self._scale)
        if replicas is not None and replicas is not self._transport:
            replicas.all_reduce(mean).wait()
            mean.div_(replicas.world_size)
        if go_on:
            self._adopt(mean)
        found: dict[str, Tensor] = {}
        for member, slot in zip(self.members, self._slots, strict=True):
            parameter = member.parameter
            local = parameter.to_local()
            own = self._own(mean)[slot.offset : slot.offset + local.numel()].view(local.shape).clone()
            placed = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            found[member.name] = DTensor.from_local(own, parameter.device_mesh, parameter.placements, **placed)
        return found

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from it, as a training without today's `.grad`; every rank calls it."""
        mean = self._feedback.zeros()
        for member, slot in zip(self.members, self._slots, strict=True):
            local = saved[member.name].to_local()
            self._own(mean)[slot.offset : slot.offset + local.numel()] = local.reshape(-1)
        self._gather(mean)
        self._adopt(mean)

    def _adopt(self, mean: Tensor) -> None:
        self._feedback.commit(final=True)
        units = [1.0] * len(self._slots)
        self._feedback.replace(mean / self._scale, torch.zeros_like(self._feedback.shard_residual), units)

    def _in_units(self, residual: Tensor, units: Sequence[float]) -> Tensor:
        """`[..., total]` in units of what is applied, in place."""
        for slot, unit in zip(self._slots, units, strict=True):
            if not math.isnan(unit):
                residual[..., slot.offset : slot.offset + slot.numel] *= unit
        return residual

    @abstractmethod
    def _mean(self) -> Tensor:
        """Over the ranks, of what a training without today's `.grad` starts from; times `scale` it is applied."""

    @abstractmethod
    def _own(self, mean: Tensor) -> Tensor:
        """The part of this rank's shards, a view."""

    @abstractmethod
    def _gather(self, mean: Tensor) -> None:
        """Make it whole, where each rank has the part of its shards."""


class KeptOfRows(Kept):
    """Of a reduce-scatter: `[ranks, row]`, where each rank has residuals of the whole gradients."""

    kind = "reduce_scatter"

    def _mean(self) -> Tensor:
        residual, _, units = self._feedback.settled()
        self._transport.all_reduce(self._in_units(residual, units)).wait()
        return residual.div_(self._transport.world_size)

    def _own(self, mean: Tensor) -> Tensor:
        return mean[self._transport.rank]

    def _gather(self, mean: Tensor) -> None:
        self._transport.all_gather(mean.view(-1)).wait()


class KeptOfShards(Kept):
    """Of an all-reduce between replicas of a shard: `[shard]`, which every replica has."""

    kind = "all_reduce"

    def _mean(self) -> Tensor:
        residual, second, units = self._feedback.settled()
        own = self._transport.rank * len(second)
        residual[own : own + len(second)].add_(second, alpha=self._transport.world_size)
        self._transport.all_reduce(self._in_units(residual, units)).wait()
        return residual.div_(self._transport.world_size)

    def _own(self, mean: Tensor) -> Tensor:
        return mean

    def _gather(self, mean: Tensor) -> None:
        """It is whole."""
