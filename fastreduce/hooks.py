"""The same compression for those who keep torch's class: a communication hook for stock DDP.

state = CompressState("int8:error_feedback", named_parameters=model.named_parameters())
ddp.register_comm_hook(state, compress)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .compression import Compression
from .environment.exits import Exit, each_at_exit
from .errors import SettingError, brief, no_group
from .policy import single
from .reduction import saved_residuals
from .reduction.agreement import check_agreement
from .reduction.arrivals import Reached, weakly
from .reduction.buckets import BucketPlan, ParameterSpec, build_plan, matrix_rows
from .reduction.jobs import Part, Told
from .reduction.pipeline import BucketPipeline
from .reduction.reducer import shut_down
from .reduction.residuals.bucket_residuals import SlotResiduals
from .reduction.residuals.error_feedback import agree_that_finite
from .reduction.sparse import average
from .reduction.streams import CudaStream, ThreadStream, make_stream
from .reduction.wires.node_level import parts_of
from .transports import Transport, make_transport

NON_MEMBER = dist.GroupMember.NON_GROUP_MEMBER  # what new_group gives ranks outside, which use no state


class _Averaged(NamedTuple):
    """A bucket of one backward, its averages, and the positions of the slots that this rank did not use."""

    pipeline: BucketPipeline
    parameters: list[Tensor]
    averages: list[Tensor]
    unused: list[int]

    def left(self) -> list[int]:
        """Positions of slots that no rank used."""
        used = self.pipeline.used_by_any.tolist() if self.unused else []
        return [i for i in self.unused if not used[i]]

    @torch.no_grad()
    def store(self, left: Collection[int]) -> None:
        """Put averages into `.grad`, but for slots in `left`: ranks that have joined take them to be applied.

        Torch does so itself where it finds that any rank used the parameter. What it adds up to find that is, of a rank
        that joins before its first backward, memory that nothing was written to, which may say less than `used_by_any`.
        """
        for i in set(self.unused).difference(left):
            parameter, average = self.parameters[i], self.averages[i]
            if parameter.grad is None:
                parameter.grad = average.to(parameter.dtype, copy=True)
            elif not _is_view(parameter.grad, average):
                parameter.grad.copy_(average)


def _names_of(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    try:
        names = {parameter: name for name, parameter in named}
        wrong = not all(isinstance(p, Tensor) and isinstance(name, str) for p, name in names.items())
    except (TypeError, ValueError):  # no iterable, or not of pairs
        wrong = True
    if wrong:
        raise SettingError(
            f"CompressState: named_parameters={brief(named)}; allowed: pairs of a name and a parameter, as "
            "model.named_parameters() gives"
        )
    return names


class CompressState:
    """What `compress` keeps between calls: the setting, buffers for each bucket, residuals by parameter name.

    Amid `join` of torch's class nobody tells a rank that has joined what becomes of averages: error feedback takes them
    to be applied there, as they are. Where steps are left out or gradients clipped amid it, use our class.

    Args:
        compression: one setting, as in `fastreduce.all_reduce_gradients`.
        process_group: the group that DDP uses; None means the default group.
        named_parameters: names for saved residuals; without them parameters are numbered in the order in
            which the hook first sees them.

    Raises:
        SettingError: if `compression` is no setting, `process_group` no group, or `named_parameters` are no pairs.
    """

    def __init__(
        self,
        compression: Compression | str | None = None,
        process_group: dist.ProcessGroup | None = None,
        named_parameters: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self.compression = single(compression, "CompressState")
        if not isinstance(process_group, (dist.ProcessGroup, NoneType)) and process_group != NON_MEMBER:
            raise SettingError(
                f"CompressState: process_group={brief(process_group)}; allowed: a ProcessGroup, as new_group "
                "makes, or None"
            )
        self._group = process_group
        self._names = _names_of(named_parameters)
        self._transport: Transport | None = None
        self._pipelines: dict[int, BucketPipeline] = {}
        self._kept: dict[str, SlotResiduals] = {}
        self._steps: dict[torch.device, Tensor] = {}
        self._step = -1  # the number of the last backward
        self._backwards = 0  # that were averaged here
        self._streams: dict[torch.device, CudaStream | ThreadStream] = {}
        # Torch hands over zeros for parameters that no rank used, and drops their averages.
        self._reached = Reached(self._look)
        self._averaged: list[_Averaged] = []
        self._used: dict[str, float] = {}  # of parameters whose buckets are gone, whether any rank used them last
        if self.compression.error_feedback:
            self._reached.watch(self._names)

    def pipeline(self, bucket: Any) -> BucketPipeline:
        """The buffers for a `dist.GradBucket`; new ones when DDP has laid its buckets out anew."""
        names = [self._names.setdefault(p, f"parameter {len(self._names)}") for p in bucket.parameters()]
        known = self._pipelines.get(bucket.index())
        if known is not None and [slot.name for slot in known.bucket.slots] == names:
            return known
        if known is not None:  # with those behind it; those before it have stayed, and are under way
            given_up = self._give_up(bucket.index())
            for each in given_up:
                if each.feedback is not None:  # not to look again: torch has put other tensors into `.grad` by now
                    each.feedback.commit()
            self._kept |= saved_residuals.collect(given_up)
        buffer = bucket.buffer()
        specs = [
            ParameterSpec(name, grad.numel(), buffer.dtype, buffer.device, matrix_rows(grad))
            for name, grad in zip(names, bucket.gradients(), strict=True)
        ]
        transport = self._connect(buffer.device)
        plan = build_plan(
            specs,
            [range(len(specs))],
            alignment=self.compression.alignment,
            shards=transport.world_size,
            parts=[parts_of(transport, self.compression)],
        )
        if buffer.device not in self._steps:
            self._steps[buffer.device] = torch.tensor([self._step], device=buffer.device)
        made = BucketPipeline(plan.buckets[0], self.compression, transport, step=self._steps[buffer.device])
        moved = {name: self._kept.pop(name) for name in names if name in self._kept}
        if moved:
            saved_residuals.restore(moved, [made])
        if self.compression.error_feedback:
            # Torch's own map is memory that nothing was written to before the first backward: mostly used, as it says.
            made.used_by_any.copy_(torch.tensor([self._used.get(name, 1.0) for name in names], device="cpu"))
        self._pipelines[bucket.index()] = made
        return made

    def _give_up(self, first: int) -> list[BucketPipeline]:
        """Take out the pipelines of bucket `first` and those behind it."""
        given_up = [self._pipelines.pop(index) for index in list(self._pipelines) if index >= first]
        for each in given_up:
            names = [slot.name for slot in each.bucket.slots]
            self._used.update(zip(names, each.used_by_any.tolist(), strict=True))
        return given_up

    def _connect(self, device: torch.device) -> Transport:
        if self._transport is None:
            self._transport = make_transport(self._ranks(), device)
            check_agreement(self._transport, {"compression": str(self.compression)})
            self._close = weakref.finalize(self, shut_down, self._streams, self._transport)
            self._close.atexit = False
            _alive.add(self)
        return self._transport

    def _ranks(self) -> dist.ProcessGroup:
        group = self._group or dist.group.WORLD
        if group is None:
            raise no_group("CompressState")
        return group

    def average(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket on the communication stream; the future holds its buffer.

        A sparse gradient, which torch puts in a bucket of its own, travels uncompressed.
        """
        device = bucket.buffer().device
        if bucket.index() == 0:
            self._step += 1
            self._backwards += 1
            for step in self._steps.values():
                step.add_(1)
        # With a device, it takes note of the stream on which its result is set.
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        begin, averaged = (self._sparse if bucket.buffer().is_sparse else self._dense)(bucket)
        if device not in self._streams:
            self._streams[device] = make_stream(device, self._connect(device))
        self._streams[device].submit(begin, _telling(future, averaged))
        return future

    def _dense(self, bucket: Any) -> tuple[Part, Callable[[], Tensor]]:
        """The first part of the job, and what gives the average when all have been done."""
        pipeline, gradients = self.pipeline(bucket), bucket.gradients()
        buffer: Tensor = bucket.buffer()
        unused, followed_here = list[int](), False
        if self.compression.error_feedback:
            joined = torch._C._current_graph_task_id() == -1  # there is no backward: the others apply the averages
            unused = self._reached.take(bucket.parameters())
            if joined:  # it brings what any rank used before, as in torch's own map, by which averages are stored
                unused = (pipeline.used_by_any == 0).nonzero().flatten().tolist()
            if bucket.index() == 0:  # what there is is of a backward that raised
                self._averaged.clear()
                if joined:
                    self._look()  # at the last averages that it has had itself
            self._averaged.append(_Averaged(pipeline, bucket.parameters(), gradients, unused))
            if bucket.is_last():
                followed_here = joined
                if not joined:
                    self._call_after_backward()

        views = [i for i in unused if _is_view(bucket.parameters()[i].grad, gradients[i])]
        before: dict[int, Tensor] = {}

        def begin() -> Part:
            before.update((i, gradients[i].clone()) for i in views)
            return pipeline.begin(gradients, gradients, unused)

        def averaged() -> Tensor:
            for i, gradient in before.items():  # torch would leave it alone, did it not lie in the bucket
                gradients[i].copy_(torch.where(pipeline.used_by_any[i] == 0, gradient, gradients[i]))
            if followed_here:
                self._follow(watched=False)
            return buffer

        return begin, averaged

    def _sparse(self, bucket: Any) -> tuple[Part, Callable[[], Tensor]]:
        gradient: Tensor = bucket.buffer()
        transport, parameters = self._connect(gradient.device), bucket.parameters()
        found: list[Tensor | None] = []

        def begin() -> None:
            found.extend(average(transport, [gradient], [True], parameters, transport.world_size))

        return begin, lambda: gradient if found[0] is None else found[0]

    # What error feedback must know beside the bucket

    def _look(self) -> None:
        # Behind the first backward torch lays buckets out anew, and puts copies into `.grad` where those are views.
        copies = self._backwards == 1
        for pipeline in self._pipelines.values():
            if pipeline.feedback is not None:
                pipeline.feedback.look(copies=copies)

    def _call_after_backward(self) -> None:
        """Follow what becomes of the averages once torch has stored them: behind the callback that it queues next."""
        engine: Any = torch.autograd.Variable._execution_engine
        stored = weakly(self._follow)
        engine.queue_callback(lambda: engine.queue_callback(stored))

    def _follow(self, watched: bool = True) -> None:
        averaged, self._averaged = self._averaged, []
        self._reached.end()
        feedbacks = []
        for each in averaged:
            assert each.pipeline.feedback is not None
            left = each.left()
            if watched:
                each.store(left)
            each.pipeline.feedback.follow(each.parameters, left, each.pipeline.magnitudes, watched=watched)
            feedbacks.append(each.pipeline.feedback)
        agree_that_finite(feedbacks)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, and the step; each rank saves its own."""
        ranks = self._ranks()
        buckets = [self._pipelines[index] for index in sorted(self._pipelines)]
        plan = BucketPlan(tuple(p.bucket for p in buckets), ranks.size())
        saved = saved_residuals.save(plan, buckets, ranks.rank(), ranks.size(), str(self.compression), folded=True)
        return {
            **saved,
            "step": self._step,
            "residuals": {name: parts.residual for name, parts in self._kept.items()} | saved["residuals"],
            "units": {name: parts.unit for name, parts in self._kept.items() if not math.isnan(parts.unit)}
            | saved["units"],
            "factors": {n: parts.factor for n, parts in self._kept.items() if parts.factor is not None}
            | saved["factors"],
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        Raises:
            SettingError: if the state is none, or of another compression, or ranks are missing.
        """
        ranks = self._ranks()
        states = list(state) if isinstance(state, Sequence) else [state]
        if not all(isinstance(each, Mapping) and "compression" in each for each in states):
            raise SettingError(
                f"CompressState.load_state_dict: {brief(state)}; allowed: what state_dict() gave, or a list "
                "of that of all ranks"
            )
        chosen = saved_residuals.pick(states, ranks.rank(), ranks.size(), str(self.compression))
        self._kept = saved_residuals.kept_in(chosen)
        self._give_up(0)  # nothing of what was kept until now stays
        self._averaged.clear()
        self._step = chosen.get("step", -1)
        for step in self._steps.values():
            step.fill_(self._step)


