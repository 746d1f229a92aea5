"""A user's communication hook in place of our reduction: what torch calls DDP communication hooks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compression import NoCompression
from ..errors import ReducerError
from ..reduction.buckets import Bucket
from ..reduction.pipeline import BucketPipeline
from ..reduction.streams import Finish, Pending, Stream
from ..transports import LocalTransport

Hook = Callable[[Any, Any], Any]


class GradBucket:
    """What a hook receives: torch's `dist.GradBucket`, which Python cannot construct, method for method."""

    def __init__(
        self, index: int, buffer: Tensor, gradients: list[Tensor], parameters: list[Tensor], last: bool
    ) -> None:
        self._index, self._buffer, self._gradients = index, buffer, gradients
        self._parameters, self._last = parameters, last

    def index(self) -> int:
        """Place of the bucket among the buckets of this backward."""
        return self._index

    def buffer(self) -> Tensor:
        """The gradients as one 1-D tensor, not divided by the world size."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as views of the buffer."""
        return self._gradients

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no further bucket follows in this backward."""
        return self._last

    def set_buffer(self, buffer: Tensor) -> None:
        """Put another tensor of as many elements in the buffer's place."""
        self._buffer = buffer


class HookPipeline(BucketPipeline):
    """One bucket's way through a hook: flatten, hook, unflatten what its future holds.

    The hook runs where the bucket became full, on the thread of backward and in bucket order, as in
    torch; its future is waited for at the end of backward. The buffer holds the gradients alone. Which
    slots other ranks used the reducer finds out, and writes to `used_by_any`.

    Args:
        bucket: laid out with alignment 1 for one shard.
        state: handed to the hook.
        hook: takes the state and a `GradBucket`, returns a `torch.futures.Future` of the reduced buffer.
        parameters: the bucket's parameters.
        layouts: tensors of the sizes and strides of their gradients.
        last: whether this is the last bucket.

    Attributes:
        indices: of the parameters among all, on the bucket's device.
    """

    def __init__(
        self,
        bucket: Bucket,
        state: object,
        hook: Hook,
        parameters: list[Tensor],
        layouts: Sequence[Tensor],
        last: bool,
    ) -> None:
        super().__init__(bucket, NoCompression(), LocalTransport())
        self._state, self._hook, self._parameters, self._last = state, hook, parameters, last
        self.alone = False
        self.indices = torch.tensor([slot.parameter for slot in bucket.slots], device=bucket.device)
        self._buffer = self.wire[: bucket.flags_offset]
        self._gradients = self.make_views(layouts)

    def launch(
        self, stream: Stream, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()
    ) -> Pending:
        """Call the hook here and now.

        Raises:
            TypeError: if the hook returns no future.
        """
        return self._call(grads, averaged)

    def begin_on(
        self, stream: Stream, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()
    ) -> Finish:
        """Call the hook here and now; the second part waits for its future."""
        return self.begin(grads, averaged, unused)

    def begin(self, grads: Sequence[Tensor], averaged: Sequence[Tensor], unused: Sequence[int] = ()) -> Finish:
        """Call the hook; the second part waits for its future."""
        return self._call(grads, averaged).result

    def _call(self, grads: Sequence[Tensor], averaged: Sequence[Tensor]) -> _HookResult:
        self.compress(grads)
        bucket = GradBucket(self.bucket.index, self._buffer, self._gradients, self._parameters, self._last)
        future = self._hook(self._state, bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"a communication hook returns a torch.futures.Future, got {type(future).__name__}")
        return _HookResult(self, future, averaged)

    def store(self, value: Tensor | list[Tensor], averaged: Sequence[Tensor]) -> None:
        """Write what the hook's future holds into `averaged`.

        Raises:
            ReducerError: if it is no tensor of as many elements as the buffer.
        """
        reduced = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not isinstance(reduced, Tensor) or reduced.numel() != self._buffer.numel():
            raise ReducerError(
                f"{self.bucket}: the future of the communication hook must hold a tensor of {self._buffer.numel()} "
                f"elements, not {reduced!r}"
            )
        if reduced.data_ptr() != self._buffer.data_ptr() or reduced.dtype != self._buffer.dtype:
            self._buffer.copy_(reduced.view(-1))
        self.decompress(averaged)


class _HookResult:
    def __init__(self, pipeline: HookPipeline, future: torch._C.Future[Any], averaged: Sequence[Tensor]) -> None:
        self._pipeline, self._future, self._averaged = pipeline, future, averaged

    def begun(self) -> None:
        """The hook has been called."""

    def result(self) -> None:
        self._pipeline.store(self._future.wait(), self._averaged)

    def cancel(self) -> None:
        """A hook's future cannot be taken back."""
