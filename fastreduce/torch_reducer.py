"""Our reducer and logger under the method names that torch's DistributedDataParallel calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .reducer import GradientReducer


class TorchReducer(GradientReducer):
    """A GradientReducer that takes the place of torch's C++ reducer."""

    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised; there is nothing to prepare."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after a forward that is to be synchronised. `outputs` is not needed: no graph is searched."""
        self.arm()

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients enabled."""
        self.drop_broken_backward()
        return self.rebuild_buckets()

    def _set_static_graph(self) -> None:
        """Called for `static_graph=True`; the reducer handles static and changing graphs alike."""

    def _delay_all_reduce(self) -> None:
        """Called at the end of a static graph's first backward, where our own callback has done the work."""


@dataclass
class DDPLoggingData:
    """What `_get_ddp_logging_data` returns: texts and numbers by torch's keys."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


class TorchLogger:
    """Keeps the logging data of one wrapper, in place of torch's C++ logger."""

    def __init__(self, reducer: TorchReducer) -> None:
        self._data = DDPLoggingData()
        plan = reducer.plan
        self._data.strs_map.update(
            backend_name=reducer.transport.name,
            comm_hook="",
            compression=str(reducer.compression),
            bucket_sizes=", ".join(str(bucket.nbytes) for bucket in plan.buckets),
        )
        self._data.ints_map.update(
            world_size=reducer.transport.world_size,
            rank=reducer.transport.rank,
            num_parameter_tensors=sum(len(bucket.slots) for bucket in plan.buckets),
            total_parameter_size_bytes=sum(bucket.nbytes for bucket in plan.buckets),
            iteration=0,
        )

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: list[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Note how the wrapper was constructed."""
        self._data.strs_map.update(module_name=module_name, device_ids=", ".join(map(str, device_ids)))
        self._data.ints_map.update(
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            has_sync_bn=has_sync_bn,
            static_graph=static_graph,
        )

    def set_runtime_stats_and_log(self) -> None:
        """Count a synchronised forward."""
        self._data.ints_map["iteration"] += 1

    def set_error_and_log(self, error: str) -> None:
        """Note an error that is about to be raised."""
        self._data.strs_map["error"] = error

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = True

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        return self._data
