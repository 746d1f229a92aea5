"""GradientReducer: hooks, order and finalisation of the reduction that happens inside backward."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..environment.exits import Exit, at_exit
from ..errors import ReducerError, TransportError
from ..transports import Transport
from ..transports.messages import checked, numbers
from . import saved_residuals
from .arrivals import Arrivals, weakly
from .bucketed import BucketedGradients, Job
from .error_feedback import agree_that_finite
from .streams import Pending, Stream


class GradientReducer(BucketedGradients):
    """Averages the gradients of `parameters` over the ranks of `transport` during backward.

    1. `arm`, after a forward that is to be synchronised, makes the next backward reduce.
    2. A hook on each parameter's AccumulateGrad node counts its bucket down; full buckets are launched
       in index order, the same order on every rank.
    3. A callback at the end of that backward launches what is left, waits for everything, and stores
       averages where any rank used a parameter.
    4. `rebuild_buckets`, before the next forward, lays the buckets out in the order in which rank 0 saw
       gradients arrive. In the first backward nothing is launched before its end: it also counts how
       often each hook fires, which re-entrant checkpointing can make more than once.

    Arguments and errors are those of `BucketedGradients`; `close` closes the transport.
    """

    def __init__(self, parameters: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__(parameters, *args, **kwargs)
        self._launching = threading.Lock()  # each device's hooks run on a thread of their own
        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False
        # Parameters that no rank used in the last reduction: the same set on every rank.
        self._left_over: set[int] = set()
        self._arrivals = Arrivals(parameters, self._launch_full_buckets, self._report)
        self._used = self._arrivals.used
        self._install(self._first_groups())
        self._own()

    def _own(self) -> None:
        """Let streams and transport end with the reducer: by `close`, when nobody holds it any more, or at exit."""
        self._close = weakref.finalize(self, shut_down, self._streams, self.transport)
        self._close.atexit = False
        _alive.add(self)

    def close(self) -> None:
        """Remove the hooks, end communication threads and close the transport."""
        self._arrivals.remove()
        self._close()

    # Buckets

    def _install(self, groups: Iterable[Sequence[int]]) -> None:
        super()._install(groups)
        self._arrivals.lay_out(self.plan)
        self._forget_backward()

    def rebuild_buckets(self) -> bool:
        """After the first reduced backward, once: lay buckets out in the order that rank 0 observed.

        What only other ranks saw comes next; what has never fired goes last, in buckets of its own, so
        that no bucket waits for it. Residuals move along. Every rank must call it at the same point.

        Returns:
            Whether buckets were rebuilt.
        """
        if self._rebuilt or not self._reduced_once:
            return False
        count = len(self._specs)
        told = self.transport.exchange(self._arrivals.last_seen())
        observed = checked(told, lambda value: numbers(value, 0, count), "order of its parameters")
        self._regroup(dict.fromkeys(itertools.chain(*observed)))
        self._rebuilt = True
        return True

    # One backward

    def look(self) -> None:
        """Before gradients accumulate: let error feedback see what has become of the last averages."""
        for feedback in self._feedbacks():
            feedback.look()

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind."""
        self.drop_broken_backward()
        self._forget_backward()
        self._armed, self._left_over = True, set()
        # Until the backward is known to have begun, and all through the first one, every hook reports.
        self._arrivals.report()

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end.

        The collectives that this rank still owes are made up for, so that ranks which raised elsewhere,
        or not at all, stay in step; the latter find NaN in their gradients.
        """
        if not self._in_backward:
            return
        with suppress(TransportError):
            for _, pending in self._launches:
                pending.result()
            if self._armed:
                for pipeline in self.pipelines[len(self._launches) :]:
                    pipeline.run_broken()
                self._sparse.take_part(self._active_ranks(), broken=True)
        self._armed = self._in_backward = False
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._launches: list[tuple[Job, Pending]] = []
        self._arrivals.stop()
        if not self._reduced_once:
            self._arrivals.order.clear()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Hook a forward's outputs, so that the end of the outermost backward through them is known."""
        if self._armed:
            enter = weakly(self._enter_backward)
            for output in outputs:
                if output.grad_fn is not None:
                    output.register_hook(enter)

    def _enter_backward(self, _: object = None) -> None:
        if (self._armed or self._left_over) and not self._in_backward:
            self._in_backward = True
            self.look()
            if self._armed and self._reduced_once:
                self._arrivals.count()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(weakly(self._end_backward))

    def _report(self, i: int) -> None:
        if not self._in_backward:  # no output hook has run
            self._enter_backward()
            self._arrivals.again(i)
        elif not self._reduced_once:
            self._arrivals.order.append(i)
        elif (bucket := self._arrivals.bucket_of[i]) < len(self._launches):
            raise ReducerError(
                f"rank {self.transport.rank}: parameter {self._specs[i].name!r} received a gradient after its "
                f"bucket {bucket} had been sent. In the first backward it received {self._arrivals.fires[i]} "
                "gradient(s), now more: run the forward that uses it most often first, or checkpoint with "
                "use_reentrant=False"
            )

    def _launch_full_buckets(self) -> None:
        # The last bucket is full when backward ends: it is run there, without a change of threads.
        last = len(self.pipelines) - 1 if self._overlaps else 0
        with self._launching:
            while (index := len(self._launches)) < last and not self._arrivals.waiting[index]:
                job = self._collect(index)
                self._launches.append((job, job.launch(self._stream(index))))

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        if not self._armed:
            self._reduce_left_over()
        elif self._arrivals.counted_any if self._reduced_once else self._arrivals.order:
            self._armed = False
            self._reduce_all()
        else:  # autograd.grad: nothing was accumulated, so the forward stays armed
            self._gradients.check_unmoved(range(len(self._specs)))
            self._arrivals.report()

    def _reduce_all(self) -> None:
        try:
            for _, pending in self._launches[-1:]:
                pending.begun()  # streams leave starting collectives to this thread
            under_way = [(job, pending.result) for job, pending in self._launches]
            for index in range(len(self._launches), len(self.pipelines)):
                if self._alone(index):
                    self._left_over |= self._unused(index)
                else:
                    job = self._collect(index)
                    under_way.append((job, job.begin_on(self._stream(index))))
            for _, finish in under_way:
                finish()
            for job, _ in under_way:
                self._left_over |= self._settle(job)
            self._left_over |= self._sparse.settle(self._arrivals.used, self._active_ranks())
            agree_that_finite(self._feedbacks())
            self._nonfinite.count(self.pipelines, self.transport.rank)
        except TransportError:
            for _, pending in self._launches:
                pending.result()  # the first bucket that failed tells more than the last
            raise
        finally:
            for _, pending in self._launches:
                pending.cancel()
            self._arrivals.forget_used()
            if not self._reduced_once:
                self._reduced_once = True
                self._arrivals.learn_fires()
            self._forget_backward()

    def _reduce_left_over(self) -> None:
        """Reduce what another backward through the same forward brought: losses over disjoint parts of a model.

        What no rank used in the first backward is the same set on all ranks, so all run the same buckets.
        """
        used = self._arrivals.used
        fired = {i for i in self._left_over if used[i]}
        if not fired:
            return
        twice = [spec.name for i, spec in enumerate(self._specs) if used[i] and i not in fired]
        if twice:
            raise ReducerError(
                f"rank {self.transport.rank}: a second backward through one forward brought first gradients for "
                f"{self._specs[min(fired)].name!r} and further ones for {twice[0]!r}, which was averaged already. "
                "Sum the losses and call backward once"
            )
        for index in sorted({self._arrivals.bucket_of[i] for i in self._left_over.intersection(self._dense)}):
            self._average(index)
        self._sparse.settle(used, self._active_ranks(), self._left_over)
        self._left_over -= fired
        self._arrivals.forget_used()

    # State

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the layout of the buckets; each rank saves its own."""
        state = saved_residuals.save(self.plan, self.pipelines, self.transport.rank, str(self.compression))
        progress = {"reduced_once": self._reduced_once, "rebuilt": self._rebuilt, "statistics": self._statistics}
        return {**state, **progress, "order": self._arrivals.order.copy(), "fires": self._arrivals.fires.copy()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        At the same world size training resumes bit for bit. At another, each rank gets the mean of the
        old ranks' residuals.

        Raises:
            SettingError: if the state is of another compression or other parameters, or ranks are missing.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        chosen = saved_residuals.pick(states, self.transport.rank, self.transport.world_size, str(self.compression))
        saved_residuals.check_parameters(chosen, [self._specs[i] for i in self._dense])
        self._reduced_once, self._rebuilt = chosen["reduced_once"], chosen["rebuilt"]
        self._arrivals.order[:], self._arrivals.fires[:] = chosen["order"], chosen["fires"]
        index_of = {spec.name: i for i, spec in enumerate(self._specs)}
        self._install([[index_of[name] for name in bucket] for bucket in chosen["buckets"]])
        saved_residuals.restore(saved_residuals.kept_in(chosen), self.pipelines)
        for pipeline, saved in zip(self.pipelines, chosen["shard_residuals"], strict=False):
            if pipeline.feedback is not None:
                pipeline.feedback.shard_residual.copy_(saved)
        if chosen.get("statistics"):
            self.keep_statistics()


def shut_down(streams: Mapping[torch.device, Stream], transport: Transport) -> None:
    """End what a reducer holds outside itself."""
    if not all(stream.idle for stream in streams.values()):  # a peer does not come: nobody will miss what is under way
        transport.abort()
    for stream in streams.values():
        stream.close()
    transport.close()


_alive: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def _close_all() -> None:
    for reducer in list(_alive):
        reducer._close()


at_exit(Exit.REDUCERS, _close_all)
