"""Backward: what is reduced of one backward, from the forward that arms it to averages in `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from ..errors import ReducerError, TransportError
from .agreed_schedule import AgreedSchedule
from .arrivals import Arrivals, makes_graph, weakly
from .autograd_stack import AutogradStack
from .bucketed import BucketedGradients
from .distributed_autograd import context_through, current_context, gradients_of
from .events import Events, call_all
from .launches import Launches, Made, goes_well
from .left_over import LeftOver
from .sparse import SparseGradients
from .telemetry.flight_record import Phase
from .telemetry.telemetry import Telemetry


class _Stage(IntEnum):
    """What ranks have done together in the reduction under way, once its buckets have been begun."""

    BUCKETS = 0
    ARRIVED = 1  # Events.arrived
    SPARSE = 2
    MET = 3  # Events.met


class Backward:
    """Launches buckets in index order as they become full, and settles all of them when backward has ended.

    `lay_out` comes first. What a backward leaves behind that raised is forgotten by the next forward.

    Args:
        buckets: the gradients, laid out.
        sparse: those that travel in no bucket.
        agreed: where steps are counted.
        events: what is called on the way.
        overlaps: whether full buckets are launched during backward, or all when it has ended.

    Attributes:
        arrivals: which gradients have arrived.
        telemetry: what is noted of it.
        armed: whether the next backward is to be reduced.
        running: whether a backward has begun that has not come to its end.
        reduced_once: whether one has been reduced.
        manual: whether averages are stored when `finish` is called, and not at the end of backward.
        brought_all: under `manual`, whether the last reduction had gradients of this rank for every parameter.
        unfinished: whether a backward has come to its end, and `finish` is awaited.
        siblings: those of other reducers that average some of the same gradients.
        reductions: how many there have been that these ranks share.
        active_ranks: tells how many ranks bring gradients; None means that all do.
        recover: called where a reduction fails, with the error, the step and what had been launched; when it returns,
            gradients are as they were, and are reduced again. Then nothing follows a reduction (`Events.met`), and
            another backward through the same forward brings nothing.
    """

    active_ranks: Callable[[], int] | None = None
    recover: Callable[[TransportError, int, Made], None] | None = None

    def __init__(
        self,
        buckets: BucketedGradients,
        sparse: SparseGradients,
        agreed: AgreedSchedule,
        events: Events,
        overlaps: bool,
    ) -> None:
        self._buckets, self._sparse, self._agreed, self._events = buckets, sparse, agreed, events
        self.overlaps = overlaps
        self.reductions = 0
        self.armed = self.running = self.reduced_once = self.unfinished = False
        self.manual = self.brought_all = False
        self._told = False  # whether `_tell_joined` has, since `arm`
        self._meet_first = False  # whether some have joined, so that it tells before any bucket is launched
        self.siblings: weakref.WeakSet[Backward] = weakref.WeakSet()
        self._in_turn = False  # whether one of these may reduce in the same backward
        self._forward_context: int | None = None  # of torch.distributed.autograd
        self._context: int | None = None  # where the gradients of the backward under way may be
        self._task = -1  # autograd's number of the last backward
        self._stack = AutogradStack()
        self._on_output, self._on_end = weakly(self._enter), weakly(self._end)
        self._on_local_output, self._on_left = weakly(self._look_locally), weakly(self._leave)
        self._left_over = LeftOver(buckets)
        self.arrivals = Arrivals(buckets.gradients.parameters, self._launch_full_buckets, self._report)
        self.telemetry = Telemetry(buckets, self.arrivals.used)
        self._recorder = self.telemetry.recorder
        events.launching.append(self._recorder.ready)
        self._launches = Launches(buckets, self.arrivals.used, events.launching)

    # Between two backwards

    def lay_out(self) -> None:
        """Buckets have been laid out anew."""
        self.arrivals.lay_out(self._buckets.plan)
        self._recorder.lay_out(self._buckets.plan, self._buckets.pipelines)
        self._forget()
        if self.armed:
            self.arrivals.report()
        self._buckets.is_laid_out = True

    def add(self, parameters: Sequence[Tensor]) -> None:
        """Buckets hold the gradients of these, too: the next backward is counted as the first one was."""
        self.arrivals.add(parameters)
        self._left_over.add(len(parameters))
        self._recorder.parameters |= set(map(id, parameters))
        self.reduced_once = self.brought_all = False
        self.lay_out()

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind.

        Raises:
            ReducerError: if buckets could not be laid out.
        """
        self._buckets.check_laid_out()
        self.drop_broken()
        self._forget()
        self.armed, self._told = True, False
        self._forward_context, self._context = current_context(), None
        self._left_over.forget()
        self._stack.note_forward()
        self._buckets.at_step(self._agreed.schedule.step)
        # Until the backward is known to have begun, and all through the first one, every hook reports.
        self.arrivals.report()

    def drop_broken(self) -> None:
        """Forget a backward that raised before its end, and make up for the collectives that this rank owes.

        Raises:
            ReducerError: as `check_ended`.
        """
        self.check_ended()
        if not self.running:
            return
        try:
            with suppress(TransportError):
                self._bring_rest()
        finally:
            if self.armed:  # it is one that ranks have reduced
                self.arrivals.forget_used()
            self.armed = self.running = False
            for feedback in self._buckets.feedbacks:
                feedback.stored = True
            self._forget()
        call_all(self._events.dropped)

    def _bring_rest(self) -> None:
        """What the others wait for of a backward that raised here, with NaN in the place of gradients."""
        self._launches.end_as_they_can()
        if self.armed:
            self._tell_joined()
            self._count()  # as on the ranks that reduce it
            for pipeline in self._buckets.pipelines[self._launches.next :]:
                goes_well(partial(self._buckets.run_broken, pipeline))
            if self._stage < _Stage.ARRIVED:
                call_all(self._events.arrived)
            if self._stage < _Stage.SPARSE:
                self._sparse.take_part(self._divisor(), broken=True)
            if self._stage < _Stage.MET:
                self._meet(counted=True)

    def check_finished(self) -> None:
        """Raise if a backward awaits `finish`.

        Raises:
            ReducerError: if one does.
        """
        if self.unfinished:
            raise ReducerError(
                f"rank {self._recorder.rank}: the last backward awaits its averages: call finalize_backward() after "
                "every backward that is synchronized, as require_manual_backward_finalization=True has it"
            )

    def check_ended(self) -> None:
        """Raise if a backward is under way, or awaits `finish`.

        Raises:
            ReducerError: if one is or does.
        """
        self.check_finished()
        if self.running and not self.has_raised:
            raise ReducerError(
                f"rank {self._recorder.rank}: a forward with gradients began while a backward of the same wrapper was "
                "under way, on another thread or around this one, which goes on: call it when that has ended, or "
                "under torch.no_grad()"
            )

    def reset(self) -> None:
        """Forget what is under way and what was learned, as if no backward had been."""
        self.armed = self.running = self.reduced_once = self.unfinished = False
        self.active_ranks = None
        self._left_over.forget()
        self.arrivals.forget_used()
        self.arrivals.fires[:] = [1] * len(self.arrivals.fires)
        self._forget()

    def _forget(self) -> None:
        self._buckets.streams.join()  # gradients are let go of
        self._launches.forget()
        self._stage = _Stage.BUCKETS
        self.arrivals.stop()
        if not self.reduced_once:
            self.arrivals.order.clear()

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        order, fires = self.arrivals.order.copy(), self.arrivals.fires.copy()
        return {"reduced_once": self.reduced_once, "order": order, "fires": fires}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` told."""
        self.reduced_once = state["reduced_once"]
        self.arrivals.order[:], self.arrivals.fires[:] = state["order"], state["fires"]

    # During one

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Hook a forward's outputs, so that the end of the outermost backward through them is known.

        One that is not reduced is only to see, where the last averages have not been applied, whether they are still
        there when it begins: what it accumulates would be taken for them.
        """
        if makes_graph() and not torch.jit.is_tracing():  # whose graph would have the view that finds a node
            self.arrivals.follow(self._buckets.gradients.is_as_wrapped, self.armed)
        if not self.armed and all(feedback.is_settled for feedback in self._buckets.feedbacks):
            return
        hook = self._on_output if self.armed else self._on_local_output
        for output in outputs:  # one that earlier forwards have returned has the hook
            if output.grad_fn is not None and hook not in (output._backward_hooks or {}).values():
                output.register_hook(hook)

    @_disable_dynamo
    def _look_locally(self, _: object = None) -> None:
        if not self.running:
            self._buckets.look()

    @property
    def brought(self) -> Sequence[bool]:
        """For each parameter, whether this rank brought a gradient to the last reduction."""
        return self._left_over.brought

    @property
    def is_here(self) -> bool:
        """Whether the backward that has begun is the one that the caller is in: a checkpoint runs forwards there."""
        return self.running and self._task == torch._C._current_graph_task_id() != -1

    @property
    def has_raised(self) -> bool:
        """Whether a backward has begun that will not come to its end."""
        return self.running and not self.unfinished and self._stack.has_left_last(others=0)

    @property
    def _is_stale(self) -> bool:
        """Whether the backward that has begun raised, and this is another."""
        if not self.running or self.unfinished or self._task == torch._C._current_graph_task_id():
            return False
        return self._stack.has_left_last(others=1)

    @_disable_dynamo
    def _enter(self, _: object = None) -> None:
        if self._is_stale:
            if self.armed and self._brings_gradients:
                raise ReducerError(
                    f"rank {self._recorder.rank}: an earlier backward through this forward raised, with some gradients "
                    "accumulated and others not: run the forward again"
                )
            self.running = False  # as autograd.grad, it had brought none
        if (self.armed or not all(self._left_over.brought)) and not self.running:
            if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
                raise ReducerError(
                    f"rank {self._recorder.rank}: compiled autograd (torch._dynamo.config.compiled_autograd) runs this "
                    "backward without the callback at its end, where gradients are averaged: leave it off"
                )
            self.running, self._task = True, torch._C._current_graph_task_id()
            self._recorder.enter(Phase.BACKWARD)
            self._buckets.look()
            self._find_context()
            if self.armed:
                if self._context is None:  # else `.grad` has nothing, and nothing was thrown away
                    self.arrivals.forget_thrown_away()
                self._meet_first = self._buckets.uneven.matter(self._buckets.transport.world_size)
                self._in_turn = any(sibling.armed for sibling in self.siblings)
                if self.reduced_once:
                    self.arrivals.count()
            self._stack.call_at_end(self._on_end, self._on_left)

    def _find_context(self) -> None:
        self._context = context_through(self._forward_context)
        if self._context is not None and self.manual:
            raise ReducerError(
                f"rank {self._recorder.rank}: torch.distributed.autograd and require_manual_backward_finalization=True "
                "exclude each other"
            )

    def _report(self, i: int) -> None:
        if self.unfinished:
            raise ReducerError(
                f"rank {self._recorder.rank}: parameter {self._buckets.specs[i].name!r} received a gradient between "
                "the end of a backward and finalize_backward(): call that first"
            )
        if self._is_stale:  # a backward of the module inside
            return
        if not self.running:  # no output hook has run
            self._enter()
            if self.armed and self._stack.is_within_another():
                raise ReducerError(
                    f"rank {self._recorder.rank}: parameter {self._buckets.specs[i].name!r} received a gradient in a "
                    "re-entrant checkpoint before the backward had come through any tensor that the forward returned, "
                    "so where it ends cannot be known. Let the forward return the tensors that the loss is made of, "
                    "or checkpoint with use_reentrant=False"
                )
            self.arrivals.again(i)
        elif not self.reduced_once:
            self._buckets.streams.note_caller()
            self.arrivals.order.append(i)
            if self.armed and self._context is None:
                self._buckets.gradients.take_in(i)
        elif (bucket := self.arrivals.bucket_of[i]) < self._launches.next:
            raise ReducerError(
                f"rank {self._recorder.rank}: parameter {self._buckets.specs[i].name!r} received a gradient after "
                f"its bucket {bucket} had been sent. In the first backward it received {self.arrivals.fires[i]} "
                "gradient(s), now more: run the forward that uses it most often first, or checkpoint with "
                "use_reentrant=False"
            )

    def _launch_full_buckets(self) -> None:
        # The last bucket is full when backward ends: it is run there, without a change of threads.
        # What two reducers average in place, each does at the end, one after the other.
        # A context's gradients are in `.grad` at the end only.
        waits = self._in_turn or self._context is not None
        last = len(self._buckets.pipelines) - 1 if self.overlaps and not waits else 0
        if self._is_stale:  # gradients of another backward are not of the one that ranks reduce
            return
        self._buckets.streams.note_caller()
        if self._meet_first:  # at the end: a bucket is not full at the same point of all ranks' backward
            return
        self._launches.launch_full(self.arrivals.waiting, last)

    def replay(self, order: Iterable[int], used: Iterable[int]) -> None:
        """Reduce what is in `.grad`, as if a backward had brought it to hooks (`TorchReducer.replay`)."""
        self.running, self._task = True, torch._C._current_graph_task_id()
        self._recorder.enter(Phase.BACKWARD)
        if self.reduced_once:
            self.arrivals.count()
        for i in used:
            self.arrivals.used[i] = True
        for i in order:
            self.arrivals.again(i)
        self._end()

    # At its end

    @torch.no_grad()
    def _leave(self, _: object) -> None:
        """Autograd has left it: where it raised, `.grad` are the user's, to zero them in place, say."""
        if self.running and not self.unfinished:
            self._launches.let_go()

    @torch.no_grad()
    def _end(self) -> None:
        if not self.running:  # finished in a hook
            return
        self._bring_unseen()
        if not self.armed:
            self.running = False
            self._reduce_left_over()
        elif self._brings_gradients:
            call_all(self._events.computed)
            if self.manual:
                self._launch_rest()
                return
            self._reduce()
        else:  # autograd.grad: nothing was accumulated, so the forward stays armed
            self.running = False
            self._buckets.gradients.check_unmoved(range(len(self._buckets.specs)))
            self.arrivals.report()
        call_all(self._events.ended)

    def _bring_unseen(self) -> None:
        """Where a part of the module was moved and is back, its gradients are here, and no hook has seen them come."""
        come = self.armed and self._brings_gradients
        unseen = set() if come else self.arrivals.reached()
        if come or (self.armed and unseen):  # else what is in `.grad` may be older
            unseen |= self.arrivals.unseen()
        if unseen:
            self._buckets.gradients.check_unmoved(sorted(unseen))
            self.arrivals.attach()
            for i in sorted(unseen):
                self.arrivals.used[i] = True
                self.arrivals.again(i)

    @torch.no_grad()
    def finish(self) -> None:
        """Store the averages of a backward under `manual`: after its end, or in a hook once all gradients are here.

        Raises:
            ReducerError: if there is none, or it raised, or within the first one, or if gradients are still to come.
        """
        rank = self._recorder.rank
        if not (self.running and self.armed and self._brings_gradients):
            raise ReducerError(
                f"rank {rank}: finalize_backward() without a backward to finalize: it is called once for each backward "
                "that is synchronized"
            )
        if not self.unfinished:
            if not self.is_here:
                raise ReducerError(f"rank {rank}: finalize_backward() after a backward that raised before its end")
            missing = [spec.name for spec, left in zip(self._buckets.specs, self.arrivals.missing, strict=True) if left]
            if not self.reduced_once:
                raise ReducerError(f"rank {rank}: finalize_backward() within the first backward: call it after that")
            if missing:
                raise ReducerError(
                    f"rank {rank}: finalize_backward() in a backward that has brought no gradient yet to "
                    f"{len(missing)} parameters, the first of them {missing[0]!r}: call it once all have theirs"
                )
            call_all(self._events.computed)
        self._reduce()
        call_all(self._events.ended)

    @property
    def _brings_gradients(self) -> bool:
        return self.arrivals.counted_any if self.reduced_once else bool(self.arrivals.order)

    def _launch_rest(self) -> None:
        """At the end of a backward under `manual`: nothing is stored yet."""
        self._tell_joined()
        self._launches.launch_rest(last_here=False)
        self.unfinished = True
        self.arrivals.report()

    def _gradients_here(self) -> AbstractContextManager[None]:
        gradients = self._buckets.gradients
        return gradients_of(
            self._context, gradients.parameters, gradients.names, self.arrivals.used, self._recorder.rank
        )

    def _reduce(self) -> None:
        self.unfinished = False
        try:
            with self.telemetry.explaining(), self._gradients_here():  # else it is one that raised, and has sent some
                self.armed = self.running = False
                if self.recover is None:
                    self._reduce_all()
                else:
                    self._reduce_until_all_have(self.recover)
        except BaseException as error:
            self._launches.end_if_interrupted(error)
            raise

    def _reduce_until_all_have(self, recover: Callable[[TransportError, int, Made], None]) -> None:
        """Reduce again where a reduction has failed, as often as it takes.

        Where that cannot be done either, this backward stays one that did not come to its end: others may have.
        """
        ended = False
        try:
            while not ended:
                step, used, launches = self._agreed.schedule.step, list(self.arrivals.used), self._launches.made
                try:
                    self._reduce_all()
                    ended = True
                except TransportError as error:
                    self._agreed.schedule.step, self.arrivals.used[:] = step, used
                    self._left_over.parameters.clear()
                    recover(error, step, launches)
        finally:
            self.running = not ended

    def _reduce_all(self) -> None:
        self._recorder.enter(Phase.WAITING)
        try:
            self._tell_joined()
            self._launches.all_begun()
            self._launches.launch_rest(last_here=True)
            left_over = self._left_over.parameters
            left_over |= self._unused_alone(range(self._launches.next)) | self._store(self._launches)
            left_over |= self._sparse.settle(self.arrivals.used, self._divisor())
            self._stage = _Stage.SPARSE
            self._meet()
            self._stage = _Stage.MET
            self._buckets.agree_that_finite()
            self.telemetry.nonfinite.count(self._buckets.pipelines, self._recorder.rank)
        except TransportError:
            try:
                self._launches.results()  # the first bucket that failed tells more than the last
            finally:
                self._end_reduction()
            raise
        except BaseException:
            # On this rank alone, it may be: the others wait for the rest, which `drop_broken` brings.
            self.armed = self.running = True
            raise
        self._end_reduction()
        call_all(self._events.stored)
        self._recorder.end_step(self._agreed.schedule.step - 1)

    def _end_reduction(self) -> None:
        self._launches.cancel()
        self._count()
        self._left_over.brought[:] = self.arrivals.used  # before they are forgotten
        self.brought_all = self.manual and all(self._left_over.brought)
        self.arrivals.forget_used()
        if not self.reduced_once:
            self.reduced_once = True
            self.arrivals.learn_fires()
        self._forget()

    def _unused_alone(self, indices: Iterable[int]) -> set[int]:
        """Of buckets with which there is nothing to do: the parameters that this rank has not used."""
        alone = [self._buckets.unused(i, self.arrivals.used) for i in indices if self._buckets.alone(i)]
        return set[int]().union(*alone)

    def _store(self, launches: Launches) -> set[int]:
        """Store averages when all have come; returns the parameters that no rank used."""
        left = set()
        launches.results()
        call_all(self._events.arrived)
        self._stage = _Stage.ARRIVED
        divisor = self._divisor()
        for job, _ in launches.made:
            left |= self._buckets.settle(job, divisor)
        return left

    def _reduce_left_over(self) -> None:
        """Reduce what another backward through the same forward brought (`LeftOver`).

        That all ranks do is not known before they meet: one without first gradients might be in the next step's by now.
        """
        used, left_over = self.arrivals.used, self._left_over
        why_once = "with elastic=True" if self.recover is not None else ""
        if self._buckets.uneven.some_had_joined:
            why_once = "where ranks have joined, which know of no second one,"
        first = left_over.first(used, why_once)
        if not first:
            return
        with self.telemetry.explaining(), self._gradients_here():
            self.telemetry.await_all(
                f"{len(left_over.parameters)} left over of reduction {self.reductions}",
                f"rank {self._recorder.rank}: a second backward through one forward brought first gradients for "
                f"{self._buckets.gradients.names[first[0]]!r}, and on all ranks it must bring some, or on none: ",
            )
            in_buckets = left_over.parameters.intersection(self._buckets.indices)
            buckets = sorted({self.arrivals.bucket_of[i] for i in in_buckets})
            launches = Launches(self._buckets, used, self._events.launching)
            launches.launch_these(buckets)
            left = self._unused_alone(buckets) | self._store(launches)
            left |= self._sparse.settle(used, self._divisor(), left_over.parameters)
        left_over.settle(first, left)
        self.arrivals.forget_used()

    def take_part(self) -> None:
        """Bring zeros to the reduction of one backward on the other ranks, which apply the averages."""
        self._recorder.enter(Phase.WAITING)
        self.arrivals.forget_used()
        self._told = False
        self._tell_joined()
        self._buckets.at_step(self._agreed.schedule.step)
        self._buckets.take_part()
        call_all(self._events.arrived)
        self._buckets.agree_that_finite()
        self._sparse.take_part(self._divisor())
        self._meet()
        self._count()
        self.reduced_once = True
        self._forget()
        self._recorder.end_step(self._agreed.schedule.step - 1)

    def _tell_joined(self) -> None:
        """Before a reduction's first collective, and not in `autograd.grad`, of which who has joined knows nothing."""
        if not self._told:
            self._told = True
            with self.telemetry.explaining():
                self._buckets.tell_joined(self._divisor())

    def _count(self) -> None:
        """One more reduction."""
        self._agreed.schedule.step += 1
        self.reductions += 1

    def _meet(self, counted: bool = False) -> None:
        """At the end of a reduction, the same one on all ranks: those who follow it with collectives."""
        if self.recover is None:  # else some ranks might find others gone, and some not
            reduction, step = self.reductions - counted, self._agreed.schedule.step - counted
            self.telemetry.meet(reduction, step)
            call_all(self._events.met, reduction, step)

    def _divisor(self) -> int:
        return self._buckets.transport.world_size if self.active_ranks is None else self.active_ranks()
