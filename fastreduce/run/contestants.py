"""What `fastreduce compare` sets beside each other: our settings, torch's own reducer and its hooks, no reduction."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP  # its other name is ours in a run

from ..ddp import DistributedDataParallel
from ..errors import SettingError
from ..policy import Policy

NO_REDUCTION = "no reduction"
AFTER_BACKWARD = "none after backward"  # nothing is sent before backward has ended
TORCHS: dict[str, Callable[..., Any] | None] = {
    "torch": None,
    "torch:fp16": fp16_compress_hook,
    "torch:bf16": bf16_compress_hook,
    NO_REDUCTION: noop_hook,  # where torch's own class trains from beginning to end: `take` takes its reducer away too
}
"""Contestants that are none of our settings → the communication hook of torch's own reducer."""


class Variant(NamedTuple):
    """A setting, and the sizes of buckets and the transport, where they are not as the script has them.

    `str()` of it is the name of a contestant, with the options as a user writes them.
    """

    setting: str
    bucket_cap_mb: int | None = None
    transport: str | None = None

    @staticmethod
    def of(name: str) -> Variant:
        """The variant of that name."""
        found = re.fullmatch(r"(.*?)(?: bucket_cap_mb=(\d+))?(?: FASTREDUCE_TRANSPORT=(\w+))?", name)
        assert found is not None
        setting, size, transport = found.groups()
        return Variant(setting, int(size) if size else None, transport)

    @property
    def options(self) -> list[str]:
        """What a user writes besides the setting."""
        found = {"bucket_cap_mb": self.bucket_cap_mb, "FASTREDUCE_TRANSPORT": self.transport}
        return [f"{name}={value}" for name, value in found.items() if value is not None]

    def __str__(self) -> str:
        return " ".join([self.setting, *self.options])


def canonical(name: str) -> str:
    """The name of a contestant, a setting as `str()` of it.

    Raises:
        SettingError: if it is neither a setting nor one of torch's.
    """
    if name in TORCHS:
        return name
    if name.startswith("torch"):
        raise SettingError(f"unknown contestant {name!r}; of torch there are: {', '.join(list(TORCHS)[:-1])}")
    return str(Policy.of(name))


def why_fixed(model: Any) -> str:
    """Why the contestant of `model` cannot change while it trains; "" where it can."""
    if not isinstance(model, TorchDDP):
        return "the script shards its model, and settings of sharded models are for good"
    if model.mixed_precision is not None:
        return "the script trains with mixed_precision="
    if model._delay_all_reduce_params:
        return "the script delays the reduction of parameters"
    if model._join_config.enable:
        return "the script trains in join(), where ranks may have different numbers of steps"
    if getattr(model, "_transport_argument", None) is not None:
        return "the script gives transport="
    if not isinstance(model, DistributedDataParallel):
        return "torch's class could not be replaced"
    if model._trainable.holds_thawed:
        return "the script unfreezes parameters in mid-training, which torch's class leaves to each rank"
    return ""


def why_missing(model: Any, name: str) -> str:
    """Why torch does not have a contestant for `model`; "" where it has, and for settings of ours."""
    hook = TORCHS.get(name)
    try:
        if hook is not None and not isinstance(model, TorchDDP):
            return "FSDP2 takes no communication hooks"
        if hook is not None:
            model._check_comm_hook(hook)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def begin(model: TorchDDP, name: str) -> None:
    """Let a new wrapper be the contestant from its first step on.

    Raises:
        SettingError: if it cannot be.
    """
    if name in TORCHS and not isinstance(model, DistributedDataParallel):
        if (hook := TORCHS[name]) is not None:
            model.register_comm_hook(None, hook)
    elif not isinstance(model, DistributedDataParallel):
        raise SettingError(f"torch's own class reduces the gradients of this {type(model).__name__}, not {name}")
    elif name in TORCHS or str(model.compression) != name:
        take(model, name)


