"""The private names of torch's FSDP2 that `torch_fsdp.py` touches, and whether the installed torch has them.

They are checked when this is imported, so that a torch that has changed them is told by its version, and not by what
breaks in the middle of a backward.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import BackendUnavailableError

FIRST, LAST = "2.9", "2.15"  # the versions of torch that we know
PLACE = "torch.distributed.fsdp._fully_shard"
_TOUCHED: dict[str, dict[str, tuple[str, ...]]] = {
    "_fully_shard": {"FSDPModule": ("_get_fsdp_state",)},
    "_fsdp_common": {"FSDPMeshInfo": (), "HSDPMeshInfo": ()},
    "_fsdp_collectives": {"DefaultReduceScatter": (), "_get_gradient_divide_factors": ()},
    "_fsdp_state": {"FSDPState": ("_fsdp_param_group", "_is_root", "_lazy_init", "_modules")},
    "_fsdp_param": {
        "FSDPParam": (
            "_unsharded_param",
            "grad_offload_event",
            "mp_policy",
            "padded_sharded_param_size",
            "sharded_param",
            "unsharded_accumulated_grad",
        )
    },
    "_fsdp_param_group": {
        "FSDPParamGroup": (
            "_all_gather_comm",
            "_all_reduce_hook",
            "_post_reduce_event",
            "_reduce_scatter_comm",
            "_reduce_scatter_process_group",
            "all_reduce_grads",
            "device",
            "force_sum_reduction_for_comms",
            "fsdp_params",
            "gradient_divide_factor",
            "lazy_init",
            "mesh_info",
            "post_forward_mesh_info",
            "post_backward",
            "reduce_grads",
        )
    },
}


def missing_names(find: Callable[[str], Any] = importlib.import_module) -> list[str]:
    """What we touch, and the installed torch lacks; `find` imports a module."""
    missing = []
    for module_name, classes in _TOUCHED.items():
        try:
            module = find(f"{PLACE}.{module_name}")
        except ImportError:
            missing.append(f"{PLACE}.{module_name}")
            continue
        for class_name, attributes in classes.items():
            cls = getattr(module, class_name, None)
            if cls is None:
                missing.append(f"{module_name}.{class_name}")
            else:
                missing += [f"{class_name}.{name}" for name in attributes if not _has(cls, name)]
    return missing


def _has(cls: type, name: str) -> bool:
    """Whether instances have an attribute: of the class, declared in it, or set by what constructs them."""
    makers: list[Any] = [vars(cls)[maker] for maker in ("__init__", "init") if maker in vars(cls)]
    is_set = any(name in maker.__code__.co_names for maker in makers)
    return hasattr(cls, name) or name in inspect.get_annotations(cls) or is_set


def check_torch(missing: Sequence[str], version: str) -> None:
    """Refuse a torch that lacks names.

    Raises:
        BackendUnavailableError: naming the version and the names.
    """
    if missing:
        raise BackendUnavailableError(
            f"fastreduce.fsdp: torch {version} has changed FSDP2, and lacks {', '.join(missing)}. It works with torch "
            f"{FIRST} to {LAST}: install one of these, or a newer fastreduce"
        )


check_torch(missing_names(), torch.__version__)
