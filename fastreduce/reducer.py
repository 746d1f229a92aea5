"""GradientReducer: hooks, order and finalisation of the reduction that happens inside backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from . import residuals
from .buckets import BucketPlan, build_plan, group_by_size
from .compression import Compression
from .errors import ReducerError, TransportError
from .gradients import Collected, Gradients
from .pipeline import BucketPipeline, Seconds, warm_up
from .streams import ThreadStream
from .transports import Transport

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


class GradientReducer:
    """Averages the gradients of `parameters` over the ranks of `transport` during backward.

    1. `arm`, after a forward that is to be synchronised, makes the next backward reduce.
    2. A hook on each parameter's AccumulateGrad node counts its bucket down; full buckets are launched
       in index order, the same order on every rank.
    3. A callback at the end of that backward launches what is left, waits for everything, and stores
       averages where any rank used a parameter.
    4. `rebuild_buckets`, before the next forward, lays the buckets out in the order in which rank 0 saw
       gradients arrive. In the first backward nothing is launched before its end: it also counts how
       often each hook fires, which re-entrant checkpointing can make more than once.

    Args:
        parameters: floating-point or complex leaves that require gradients.
        names: their names, which key saved residuals and appear in errors.
        transport: what moves wires; `close` closes it.
        compression: the setting.
        bucket_caps: bytes of the first, second, … bucket; the last holds for all that follow.
        gradient_as_bucket_view: whether `.grad` become views of the buckets.

    Raises:
        TensorError: if a parameter's dtype is not supported.
        BackendUnavailableError: if the kernels cannot run on the parameters' device.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        transport: Transport,
        compression: Compression,
        *,
        bucket_caps: Sequence[int] = (FIRST_BUCKET_BYTES, BUCKET_BYTES),
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self.transport, self.compression = transport, compression
        self._caps, self._as_views = tuple(bucket_caps), gradient_as_bucket_view
        self._gradients = Gradients(parameters, names)
        self._specs = self._gradients.specs
        self._stream = ThreadStream()

        # What outlives a backward: who was used since the last reduction, the order of the first one,
        # and how often each hook fires.
        self._used = [False] * len(self._specs)
        self._order: list[int] = []
        self._fires = [1] * len(self._specs)
        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False

        for device, dtype in {(spec.device, spec.dtype) for spec in self._specs}:
            warm_up(dtype, device, compression)
        self._install(group_by_size(self._specs, range(len(self._specs) - 1, -1, -1), self._caps))

        this = weakref.ref(self)
        self._nodes = [get_gradient_edge(parameter).node for parameter in parameters]
        self._handles = [node.register_hook(_ready_hook(this, i)) for i, node in enumerate(self._nodes)]
        self._close = weakref.finalize(self, _close, self._stream, transport)
        self._close.atexit = False

    def close(self) -> None:
        """Remove the hooks, end the communication thread and close the transport."""
        for handle in self._handles:
            handle.remove()
        self._close()

    # Buckets

    def _install(self, groups: Iterable[Sequence[int]]) -> None:
        self.plan: BucketPlan = build_plan(
            self._specs, groups, alignment=self.compression.alignment, shards=self.transport.world_size
        )
        self.pipelines = [BucketPipeline(b, self.compression, self.transport) for b in self.plan.buckets]
        self._bucket_of = [0] * len(self._specs)
        for bucket, pipeline in zip(self.plan.buckets, self.pipelines, strict=True):
            for slot in bucket.slots:
                self._bucket_of[slot.parameter] = bucket.index
            if self._as_views:
                self._gradients.install_views(bucket, pipeline.make_views)
        self._forget_backward()

    def rebuild_buckets(self) -> bool:
        """After the first reduced backward, once: lay buckets out in the order that rank 0 observed.

        What only other ranks saw comes next; what has never fired goes last, in buckets of its own, so
        that no bucket waits for it. First-stage residuals move along; second-stage ones start anew,
        because shards change hands. Every rank must call it at the same point.

        Returns:
            Whether buckets were rebuilt.
        """
        if self._rebuilt or not self._reduced_once:
            return False
        last_seen = list(dict.fromkeys(reversed(self._order)))[::-1]
        observed = self.transport.exchange(last_seen)
        order = list(dict.fromkeys(i for seen in observed for i in seen))
        idle = [i for i in range(len(self._specs)) if i not in set(order)]
        kept = residuals.collect(self.pipelines)
        self._install(
            group_by_size(self._specs, order, self._caps) + group_by_size(self._specs, idle, self._caps)
        )
        residuals.restore(kept, self.pipelines)
        self._rebuilt = True
        return True

    # One backward

    def arm(self) -> None:
        """Make the next backward reduce, whatever an earlier one left behind."""
        self.drop_broken_backward()
        self._forget_backward()
        self._armed = True

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end; what it had launched is waited for."""
        if not self._in_backward:
            return
        for pipeline, _, future in self._launches:
            with suppress(TransportError):
                future.result()
            pipeline.used.fill_(1)
        self._armed = self._in_backward = False
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._launches: list[tuple[BucketPipeline, Collected, Future[None]]] = []
        self._waiting = [len(bucket.slots) for bucket in self.plan.buckets]
        self._remaining = self._fires.copy()
        self._fired = False

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """Hook a forward's outputs, so that the end of the outermost backward through them is known."""
        if self._armed:
            hook = _output_hook(weakref.ref(self))
            for output in outputs:
                if output.grad_fn is not None:
                    output.register_hook(hook)

    def _enter_backward(self) -> None:
        if self._armed and not self._in_backward:
            self._in_backward = True
            engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
            engine.queue_callback(_end_callback(weakref.ref(self)))

    def _gradient_ready(self, i: int) -> None:
        self._used[i] = True
        if not self._armed:
            return
        if not self._in_backward:
            self._enter_backward()
        self._fired = True
        remaining = self._remaining[i] = self._remaining[i] - 1
        if not self._reduced_once:
            self._order.append(i)
        elif remaining == 0:
            bucket = self._bucket_of[i]
            self._waiting[bucket] -= 1
            while len(self._launches) < len(self._waiting) and not self._waiting[len(self._launches)]:
                self._launch(len(self._launches))
        elif remaining < 0 and self._bucket_of[i] < len(self._launches):
            raise ReducerError(
                f"rank {self.transport.rank}: parameter {self._specs[i].name!r} received a gradient after its "
                f"bucket {self._bucket_of[i]} had been sent. In the first backward it received {self._fires[i]} "
                "gradient(s), now more: run the forward that uses it most often first, or checkpoint with "
                "use_reentrant=False"
            )

    @torch.no_grad()
    def _launch(self, index: int) -> None:
        pipeline = self.pipelines[index]
        found = self._gradients.collect(pipeline.bucket, self._used)
        for position in found.unused:
            pipeline.used[position] = 0
        future = self._stream.submit(lambda: pipeline.run(found.sources, found.targets))
        self._launches.append((pipeline, found, future))

    @torch.no_grad()
    def _end_backward(self) -> None:
        if not self._in_backward:
            return
        self._in_backward = False
        if not self._fired:  # autograd.grad: nothing was accumulated, the forward stays armed
            return
        self._armed = False
        for index in range(len(self._launches), len(self.pipelines)):
            self._launch(index)
        try:
            for pipeline, found, future in self._launches:
                future.result()
                found.settle(pipeline.used_by_any)
        finally:
            for pipeline, found, future in self._launches:
                future.cancel()
                if found.unused:
                    pipeline.used.fill_(1)
            self._launches = []
            self._used = [False] * len(self._specs)
        if not self._reduced_once:
            self._reduced_once = True
            for i in range(len(self._fires)):
                self._fires[i] = max(1, self._fires[i] - self._remaining[i])

    # State and figures

    @property
    def seconds(self) -> Seconds:
        """Time that the last reduction spent in each stage, summed over the buckets."""
        stages = [pipeline.seconds for pipeline in self.pipelines]
        return Seconds(
            sum(s.compress for s in stages), sum(s.reduce for s in stages), sum(s.decompress for s in stages)
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(pipeline.sent_bytes for pipeline in self.pipelines)

    def rescale_residuals(self, factor: float) -> None:
        """Multiply what error feedback keeps by `factor`: new loss scale / old loss scale.

        Residuals are in units of scaled gradients. Call it where a GradScaler's scale changes.
        """
        residuals.rescale(self.pipelines, factor)

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, with the layout of the buckets; each rank saves its own."""
        return residuals.save(self.plan, self.pipelines, self.transport.rank, str(self.compression))

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from `state_dict`: this rank's own, or those of all ranks of another world size.

        At the same world size training resumes bit for bit. At another, each rank gets the mean of the
        old ranks' residuals.

        Raises:
            SettingError: if the state is of another compression or other parameters, or ranks are missing.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        chosen = residuals.pick(states, self.transport.rank, self.transport.world_size, str(self.compression))
        residuals.check_names(chosen, [spec.name for spec in self._specs])
        index_of = {spec.name: i for i, spec in enumerate(self._specs)}
        self._install([[index_of[name] for name in bucket] for bucket in chosen["buckets"]])
        residuals.restore(chosen["residuals"], self.pipelines)
        for pipeline, saved in zip(self.pipelines, chosen["shard_residuals"], strict=False):
            if pipeline.shard_residual is not None:
                pipeline.shard_residual.copy_(saved)


Reference = Callable[[], GradientReducer | None]


def _ready_hook(reducer: Reference, i: int) -> Callable[..., None]:
    def gradient_ready(*_: object) -> None:
        this = reducer()
        if this is not None:
            this._gradient_ready(i)

    return gradient_ready


def _output_hook(reducer: Reference) -> Callable[[Tensor], None]:
    def enter_backward(_: Tensor) -> None:
        this = reducer()
        if this is not None:
            this._enter_backward()

    return enter_backward


def _end_callback(reducer: Reference) -> Callable[[], None]:
    def end_backward() -> None:
        this = reducer()
        if this is not None:
            this._end_backward()

    return end_backward


def _close(stream: ThreadStream, transport: Transport) -> None:
    stream.close()
    transport.close()
