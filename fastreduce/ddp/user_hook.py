"""A user's communication hook in place of our reduction: what torch calls DDP communication hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..compression import NoCompression
from ..errors import ReducerError
from ..reduction.buckets import Bucket, BucketPlan, build_plan
from ..reduction.gradients import Gradients
from ..reduction.jobs import Begun, Part, Pending
from ..reduction.pipeline import BucketPipeline
from ..reduction.residuals.factors import to_device
from ..reduction.streams import Stream
from ..transports import LocalTransport, Transport, Work

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """What a hook receives: torch's `dist.GradBucket`, which Python cannot construct, method for method."""

    def __init__(
        self, index: int, buffer: Tensor, gradients: list[Tensor], parameters: list[Tensor], last: bool
    ) -> None:
        self._index, self._buffer, self._gradients = index, buffer, gradients
        self._parameters, self._last, self._replaced = parameters, last, False

    def index(self) -> int:
        """Place of the bucket among the buckets of this backward."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients as one 1-D tensor, not divided by the world size."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as views of the buffer, of one that `set_buffer` brought, too."""
        if not self._replaced:
            return self._gradients
        flat = self._buffer.view(-1)
        pieces = zip(flat.split([like.numel() for like in self._gradients]), self._gradients, strict=True)
        return [piece.as_strided(like.size(), [n * flat.stride(0) for n in like.stride()]) for piece, like in pieces]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no further bucket follows in this backward."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor of as many elements in the buffer's place."""
        self._buffer, self._replaced = buffer, True


class UserHook:
    """Averages buckets by a user's hook, in the place of our kernels and transport.

    The hook runs where a bucket became full, on the thread of backward and in bucket order, as in torch; its future is
    waited for at the end of backward. Its buffer holds the gradients alone: which slots other ranks used is summed
    apart, once a backward, when all hooks have ended.

    Args:
        state: handed to the hook.
        hook: takes the state and a `GradBucket`, returns a `torch.futures.Future` of the reduced buffer.
        used: for each parameter, whether this rank has used it in this backward; read when all hooks have ended.
    """

    def __init__(self, state: object, hook: Hook, used: Sequence[bool]) -> None:
        self._state, self._hook, self._used = state, hook, used
        # Of torch's hook of optimizers that step in backward, on a stream of which its future knows nothing.
        self._optimizers: Any = hook.keywords.get("optim_stream_state") if isinstance(hook, partial) else None
        self._members: list[tuple[BucketPipeline, Tensor]] = []  # with the indices of their parameters

    def call(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The hook's future."""
        future: torch.futures.Future[Tensor] = self._hook(self._state, bucket)
        return future

    def make_pipelines(
        self, gradients: Gradients, groups: Iterable[Sequence[int]], transport: Transport, as_views: bool
    ) -> tuple[BucketPlan, list[BucketPipeline]]:
        """Buckets without padding, each with a transport that calls the hook."""
        plan = build_plan(gradients.specs, groups, alignment=1, shards=1)
        self._transport, self._members = transport, []
        for bucket in plan.buckets:
            members = gradients.members(bucket)
            hook = HookTransport(self.call, bucket, members.parameters, last=bucket.index == len(plan.buckets) - 1)
            pipeline = BucketPipeline(bucket, NoCompression(), hook)
            pipeline.alone = False
            hook.gradients = pipeline.make_views([gradients.layouts[i] for i in members.indices])
            hook.optimizers = self._optimizers
            # Where flags are summed, which other devices' buckets are told.
            self._members.append((pipeline, torch.tensor(members.indices, device=plan.buckets[0].device)))
        return plan, [pipeline for pipeline, _ in self._members]

    def make_stream(self, device: torch.device, transport: Transport) -> Stream:
        """Hooks are called at once."""
        return CallerStream()

    def end_collectives(self) -> None:
        """Wait for what hooks have begun on GPUs: a future that raised has ordered no stream behind its collectives."""
        for device in {pipeline.bucket.device for pipeline, _ in self._members}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    @torch.no_grad()
    def sum_used(self) -> None:
        """Tell the pipelines which slots any rank used: one flag a parameter, summed over the ranks."""
        if not self._members:  # all gradients are sparse
            return
        device = self._members[0][1].device
        flags = to_device(torch.tensor(list(self._used), dtype=torch.float32, device="cpu"), device)
        self._transport.all_reduce(flags).wait()
        for pipeline, indices in self._members:
            pipeline.used_by_any.copy_(flags[indices])


class HookTransport(LocalTransport):
    """One bucket's all-reduce by a user's hook."""

    gradients: list[Tensor]  # views of the wire
    optimizers: Any  # torch's state of those that step in backward

    def __init__(
        self,
        call: Callable[[GradBucket], torch.futures.Future[Tensor]],
        bucket: Bucket,
        parameters: list[Tensor],
        last: bool,
    ) -> None:
        super().__init__()
        self._call, self._bucket, self._parameters, self._last = call, bucket, parameters, last

    def all_reduce(self, tensor: Tensor) -> Work:
        """Call the hook.

        Raises:
            TypeError: if it returns no future.
        """
        buffer = tensor[: self._bucket.flags_offset]
        future = self._call(GradBucket(self._bucket.index, buffer, self.gradients, self._parameters, self._last))
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"a communication hook returns a torch.futures.Future, got {type(future).__name__}")
        stream = self.optimizers.optim_stream if self.optimizers is not None and tensor.is_cuda else None
        return HookWork(self._bucket, future, buffer, stream)


class HookWork:
    """A hook's future, whose value belongs into a buffer; `stream` may be at work on that still."""

    def __init__(
        self, bucket: Bucket, future: torch._C.Future[Any], buffer: Tensor, stream: torch.Stream | None
    ) -> None:
        self._bucket, self._future, self._buffer, self._stream = bucket, future, buffer, stream

    def wait(self) -> None:
        """Write what the future holds into the buffer.

        Raises:
            ReducerError: if it is no tensor of as many elements.
        """
        value: Any = self._future.wait()
        if self._stream is not None:
            torch.accelerator.current_stream(self._buffer.device).wait_stream(self._stream)
        reduced = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(reduced, Tensor) or reduced.numel() != self._buffer.numel():
            raise ReducerError(
                f"{self._bucket}: the future of the communication hook must hold a tensor of {self._buffer.numel()} "
                f"elements, not {reduced!r}"
            )
        if reduced.data_ptr() != self._buffer.data_ptr() or reduced.dtype != self._buffer.dtype:
            self._buffer.copy_(reduced.reshape(-1))


class CallerStream:
    """Begins work at once, on the caller's thread, and finishes it where its result is asked for."""

    idle = True

    def submit(self, begin: Part) -> Pending:
        """Do the first part; raises what it raises."""
        return Begun(begin())

    begin = submit

    def close(self) -> None:
        """There is nothing to end."""
