"""The all-gather that FSDP calls in place of torch's: compress this rank's part, gather, decompress all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression import Compression
from ..errors import ReducerError
from ..reduction.pipeline import Collectives
from ..transports import Transport
from .torch_fsdp import Group
from .wires import RowWire


class CompressedAllGather:
    """FSDP's interface of an all-gather, for one group.

    1. This rank's part of each setting's parameters is compressed into its row of a wire.
    2. An all-gather gives every rank all rows.
    3. They are decompressed into the output, this rank's own too: all ranks compute with the same numbers.

    Sharded parameters stay as they are. What is gathered again before they change has the same bits.

    Args:
        group: whose parameters.
        settings: by name of parameter.
        transport: the ranks.
    """

    def __init__(self, group: Group, settings: Mapping[str, Compression], transport: Transport) -> None:
        self._group, self._transport = group, transport
        self._collectives = Collectives(transport, f"FSDP gathers {group}, with {group.listed}.")
        self._pieces = [member.piece for member in group.members]
        by_setting = group.by_setting(settings, range(len(group.members)))
        self._wires = [self._make_wires(chosen, setting) for setting, chosen in by_setting.items()]

    def _make_wires(self, chosen: Sequence[int], setting: Compression) -> tuple[RowWire, RowWire]:
        """Of this rank's row, and of all."""
        names = [self._group.members[i].name for i in chosen]
        pieces = [self._pieces[i] for i in chosen]
        own, every = (
            RowWire(chosen, names, pieces, setting, rows, self._group.device)
            for rows in (1, self._transport.world_size)
        )
        return own, every

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the output, of which the input is a part."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather `[n]` of each rank into `[ranks · n]`. `group` has the transport's ranks.

        It is done when this returns, whatever `async_op` says; on a GPU it is work on the current stream.

        Raises:
            TransportError: naming rank, operation and parameters, if it failed.
            ReducerError: if the call is not what was expected of FSDP.
        """
        ranks = self._transport.world_size
        fits = (input_tensor.numel(), output_tensor.numel()) == (sum(self._pieces), sum(self._pieces) * ranks)
        if not fits or group.size() != ranks or not output_tensor.is_floating_point():
            raise ReducerError(
                f"fastreduce.fsdp: torch {torch.__version__} gathers {input_tensor.numel()} elements of {self._group} "
                f"as {input_tensor.dtype} from each of {group.size()} ranks, where its {len(self._pieces)} parameters "
                f"have {sum(self._pieces)} on each of {ranks}: FSDP2 lays them out in another way here"
            )
        with self._collectives:
            self._gather(output_tensor, input_tensor)

    @torch.no_grad()
    def _gather(self, output: Tensor, given: Tensor) -> None:
        ranks, dtype = self._transport.world_size, output.dtype
        if len(self._wires) == 1 and self._wires[0][1].dtype(dtype) is dtype:
            self._transport.all_gather(output).wait()  # the input lies in it
            return
        mine, all_ = given.split(self._pieces), output.split(self._pieces * ranks)
        under_way = []
        for own, every in self._wires:
            wire = torch.empty(every.numel(dtype), dtype=every.dtype(dtype), device=output.device)
            own.compress([mine[i] for i in own.members], wire.view(ranks, -1)[self._transport.rank])
            under_way.append((every, wire, self._transport.all_gather(wire)))
        for every, wire, work in under_way:
            work.wait()
            every.decode(wire, dtype, [all_[r * len(mine) + i] for r in range(ranks) for i in every.members])
