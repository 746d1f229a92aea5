"""DistributedDataParallel: torch's class with our reducer inside."""

from __future__ import annotations

import difflib
import inspect
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _AllreduceUpcastHookState
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..compression import Compression
from ..environment.signals import is_of_signal
from ..environment.stacks import dump_at_signal
from ..environment.variables import folder_asked_for, this_rank
from ..errors import SettingError, TransportError
from ..policy import Policy
from ..reduction.agreement import check_agreement
from ..reduction.arrivals import weakly
from ..reduction.schedule import Schedule, Setting
from ..reduction.telemetry.counter_files import VARIABLE as COUNTERS
from ..reduction.telemetry.flight_record import Phase
from ..reduction.telemetry.flight_recorder import all_flights, answer_debug_server
from ..reduction.telemetry.trace import VARIABLE as TRACE
from ..reduction.telemetry.watch import explain_elsewhere
from ..reduction.telemetry.whereabouts import Whereabouts, note_meeting
from ..sync_batchnorm import SyncBatchNorm
from ..transports import Transport, make_transport
from ..transports.ranks import client_of, timeout_of
from .checks import (
    PACKAGE,
    check_module,
    check_reduced_here,
    describe_wrapping,
    group_asked_for,
    module_device,
    tell_others,
    torchs_signature,
    warn_caller,
)
from .clipping import clip_
from .elastic_reducer import ElasticReducer, check_elastic, group_of_one
from .joining import JoinContext
from .logger import TorchLogger, environment
from .mixed_precision import LowPrecision, put_own
from .outputs import tensors_of
from .reducer import TorchReducer
from .trainable import Trainable, names_of

if TYPE_CHECKING:
    from typing_extensions import Self

_before_forward = TorchDDP._pre_forward  # as it is before a comparison of settings wraps it
OWN_ARGUMENTS = "compression", "transport", "elastic"


def _tell_where_called(found: list[warnings.WarningMessage]) -> None:
    """What torch's class has warned the line that called it of is told of the line that called ours."""
    for each in found:
        if each.filename.startswith(PACKAGE):
            warn_caller(each.message, each.category)
        else:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno, source=each.source)


