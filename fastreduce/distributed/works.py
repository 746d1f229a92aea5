"""Work: a collective under way, and what is left to do here when it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..environment.signals import is_of_signal
from ..errors import TensorError, TransportError
from ..transports.meeting import no_word_from
from ..transports.ranks import count_as_failed

LOCAL = ("Invalid scalar type", "Cannot use ReduceOp")  # how errors of gloo begin for which no peer is to blame


class Work(dist.Work):
    """torch's Work of a collective; its last steps run once, by whichever way its end is noticed.

    On a GPU they do so on the stream of whoever notices it, for which those of others who wait then wait.

    Args:
        call: the collective, for errors.
        inner: torch's own work.
        last_steps: run in order when the data has arrived: a division, copies into tensors that lie apart.
        given: the tensors' dtypes, for errors.
        device: where the last steps write; None where they do not.
    """

    def __init__(
        self,
        call: str,
        inner: dist.Work,
        last_steps: Iterable[Callable[[], Any]] = (),
        given: str = "",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._call, self._inner, self._given, self._device = call, inner, given, device
        self._lock, self._last_steps = threading.Lock(), list(last_steps)
        self._settled: torch.cuda.Event | None = None  # when the last steps are done
        self._waited = False  # gloo's reduce_scatter does not know when it is done

    def _settle(self) -> None:
        with self._lock, torch.no_grad():
            if self._settled is not None:
                self._settled.wait(torch.cuda.current_stream(self._device))
            elif self._last_steps:
                for step in self._last_steps:
                    step()
                self._last_steps.clear()
                if self._device is not None and self._device.type == "cuda":
                    self._settled = torch.cuda.current_stream(self._device).record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the tensors hold the result.

        Raises:
            TransportError: naming call and rank, if it failed or timed out.
            TensorError: if the backend cannot do it with tensors of their dtype.
        """
        with as_transport_error(self._call, self._given):
            self._inner.wait(timeout)
        self._settle()
        self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether the tensors hold the result."""
        done = self._waited or self._inner.is_completed()
        if done:
            self._settle()
        return done and (self._waited or self._settled is None or self._settled.query())

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._waited or self._inner.is_success()

    def exception(self) -> Any:
        """What it failed with, or None."""
        return self._inner.exception()

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the tensors; RuntimeError where torch has none (reduce_scatter over gloo)."""

        def finish(future: torch.futures.Future[Any]) -> Any:
            value = future.value()
            self._settle()
            return value

        return self._inner.get_future().then(finish)


def count_as_written(*tensors: torch.Tensor) -> None:
    """Tell autograd's version counters of a backend's write; without, `ddp.clip_grad_norm_` trusts the norm it has."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


class as_transport_error:
    """Errors of torch's backends come out as TransportError with call and rank, or TensorError with `given` dtypes."""

    def __init__(self, call: str, given: str = "") -> None:
        self.call, self.given = call, given

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and str(error).startswith(LOCAL):
            raise TensorError(f"{self.call} on rank {dist.get_rank()} with {self.given} tensors: {error}") from error
        if isinstance(error, RuntimeError) and not isinstance(error, TransportError) and not is_of_signal(error):
            count_as_failed()
            raise TransportError(
                f"{self.call} on rank {dist.get_rank()} failed: {error}. {no_word_from([])}"
            ) from error
