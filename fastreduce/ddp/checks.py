"""What is looked at before a module is wrapped: its ranks, its parameters, and what ranks must agree on."""

from __future__ import annotations

import inspect
import math
import numbers
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.nn.parameter import is_lazy

from .. import ops
from ..compression import NoCompression
from ..errors import BackendUnavailableError, DeviceError, SettingError, TensorError, brief, no_group
from ..reduction.agreement import describe_tensor
from ..reduction.gradients import Gradients
from ..reduction.schedule import Schedule
from ..transports import make_transport

T = TypeVar("T", bound=Tensor)
PACKAGE = f"{os.path.dirname(os.path.dirname(__file__))}{os.sep}"  # as frames spell it, where `sys.path` has a//b, too
_SIGNATURE = vars(TorchDDP).get("signature_before_run") or inspect.signature(TorchDDP)


def torchs_signature() -> inspect.Signature:
    """What torch's class takes.

    A function of `**kwargs` that a program has put around its `__init__` does not say it: then what it took before.
    """
    signature = inspect.signature(TorchDDP)
    says_nothing = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    return _SIGNATURE if says_nothing else signature


def warn_caller(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn of the line that called this package, through however many of its own calls.

    Under `fastreduce run` there is one more than where a script imports our class.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def group_asked_for(group: dist.ProcessGroup | None, mesh: Any) -> dist.ProcessGroup:
    """The ranks that `process_group=` or `device_mesh=` names, or all.

    Raises:
        RuntimeError, TypeError, ValueError: as torch's class, before anything is exchanged.
    """
    if group is not None and mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh is not None and mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if mesh is not None:
        found: dist.ProcessGroup = mesh.get_group(mesh_dim=0)
        return found
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise no_group("DistributedDataParallel")
    if not isinstance(group, dist.ProcessGroup):
        outside = (
            ", which stands for a group that this rank is not in" if group == dist.GroupMember.NON_GROUP_MEMBER else ""
        )
        raise TypeError(
            f"process_group must be a ProcessGroup, e.g. from torch.distributed.new_group; got {group!r}{outside}"
        )
    return group


def tell_others(error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Let the other ranks know why this one wraps nothing, where its own arguments say who they are.

    Args:
        error: the reason.
        args: those of torch's class behind the third, by position.
        kwargs: those by name; some may be unknown.

    Raises:
        Exception: `error`, if others have been told.
    """
    signature = torchs_signature()
    known = {name: value for name, value in kwargs.items() if name in signature.parameters}
    try:
        arguments = signature.bind_partial(None, None, None, *args, **known).arguments
        group = group_asked_for(arguments.get("process_group"), arguments.get("device_mesh"))
    except Exception:  # nobody knows who the others are
        return
    make_transport(group, error=error)


def _managed(named: Iterable[tuple[str, T]], module: nn.Module) -> dict[str, T]:
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {name: tensor for name, tensor in named if name not in ignored}


def module_device(module: nn.Module) -> torch.device:
    """The device of the parameters; of several GPUs, the first one's."""
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def check_module(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raise if this rank cannot reduce the gradients of `module`, wrapped with these arguments of torch's class.

    Raises:
        TensorError: naming a parameter whose dtype or device is not supported (DeviceError where devices differ), or
            that autograd cannot train.
        BackendUnavailableError: if no kernels run on the device of the parameters.
        TypeError: as torch's class.
    """
    parameters = _managed(module.named_parameters(), module)
    trainable = {name: p for name, p in parameters.items() if p.requires_grad and not is_lazy(p)}
    reduced = list(trainable.values())
    if arguments["device_mesh"] is not None:  # torch's class trains what ranks have of DTensors then
        reduced = [p.to_local().detach() if hasattr(p, "to_local") else p for p in reduced]
    Gradients(reduced, list(trainable))
    for name, parameter in trainable.items():
        if parameter.is_inference():
            raise TensorError(
                f"parameter {name!r} was made under torch.inference_mode(), so autograd cannot train it; allowed: "
                "parameters made outside, as copy.deepcopy(module) outside makes them"
            )
    first: dict[str, tuple[str, torch.device]] = {}  # parameter and device, by type of device
    for name, parameter in trainable.items():
        first.setdefault(parameter.device.type, (name, parameter.device))
    to_fill = ". What is on meta has no memory: module.to_empty(device=…) makes some, to be filled"
    empty = to_fill if "meta" in first else ""
    if len(first) > 1:
        where = ", ".join(f"parameter {name!r} is on {device}" for name, device in first.values())
        raise DeviceError(f"{where}; all must be on CPUs or all on GPUs{empty}")
    for kind, (name, device) in first.items():
        if kind not in ("cpu", "cuda"):
            raise BackendUnavailableError(f"parameter {name!r} is on {device}; allowed: cpu, cuda{empty}")
        ops.choose(device)
    _check_arguments(arguments)
    for name, child in module.named_modules():
        if isinstance(child, TorchDDP):
            inner = set(map(id, child._module_parameters))
            twice = [n for n, p in trainable.items() if id(p) in inner]
            if twice:
                which = f"module {name!r}" if name else "the module"
                warn_caller(
                    f"{which} is wrapped already: {twice[0]!r} would be averaged twice. Unwrap it, or leave its "
                    "parameters to it: _set_params_and_buffers_to_ignore_for_model(module, names)"
                )


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise what torch's class would raise behind the exchange, where other ranks wait, or in words of its own.

    Raises:
        AttributeError, TypeError, ValueError: as torch's class.
    """
    caps = arguments.get("bucket_cap_mb_list")
    if caps is not None and not (isinstance(caps, Sequence) and all(_is_size(cap) and cap >= 0 for cap in caps)):
        raise TypeError(
            f"bucket_cap_mb_list={brief(caps)} of {type(caps).__name__}; allowed: a list of finite numbers of MiB, "
            "from 0 on, or None"
        )
    cap = arguments.get("bucket_cap_mb")
    if cap is not None and not _is_size(cap):
        raise SettingError(f"bucket_cap_mb={brief(cap)}; allowed: a finite number of MiB, or None")
    precision = arguments.get("mixed_precision")
    if precision is not None and not isinstance(precision, _MixedPrecision):
        raise AttributeError(
            f"mixed_precision={brief(precision)}; allowed: None, or torch's _MixedPrecision(param_dtype=torch.bfloat16)"
        )
    device_ids = arguments.get("device_ids")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {brief(device_ids)}; settings are "
            "compression=…"
        )
    names = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")
    if (arguments.get(names[0]) is None) != (arguments.get(names[1]) is None):
        raise ValueError(f"{names[0]} and {names[1]} need to be set at the same time.")


def _is_size(value: object) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


def check_reduced_here(schedule: Schedule) -> None:
    """Raise SettingError if there is a compression, and Dynamo is to let torch reduce by itself."""
    compressed = [str(setting) for setting in schedule.settings if not isinstance(setting, NoCompression)]
    if compressed and torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
        raise SettingError(
            f"compression={compressed[0]!r} and torch._dynamo.config.optimize_ddp='python_reducer' exclude each other: "
            "there torch averages gradients by itself, uncompressed"
        )


_AGREED_ARGUMENTS = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "broadcast_buffers",
    "forward_sync_buffers",
    "init_sync",
    "gradient_as_bucket_view",
    "mixed_precision",
)


def describe_wrapping(module: nn.Module, schedule: Schedule, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What must be equal on every rank, by what it is called in an error."""
    managed = _managed(module.named_parameters(), module)
    trainable = {name: parameter for name, parameter in managed.items() if parameter.requires_grad}
    frozen = {name: parameter for name, parameter in managed.items() if not parameter.requires_grad}
    description = schedule.description(list(trainable), list(trainable.values()), frozen)
    description.update({name: repr(arguments.get(name)) for name in _AGREED_ARGUMENTS})
    embeddings = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    sparse = {id(m.weight) for m in embeddings if m.sparse}
    for name, parameter in managed.items():
        grad = "requires grad" if parameter.requires_grad else "requires no grad"
        grad += ", which is sparse" if id(parameter) in sparse else ""
        description[f"parameter {name!r}"] = f"{describe_tensor(parameter)}, {grad}"
    for name, buffer in _managed(module.named_buffers(), module).items():
        description[f"buffer {name!r}"] = describe_tensor(buffer)
    return description
