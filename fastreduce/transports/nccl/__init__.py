"""Collectives on NCCL, through CuPy, in communicators of our own over the ranks of the user's group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...errors import DeviceError, TensorError
from ..base import Transport
from ..connections import Lease
from ..ranks import Ranks, own_name, place_in
from . import library
from .communicator import Communicator, Enqueue
from .connection import NcclConnection

# NCCL's own numbers; CuPy names most of them.
DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SUM = 0
_BYTES = DTYPES[torch.uint8]


class _Enqueued:
    """The caller goes on on the stream that the collective is on."""

    def __init__(self, transport: NcclTransport) -> None:
        self._transport = transport

    def wait(self) -> None:
        """Return at once, or raise if the transport has failed."""
        self._transport.check()


class NcclTransport(Transport):
    """NCCL over the ranks of `group`, on CUDA's current stream of each tensor's device.

    The first collective on a device makes a communicator, or takes one that another transport over `group` has left;
    the ranks meet in the group's store. A watchdog thread ends collectives that outlast the group's timeout, and
    raises TransportError on the main thread where that waits for the GPU.

    Args:
        group: the ranks.
        interrupts: whether it may; who begins again with other ranks waits by looking, and calls `check`.

    Raises:
        BackendUnavailableError: if CuPy or NCCL is missing or too old, or two ranks are on one GPU.
        TransportError: if ranks do not come within the group's timeout; it names them.
        DeviceError: for tensors that are not on a GPU.
        TensorError: for tensors that are not contiguous, or of a dtype that NCCL cannot add.
    """

    name = "nccl"
    enqueues = True

    def __init__(self, group: Ranks, interrupts: bool = True) -> None:
        self._nccl = library.load_nccl()
        self.rank, self.world_size = place_in(group)
        self._me = own_name(group)
        self._lease = Lease("NCCL", group, partial(NcclConnection, interrupts=interrupts))
        self._about = ""
        self._communicators: dict[torch.device, Communicator] = {}

    def all_reduce(self, tensor: Tensor) -> _Enqueued:
        """NCCL's all-reduce, in place."""
        address, count, dtype = tensor.data_ptr(), tensor.numel(), self._dtype(tensor)
        return self._run(
            "all_reduce", tensor, lambda c, stream: c.allReduce(address, address, count, dtype, SUM, stream)
        )

    def all_to_all(self, received: Tensor, wire: Tensor) -> _Enqueued:
        """One group of sends and receives of bytes."""
        self._check("all_to_all", received)
        if received.numel() != wire.numel():
            raise TensorError(
                f"{self._where('all_to_all')}: received has {received.numel()} elements; it needs {wire.numel()}"
            )
        source, target, size = wire.data_ptr(), received.data_ptr(), self._shard_bytes("all_to_all", wire)

        def enqueue(communicator: Any, stream: int) -> None:
            self._nccl.groupStart()
            try:
                for rank in range(self.world_size):
                    communicator.send(source + rank * size, size, _BYTES, rank, stream)
                    communicator.recv(target + rank * size, size, _BYTES, rank, stream)
            finally:
                self._nccl.groupEnd()

        return self._run("all_to_all", wire, enqueue)

    def all_gather(self, wire: Tensor) -> _Enqueued:
        """NCCL's all-gather of bytes, in place."""
        address, size = wire.data_ptr(), self._shard_bytes("all_gather", wire)
        own = address + self.rank * size
        return self._run("all_gather", wire, lambda c, stream: c.allGather(own, address, size, _BYTES, stream))

    def exchange(self, value: Any) -> list[Any]:
        """Over the group's store: no GPU takes part."""
        return self._lease.connection.exchange(value)

    def tell_watchdog(self, about: str) -> None:
        """Add `about` to errors of the collectives that follow."""
        self._about = about

    def check(self) -> None:
        """Raise what made it fail."""
        self._lease.connection.check()

    def abort(self) -> None:
        """NCCL's abort: collectives under way end, on the peers too; theirs raise within half a second."""
        self._lease.abort()

    def close(self) -> None:
        """Leave the communicators to the next transport over these ranks, unless they have failed."""
        self._lease.close()

    def _run(self, operation: str, tensor: Tensor, enqueue: Enqueue) -> _Enqueued:
        self._check(operation, tensor)
        connection = self._lease.connection
        if tensor.numel():
            communicator = self._communicators.get(tensor.device)
            if communicator is None:
                communicator = self._communicators[tensor.device] = connection.communicator(tensor.device)
            connection.run(communicator, operation, tensor, self._about, enqueue)
        return _Enqueued(self)

    # Checks

    def _check(self, operation: str, tensor: Tensor) -> None:
        if tensor.device.type != library.Cuda.device_type:
            raise DeviceError(
                f"{self._where(operation)}: NCCL moves tensors on a GPU, and this one is on {tensor.device}: move it "
                "with .cuda(), or use GlooTransport (gloo)"
            )
        if not tensor.is_contiguous():
            raise TensorError(f"{self._where(operation)}: a tensor with strides {tensor.stride()}; call contiguous()")

    def _dtype(self, tensor: Tensor) -> int:
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TensorError(f"{self._where('reducing')}: NCCL cannot combine {tensor.dtype}; allowed: {allowed}")
        return DTYPES[tensor.dtype]

    def _shard_bytes(self, operation: str, wire: Tensor) -> int:
        size, rest = divmod(wire.nbytes, self.world_size)
        if rest:
            raise TensorError(
                f"{self._where(operation)}: {wire.nbytes} bytes do not split into {self.world_size} shards"
            )
        return size

    def _where(self, operation: str) -> str:
        return f"{self._me}: {operation} over NCCL"
