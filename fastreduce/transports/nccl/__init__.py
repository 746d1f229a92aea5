"""Collectives on NCCL, through CuPy, in communicators of our own over the ranks of the user's group."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import DeviceError, SettingError, TensorError, TransportError
from ..base import Transport
from ..connections import Connections
from . import library
from .communicator import Communicator, Enqueue
from .connection import Connection

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
OPERATIONS = {"sum": 0, "max": 2, "min": 3, "avg": 4}
_BYTES = DTYPES[torch.uint8]

_beside: weakref.WeakKeyDictionary[dist.ProcessGroup, Connections] = weakref.WeakKeyDictionary()


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

    Raises:
        BackendUnavailableError: if CuPy or NCCL is missing or too old, or two ranks are on one GPU.
        TransportError: if ranks do not come within the group's timeout; it names them.
        DeviceError: for tensors that are not on a GPU.
        TensorError: for tensors that are not contiguous, or of a dtype that NCCL cannot add.
    """

    name = "nccl"
    enqueues = True

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._nccl = library.load_nccl()
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._group = group
        self._number, self._ended = -1, False
        self._about = ""
        self._communicators: dict[torch.device, Communicator] = {}

    @cached_property
    def _taken(self) -> Connection:
        """Taken at the first call, so that a copied or loaded wrapper needs nobody until it trains."""
        ours = _beside.setdefault(self._group, Connections())
        ours.free -= {number for number in ours.free if ours.made[number].failed}  # since it was left
        self._number = ours.take(
            lambda name: Connection(self._group, name), lambda control, value: control.exchange(value, "connecting")
        )
        connection: Connection = ours.made[self._number]
        connection.take()
        return connection

    @property
    def _connection(self) -> Connection:
        if self._ended:
            raise TransportError(f"rank {self.rank} of {self.world_size}: this NCCL transport is closed")
        return self._taken

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> _Enqueued:
        """Combine a tensor over the ranks, in place: op is "sum", "avg", "min" or "max"."""
        address, count, dtype, code = tensor.data_ptr(), tensor.numel(), self._dtype(tensor), self._operation(op)
        return self._run(
            "all_reduce", tensor, lambda c, stream: c.allReduce(address, address, count, dtype, code, stream)
        )

    def reduce_scatter(self, received: Tensor, wire: Tensor, op: str = "sum") -> _Enqueued:
        """Combine `wire` over the ranks, and give `received` this rank's shard of it."""
        self._check("reduce_scatter", received)
        self._check_size("reduce_scatter", "wire", wire, received.numel() * self.world_size)
        source, target, count = wire.data_ptr(), received.data_ptr(), received.numel()
        dtype, code = self._dtype(wire), self._operation(op)
        return self._run(
            "reduce_scatter", wire, lambda c, stream: c.reduceScatter(source, target, count, dtype, code, stream)
        )

    def all_to_all(self, received: Tensor, wire: Tensor) -> _Enqueued:
        """One group of sends and receives of bytes."""
        self._check("all_to_all", received)
        self._check_size("all_to_all", "received", received, wire.numel())
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

    def broadcast(self, tensor: Tensor, root: int = 0) -> _Enqueued:
        """Give every rank the bytes of rank `root` of the group, in place."""
        address, size = tensor.data_ptr(), tensor.nbytes
        self._check_rank("broadcast", "root", root)
        return self._run(
            "broadcast", tensor, lambda c, stream: c.broadcast(address, address, size, _BYTES, root, stream)
        )

    def send(self, tensor: Tensor, peer: int) -> _Enqueued:
        """Send bytes to rank `peer` of the group, which calls `recv`."""
        address, size = tensor.data_ptr(), tensor.nbytes
        self._check_rank("send", "peer", peer)
        return self._run("send", tensor, lambda c, stream: c.send(address, size, _BYTES, peer, stream))

    def recv(self, tensor: Tensor, peer: int) -> _Enqueued:
        """Receive bytes from rank `peer` of the group."""
        address, size = tensor.data_ptr(), tensor.nbytes
        self._check_rank("recv", "peer", peer)
        return self._run("recv", tensor, lambda c, stream: c.recv(address, size, _BYTES, peer, stream))

    def exchange(self, value: Any) -> list[Any]:
        """Over the group's store: no GPU takes part."""
        return self._connection.exchange(value)

    def note(self, about: str) -> None:
        """Add `about` to errors of the collectives that follow."""
        self._about = about

    def check(self) -> None:
        """Raise what made the transport fail.

        Raises:
            TransportError: if it did.
        """
        self._connection.check()

    def abort(self) -> None:
        """NCCL's abort: collectives under way end, on the peers too; theirs raise within half a second."""
        self._end(aborted=True)

    def close(self) -> None:
        """Leave the communicators to the next transport over these ranks, unless they have failed."""
        self._end()

    def _end(self, aborted: bool = False) -> None:
        ended, self._ended = self._ended, True
        connection: Connection | None = self.__dict__.get("_taken")
        if ended or connection is None:
            return
        if aborted:
            connection.abort()
        else:
            connection.leave()
        if self._group in _beside:
            _beside[self._group].leave(self._number, connection.failed)

    def _run(self, operation: str, tensor: Tensor, enqueue: Enqueue) -> _Enqueued:
        self._check(operation, tensor)
        connection = self._connection
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
                "with .cuda(), or use TorchProcessGroup (gloo)"
            )
        if not tensor.is_contiguous():
            raise TensorError(f"{self._where(operation)}: a tensor with strides {tensor.stride()}; call contiguous()")

    def _dtype(self, tensor: Tensor) -> int:
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise TensorError(f"{self._where('reducing')}: NCCL cannot combine {tensor.dtype}; allowed: {allowed}")
        return DTYPES[tensor.dtype]

    def _operation(self, op: str) -> int:
        if op not in OPERATIONS:
            raise SettingError(f"{self._where('reducing')}: unknown op {op!r}; allowed: {', '.join(OPERATIONS)}")
        return OPERATIONS[op]

    def _shard_bytes(self, operation: str, wire: Tensor) -> int:
        size, rest = divmod(wire.nbytes, self.world_size)
        if rest:
            raise TensorError(
                f"{self._where(operation)}: {wire.nbytes} bytes do not split into {self.world_size} shards"
            )
        return size

    def _check_size(self, operation: str, name: str, tensor: Tensor, numel: int) -> None:
        self._check(operation, tensor)
        if tensor.numel() != numel:
            raise TensorError(f"{self._where(operation)}: {name} has {tensor.numel()} elements; it needs {numel}")

    def _check_rank(self, operation: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise SettingError(f"{self._where(operation)}: {name}={rank}; allowed: 0 to {self.world_size - 1}")

    def _where(self, operation: str) -> str:
        return f"rank {self.rank} of {self.world_size}: {operation} over NCCL"
