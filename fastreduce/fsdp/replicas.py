"""The all-reduce of a group's shard between its replicas, behind FSDP's reduce-scatter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..compression import Compression
from ..errors import ReducerError
from ..reduction import saved_residuals
from ..reduction.agreement import check_agreement
from ..reduction.buckets import ParameterSpec, build_plan
from ..reduction.pipeline import BucketPipeline, Collectives
from ..reduction.residuals.applied import norms_of
from ..transports import Transport
from .followed import Followed, Follower
from .kept import Kept, KeptOfShards
from .torch_fsdp import Group, used_elsewhere


class ReplicaAverage:
    """FSDP's all-reduce hook for one group: the mean over replicas, in place, as DDP averages a bucket.

    Where `set_gradient_divide_factor` says what sums are divided by, it is the sum. While `set_requires_all_reduce`
    says that it is not to be, shards are added up here, and `.grad` gets them with the next ones.

    Args:
        group: whose gradients.
        settings: by name of parameter.
        transport: the replicas.
        follower: lets error feedback see what became of gradients.

    Attributes:
        owner: what ends the transport when it ends itself (`CompressedReduceScatter.owner`).
    """

    owner: object = None

    def __init__(
        self, group: Group, settings: Mapping[str, Compression], transport: Transport, follower: Follower
    ) -> None:
        self._group, self._transport, self._follower = group, transport, follower
        self._collectives = Collectives(transport, f"FSDP averages {group}, with {group.listed}.")
        # What is kept of a shard is kept by its own ranks: replicas on one host reduce as equals with all others.
        self._settings = {name: replace(setting, flat=True) for name, setting in settings.items()}
        self._followed: list[Followed] = []
        self._partial: dict[int, Tensor] = {}  # by position, what has not been averaged yet
        self._compared = False
        self.pipelines: list[BucketPipeline] = []
        self._lay_out(group.trained, group.reduce_dtype)

    def _lay_out(self, positions: Sequence[int], dtype: torch.dtype) -> None:
        members, ranks = self._group.members, self._transport.world_size
        specs = [ParameterSpec(member.name, member.piece, dtype, self._group.device) for member in members]
        by_setting = self._group.by_setting(self._settings, positions)
        kept = saved_residuals.collect(self.pipelines)
        alignment = [setting.alignment for setting in by_setting]
        plan = build_plan(specs, by_setting.values(), alignment=alignment, shards=ranks)
        self.pipelines = [
            BucketPipeline(bucket, setting, self._transport)
            for bucket, setting in zip(plan.buckets, by_setting, strict=True)
        ]
        saved_residuals.restore(kept, self.pipelines)
        self._follower.remove(self._followed)
        self._followed = [
            Followed(pipeline.feedback, self._group, [slot.parameter for slot in pipeline.bucket.slots])
            for pipeline in self.pipelines
            if pipeline.feedback is not None
        ]
        self._follower.add(self._followed)
        self._known, self._dtype = {i for group in by_setting.values() for i in group}, dtype

    def kept(self) -> list[Kept]:
        """What error feedback keeps, for each pipeline that has any, of all that is trained now."""
        self._learn(self._group.trained, self._dtype)
        self._follow_scale()
        members, (_, scale) = self._group.members, self._group.scales()
        return [
            KeptOfShards(pipeline.feedback, slots, [members[slot.parameter] for slot in slots], self._transport, scale)
            for pipeline in self.pipelines
            if pipeline.feedback is not None and (slots := pipeline.bucket.slots)
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one all-reduce of all parameters."""
        return sum(pipeline.sent_bytes for pipeline in self.pipelines)

    @torch.no_grad()
    def __call__(self, shard: Tensor) -> None:
        """Average the shard that a reduce-scatter has made, in place.

        Raises:
            MismatchError: on every replica, if parameters differ between them, at the first call.
            TransportError: naming rank, operation and parameters, if it failed.
            ReducerError: if a parameter is used on another replica only, or not in the backward that averages what has
                been added up of it.
        """
        if not self._compared:
            self._compare()
            self._compared = True
        if shard.is_cuda:  # FSDP may free it, as another stream's memory, as soon as this one has work to do with it
            shard.record_stream(torch.cuda.current_stream(shard.device))
        present = list(self._group.present)
        pieces = [self._group.members[i].piece for i in present]
        for i, part in zip(present, shard.split(pieces), strict=True):
            if (partial := self._partial.pop(i, None)) is not None:
                part += partial
        if not self._group.reduces_over_replicas:
            self._partial.update(zip(present, shard.clone().split(pieces), strict=True))
            shard.zero_()
            return
        if self._partial:
            self._group.call_after_backward(self._look_for_partial)
        self._learn({*present, *self._group.trained}, shard.dtype)
        self._follower.begin(self._followed, present)
        self._follow_scale()
        with self._collectives:
            self._average(dict(zip(present, shard.split(pieces), strict=True)))
        if self._group.divides_by is not None:
            shard *= self._transport.world_size

    def _learn(self, found: Collection[int], dtype: torch.dtype) -> None:
        """Where parameters have begun to require gradients, or have another dtype: lay buckets out for them."""
        if not self._known.issuperset(found) or dtype is not self._dtype:
            self._follower.catch_up()
            self._follow_scale()
            self._lay_out(sorted(self._known.union(found)), dtype)
            for each in self._followed:
                each.follow_on()

    def _follow_scale(self) -> None:
        """Let what is kept follow `set_gradient_divide_factor`."""
        for each in self._followed:
            each.feedback.set_average_scale(self._group.scales()[1])

    def forget(self) -> None:
        """An iteration is lost, and what has been added up in it."""
        self._partial.clear()

    def _look_for_partial(self) -> None:
        """Whether a backward has left out what has been added up: the parameter has no `.grad` that it could go to."""
        if self._partial:
            first, self._partial = next(iter(self._partial)), {}
            raise ReducerError(
                f"fastreduce.fsdp: parameter {self._group.members[first].name!r} has been used while "
                "set_requires_all_reduce(False) held, and not in the backward that averages over replicas, where FSDP "
                "reduces nothing of it. Call set_reduce_scatter_unused_params(True) on the model"
            )

    def _average(self, parts: Mapping[int, Tensor]) -> None:
        for pipeline in self.pipelines:
            slots = pipeline.bucket.slots
            grads = [parts.get(slot.parameter) for slot in slots]
            dense = [
                pipeline.used.new_zeros(slot.numel) if grad is None else grad
                for grad, slot in zip(grads, slots, strict=True)
            ]
            unused = [k for k, grad in enumerate(grads) if grad is None]
            pipeline.run(dense, dense, unused)
            for k in unused:
                if pipeline.used_by_any[k] > 0:
                    raise used_elsewhere(slots[k].name, self._transport, "replica")

    def _compare(self) -> None:
        """Replicas that began with other numbers would never come together."""
        told = {}
        for member in self._group.members:  # one at a time, for memory; a frozen base may have integers
            numbers = member.parameter.detach()
            floats = numbers if numbers.is_floating_point() or numbers.is_complex() else numbers.float()
            told[member.name] = repr(norms_of([floats]).flatten().tolist())
        check_agreement(self._transport, {f"the parameter {name!r}": f"norms {norm}" for name, norm in told.items()})