class _ReachesModule(TorchDDP):
    """What comes behind ours in the order of bases, so that torch's `__init__` is skipped by who skips ours.

    A class that wraps parts of its module, each by itself, calls `super(DistributedDataParallel, self).__init__()` to
    be a `torch.nn.Module` only; MMEngine's `MMSeparateDistributedDataParallel` is one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            super().__init__(*args, **kwargs)
        else:
            super(TorchDDP, self).__init__()


class DistributedDataParallel(_ReachesModule):
    """torch's DistributedDataParallel, with gradients averaged by fastreduce.

    Takes every argument of the installed torch's class, with its meaning, and three of its own. forward,
    no_sync, buffers, pickling and argument checks are torch's code.

    Args:
        module: the model; parameters on the CPU, or on GPUs.
        device_ids: as in torch, but on a CPU module it warns and is dropped, so that GPU scripts run.
        output_device: likewise.
        *args: torch's other arguments.
        compression: a spec string (`"fp16"`, `"int8:error_feedback"`, …) or a `Compression`; or a policy, which says by
            parameter: a dict (`{"*.bias|ndim<2": "fp16", "*": "int8"}`), its spec string (`"*.bias|ndim<2: fp16; *:
            int8"`), `"auto4"`, or a function of a parameter's name and the parameter; or a callable that returns one
            for each step, the same on every rank, and is asked 1000 steps ahead (steps are reduced backwards, counted
            from 0); None means FASTREDUCE_COMPRESSION, or `none`.
        transport: what moves the data, or its name: `"gloo"`, `"shm"` (memory that the ranks of one host share),
            `"mpi"` (in a job that `init_process_group("mpi")` began), `"nccl"` or `"two_level"`. None means
            FASTREDUCE_TRANSPORT; else for GPUs NCCL, or MPI in such a job, and for CPUs `"shm"` where all ranks run on
            one host and `"gloo"`, or MPI, otherwise, in communicators of its own over the ranks of `process_group` (at
            world size 1: nothing to move). Where ranks run on several hosts, and several on one of them, those of one
            host sum in shared memory first, and gloo or MPI carries what leaves the host (`"two_level"`), unless the
            setting is `flat`.
        elastic: whether ranks may be lost and come while it trains, without a restart: then
            `fastreduce.elastic.join(ddp, …)` takes the place of `init_process_group`. On CPUs over gloo or shared
            memory, on GPUs over NCCL.
        **kwargs: torch's other arguments.

    Raises:
        SettingError: if `compression` is no setting, or `transport` no name of one, or under `elastic` for what cannot
            go on without a lost rank.
        BackendUnavailableError: if the transport that was asked for cannot be used here; it says why.
        MismatchError: on every rank, if ranks differ in model, settings, transport or version.
        RuntimeError: if no parameter requires a gradient (as torch).
    """

    __module__ = "fastreduce.ddp"  # where pickles find it
    reducer: TorchReducer  # type: ignore[assignment]
    logger: TorchLogger  # type: ignore[assignment]
    _elastic = False
    _may_have_changed = False
    _joining = False

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        *args: Any,
        compression: Setting = None,
        transport: Transport | str | None = None,
        elastic: bool = False,
        **kwargs: Any,
    ) -> None:
        try:
            if not isinstance(module, nn.Module):
                raise AttributeError(f"module is a {type(module).__name__!r} object; allowed: a torch.nn.Module")
            if device_ids is not None and all(device is None for device in device_ids):
                device_ids = None
            on_cpu = all(p.device.type == "cpu" for p in module.parameters())
            if on_cpu and (device_ids or output_device is not None) and len(device_ids or ()) <= 1:
                warn_caller(
                    f"device_ids={device_ids} and output_device={output_device} are dropped: the module is on the CPU"
                )
                device_ids = output_device = None
            taken = torchs_signature()
            for unknown in sorted(kwargs.keys() - taken.parameters.keys()):
                close = difflib.get_close_matches(unknown, [*OWN_ARGUMENTS, *taken.parameters], 1)
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument {unknown!r}"
                    + (f", did you mean {close[0]!r}?" if close else "")
                )
            bound = taken.bind(module, device_ids, output_device, *args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if elastic:
                check_elastic(module, arguments, transport)
                group_of_one()
        except Exception as refused:  # whatever it is, other ranks must not wait
            tell_others(refused, args, kwargs)
            raise
        self._transport_argument, self._elastic = transport, elastic
        group = group_asked_for(arguments["process_group"], arguments["device_mesh"])
        self._transport = make_transport(group, module_device(module), transport)
        error, description = None, dict[str, str]()
        try:
            self._schedule = Schedule(compression)
            check_module(module, arguments)
            check_reduced_here(self._schedule)
            dump_at_signal(all_flights)
            description[TRACE] = "set" if folder_asked_for(TRACE) else "not set"
            folder_asked_for(COUNTERS)
            description |= describe_wrapping(module, self._schedule, arguments)
        except Exception as found:  # whatever it is, other ranks must not wait
            error = found
        try:
            check_agreement(self._transport, description, error)
            if self._transport.world_size > 1:
                note_meeting(client_of(group))  # behind it, ranks compile kernels, or find them compiled
            self._description = description
            warned: list[warnings.WarningMessage] = []
            try:
                with warnings.catch_warnings(record=True) as warned:
                    super().__init__(module, device_ids, output_device, *args, **kwargs)
            finally:
                _tell_where_called(warned)
        except BaseException:
            if self._transport is not transport:
                self._transport.close()  # its connection is the next wrapper's
            raise
        if self.mixed_precision is not None and not self._delay_all_reduce_all_params:
            for inner in self.module.modules():
                inner.register_state_dict_post_hook(put_own)
                inner.register_load_state_dict_pre_hook(weakly(self._restore_precision))

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        """Build our reducer and logger where torch builds its own."""
        self._trainable = Trainable(self.module, self.parameters_to_ignore)
        names = names_of(self.module, parameters)
        low = self.mixed_precision
        self.reducer = (ElasticReducer if self._elastic else TorchReducer)(
            parameters,
            names,
            self._transport,
            self._schedule,
            bucket_caps=self._bucket_caps,
            gradient_as_bucket_view=self.gradient_as_bucket_view and low is None,
            dtype=low and (low.reduce_dtype or low.param_dtype),
            sparse=[i for i, expected in enumerate(expect_sparse_gradient) if expected],
            low_precision=LowPrecision(self.module.parameters(), low.param_dtype) if low else None,
            overlaps=not self._meets_elsewhere(),
            frozen=self._trainable.frozen,
            asked=self._transport_argument if isinstance(self._transport_argument, str) else None,
            find_unused_parameters=self.find_unused_parameters,
        )
        self.reducer.check = weakly(self._check_parameters)
        self.reducer.events.ended.append(weakly(self._check_thawed))
        if not self._elastic:  # who comes later would not know of it
            self.reducer.thaw = weakly(self._add_thawed)
        self.logger = TorchLogger(
            parameters,
            names,
            self.reducer.plan,
            rank=self._transport.rank,
            world_size=self._transport.world_size,
            transport=self._transport.name,
            compression=str(self._schedule.setting),
            bucket_cap_bytes=self.bucket_bytes_cap,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            is_multi_device_module=self.is_multi_device_module,
            **environment(self.process_group),
        )
        self._tell_whereabouts()
        answer_debug_server()
        if (folder := folder_asked_for(TRACE)) is not None:
            self.reducer.trace_to(folder, this_rank())
        if (folder := folder_asked_for(COUNTERS)) is not None:
            self.reducer.write_counters(folder, this_rank())
        self.logger.update(compression_by_parameter=self.reducer.buckets.settings_text())
        self.reducer.log_to(self.logger)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            self._has_sync_batchnorm(),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)

    def _add_thawed(self) -> None:
        self._trainable.add_thawed(self.module, self.reducer, self.logger, self._build_params_for_reducer)

    @property
    def _bucket_caps(self) -> list[int]:
        """Bytes of the first, second, … bucket, as the arguments of torch's class have them."""
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        return getattr(self, "bucket_bytes_cap_list", None) or [first, self.bucket_bytes_cap]

    def _tell_whereabouts(self) -> None:
        """Let ranks that are missed say where they are."""
        if self._transport.world_size > 1:
            group = self.process_group
            wrapped = f"{group.group_name} {type(self.module).__name__}"
            self.reducer.tell_at(Whereabouts(client_of(group), timeout_of(group).total_seconds(), wrapped))

    @property
    def compression(self) -> Compression | Policy:
        """The setting of the next step, or the policy."""
        return (self._schedule if self._delay_all_reduce_all_params else self.reducer.schedule).setting

    def set_compression(self, setting: Setting, at: int | None = None, bucket_cap_mb: float | None = None) -> None:
        """Reduce under another setting from step `at` on; every rank calls it, between the same two steps.

        Steps are reduced backwards, counted from 0; `ddp.reducer.step` tells how many there have been, those before a
        checkpoint included. The switch is made before the forward of step `at`. From there on training has the bits of
        a checkpoint of that moment that is resumed under the new setting. Connections are kept.

        What error feedback keeps is never dropped: a setting with error feedback goes on with it, and one without adds
        it to its next gradient, and what has not been applied of that (a skipped step, clipping) to the one after.

        Args:
            setting: as at construction: also one with `warm_up`, whose steps are counted from `at`, or a callable. It
                takes the place of all that was to come from step `at` on.
            at: the step; None means the next one.
            bucket_cap_mb: the size of buckets from there on, in MiB; None leaves it as it is.

        Raises:
            SettingError: if it is no setting or no size, if the step has been already, within a backward or `join()`,
                or if a communication hook or `delay_all_reduce_named_params` of all parameters does the averaging.
            MismatchError: on every rank, if ranks differ in the setting, the step, or in how many steps they have
                reduced. Nothing has changed then.
            TransportError: within the group's timeout, if a rank does not call it.
        """
        if self._delay_all_reduce_all_params:
            raise SettingError(
                "set_compression and delay_all_reduce_named_params of all parameters: torch reduces them"
            )
        if self._joining and self._join_config.enable:
            raise SettingError(
                f"set_compression({setting!r}) within join(), or behind one that an exception has left: ranks that "
                "have joined cannot take part; call it before, with at=step"
            )
        size = bucket_cap_mb * 1024 * 1024 if isinstance(bucket_cap_mb, numbers.Real) else bucket_cap_mb
        self.reducer.set_compression(setting, at, size)

    def compression_by_parameter(self) -> dict[str, str]:
        """What each parameter's gradient travels under in the next step, by name."""
        found = self.reducer.buckets.assign(self.compression)
        return {spec.name: str(each) for spec, each in zip(self.reducer.buckets.specs, found, strict=True)}

    def _has_sync_batchnorm(self) -> bool:
        return any(isinstance(m, (nn.SyncBatchNorm, SyncBatchNorm)) for m in self.module.modules())

    def _meets_elsewhere(self) -> bool:
        """Whether the module's own backward runs NCCL collectives, in communicators other than ours.

        Two communicators on one GPU must be used in the same order on every rank. Where ranks use different
        parameters, a bucket fills before a SyncBatchNorm on one rank and behind it on another.
        """
        return self.device_type != "cpu" and self._has_sync_batchnorm()

    # Under torch.compile what goes on around the module's forward stays Python: Dynamo would trace the reducer.
    @_disable_dynamo
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._delay_all_reduce_all_params:
            return _before_forward(self, *inputs, **kwargs)
        recorder = getattr(self.reducer, "recorder", None)
        # None in torch's own reducer, which a comparison of settings puts there by turns.
        if recorder is None or self.reducer.backward.is_here:
            return _before_forward(self, *inputs, **kwargs)
        if self.reducer.backward.has_raised:
            # Others would wait for it until this one trains again, and those that have joined come to nothing before.
            self.reducer.drop_broken_backward()
        # Also where nothing trains: those that have joined take part in it.
        self.reducer.buckets.uneven.joining = self._joining and self._join_config.enable
        if not torch.is_grad_enabled():
            return _before_forward(self, *inputs, **kwargs)
        self.reducer.backward.check_ended()
        if not self._join_config.enable:
            self.reducer.active_ranks = None  # nor does torch count anew: what a join before this one has left is stale
        before = recorder.phase
        recorder.enter(Phase.WAITING)  # where buffers and settings are compared
        try:
            given = _before_forward(self, *inputs, **kwargs)
        except BaseException:  # an interrupt, say: it waits no more
            recorder.enter(before)
            raise
        recorder.enter_forward(self.require_backward_grad_sync)
        return given

    def _sync_buffers(self) -> None:
        try:
            super()._sync_buffers()
        except RuntimeError as error:
            if not self.modules_buffers:  # taken out since the last forward, as by `prune.remove`: torch has looked
                return
            if isinstance(error, TransportError) or hasattr(self, "buffer_hook") or is_of_signal(error):
                raise
            told = TransportError(
                f"rank {self._distributed_rank} of {self._transport.world_size}: broadcasting the module's buffers "
                f"before a forward failed: {error}. Every rank runs each forward of the wrapper, those without "
                "gradients too: to evaluate on one rank alone, call ddp.module(…)"
            )
            # None in torch's own reducer, or where there is none.
            recorder = getattr(getattr(self, "reducer", None), "recorder", None)
            raise explain_elsewhere(told, recorder) from error

    @_disable_dynamo
    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        try:
            super()._passing_sync_batchnorm_handle(module)
        except ValueError as error:
            raise ValueError(
                f"{error}; fastreduce.SyncBatchNorm.convert_sync_batchnorm(model) puts in layers that work on CPUs"
            ) from None

    @_disable_dynamo
    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        if not self._delay_all_reduce_all_params:  # else torch has built no reducer
            if torch.is_grad_enabled() and (self._may_have_changed or self.logger.sampling):
                self.reducer.checks = True
                if self.reducer.overlaps and self._meets_elsewhere():  # its layers were converted after wrapping
                    self.reducer.overlaps = False
            self.reducer.watch(tensors_of(output))
            if not torch.is_grad_enabled():
                self.reducer.restore_unless_needed()
        return output

    @property
    def _root_copy_hook(self) -> Callable[..., None]:
        """Called before the module's forward, which does not keep the wrapper alive."""
        return weakly(self._lower_precision)

    @staticmethod
    def _module_wait_for_copy_hook(*_: Any) -> None:
        """Called before the forward of each module inside: the copies are there."""

    def _lower_precision(self, module: nn.Module, *_: Any) -> None:
        if module is self.module:  # else a copy of it, with its hooks
            self.reducer.lower_precision()

    def _restore_precision(self, *_: Any) -> None:
        self.reducer.restore_precision()  # else the next backward would put back what was there before

    @property
    def _delayed_all_reduce_hook(self) -> Callable[..., None]:
        """Called when `param_to_hook_all_reduce` has its gradient: torch reduces there, and nobody waits for it."""
        return weakly(self._average_delayed_at_end)

    def _average_delayed_at_end(self, _: Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._average_delayed)

    def _average_delayed(self) -> None:
        """Average the delayed gradients, when backward has brought them all and our buckets are on their way."""
        buffer = self._delay_grad_buffer
        assert buffer is not None
        dist.all_reduce(buffer.div_(self.process_group.size()), group=self.process_group)

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as in torch. The next backward looks for parameters that are new since construction."""
        self._may_have_changed = mode
        super().train(mode)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """`cpu()`, `to()` and so on, as in torch.

        The gradients' memory is let go of, where buckets of a backward that raised may be at work still.
        """
        # None in torch's own reducer, or where there is none.
        buckets = getattr(getattr(self, "reducer", None), "buckets", None)
        if buckets is not None:
            buckets.streams.join()
        super()._apply(*args, **kwargs)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as in torch, or, where no name begins with `module.`, the state of the module that is wrapped."""
        self._may_have_changed = True  # assign=True puts new parameters in the place of the old ones
        if not state_dict or any(name.startswith("module.") for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        return self.module.load_state_dict(state_dict, strict, assign)

    def _check_thawed(self) -> None:
        """Called at the end of backward: what was unfrozen behind the forward is reached where a checkpoint runs it."""
        if self._trainable.holds_thawed:
            self._check_parameters()

    def _check_parameters(self) -> None:
        """Raise if the module holds a trainable parameter that nobody averages.

        Called at the end of backward, because `torch.func.functional_call` lends the module other parameters during
        forward. A walk over a thousand parameters costs over a millisecond: it is made in the steps whose times are
        taken (the first ten, then every hundredth), in the first after `train()` and `load_state_dict`, where one
        that was frozen at construction requires a gradient, and where one that always had a gradient has none.
        """
        self._may_have_changed = False
        self._trainable.check(self.module, self.reducer.recorder.parameters, self.reducer.transport.rank)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the averaged gradients by their total norm, which is returned: the same bits on every rank.

        As `torch.nn.utils.clip_grad_norm_`, without its pass over the gradients: from the first call on, decompression
        sums up squares while it writes averages. What has been changed since, by `GradScaler.unscale_`, by a backward
        without synchronisation or in place, is read again. That is told by autograd's version counter, which does not
        see writes through `.data`, NumPy, DLPack or a collective of `torch.distributed`: after these call torch's
        function. Gradients that nobody averages (`_set_params_and_buffers_to_ignore_for_model`) differ from rank to
        rank: they are neither counted nor clipped.

        Every rank calls it. Nothing waits for the device, except `error_if_nonfinite`.

        Raises:
            TypeError: if `max_norm` is no number, as where parameters are given in its place.
            SettingError: if it is negative, where torch would turn gradients round, or NaN, or `norm_type` is NaN.
            RuntimeError: if the norm is not finite and `error_if_nonfinite` is set, with the parameters, their buckets
                and how many of their elements are not finite. Nothing has been clipped then.
            ReducerError: if averages are to be stored by `finalize_backward()` first (torch 2.15 and later).
        """
        pipelines = []
        if not self._delay_all_reduce_all_params:  # else torch has built no reducer
            self.reducer.backward.check_finished()
            self.reducer.keep_statistics()
            pipelines = self.reducer.pipelines
        delayed = set(map(id, self._delay_all_reduce_params))  # torch averages them, and counts them as ignored
        named = {
            name: parameter
            for name, parameter in self.module.named_parameters()
            if name not in self.parameters_to_ignore or id(parameter) in delayed
        }
        return clip_(named, pipelines, max_norm, norm_type, error_if_nonfinite, foreach)

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Let `hook` reduce the buckets, as in torch; it receives a duck type of `dist.GradBucket`.

        Raises:
            RuntimeError: if a hook is registered already, or a compression is set.
            TypeError, ValueError: if it is not a hook (torch's checks).
        """
        if isinstance(state, _AllreduceUpcastHookState):  # torch's own, for mixed_precision=: the reducer does its work
            return
        self._check_comm_hook(hook)
        self.reducer.use_hook(state, hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Use the Python hook of the same meaning as torch's built-in one."""
        builtin = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.reducer.use_hook(self.process_group, builtin[comm_hook_type])
        self.logger._set_comm_hook_name(str(comm_hook_type))

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Train with other ranks from now on, as in torch: every old and new rank calls it.

        Raises:
            SettingError: if the wrapper was given a transport, whose ranks are fixed.
        """
        if self._transport_argument is not None and not isinstance(self._transport_argument, str):
            raise SettingError("this wrapper was given transport=, whose ranks are fixed: wrap the module again")
        super()._update_process_group(new_process_group)
        self._transport = self.reducer.transport
        self._tell_whereabouts()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Torch's context for uneven inputs: a rank that leaves it brings zeros to what the others still average.

        Its last backward may have raised, and been caught: the others go on with NaN in that step.
        """
        reducer = None if self._delay_all_reduce_all_params else self.reducer
        divides = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return JoinContext(self, reducer, enable, throw_on_early_termination, **divides)

    def join_hook(self, **kwargs: Any) -> Any:
        """What a join context calls, as in torch."""
        hook = super().join_hook(**kwargs)
        meanwhile, after = hook.main_hook, hook.post_hook
        # Where torch reduces all parameters itself there is no reducer.
        buckets = None if self._delay_all_reduce_all_params else self.reducer.buckets

        def main_hook() -> None:
            if buckets is not None:
                buckets.uneven.joining = buckets.uneven.here = True
            meanwhile()

        def post_hook(is_last_joiner: bool) -> None:
            self._joining = False
            if buckets is not None:
                buckets.end_join()
            after(is_last_joiner)

        hook.main_hook, hook.post_hook = main_hook, post_hook
        self._joining = True
        if buckets is not None:
            buckets.uneven.begin()
            self.reducer.add_thawed()  # a rank without inputs has no forward
        return hook

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.take_part()

    def _match_unused_params_allreduce(self) -> None:
        """Used-flags travel with the gradients."""

    def __getstate__(self) -> dict[str, Any]:
        if not isinstance(self._transport_argument, (str, NoneType)):
            raise SettingError(
                f"this wrapper was given transport={self._transport_argument!r:.80}, whose connections cannot be "
                "copied or saved: give a transport's name, or copy ddp.module and wrap that"
            )
        state: dict[str, Any] = super().__getstate__()
        del state["_transport"]
        if not self._delay_all_reduce_all_params:
            state["_schedule"] = self.reducer.schedule
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = module_device(state["_modules"]["module"])
        self._transport = make_transport(group_asked_for(None, None), device, state["_transport_argument"], alone=True)
        super().__setstate__(state)


def _signature() -> inspect.Signature:
    """That of the installed torch's class, and three arguments more: configurations keep what a signature names."""
    torchs, ours = (inspect.signature(each.__init__) for each in (TorchDDP, DistributedDataParallel))
    arguments = [*torchs.parameters.values(), *(ours.parameters[name] for name in OWN_ARGUMENTS)]
    return ours.replace(parameters=sorted(arguments, key=lambda argument: argument.kind))


DistributedDataParallel.__init__.__signature__ = _signature()  # type: ignore[attr-defined]
