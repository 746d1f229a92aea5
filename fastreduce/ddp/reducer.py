"""Our reducer and logger under the method names that torch's DistributedDataParallel calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ..compression import NoCompression
from ..errors import MismatchError, ReducerError, SettingError, TensorError
from ..reduction.arrivals import makes_graph, weakly
from ..reduction.reducer import GradientReducer
from ..reduction.schedule import Setting
from ..transports import make_transport
from .logger import TorchLogger
from .mixed_precision import LowPrecision
from .user_hook import GradBucket, Hook, UserHook

# What only torch's C++ reducer has → what to use instead.
CPP_ONLY = {
    "_get_local_used_map": "used-flags travel with the gradients; TORCH_DISTRIBUTED_DEBUG=DETAIL names what is unused",
    "_get_zeros_like_grad_buckets": "`take_part()` does a joined rank's part of a backward",
    "_set_sparse_metadata": "only the C++ reducer's sparse all-reduce over NCCL reads it",
    "get_backward_stats": "`seconds` has the time by stage, `_get_ddp_logging_data()` of the wrapper that by phase",
    "set_logger": "the wrapper has handed the logger to `log_to`",
}


class TorchReducer(GradientReducer):
    """A GradientReducer in the place of torch's C++ reducer: torch's names for what it does, hooks and join.

    Args:
        *args: those of GradientReducer.
        low_precision: the parameters' storages under `mixed_precision=`.
        asked: the name of the transport that the user asked for, for other ranks too.
        find_unused_parameters: as torch's class was given it.
        **kwargs: those of GradientReducer.

    Attributes:
        asked: as given; the next `_update_process_group` follows it.
        check: raises if the module holds a trainable parameter that nobody reduces.
        checks: whether it is called when the next backward has ended.
        thaw: adds what was frozen at construction, and requires a gradient now.
    """

    logger: TorchLogger
    check: Callable[[], None] | None = None
    checks = False
    thaw: Callable[[], None] | None = None

    def __init__(
        self,
        *args: Any,
        low_precision: LowPrecision | None,
        asked: str | None,
        find_unused_parameters: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.asked, self._finds_unused = asked, find_unused_parameters
        self._hook: UserHook | None = None
        self._low_precision = low_precision
        if low_precision is not None:
            self._sparse.dtype = low_precision.dtype  # parameters are in their own before sparse gradients are averaged
        self._device = self.buckets.specs[0].device
        self._buffers_under_way: list[Any] = []  # futures
        self._missed: set[int] = set()  # parameters that a reduced backward has not brought a gradient to
        self.events.ended.append(weakly(self._check_at_end))
        self.events.dropped.append(self._buffers_under_way.clear)

    def log_to(self, logger: TorchLogger) -> None:
        """Tell the wrapper's logger what goes on, from now on; called once."""
        self.logger, used, low = logger, self.used, self._low_precision
        self.events.launching.append(lambda _: logger.begin_communication())
        self.events.computed.append(lambda: logger.end_backward(used))
        self.events.stored.append(logger.end_communication)
        if low is not None:
            self.events.computed.append(low.restore)  # averages are stored in the parameters' own
            self.events.stored.append(low.raise_gradients)
            self.events.dropped += [low.restore, low.raise_gradients]
        self.events.stored.append(weakly(self._wait_for_buffers))

    def __getattr__(self, name: str) -> Any:
        if name in CPP_ONLY:
            raise AttributeError(f"only torch's C++ reducer has {name!r}; here, {CPP_ONLY[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def prepare_for_forward(self) -> None:
        """Called before a forward that will be synchronised; there is nothing to prepare."""

    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Called after a forward that is to be synchronised. `outputs` is not needed: no graph is searched."""
        if not self.backward.is_here:
            self.logger.begin_backward()
            self.arm()

    @temporarily_clear_interpreter_stack()  # a forward inside a transform of torch.func
    def _rebuild_buckets(self) -> bool:
        """Called before every forward with gradients enabled, and by ranks that have joined."""
        if self.backward.is_here:  # a checkpoint runs the forward again
            return False
        self.drop_broken_backward()
        self.look()
        self.add_thawed()
        self.switch_if_due()
        # As in torch: such a hook may average among others than these ranks, who begin at another time, as torchft's.
        if (self._hook is not None and self._finds_unused) or not self.rebuild_buckets():
            return False
        self.logger.rebuilt(self.plan, self.arrival_order)
        return True

    def set_compression(self, setting: Setting, at: int | None = None, bucket_bytes: float | None = None) -> None:
        """As in GradientReducer, where no communication hook averages; what was unfrozen is averaged by then.

        Raises:
            SettingError: also if one does.
        """
        if self._hook is not None:
            raise SettingError(
                f"compression={setting!r} and a communication hook exclude each other: "
                "both decide what goes on the wire"
            )
        if not self.backward.running or self.backward.has_raised:
            # On all ranks alike: what one refuses is a MismatchError on the others. The next forward tries it again.
            with suppress(SettingError, TensorError, MismatchError):
                self.add_thawed()
        super().set_compression(setting, at, bucket_bytes)

    def switch_if_due(self) -> bool:
        """As in GradientReducer, and the log tells."""
        switched = super().switch_if_due()
        if switched:
            self.logger.switched(self.step, str(self.compression), self.buckets.settings_text(), self.plan)
        return switched

    def add_thawed(self) -> None:
        """Average what has been unfrozen since the last forward, on all ranks alike: where all of them come by."""
        self.backward.check_finished()
        self.make_up_for_raised()
        if self.thaw is not None:
            self.thaw()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As in GradientReducer, also of what has been unfrozen since the last forward."""
        self.add_thawed()
        super().load_state_dict(state)

    def replay(self, order: Iterable[int], used: Iterable[int]) -> None:
        """Reduce what is in `.grad`, as if a synchronised forward and backward had brought it to hooks, which are off.

        Args:
            order: parameters as they arrived, so often as they did.
            used: those that this rank has used since its last reduction.
        """
        self.recorder.enter_forward(True)
        self.prepare_for_backward(())
        self.backward.replay(order, used)

    def _set_static_graph(self) -> None:
        """Called for `static_graph=True`; the reducer handles static and changing graphs alike.

        Raises:
            RuntimeError: if training has begun (as torch).
        """
        if self.backward.reduced_once:
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
        self._buffers_under_way += futures

    def _wait_for_buffers(self) -> None:
        while self._buffers_under_way:
            self._buffers_under_way.pop().wait()

    def _check_at_end(self) -> None:
        due, self.checks = self._misses_more() or self.checks, False
        if due and self.check is not None:
            self.check()

    def _misses_more(self) -> bool:
        """Whether no gradient came for a parameter that always had one: another may be in its place by now."""
        if self.backward.armed:  # none came at all
            return True
        brought = self.backward.brought
        if all(brought):
            return False
        missed = {i for i, is_brought in enumerate(brought) if not is_brought}
        more = not missed <= self._missed
        self._missed |= missed
        return more

    # Mixed precision

    def lower_precision(self) -> None:
        """Called before every forward under `mixed_precision=`."""
        if self._low_precision is not None and not self.backward.is_here:
            self._low_precision.lower()
            if self.backward.arrivals.attached and makes_graph():
                self.replace_hooks()

    def restore_unless_needed(self) -> None:
        """Called after a forward that no backward will follow: one that will may have been before it."""
        if self._low_precision is not None and not self._low_precision.needed:
            self._low_precision.restore()

    def restore_precision(self) -> None:
        """Called before a state is loaded."""
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
            RuntimeError: if a backward raised, and no forward came after it, or if it is to be finalized by hand.
        """
        self.backward.check_finished()
        if self.backward.running:
            raise RuntimeError("the last backward raised before its gradients were reduced")

    # Averages stored by hand

    def _set_manual_finalization_required(self, required: bool) -> None:
        """Called by the wrapper's `require_manual_backward_finalization = …`, between a step and the next forward.

        Raises:
            ReducerError: between a forward that is to be synchronized and the end of its backward.
        """
        if required != self.backward.manual and (self.backward.armed or self.backward.running):
            raise ReducerError(
                f"require_manual_backward_finalization = {required} between a forward and the averages of its "
                "backward: set it before the forward"
            )
        self.backward.manual = required

    def _should_finalize_after_backward(self) -> bool:
        """Whether averages cannot be stored before backward has ended, in a hook.

        Buckets that are laid out anew after the first backward are no reason to wait. What no rank uses is known at
        the end alone.
        """
        return self.backward.manual and (not self.backward.brought_all or self._finds_unused)

    def _finalize_backward_manual(self) -> None:
        """Called by the wrapper's `finalize_backward()`: store the averages, once for each backward.

        Raises:
            ReducerError: if that is not for the caller to do, and as `Backward.finish`.
        """
        if not self.backward.manual:
            raise ReducerError(
                "finalize_backward() without require_manual_backward_finalization = True: backward stores averages"
            )
        self.backward.finish()

    def _remove_autograd_hooks(self) -> None:
        """Called to keep gradients local from now on."""
        self.remove_hooks()

    # Another process group

    def _reset_state(self) -> None:
        """Called before other ranks take part."""
        self._buffers_under_way.clear()
        self.reset()

    def _update_process_group(self, group: dist.ProcessGroup) -> None:
        """Reduce over the ranks of `group` from now on; every one of them calls it, after `_reset_state`."""
        self.move_to(lambda: make_transport(group, self._device, self.asked))
        self.logger.update(rank=self.transport.rank, world_size=self.transport.world_size, has_rebuilt_buckets=False)

    # Communication hooks

    def use_hook(self, state: object, hook: Hook) -> None:
        """Let `hook` reduce buckets from now on.

        Raises:
            RuntimeError: if there is a hook or `mixed_precision=` already (torch's error), or a compression, also one
                that is to come or has left residuals.
        """
        if self._hook is not None or self._low_precision is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self.switch_if_due()  # what was set for the next step comes before the hook
        in_backward = getattr(hook, "__qualname__", "").startswith("_apply_optim_in_backward_hook")
        whose = ", torch's own for optimizers that step in backward," if in_backward else ""
        for setting in self.schedule.settings:
            if setting != NoCompression():
                raise RuntimeError(
                    f"compression={str(setting)!r} and a communication hook{whose} exclude each other: "
                    "both decide what goes on the wire"
                )
        if self.schedule.due < math.inf:
            raise RuntimeError(
                f"a change of compression in step {self.schedule.due} and a communication hook exclude each other: "
                "both decide what goes on the wire"
            )
        if self.buckets.feedbacks:
            raise RuntimeError(
                "error feedback keeps residuals for the next step, which a communication hook would drop: register it "
                "one step later"
            )
        self._hook = UserHook(state, hook, self.used)
        self.average_with(self._hook)
        if self.buckets.as_views:
            self.events.launching.append(lambda job: job.found.point_used())
        self.events.arrived.append(self._hook.sum_used)
        self.events.dropped.append(self._hook.end_collectives)

    def _run_comm_hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """The future of the user's hook, or of the sum over the ranks where there is none."""
        return self._run_allreduce_hook(bucket) if self._hook is None else self._hook.call(bucket)

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

        def count() -> int:
            work.wait()
            return int(work.get_future().value()[0].item())

        self.active_ranks = None if use_static_world_size else count
        self.buckets.uneven.active = count

    def _push_all_rebuilt_params(self) -> None:
        """Called on joined ranks; the order of buckets is exchanged when they are rebuilt."""
