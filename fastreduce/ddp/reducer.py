"""Our reducer and logger under the method names that torch's DistributedDataParallel calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compression import NoCompression
from ..reduction import saved_residuals
from ..reduction.bucketed import Job
from ..reduction.buckets import BucketPlan, build_plan
from ..reduction.error_feedback import agree_that_finite
from ..reduction.pipeline import BucketPipeline
from ..reduction.reducer import GradientReducer
from ..transports import make_transport
from .logger import TorchLogger
from .mixed_precision import LowPrecision
from .user_hook import GradBucket, Hook, HookPipeline

# What only torch's C++ reducer has → what to use instead.
CPP_ONLY = {
    "_get_local_used_map": "used-flags travel with the gradients; TORCH_DISTRIBUTED_DEBUG=DETAIL names what is unused",
    "_get_zeros_like_grad_buckets": "`shadow_backward()` does a joined rank's part of a backward",
    "_set_sparse_metadata": "only the C++ reducer's sparse all-reduce over NCCL reads it",
    "get_backward_stats": "`seconds` has the time by stage, `_get_ddp_logging_data()` of the wrapper that by phase",
    "set_logger": "the wrapper has set the attribute `logger`",
}


class TorchReducer(GradientReducer):
    """A GradientReducer in the place of torch's C++ reducer, with what only its class needs: hooks and join."""

    _hook: tuple[object, Hook] | None = None
    _flags: Tensor | None = None
    _join: tuple[Any, bool] | None = None
    logger: TorchLogger
    check_at_end: Callable[[], None] | None = None  # called once, when the next backward has ended

    def __init__(self, *args: Any, low_precision: LowPrecision | None = None, **kwargs: Any) -> None:
        self._after_backward: list[Any] = []
        self._low_precision = low_precision
        super().__init__(*args, **kwargs)
        self.known = frozenset(map(id, self._gradients.parameters))

    def __getattr__(self, name: str) -> Any:
        if name in CPP_ONLY:
            raise AttributeError(f"only torch's C++ reducer has {name!r}; here, {CPP_ONLY[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised; there is nothing to prepare."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after a forward that is to be synchronised. `outputs` is not needed: no graph is searched."""
        self.logger.begin_backward()
        self.arm()

    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients enabled, and by ranks that have joined."""
        self.drop_broken_backward()
        self.look()
        if not self.rebuild_buckets():
            return False
        self.logger.rebuilt(self.plan, self._arrivals.last_seen())
        return True

    def _set_static_graph(self) -> None:
        """Called for `static_graph=True`; the reducer handles static and changing graphs alike.

        Raises:
            RuntimeError: if training has begun (as torch).
        """
        if self._reduced_once:
            error = (
                "_set_static_graph() should be called before training loop starts; or pass static_graph=True to the "
                "constructor"
            )
            self.logger.set_error_and_log(error)
            raise RuntimeError(error)

    def _ddp_graph_static(self) -> bool:
        """Whether the set of unused parameters has never changed, as far as find_unused_parameters=True tells."""
        return self.logger.graph_is_static

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Take times in every `sample_rate`-th step once the first ten are over."""
        self.logger.sample_rate = sample_rate

    def _install_post_backward_futures(self, futures: Sequence[Any]) -> None:
        """Called with the futures of a hook that reduces buffers: wait for them at the end of backward."""
        self._after_backward += futures

    def _launch_full_buckets(self) -> None:
        super()._launch_full_buckets()
        if self._launches:
            self.logger.begin_communication()

    def _end_backward(self) -> None:
        super()._end_backward()
        check, self.check_at_end = self.check_at_end, None
        if check is not None:
            check()

    def _reduce_all(self) -> None:
        self.logger.end_backward(self._arrivals.used)
        self.restore_precision()  # averages are stored in the parameters' own
        super()._reduce_all()
        self.logger.end_communication()
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

    # Another process group

    def _reset_state(self) -> None:
        """Forget what is under way and what was learned, as if no backward had been: other ranks will take part.

        Nothing is made up for, so that it works after a peer has died.
        """
        self._after_backward.clear()
        self._join = None
        self._armed = self._in_backward = self._reduced_once = self._rebuilt = False
        self._left_over = set()
        self._arrivals.forget_used()
        self._arrivals.fires[:] = [1] * len(self._specs)
        self._forget_backward()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        """Reduce over the ranks of `group` from now on; every one of them calls it, after `_reset_state`.

        Buckets are laid out as at construction, so that ranks with another past agree. Residuals move along.
        """
        kept = saved_residuals.collect(self.pipelines)
        self._close()
        self.transport = make_transport(group, self._specs[0].device)
        self._make_streams()
        self._own()
        self._sparse.transport = self.transport
        self._install(self._first_groups())
        saved_residuals.restore(kept, self.pipelines)
        self.logger.update(rank=self.transport.rank, world_size=self.transport.world_size, has_rebuilt_buckets=False)

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
            return super()._build(groups)
        state, hook = self._hook
        plan = build_plan(self._specs, groups, alignment=1, shards=1)
        last = len(plan.buckets) - 1
        pipelines: list[BucketPipeline] = []
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

    def _settle(self, job: Job, scale: float = 1.0) -> set[int]:
        if self._hook is not None:
            assert isinstance(job.pipeline, HookPipeline)
            job.pipeline.used_by_any.copy_(self._used_by_any()[job.pipeline.indices])
        active = self._active_ranks()
        if active != self.transport.world_size:
            scale *= self.transport.world_size / active
            torch._foreach_mul_(job.found.targets, scale)
            job.pipeline.has_statistics = False
        return super()._settle(job, scale)

    def _used_by_any(self) -> Tensor:
        """One flag a parameter, summed over the ranks once a backward: a hook's buffer has no room for them."""
        if self._flags is None:
            device = self._specs[0].device
            flags = torch.tensor(self._arrivals.used, dtype=torch.float32, pin_memory=device.type == "cuda")
            self._flags = flags.to(device, non_blocking=True)
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
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
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
            zeros = [pipeline.used.new_zeros(slot.numel) for slot in pipeline.bucket.slots]
            pipeline.run(zeros, zeros, range(len(zeros)))
            if pipeline.feedback is not None:  # the others apply it
                left = (pipeline.used_by_any == 0).nonzero().flatten().tolist()
                parameters = self._members[pipeline.bucket.index].parameters
                pipeline.feedback.follow(parameters, left, pipeline.magnitudes, watched=False)
        agree_that_finite(self._feedbacks())
        if self._hook is not None:
            self._arrivals.forget_used()
            self._used_by_any()
        self._sparse.take_part(self._active_ranks())
        self._reduced_once = True
        self._forget_backward()

    def _push_all_rebuilt_params(self) -> None:
        """Called on joined ranks; the order of buckets is exchanged when they are rebuilt."""
