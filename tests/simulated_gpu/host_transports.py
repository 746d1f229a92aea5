"""Transports of CUDA tensors for which the host waits: gloo on copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce.transports import GlooTransport, LateGatherTransport, Transport
from fastreduce.transports.base import Work


class _Back:
    """A collective of a copy, which goes back to the device when it has ended."""

    def __init__(self, work: Work, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host, non_blocking=True)


class OverHost(Transport):
    """Gloo, over the default group's ranks."""

    name = "gloo over the host"

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self._gloo = GlooTransport(dist.group.WORLD)
        self.rank, self.world_size = self._gloo.rank, self._gloo.world_size

    def all_reduce(self, tensor: Tensor) -> Work:
        host = tensor.cpu()
        return _Back(self._gloo.all_reduce(host), host, tensor)

    def all_to_all(self, received: Tensor, wire: Tensor) -> Work:
        into = torch.empty_like(received, device="cpu")
        return _Back(self._gloo.all_to_all(into, wire.cpu()), into, received)

    def all_gather(self, wire: Tensor) -> Work:
        host = wire.cpu()
        return _Back(self._gloo.all_gather(host), host, wire)

    def exchange(self, value: Any) -> list[Any]:
        return self._gloo.exchange(value)

    def abort(self) -> None:
        self._gloo.abort()

    def close(self) -> None:
        self._gloo.close()


class LateOverHost(OverHost, LateGatherTransport):
    """The same, whose work has three threads."""

    def late_all_gather(self) -> Callable[[Tensor], Work]:
        begin = self._gloo.late_all_gather()

        def begin_there(wire: Tensor) -> Work:
            host = wire.cpu()
            return _Back(begin(host), host, wire)

        return begin_there
