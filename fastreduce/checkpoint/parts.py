"""The parts of a training: a module, wrapped or not, an optimizer, whatever else has a state."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP


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
        for prefix in ("_orig_mod.", "module."):  # of a file that was written without us
            if all(name.startswith(prefix) for name in state) and not any(name.startswith(prefix) for name in own):
                state = {name.removeprefix(prefix): value for name, value in state.items()}
    target.load_state_dict(state)
