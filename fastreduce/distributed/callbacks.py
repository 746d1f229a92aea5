"""make_allreduce_cb: gradients are handed over one by one, packed, and reduced a bucket at a time."""

from __future__ import annotations

import numbers
from typing import Any

import torch
import torch.distributed as dist

from ..compression import Compression
from ..errors import SettingError
from ..policy import single
from ..reduction.arrays import as_tensor
from ..reduction.bucketed import BUCKET_BYTES
from ..reduction.one_call import OPERATIONS, reduce_owned
from .meetings import group_or_default


class AllReduceCallback:
    """Collects gradients until a bucket is full, and reduces it in place; made by `make_allreduce_cb`.

    `callback(gradient)` and `callback(parameter, gradient)` take an array of any library and return it;
    `callback(parameter)` takes a torch parameter's `.grad`. The values are final after `flush`, which the end
    of torch's backward calls where gradients are handed over inside it. A `with` statement flushes too. Every
    rank hands over the same shapes in the same order.
    """

    def __init__(self, op: str, group: dist.ProcessGroup, compression: Compression, bucket_bytes: int) -> None:
        self._op, self._group, self._compression, self._bucket_bytes = op, group, compression, bucket_bytes
        self._collected: list[tuple[Any, Any]] = []  # arrays, and whose they are
        self._bytes, self._backward = 0, -1

    def __call__(self, array: Any, gradient: Any = None) -> Any:
        """Take one gradient.

        Raises:
            TensorError: if it cannot be reduced in place.
        """
        taken = array if gradient is None else gradient
        self._flush_at_the_end_of_backward()
        self._collected.append((taken, array))
        self._bytes += as_tensor(taken).nbytes
        if self._bytes >= self._bucket_bytes:
            self.flush()
        return taken

    def flush(self) -> None:
        """Reduce what has been collected.

        Raises:
            MismatchError: on every rank, if ranks handed over other shapes or dtypes.
            TransportError: if a peer is gone, or does not come within the timeout.
        """
        collected, self._collected, self._bytes = self._collected, [], 0
        if collected:
            arrays, owners = zip(*collected, strict=True)
            reduce_owned(arrays, owners, self._compression, self._group, None, self._op)

    def _flush_at_the_end_of_backward(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):  # inside a backward of torch, for the first time
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.flush)
        self._backward = backward

    def __enter__(self) -> AllReduceCallback:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.flush()


def make_allreduce_cb(
    reduce_method: str = "mean",
    group: dist.ProcessGroup | None = None,
    *,
    compression: Compression | str | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> AllReduceCallback:
    """A callback that averages (or sums) gradients over the ranks, for any array library.

    With torch: `for p in model.parameters(): p.register_post_accumulate_grad_hook(callback)`.

    Args:
        reduce_method: "mean" or "sum".
        group: the ranks; None means the default group.
        compression: one setting, as in `all_reduce_gradients`.
        bucket_bytes: how much is reduced at once.

    Raises:
        NotInitializedError: if there is no process group.
        SettingError: for another `reduce_method`, or if `compression` is no setting, or `bucket_bytes` no number.
    """
    found = group_or_default("make_allreduce_cb", group)
    if reduce_method not in OPERATIONS:
        raise SettingError(f"make_allreduce_cb: unknown method {reduce_method!r}; allowed: {', '.join(OPERATIONS)}")
    if not isinstance(bucket_bytes, numbers.Real):
        raise SettingError(f"make_allreduce_cb: bucket_bytes={bucket_bytes!r}; allowed: a number of bytes")
    setting = single(compression, "make_allreduce_cb")
    return AllReduceCallback(reduce_method, found, setting, bucket_bytes)
