"""The reduce-scatter that FSDP calls in place of torch's: compress, all-to-all, sum in FP32 in rank order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..compression import Compression
from ..errors import ReducerError
from ..reduction.pipeline import Collectives
from ..reduction.shared_buffers import SharedBuffers
from ..transports import Transport
from .followed import Followed, Follower
from .kept import Kept, KeptOfRows
from .torch_fsdp import Group, scale_of, used_elsewhere
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

    Attributes:
        owner: what ends the transport when it ends itself: the group keeps it, and the model's list may be gone.
    """

    owner: object = None

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
        self._group, self._settings, self._transport = group, settings, transport
        self._buffers, self._turns = buffers, buffers.turns
        self._collectives = Collectives(transport, f"FSDP reduces {group}, with {group.listed}.")
        self._kernels = ops.choose(group.device)
        self._lay_out(group.trained)

    def _lay_out(self, positions: Sequence[int]) -> None:
        members = self._group.members
        self.wires = [
            RowWire(
                chosen,
                [members[i].name for i in chosen],
                [members[i].piece for i in chosen],
                setting,
                self._transport.world_size,
                self._group.device,
            )
            for setting, chosen in self._group.by_setting(self._settings, positions).items()
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
        """What error feedback keeps, for each wire that has any, of all that is trained now; every rank calls it."""
        self._learn(self._group.trained)
        self._follow_scale()
        members, of_mean = self._group.members, self._group.scales()[0] * self._transport.world_size
        return [
            KeptOfRows(wire.feedback, wire.row.slots, [members[i] for i in wire.members], self._transport, of_mean)
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
            ReducerError: if the call is not what was expected of FSDP, or a parameter is used on other ranks only.
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
        self._learn({*present, *self._group.trained})
        self._turns.use_here(input_tensor.device)
        self._follower.begin(self._followed, present)
        self._follow_scale()
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
        with self._collectives:
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
            return self._exchange_as_it_is(given, present)
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
        found: dict[int, Sequence[Tensor]] = {}
        for wire, received, work in under_way:
            work.wait()
            decoded_here = self._of(wire, decoded, present)
            wire.decode(received, dtype, decoded_here)
            if wire.feedback is not None:
                wire.feedback.finite = wire.finite.bool()[0]
            else:  # residuals come of ranks that have no gradient, too: there `Followed` looks
                parts = len(wire.row.slots)
                found |= {slot.parameter: decoded_here[k::parts] for k, slot in enumerate(wire.row.slots)}
        self._look(found, present)
        return terms

    def _exchange_as_it_is(self, given: Tensor, present: list[int]) -> Tensor:
        """The same, where the input is the wire. All ranks send what all may have."""
        ranks, members = self._transport.world_size, self._group.members
        sent = [i for i in self._group.order if i in {*present, *self._group.trained}]
        pieces = [members[i].piece for i in sent]
        if len(sent) > len(present):
            had = dict(zip(present, given.view(ranks, -1).split([members[i].piece for i in present], 1), strict=True))
            rows = [had[i] if i in had else given.new_zeros(ranks, members[i].piece) for i in sent]
            given = torch.cat(rows, 1).view(-1)
        received = self._buffers.take("received 0", given.numel(), given.dtype, given.device)
        self._transport.all_to_all(received.view(ranks, -1), given).wait()
        if len(sent) == len(present):
            return received
        found = dict(zip(sent, received.view(ranks, -1).split(pieces, 1), strict=True))
        self._look({i: [part] for i, part in found.items()}, present)
        return torch.cat([found[i] for i in present], 1).view(-1)

    def _look(self, found: Mapping[int, Sequence[Tensor]], present: Sequence[int]) -> None:
        """Whether other ranks have gradients of parameters of which this one has none, and so stores no average.

        Raises:
            ReducerError: if they have.
        """
        for i in set(self._group.trained).intersection(found).difference(present):
            if any(bool(part.any()) for part in found[i]):
                raise used_elsewhere(self._group.members[i].name, self._transport, "rank")

    def _of(self, wire: RowWire, parts: list[Tensor], present: list[int]) -> list[Tensor]:
        """A wire's parameters out of the parts of those present, row by row; zeros for others, which may be written."""
        place, count = {member: i for i, member in enumerate(present)}, len(present)
        found = []
        for r in range(wire.ranks):
            for slot in wire.row.slots:
                i = place.get(slot.parameter)
                found.append(parts[0].new_zeros(slot.numel) if i is None else parts[r * count + i])
        return found

    def _follow_scale(self) -> None:
        """Let what is kept follow `set_gradient_divide_factor`."""
        for each in self._followed:
            each.feedback.set_average_scale(self._group.scales()[0])

    def _learn(self, found: Collection[int]) -> None:
        """Where parameters have begun to require gradients: lay wires out for them too; residuals move along."""
        if self._known.issuperset(found):
            return
        self._follower.catch_up()
        self._follower.look()
        self._follow_scale()
        before = {
            slot.name: wire.feedback.take(k)
            for wire in self.wires
            if wire.feedback is not None
            for k, slot in enumerate(wire.row.slots)
        }
        self._lay_out(sorted(self._known.union(found)))
        for wire in self.wires:
            for k, slot in enumerate(wire.row.slots):
                if wire.feedback is not None and slot.name in before:
                    wire.feedback.put(k, before[slot.name])
        for each in self._followed:
            each.follow_on()
