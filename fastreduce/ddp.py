"""DistributedDataParallel: torch's class with our reducer inside."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.mixed_precision_hooks import _AllreduceUpcastHookState
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _find_tensors
from torch.nn.parameter import is_lazy

from . import ops
from .agreement import check_agreement, describe_tensor
from .compression import Compression
from .errors import DeviceError, FastreduceError, NotInitializedError
from .gradients import Gradients
from .mixed_precision import LowPrecision
from .torch_reducer import TorchLogger, TorchReducer
from .transports import LocalTransport, TorchProcessGroup, Transport

T = TypeVar("T", bound=Tensor)


class DistributedDataParallel(TorchDDP):
    """torch's DistributedDataParallel, with gradients averaged by fastreduce.

    Takes every argument of the installed torch's class, with its meaning, and two of its own. forward,
    no_sync, buffers, pickling and argument checks are torch's code.

    Args:
        module: the model; parameters on the CPU.
        device_ids: as in torch, but on a CPU module it warns and is dropped, so that GPU scripts run.
        output_device: likewise.
        *args: torch's other arguments.
        compression: a spec string (`"fp16"`, `"int8:error_feedback"`, …) or a `Compression`; None means
            FASTREDUCE_COMPRESSION, or `none`.
        transport: what moves the data; None means gloo in a group of its own over the ranks of
            `process_group` (at world size 1: nothing to move).
        **kwargs: torch's other arguments.

    Raises:
        SettingError: if `compression` is no setting.
        MismatchError: on every rank, if ranks differ in model or settings.
        RuntimeError: if no parameter requires a gradient (as torch).
    """

    reducer: TorchReducer  # type: ignore[assignment]
    logger: TorchLogger  # type: ignore[assignment]

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        *args: Any,
        compression: Compression | str | None = None,
        transport: Transport | None = None,
        **kwargs: Any,
    ) -> None:
        if device_ids is not None and all(device is None for device in device_ids):
            device_ids = None
        on_cpu = all(p.device.type == "cpu" for p in module.parameters())
        if on_cpu and (device_ids or output_device is not None):
            warnings.warn(
                f"device_ids={device_ids} and output_device={output_device} are dropped: the module is on the CPU",
                stacklevel=2,
            )
            device_ids = output_device = None
        bound = inspect.signature(TorchDDP).bind(module, device_ids, output_device, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        self._transport_argument = transport
        self._transport = transport or _make_transport(_group_of(arguments["process_group"], arguments["device_mesh"]))
        error = None
        try:
            self.compression = Compression.resolve(compression)
            _check_module(module, arguments)
        except (FastreduceError, RuntimeError) as found:
            error = found
        check_agreement(self._transport, {} if error else _describe(module, self.compression, arguments), error)
        super().__init__(module, device_ids, output_device, *args, **kwargs)

    def _ddp_init_helper(
        self,
        parameters: list[Tensor],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: Mapping[int, str],
        static_graph: bool,
    ) -> None:
        """Build our reducer and logger where torch builds its own."""
        names: dict[int, str] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name)
        first = dist._DEFAULT_FIRST_BUCKET_BYTES if self.bucket_bytes_cap_default else self.bucket_bytes_cap
        low = self.mixed_precision
        self.reducer = TorchReducer(
            parameters,
            [names[id(p)] for p in parameters],
            self._transport,
            self.compression,
            bucket_caps=getattr(self, "bucket_bytes_cap_list", None) or [first, self.bucket_bytes_cap],
            gradient_as_bucket_view=self.gradient_as_bucket_view and low is None,
            dtype=low and (low.reduce_dtype or low.param_dtype),
            sparse=[i for i, expected in enumerate(expect_sparse_gradient) if expected],
            low_precision=LowPrecision(self.module.parameters()) if low else None,
        )
        self.logger = self.reducer.logger = TorchLogger(self.reducer)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(m, nn.SyncBatchNorm) for m in self.module.modules()),
            static_graph,
        )
        self._passing_sync_batchnorm_handle(self.module)

    def _post_forward(self, output: Any) -> Any:
        output = super()._post_forward(output)
        if not self._delay_all_reduce_all_params:  # else torch has built no reducer
            self.reducer.watch(_find_tensors(output))
            if not torch.is_grad_enabled():
                self.reducer.restore_precision()
        return output

    def _root_copy_hook(self, *_: Any, **__: Any) -> None:
        self.reducer.lower_precision()

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

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.shadow_backward()

    def _match_unused_params_allreduce(self) -> None:
        """Used-flags travel with the gradients."""

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        del state["_transport"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._transport = state["_transport_argument"] or _make_transport(_group_of(None, None))
        super().__setstate__(state)


def _group_of(group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup:
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None and mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if mesh is not None:
        found: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
        return found
    group = group or dist.group.WORLD
    if group is None:
        raise NotInitializedError("DistributedDataParallel")
    return group


def _make_transport(group: dist.ProcessGroup) -> Transport:
    return LocalTransport() if dist.get_world_size(group) == 1 else TorchProcessGroup(group)


def _managed(named: Iterable[tuple[str, T]], module: nn.Module) -> dict[str, T]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {name: tensor for name, tensor in named if name not in ignored}


def _check_module(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    parameters = _managed(module.named_parameters(), module)
    trainable = {name: p for name, p in parameters.items() if p.requires_grad and not is_lazy(p)}
    Gradients(list(trainable.values()), list(trainable))
    for name, parameter in trainable.items():
        if parameter.device.type != "cpu":
            raise DeviceError(f"parameter {name!r} is on {parameter.device}; this version reduces tensors on cpu")
    if trainable:
        ops.unchecked(torch.device("cpu"))


_AGREED_ARGUMENTS = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "gradient_as_bucket_view",
    "mixed_precision",
)


def _describe(module: nn.Module, compression: Compression, arguments: Mapping[str, Any]) -> dict[str, str]:
    description = {"compression": str(compression)}
    description.update({name: repr(arguments.get(name)) for name in _AGREED_ARGUMENTS})
    embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(m.weight) for m in embeddings if m.sparse}
    for name, parameter in _managed(module.named_parameters(), module).items():
        grad = "requires grad" if parameter.requires_grad else "requires no grad"
        grad += ", which is sparse" if id(parameter) in sparse else ""
        description[f"parameter {name!r}"] = f"{describe_tensor(parameter)}, {grad}"
    for name, buffer in _managed(module.named_buffers(), module).items():
        description[f"buffer {name!r}"] = describe_tensor(buffer)
    return description
