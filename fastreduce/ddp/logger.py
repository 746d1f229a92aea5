"""The logging data of one wrapper under torch's keys, and what TORCH_DISTRIBUTED_DEBUG asks for."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..reduction.buckets import BucketPlan

logger = logging.getLogger(__name__)

FIRST_SAMPLES, SAMPLE_RATE = 10, 100  # torch's: the first ten steps, then every hundredth

# The names that torch's C++ logger has for dtypes.
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex32: "c10::complex<c10::Half>",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


@dataclass
class DDPLoggingData:
    """What `_get_ddp_logging_data` returns: texts and numbers by torch's keys."""

    strs_map: dict[str, str] = field(default_factory=dict)
    ints_map: dict[str, int] = field(default_factory=dict)


@dataclass
class StepTimes:
    """Points in time of one step, in nanoseconds since the epoch; 0 where it has not come so far."""

    forward: int
    backward: int = 0
    communication: int = 0
    backward_end: int = 0
    communication_end: int = 0

    def data(self) -> dict[str, int]:
        """The points and the times between them, by torch's keys."""
        return {
            "forward_compute_time_start": self.forward,
            "backward_compute_time_start": self.backward,
            "backward_compute_time_end": self.backward_end,
            "backward_comm_time_start": self.communication,
            "backward_comm_time_end": self.communication_end,
            "forward_compute_time": self.backward - self.forward,
            "backward_compute_time": self.backward_end - self.backward,
            "backward_comm_time": self.communication_end - self.communication,
            "backward_compute_comm_overlap_time": max(0, self.backward_end - self.communication),
        }