def _is_view(grad: Tensor | None, gradient: Tensor) -> bool:
    """Whether a bucket's gradient is what lies in `.grad`."""
    return grad is not None and grad.data_ptr() == gradient.data_ptr()


_alive: weakref.WeakSet[CompressState] = weakref.WeakSet()  # those with a connection
each_at_exit(Exit.REDUCERS, lambda state: state._close(), _alive)


def _telling(future: torch.futures.Future[Tensor], averaged: Callable[[], Tensor]) -> Told:
    """What tells the future of a job's end: the average, or an error, which torch raises behind backward."""
    held = [averaged]  # so that a state that is let go of behind the last future has no other reference here

    def told(error: BaseException | None) -> None:
        average = held.pop()
        if error is None:
            try:
                result = average()
            except Exception as raised:
                future.set_exception(raised)  # type: ignore[arg-type]
                return
            del average
            future.set_result(result)
        else:
            del average
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))  # type: ignore[arg-type]

    return told


def compress(state: CompressState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of torch's DDP under `state`'s compression; register it with `register_comm_hook`.

    Raises:
        SettingError: if `state` is no CompressState.
    """
    if not isinstance(state, CompressState):
        raise SettingError(f"compress needs a CompressState, got {type(state).__name__}: {state!r}")
    return state.average(bucket)


# torch compares annotations with its own classes, and does not take strings.
compress.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
