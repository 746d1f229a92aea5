"""The parts of a training: a module, wrapped or not, an optimizer, whatever else has a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..errors import CheckpointError


def unwrapped(part: Any) -> Any:
    """The module inside torch.compile and DDP."""
    part = getattr(part, "_orig_mod", part)
    return unwrapped(part.module) if isinstance(part, TorchDDP) else part


def state_of(part: Any) -> Any:
    """What a part's `state_dict` returns, of a wrapper that of the module inside; or the part itself."""
    part = unwrapped(part)
    return part.state_dict() if hasattr(part, "state_dict") else part


def load_into(part: Any, state: Any) -> None:
    """Load what `state_of` returned."""
    target = unwrapped(part)
    if isinstance(target, nn.Module):
        own = target.state_dict()
        for prefix in ("_orig_mod.", "module.", "_orig_mod."):  # wrapped and compiled, either first
            if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
                state = {name.removeprefix(prefix): value for name, value in state.items()}
    target.load_state_dict(state)


def refuse_sharded(name: str, state: Any) -> None:
    """Raise if no rank alone has all of a part's state.

    Raises:
        CheckpointError: naming the tensor of which each rank has a part.
    """
    for path, tensor in _sharded(state, name):
        raise CheckpointError(
            f"{path} is sharded, {tuple(tensor.placements)} of {tuple(tensor.shape)}, and a snapshot has what rank 0 "
            "has: save what is sharded by torch.distributed.checkpoint"
        )


def _sharded(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """DTensors of which ranks have parts, with where they are."""
    if isinstance(state, Tensor):
        placements, mesh = getattr(state, "placements", ()), getattr(state, "device_mesh", None)  # of a DTensor
        if mesh and any(not each.is_replicate() and mesh.size(i) > 1 for i, each in enumerate(placements)):
            yield path, state
    elif isinstance(state, (dict, list, tuple)):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _sharded(value, f"{path}[{key!r}]")