def take(model: Any, name: str) -> None:
    """Let a wrapper of ours be the contestant from the next forward on; every rank calls it between steps.

    Between settings the reducer stays. Over another transport it learns the order of gradients anew, so that buckets
    are what they will be from the second step on. For one of torch's it is set aside, and torch's is a new one each
    time. Without reduction there is none: gradients stay where autograd leaves them.
    """
    if model in _set_aside:
        model.reducer._remove_autograd_hooks()
        _set_aside.pop(model).put_into(model)
        model.reducer.replace_hooks()
    if name not in TORCHS:
        variant = Variant.of(name)
        own = model._transport_argument if isinstance(model._transport_argument, str) else None
        if model.reducer.asked != (asked := variant.transport or own):
            model.reducer.asked = asked
            model._update_process_group(model.process_group)
        size = variant.bucket_cap_mb
        model.reducer.bucket_caps = model._bucket_caps if size is None else [size << 20]
        model.set_compression("none" if name == AFTER_BACKWARD else variant.setting)
        model.reducer.overlaps = name != AFTER_BACKWARD and not model._meets_elsewhere()
        return
    model.reducer.look()  # lets error feedback see what became of the last averages
    model.reducer.remove_hooks()
    _set_aside[model] = Place.of(model)
    instead: dict[str, Callable[..., Any]] = {"clip_grad_norm_": _clip, "__getstate__": _state}
    if name == NO_REDUCTION:
        Place(model.reducer, model.logger, instead | {"_post_forward": _leave_gradients}).put_into(model)
        return
    instead |= {method: getattr(TorchDDP, method) for method in _OF_TORCHS_REDUCER}
    Place(model.reducer, model.logger, instead).put_into(model)
    parameters, sparse = model._build_params_for_reducer()
    names = model._build_debug_param_to_name_mapping(parameters)
    model._static_graph_delay_allreduce_enqueued = False
    TorchDDP._ddp_init_helper(model, parameters, sparse, names, model.static_graph)
    if model.static_graph:
        model.reducer._set_static_graph()
        model.logger._set_static_graph()
    if (hook := TORCHS[name]) is not None:
        dist._register_comm_hook(model.reducer, None, hook)


_OF_TORCHS_REDUCER = ("_post_forward", "_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce")


class _Instead:
    """A function in place of a wrapper's method, which does not keep the wrapper alive."""

    def __init__(self, function: Callable[..., Any], model: Any) -> None:
        self.function, self._model = function, weakref.ref(model)

    @_disable_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self._model(), *args, **kwargs)


class Place(NamedTuple):
    """Who reduces the gradients of a wrapper, and what it calls in place of methods of its class.

    The class stays: scripts compare it, and pickles name it.
    """

    reducer: Any
    logger: Any
    instead: dict[str, Callable[..., Any]]

    @staticmethod
    def of(model: Any) -> Place:
        """What is in the wrapper's place now."""
        found = {name: value.function for name, value in model.__dict__.items() if isinstance(value, _Instead)}
        return Place(model.reducer, model.logger, found)

    def put_into(self, model: Any) -> None:
        """Let the wrapper have this from now on."""
        model.reducer, model.logger = self.reducer, self.logger
        for name in [name for name, value in model.__dict__.items() if isinstance(value, _Instead)]:
            del model.__dict__[name]
        for name, function in self.instead.items():
            model.__dict__.setdefault(name, _Instead(function, model))  # but for what the script has put there


_set_aside: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()


def _leave_gradients(model: Any, output: Any) -> Any:
    """In place of `_post_forward`: buffers are still made equal before a forward."""
    model.require_forward_param_sync = torch.is_grad_enabled() and model.require_backward_grad_sync
    return output


def _clip(model: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), *args, **kwargs)


def _state(model: Any) -> dict[str, Any]:
    """Of a copy or a pickle: as if our own reducer were there."""
    now = Place.of(model)
    _set_aside[model].put_into(model)
    try:
        state: dict[str, Any] = model.__getstate__()
        return state
    finally:
        now.put_into(model)
