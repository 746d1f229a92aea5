"""Training under one setting while contestants are timed: `fastreduce compare --weights-from`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ddp import DistributedDataParallel
from ..errors import SettingError
from ..reduction.arrivals import accumulation_node, weakly
from ..reduction.pipeline import BucketPipeline
from ..reduction.reducer import GradientReducer
from ..reduction.residuals.applied import norms_of
from ..reduction.schedule import Schedule
from ..reduction.telemetry.flight_record import Phase
from ..transports import make_transport
from .contestants import Place

REPETITIONS = 5  # of a copy whose time is taken


class WeightsFrom:
    """Lets contestants reduce a wrapper's backwards, and its optimizer see the averages of the wrapper's own setting.

    The wrapper keeps its reducer, and contestants share another one. Every rank calls all of this at the same points.

    1. `contest`, before a forward: the contestants' reducer takes the place of the wrapper's.
    2. A hook on each parameter's node, in front of the reducers', copies this rank's gradient.
    3. The contestant reduces, and its time is taken.
    4. `settle`, behind the backward: the wrapper's reducer is back, finds the copies in `.grad`, and reduces them in
       the order in which they came. The script finds averages, norms, residuals and steps as if nobody contested.
    5. What becomes of these averages becomes of the contestant's, as far as its error feedback is told.

    Args:
        model: a new wrapper, which has begun with the setting.

    Raises:
        SettingError: if its ranks may be lost.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        if model._elastic:
            raise SettingError("--weights-from and elastic=True: a reduction that is made twice cannot lose a rank")
        self._model = weakref.ref(model)
        self._own, self._own_place = model.reducer, Place.of(model)
        self._parameters = model.reducer.buckets.gradients.parameters
        self._copies: list[Tensor | None] = [None] * len(self._parameters)
        self._kept: dict[int, Tensor | None] = {}  # gradients of this rank in the backward under way; None: none
        self._order: list[int] = []  # in which they came
        self._used: set[int] = set()  # since the last reduction
        self._due = False  # whether the next backward is to be reduced
        self._own.remove_hooks()
        self._nodes = [accumulation_node(parameter) for parameter in self._parameters]  # hooks die with them
        for i, node in enumerate(self._nodes):
            node.register_hook(partial(weakly(self._arrive), i))
        self._contestants = self._make_reducer(model)
        self._place = Place.of(model)  # the contestant's
        self._own_place.put_into(model)
        self._reductions = 0  # of the contestants', when their residuals were told last
        self._followed: list[_Followed] = []

    def _make_reducer(self, model: Any) -> GradientReducer:
        """A second reducer, with connections and a setting of its own, in the wrapper's place for it."""
        mine = model._transport, model._schedule
        model._transport, model._schedule = make_transport(model.process_group, model.device_type), Schedule("none")
        try:
            parameters, sparse = model._build_params_for_reducer()
            names = model._build_debug_param_to_name_mapping(parameters)
            model._ddp_init_helper(parameters, sparse, names, model.static_graph)
        finally:
            model._transport, model._schedule = mine
        made: GradientReducer = model.reducer
        made.events.computed.append(weakly(self._keep_rest))
        return made

    # The way of a step

    def contest(self, model: Any) -> None:
        """Before a forward with gradients: from here on the contestant is in the wrapper's place."""
        self._own._rebuild_buckets()
        if model.reducer is self._own:
            self._place.put_into(model)
            self._kept.clear()
            self._order.clear()
            if self._own.buckets.keeps_statistics:
                self._contestants.keep_statistics()
        self._own.recorder.enter(Phase.FORWARD)  # else all until its own reduction were data
        self._due |= model.require_backward_grad_sync

    def look(self) -> None:
        """Before a backward: see what has become of the last averages."""
        self._own.recorder.enter(Phase.BACKWARD)
        self._own.buckets.look()

    def settle(self) -> None:
        """After a backward: where it was to be reduced, `.grad` become the averages of the wrapper's own reducer."""
        model: Any = self._model()
        if not self._order or model is None:
            return
        if model.reducer is not self._own:
            self._place = Place.of(model)
            self._own_place.put_into(model)
        self._put_back()
        self._own.replay(self._order, self._used)
        self._due = False
        self._order.clear()
        self._used.clear()
        if self._contestants.reductions != self._reductions:
            self._reductions = self._contestants.reductions
            self._tell()
        self._contestants.recorder.restart()  # neither the reduction for the optimizer nor others' turns are its step

    def copy_seconds(self) -> float:
        """How long the copies of one step take, the median of a few."""
        pairs = [(copy, torch.empty_like(copy)) for copy in self._copies if copy is not None and not copy.is_sparse]
        found = []
        for _ in range(REPETITIONS + 1):  # the first pays for memory
            start = time.perf_counter()
            for copy, other in pairs:
                other.copy_(copy)
            if self._parameters[0].is_cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - start)
        return sorted(found[1:])[REPETITIONS // 2]

    # Gradients of this rank

    def _arrive(self, i: int, _: object = None, grads: Sequence[Tensor | None] = (None,)) -> None:
        """As a reducer's own hook: a gradient has accumulated."""
        if grads[0] is not None:
            self._used.add(i)
        if not self._due:
            if self._contestants.backward.running:
                raise SettingError(
                    "--weights-from and a second backward through one forward, for what the first left out, exclude "
                    "each other: sum the losses and call backward once"
                )
            return
        first = not self._order
        self._order.append(i)
        if first and self._own.buckets.as_views:  # torch's reducer may average in `.grad` itself from here on
            self._keep_rest()
        elif first:  # torch's reducer stores averages behind this; ours asks `_keep_rest` before
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(weakly(self._keep_rest))
        self._keep(i)

    @torch.no_grad()
    def _keep(self, i: int) -> None:
        grad, copy = self._parameters[i].grad, self._copies[i]
        if grad is None:
            self._kept[i] = None
            return
        if copy is None or not _alike(grad, copy):
            copy = self._copies[i] = grad.detach().clone()
        else:
            copy.copy_(grad)
        self._kept[i] = copy

    def _keep_rest(self) -> None:
        """Gradients that this backward does not reach are about to be averaged, too."""
        if self._order:
            for i in range(len(self._parameters)):
                if i not in self._kept:
                    self._keep(i)

    @torch.no_grad()
    def _put_back(self) -> None:
        for i, copy in self._kept.items():
            parameter = self._parameters[i]
            if copy is None or parameter.grad is None or not _alike(parameter.grad, copy):
                parameter.grad = None if copy is None else copy.clone()
            else:
                parameter.grad.copy_(copy)
        self._kept.clear()

    @torch.no_grad()
    def _tell(self) -> None:
        """Let the contestant's error feedback follow the averages that have taken the place of its own."""
        self._followed = [
            _Followed(pipeline, [self._parameters[slot.parameter] for slot in pipeline.bucket.slots])
            for pipeline in self._contestants.pipelines
            if pipeline.kept is not None
        ]


class _Followed:
    """A bucket's averages that have taken the place of a contestant's, and what is noted of them."""

    def __init__(self, pipeline: BucketPipeline, parameters: Sequence[Tensor]) -> None:
        nothing = torch.zeros(1, dtype=pipeline.bucket.dtype, device=pipeline.bucket.device)
        self._norms = norms_of([nothing if p.grad is None else p.grad for p in parameters])
        left = [position for position, used in enumerate(pipeline.used_by_any.tolist()) if used == 0]
        assert pipeline.kept is not None
        pipeline.kept.follow(parameters, left, self.magnitudes)

    def magnitudes(self) -> Tensor:
        """As those of the pipeline."""
        return self._norms.clone()


def _alike(grad: Tensor, copy: Tensor) -> bool:
    if grad.layout is not torch.strided or copy.layout is not torch.strided:
        return False
    return (grad.shape, grad.dtype, grad.stride()) == (copy.shape, copy.dtype, copy.stride())
