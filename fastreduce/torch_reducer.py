"""Our reducer and logger under the method names that torch's DistributedDataParallel calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .buckets import BucketPlan, build_plan
from .comm_hook import GradBucket, Hook, HookPipeline
from .compression import NoCompression
from .mixed_precision import LowPrecision
from .pipeline import BucketPipeline
from .reducer import GradientReducer, Job


class TorchReducer(GradientReducer):
    """A GradientReducer in the place of torch's C++ reducer, with what only its class needs: hooks and join."""

    _hook: tuple[object, Hook] | None = None
    _flags: Tensor | None = None
    _join: tuple[Any, bool] | None = None
    logger: TorchLogger

    def __init__(self, *args: Any, low_precision: LowPrecision | None = None, **kwargs: Any) -> None:
        self._after_backward: list[Any] = []
        self._low_precision = low_precision
        super().__init__(*args, **kwargs)

    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised; there is nothing to prepare."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after a forward that is to be synchronised. `outputs` is not needed: no graph is searched."""
        self.arm()

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients enabled, and by ranks that have joined."""
        self.drop_broken_backward()
        return self.rebuild_buckets()

    def _set_static_graph(self) -> None:
        """Called for `static_graph=True`; the reducer handles static and changing graphs alike.

        Raises:
            RuntimeError: if training has begun (as torch).
        """
        if self._reduced_once:
            error = "_set_static_graph() should be called before training loop starts"
            self.logger.set_error_and_log(error)
            raise RuntimeError(error)

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Called with the futures of a hook that reduces buffers: wait for them at the end of backward."""
        self._after_backward += futures

    def _reduce_all(self) -> None:
        self.restore_precision()  # averages are stored in the parameters' own
        super()._reduce_all()
        if self._low_precision is not None:
            self._low_precision.raise_gradients()
        while self._after_backward:
            self._after_backward.pop().wait()

    # Mixed precision

    def lower_precision(self) -> None:
        """Called before every forward under `mixed_precision=`."""
        if self._low_precision is not None:
            self._low_precision.lower()
            self._arrivals.remove()
            self._arrivals.attach()

    def restore_precision(self) -> None:
        """Called after a forward that no backward will follow."""
        if self._low_precision is not None:
            self._low_precision.restore()

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype | None) -> None:
        """Called at the end of the constructor; the reducer knew the dtypes from its beginning."""

    def _delay_all_reduce(self) -> None:
        """Called at the end of a static graph's first backward, where our own callback has done the work."""

    def _set_optimizer_in_backward(self) -> None:
        """Called where optimizers run in a hook; nothing to prepare."""

    def _check_reducer_finalized(self) -> None:
        """Raise if the last backward was not reduced to its end.

        Raises:
            RuntimeError: if a backward raised, and no forward came after it.
        """
        if self._in_backward:
            raise RuntimeError("the last backward raised before its gradients were reduced")

    def _remove_autograd_hooks(self) -> None:
        """Take the hooks off the parameters: gradients stay local from now on."""
        self._arrivals.remove()

    # Communication hooks

    def use_hook(self, state: object, hook: Hook) -> None:
        """Let `hook` reduce buckets from now on.

        Raises:
            RuntimeError: if there is a hook or `mixed_precision=` already (torch's error), or a compression.
        """
        if self._hook is not None or self._low_precision is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if not isinstance(self.compression, NoCompression):
            raise RuntimeError(
                f"compression={str(self.compression)!r} and a communication hook exclude each other: "
                "both decide what goes on the wire"
            )
        self._hook = (state, hook)
        self._install([[slot.parameter for slot in bucket.slots] for bucket in self.plan.buckets])

    def _build(self, groups: Iterable[Sequence[int]]) -> tuple[BucketPlan, list[BucketPipeline]]:
        if self._hook is None:
            plan, pipelines = super()._build(groups)
            for pipeline in pipelines:
                pipeline.alone &= self._low_precision is None  # else gradients are cast, by one rank too
            return plan, pipelines
        state, hook = self._hook
        plan = build_plan(self._specs, groups, alignment=1, shards=1)
        last, pipelines = len(plan.buckets) - 1, []
        for bucket in plan.buckets:
            members = self._gradients.members(bucket)
            layouts = self._gradients.layouts(members)
            pipelines.append(HookPipeline(bucket, state, hook, members.parameters, layouts, last=bucket.index == last))
        return plan, pipelines

    def _forget_backward(self) -> None:
        super()._forget_backward()
        self._flags = None

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end, and the futures that it was to wait for."""
        if self._in_backward:
            self._after_backward.clear()
        super().drop_broken_backward()

    def _collect(self, index: int) -> Job:
        job = super()._collect(index)
        if self._hook is not None and self._as_views:
            job.found.point_used()
        return job

    def _settle(self, job: Job) -> set[int]:
        if self._hook is not None:
            indices = [slot.parameter for slot in job.pipeline.bucket.slots]
            job.pipeline.used_by_any.copy_(self._used_by_any()[indices])
        active = self._active_ranks()
        if active != self.transport.world_size:
            torch._foreach_mul_(job.found.targets, self.transport.world_size / active)
        return super()._settle(job)

    def _used_by_any(self) -> Tensor:
        """One flag a parameter, summed over the ranks once a backward: a hook's buffer has no room for them."""
        if self._flags is None:
            self._flags = torch.tensor(self._arrivals.used, dtype=torch.float32)
            self.transport.all_reduce(self._flags).wait()
        return self._flags

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The future of the user's hook, or of the sum over the ranks where there is none."""
        if self._hook is None:
            return self._run_allreduce_hook(bucket)
        state, hook = self._hook
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        return future

    def _run_allreduce_hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The sum of the bucket's buffer over the ranks, in place and not divided."""
        self.transport.all_reduce(bucket.buffer()).wait()
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    # Uneven inputs

    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        """Called in a join context: `work` sums up how many ranks still have inputs."""
        self._join = (work, use_static_world_size)

    def _active_ranks(self) -> int:
        """Ranks to divide by."""
        if self._join is None or self._join[1]:
            return self.transport.world_size
        work = self._join[0]
        work.wait()
        return int(work.result()[0].item())

    def shadow_backward(self) -> None:
        """Take part with zeros in the reduction of one backward, for ranks that have joined."""
        for pipeline in self.pipelines:
            zeros = [torch.zeros(slot.numel, dtype=pipeline.bucket.dtype) for slot in pipeline.bucket.slots]
            pipeline.run(zeros, zeros, range(len(zeros)))
        if self._hook is not None:
            self._arrivals.forget_used()
            self._used_by_any()
        self._sparse.take_part(self._active_ranks())
        self._reduced_once = True
        self._forget_backward()

    def _push_all_rebuilt_params(self) -> None:
        """Called on joined ranks; the order of buckets is exchanged when they are rebuilt."""


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
        self._data.ints_map["has_error"] = True

    def _set_static_graph(self) -> None:
        self._data.ints_map["static_graph"] = True

    def _set_uneven_input_join(self) -> None:
        self._data.ints_map["join_uneven_inputs"] = True

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map["comm_hook"] = name

    def _get_ddp_logging_data(self) -> DDPLoggingData:
        return self._data
