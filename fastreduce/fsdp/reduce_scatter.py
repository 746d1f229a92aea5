"""The reduce-scatter that FSDP calls in place of torch's: compress, all-to-all, sum in FP32 in rank order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..compression import Compression
from ..errors import ReducerError
from ..reduction.pipeline import Naming
from ..reduction.shared_buffers import SharedBuffers
from ..transports import Transport
from .followed import Followed, Follower
from .kept import Kept, KeptOfRows
from .torch_fsdp import Group, scale_of
from .wires import RowWire


class CompressedReduceScatter:
    """FSDP's interface of a reduce-scatter, for one group.

    1. Each setting's parameters are compressed into a wire of their own, a shard for each rank.
    2. An all-to-all gives this rank every rank's version of its shard.
    3. They are decompressed to FP32 (FP64 of FP64), where there is room: over the input, which FSDP has no use for.
    4. Our kernel sums them in rank order, and scales the sum once, into the output.

    Where gradients travel in their own dtype, the input is the wire and nothing is decompressed.

    Args:
        group: whose gradients.
        settings: by name of parameter.
        transport: the ranks.
        buffers: memory for wires, which the groups of a device use in turn, whatever streams FSDP reduces them on.
        follower: lets error feedback see what became of gradients.
    """

    def __init__(
        self,
        group: Group,
        settings: Mapping[str, Compression],
        transport: Transport,
        buffers: SharedBuffers,
        follower: Follower,
    ) -> None:
        self._follower = follower
        self._followed: list[Followed] = []
        self._group, self._settings, self._transport, self._buffers = group, settings, transport, buffers
        self._naming = Naming(f"FSDP reduces {group}, with {group.listed}.")
        self._kernels = ops.choose(group.device)
        self._lay_out([i for i, member in enumerate(group.members) if member.parameter.requires_grad])

    def _lay_out(self, positions: Sequence[int]) -> None:
        members = self._group.members
        by_setting: dict[Compression, list[int]] = {}
        for i in positions:
            by_setting.setdefault(self._settings[members[i].name], []).append(i)
        self.wires = [
            RowWire(
                chosen,
                [members[i].name for i in chosen],
                [members[i].piece for i in chosen],
                setting,
                self._transport.world_size,
                self._group.device,
            )
            for setting, chosen in by_setting.items()
        ]
        self._follower.remove(self._followed)
        self._followed = [
            Followed(wire.feedback, self._group, wire.members, self._transport)
            for wire in self.wires
            if wire.feedback is not None
        ]
        self._follower.add(self._followed)
        self._known = {i for wire in self.wires for i in wire.members}

    def kept(self) -> list[Kept]:
        """What error feedback keeps, for each wire that has any."""
        members = self._group.members
        return [
            KeptOfRows(wire.feedback, wire.row.slots, [members[i] for i in wire.members], self._transport)
            for wire in self.wires
            if wire.feedback is not None
        ]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends in one reduce-scatter of all parameters."""
        dtype, ranks = self._group.reduce_dtype, self._transport.world_size
        return sum(wire.numel(dtype) * wire.dtype(dtype).itemsize * (ranks - 1) // ranks for wire in self.wires)

    # What FSDP calls

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the input or the output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce `[ranks · n]` into `[n]`; the input is written over. `group` has the transport's ranks.

        It is done when this returns; on a GPU it is work on the current stream.

        Raises:
            TransportError: naming rank, operation and parameters, if it failed.
            ReducerError: if the call is not what was expected of FSDP.
        """
        if async_op:
            raise ReducerError(
                f"fastreduce.fsdp: torch {torch.__version__} asks for a reduce-scatter with async_op=True; "
                "allowed: False, as in FSDP2 so far"
            )
        scale = scale_of(op, self._transport.world_size)
        if self._transport.world_size == 1:  # torch 2.9 asks there too
            torch.mul(input_tensor, scale, out=output_tensor)
            return
        present = list(self._group.present)
        self._check(input_tensor, output_tensor, present)
        if not self._known.issuperset(present):
            self._learn(present)
        self._buffers.use_here(input_tensor.device)
        self._follower.begin(self._followed, present)
        self._reduce(output_tensor, input_tensor, scale, present)

    def _check(self, given: Tensor, output: Tensor, present: Sequence[int]) -> None:
        pieces = [self._group.members[i].piece for i in present]
        if given.numel() != sum(pieces) * self._transport.world_size or output.numel() != sum(pieces):
            raise ReducerError(
                f"fastreduce.fsdp: torch {torch.__version__} reduces {given.numel()} elements of {self._group} into "
                f"{output.numel()}, where its {len(pieces)} parameters with gradients have "
                f"{sum(pieces)} on each of {self._transport.world_size} ranks: FSDP2 lays them out in another way here"
            )

    @torch.no_grad()
    def _reduce(self, output: Tensor, given: Tensor, scale: float, present: list[int]) -> None:
        with self._naming:
            terms = self._exchange(given, present)
        summed = output
        if terms.dtype is not output.dtype:
            summed = self._buffers.take("sum", output.numel(), terms.dtype, output.device)
        self._kernels.reduce_shards(terms.view(self._transport.world_size, -1), summed, scale)
        if summed is not output:
            output.copy_(summed)

    def _exchange(self, given: Tensor, present: list[int]) -> Tensor:
        """Every rank's version of this rank's row: in the gradients' dtype, or FP32, or FP64."""
        ranks, dtype, device = self._transport.world_size, given.dtype, given.device
        plain = [wire for wire in self.wires if wire.dtype(dtype) is dtype]
        if len(plain) == len(self.wires) == 1:
            received = self._buffers.take("received 0", given.numel(), dtype, device)
            self._transport.all_to_all(received.view(ranks, -1), given).wait()
            return received
        wide = dtype in (torch.float32, torch.float64)
        terms = given if wide else self._buffers.take("terms", given.numel(), torch.float32, device)
        pieces = [self._group.members[i].piece for i in present]
        gradients, decoded = (list(tensor.split(pieces * ranks)) for tensor in (given, terms))
        under_way = []
        for k, wire in enumerate(self.wires):
            packed, received = (
                self._buffers.take(f"{name} {k}", wire.numel(dtype), wire.dtype(dtype), device)
                for name in ("wire", "received")
            )
            wire.compress(self._of(wire, gradients, present), packed)
            under_way.append((wire, received, self._transport.all_to_all(received.view(ranks, -1), packed)))
        for wire, received, work in under_way:
            work.wait()
            wire.decode(received, dtype, self._of(wire, decoded, present))
            if wire.feedback is not None:
                wire.feedback.finite = wire.finite.bool()[0]
        return terms

    def _of(self, wire: RowWire, parts: list[Tensor], present: list[int]) -> list[Tensor]:
        """A wire's parameters out of the parts of those present, row by row; zeros for others, which may be written."""
        place, count = {member: i for i, member in enumerate(present)}, len(present)
        found = []
        for r in range(wire.ranks):
            for slot in wire.row.slots:
                i = place.get(slot.parameter)
                found.append(parts[0].new_zeros(slot.numel) if i is None else parts[r * count + i])
        return found

    def _learn(self, present: Sequence[int]) -> None:
        """Parameters have begun to require gradients: lay wires out for them too; residuals move along."""
        self._follower.end()
        self._follower.look()
        before = {
            slot.name: wire.feedback.take(k)
            for wire in self.wires
            if wire.feedback is not None
            for k, slot in enumerate(wire.row.slots)
        }
        self._lay_out(sorted(self._known.union(present)))
        for wire in self.wires:
            for k, slot in enumerate(wire.row.slots):
                if wire.feedback is not None and slot.name in before:
                    wire.feedback.put(k, before[slot.name])