class TorchLogger:
    """Keeps the logging data of one wrapper, in place of torch's C++ logger.

    A step costs a few comparisons. Times are taken in the first ten steps and then in every hundredth, and appear
    in the data at the forward after, as in torch.

    Args:
        parameters: what is reduced, as the plan numbers it.
        names: their names.
        plan: the first layout of the buckets.
        **settings: texts and numbers that go into the data as they are.
    """

    def __init__(self, parameters: Sequence[Tensor], names: Sequence[str], plan: BucketPlan, **settings: str | int):
        self._data = DDPLoggingData()
        self._names, self._bytes = list(names), list[int]()
        self._level = dist.get_debug_level()
        self._step, self.sample_rate = 0, SAMPLE_RATE
        self._times: StepTimes | None = None
        self._sums: Counter[str] = Counter()
        self._samples = 0
        self._unused: list[int] | None = None
        self._named: set[tuple[int, ...]] = set()
        self.graph_is_static = True
        self._dtypes = set[str]()
        self._tell_parameters(parameters)
        self.update(
            bucket_sizes=self._sizes(plan),
            num_buckets_reduced=len(plan.buckets),
            iteration=0,
            find_unused_parameters=False,
            static_graph=False,
        )
        self.update(**settings)
        self._log_plan("buckets", plan)

    def update(self, **values: str | int) -> None:
        """Put texts and numbers into the data."""
        for name, value in values.items():
            if isinstance(value, str):
                self._data.strs_map[name] = value
            else:
                self._data.ints_map[name] = int(value)

    # What torch's class calls

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Iterable[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
    ) -> None:
        """Note how the wrapper was constructed."""
        self.update(
            module_name=module_name,
            device_ids=", ".join(map(str, device_ids)),
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            has_sync_bn=has_sync_bn,
            static_graph=static_graph,
        )

    def set_runtime_stats_and_log(self) -> None:
        """Called before a forward that will be synchronised: publish the last step's figures and begin a step."""
        times = self._times
        if self._is_sampled():
            self.update(iteration=self._step)
            if times is not None and times.communication_end:
                self._publish(times.data())
        self._step += 1
        self._times = StepTimes(time.time_ns()) if self._is_sampled() else None

    def set_error_and_log(self, error: str) -> None:
        """Note an error that is about to be raised."""
        self.update(error=error, has_error=True)

    def _set_static_graph(self) -> None:
        self.update(static_graph=True)

    def _set_uneven_input_join(self) -> None:
        self.update(join_uneven_inputs=True)

    def _set_comm_hook_name(self, name: str) -> None:
        self.update(comm_hook=name)

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        return self._data

    # What wrapper and reducer ask and tell

    @property
    def sampling(self) -> bool:
        """Whether this is a step whose times are taken."""
        return self._times is not None

    def begin_backward(self) -> None:
        """A forward has ended whose backward will be reduced."""
        if self._times is not None:
            self._times.backward = time.time_ns()

    def begin_communication(self) -> None:
        """The first bucket of a backward is on its way."""
        if self._times is not None and not self._times.communication:
            self._times.communication = time.time_ns()

    def end_backward(self, used: Sequence[bool]) -> None:
        """The gradients of a backward are there; `used` tells by parameter whether this rank has one."""
        if self._times is not None:
            self._times.backward_end = time.time_ns()
            self.begin_communication()
        data = self._data.ints_map
        detail = self._level == dist.DebugLevel.DETAIL
        if data["find_unused_parameters"] or detail or self._times is not None:
            self._note_unused([i for i, is_used in enumerate(used) if not is_used], detail)

    def end_communication(self) -> None:
        """The averages are there."""
        if self._times is not None:
            self._times.communication_end = time.time_ns()

    def rebuilt(self, plan: BucketPlan, order: Sequence[int]) -> None:
        """Buckets were laid out anew; `order` is that in which this rank saw gradients arrive."""
        self.update(
            has_rebuilt_buckets=True,
            num_buckets_reduced=len(plan.buckets),
            rebuilt_bucket_sizes=self._sizes(plan),
            rebuilt_per_bucket_param_indices=", ".join(
                " ".join(str(slot.parameter) for slot in bucket.slots) for bucket in plan.buckets
            ),
            prev_iteration_grad_ready_order_indices=", ".join(map(str, order)),
        )
        self._log_plan("buckets were rebuilt", plan)

    def switched(self, step: int, compression: str, by_parameter: str, plan: BucketPlan) -> None:
        """From this step on buckets travel under another setting."""
        self.update(compression=compression)
        self._tell_layout(plan, by_parameter)
        logger.info("rank %d: from step %d on under %s", self._data.ints_map["rank"], step, compression)
        self._log_plan("buckets", plan)

    def added(self, parameters: Sequence[Tensor], names: Sequence[str], plan: BucketPlan, by_parameter: str) -> None:
        """These are averaged, too, from now on."""
        self._names += names
        self._tell_parameters(parameters)
        self._tell_layout(plan, by_parameter)
        rank, others = self._data.ints_map["rank"], len(names) - 1
        more = f" and {others} other parameters" if others else ""
        logger.info("rank %d: %r%s, frozen so far, averaged from now on", rank, names[0], more)
        self._log_plan("buckets", plan)

    # Inside

    def _tell_layout(self, plan: BucketPlan, by_parameter: str) -> None:
        self.update(rebuilt_bucket_sizes=self._sizes(plan), compression_by_parameter=by_parameter)
        self.update(num_buckets_reduced=len(plan.buckets))

    def _tell_parameters(self, new: Sequence[Tensor]) -> None:
        self._bytes += [p.numel() * p.element_size() for p in new]
        self._dtypes |= {_DTYPES[p.dtype] for p in new}
        self.update(dtypes=", ".join(sorted(self._dtypes)))
        self.update(num_parameter_tensors=len(self._bytes), total_parameter_size_bytes=sum(self._bytes))

    def _is_sampled(self) -> bool:
        return self._step > 0 and (self._step <= FIRST_SAMPLES or self._step % self.sample_rate == 0)

    def _publish(self, times: dict[str, int]) -> None:
        self.update(**times)
        self._samples += 1
        for name, value in times.items():
            if name.endswith("_time"):
                self._sums[name] += value
                self.update(**{f"avg_{name}": self._sums[name] // self._samples})

    def _note_unused(self, unused: list[int], detail: bool) -> None:
        data = self._data.ints_map
        if self._times is not None:
            data["unused_parameter_size"] = sum(self._bytes[i] for i in unused)
        if data["find_unused_parameters"]:
            self.graph_is_static = self.graph_is_static and self._unused in (None, unused)
            self._unused = unused
            data["can_set_static_graph"] = int(self.graph_is_static)
        elif detail and unused and not data["static_graph"] and tuple(unused) not in self._named:
            self._named.add(tuple(unused))
            logger.warning(
                "rank %d: no gradient arrived for %s. The average over the ranks counts it as zero, and .grad is left "
                "alone where no rank has one; torch's class would raise at the next forward, unless it is given "
                "find_unused_parameters=True, which also silences this warning",
                data["rank"],
                ", ".join(self._names[i] for i in unused),
            )

    def _log_plan(self, what: str, plan: BucketPlan) -> None:
        if self._level != dist.DebugLevel.OFF:
            sizes = self._sizes(plan)
            rank = self._data.ints_map["rank"]
            logger.info("rank %d: %s: %d of %s bytes\n%s", rank, what, len(plan.buckets), sizes, plan)

    def _sizes(self, plan: BucketPlan) -> str:
        return ", ".join(str(bucket.nbytes) for bucket in plan.buckets)


def environment(group: dist.ProcessGroup) -> dict[str, str | int]:
    """What torch's logger reads from the environment and the group."""
    try:
        backend: str = dist.get_backend(group)
    except ValueError:  # a group that `new_group` has not made, as torchft's of one rank
        backend = group.name()
    variables = ["MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES"]
    found: dict[str, str | int] = {"backend_name": backend}
    if backend == "gloo":
        variables += ["GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"]
        found["gloo_num_threads"] = getattr(group._get_backend(torch.device("cpu")).options, "_threads", 2)
    return {**found, **{name.lower(): os.environ.get(name, "N/A") for name in variables}}
